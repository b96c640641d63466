"""One target and one drafter serve several threads at once."""

import pytest
from at_once import PROMPTS, at_once
from close import assert_close
from draftings import tree_of
from observers import num_hooks, speculate

from eagle31_hf import track_acceptance

GREEDY = {"max_new_tokens": 20, "do_sample": False}
DRAFTED = GREEDY | {"num_assistant_tokens": 5}


@pytest.mark.parametrize(
    ("name", "drafting"),
    [("pruned", DRAFTED), ("target_head", DRAFTED), ("window_4", GREEDY | tree_of(3, 16, 4))],
    ids=["pruned-chain", "target_head-chain", "window_4-tree"],
)
def test_every_thread_gets_its_own_text_and_statistics(target, make_drafter, name, drafting):
    drafter = make_drafter(target, name)
    expected = [speculate(target, drafter, prompt, **drafting) for prompt in PROMPTS]
    with track_acceptance() as outside:
        results = at_once([lambda prompt=prompt: speculate(target, drafter, prompt, **drafting) for prompt in PROMPTS])
    for i, ((text, stats), (expected_text, expected_stats)) in enumerate(zip(results, expected, strict=True)):
        assert_close(f"text {i}", text, expected_text)
        assert stats.accepted_per_round == expected_stats.accepted_per_round, "threads drafted from each other's states"
        assert stats.drafted_per_position == expected_stats.drafted_per_position
    assert outside.prefills == 0
    assert num_hooks(target) == 0


def test_beside_threads_that_use_the_target_otherwise(target, drafter, prompt):
    """Their forwards pass the same hooks."""
    expected, expected_stats = speculate(target, drafter, prompt, **DRAFTED)
    functions = [
        lambda: speculate(target, drafter, prompt, **DRAFTED),
        lambda: (target.generate(prompt, **GREEDY), None),
        lambda: (target.generate(prompt.repeat(3, 1), **GREEDY)[1:2], None),
    ]
    for i, (text, stats) in enumerate(at_once(functions)):
        assert_close(f"text {i}", text, expected)
        assert stats is None or stats.accepted_per_round == expected_stats.accepted_per_round


def test_two_targets_at_once(make_target, make_drafter, prompt):
    """They share one drafter that borrows its embedding: drafts may suffer, texts may not."""
    targets = make_target("llama"), make_target("llama", rms_norm_eps=1e-3)
    drafter = make_drafter(targets[0])
    results = at_once([lambda target=target: speculate(target, drafter, prompt, **DRAFTED)[0] for target in targets])
    for i, (text, target) in enumerate(zip(results, targets, strict=True)):
        assert_close(f"text of target {i}", text, target.generate(prompt, **GREEDY))
