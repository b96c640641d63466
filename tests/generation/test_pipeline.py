"""`pipeline("text-generation", model=target, assistant_model=drafter)`."""

import pytest
from conftest import build_drafter, build_target
from transformers import pipeline

from eagle31_hf import track_acceptance

GREEDY = {"max_new_tokens": 20, "do_sample": False}
TEXT = "bcdfi"


def run(target, tokenizer, *prompts, call=(), **kwargs):
    generator = pipeline("text-generation", model=target, tokenizer=tokenizer, device="cpu", **kwargs)
    with track_acceptance() as stats:
        results = [generator(prompt, **GREEDY, **dict(call)) for prompt in prompts]
    return results, stats


@pytest.mark.parametrize(
    "call", [{}, {"stop_sequence": "i"}, {"return_full_text": False}], ids=["plain", "stop_sequence", "new_text"]
)
def test_gives_what_it_gives_without_a_drafter(target, drafter, tokenizer, call):
    expected, _ = run(target, tokenizer, TEXT, "a", call=call)
    got, stats = run(target, tokenizer, TEXT, "a", call=call | {"num_assistant_tokens": 5}, assistant_model=drafter)
    assert got == expected
    assert stats.prefills == 2
    assert max(stats.accepted_per_round) >= 1


def test_the_drafters_knobs_are_used(target, tokenizer):
    drafter = build_drafter(target)
    drafter.generation_config.num_assistant_tokens = 4
    _, stats = run(target, tokenizer, TEXT, assistant_model=drafter)
    assert len(stats.drafted_per_position) == 4
    _, stats = run(target, tokenizer, TEXT, assistant_model=drafter, call={"num_assistant_tokens": 2})
    assert len(stats.drafted_per_position) == 2


def test_special_tokens_only_the_target_has(tokenizer):
    """transformers then asks for the assistant's tokenizer, which is the target's."""
    target = build_target(eos_token_id=6, bos_token_id=0)
    drafter = build_drafter(target)
    expected, _ = run(target, tokenizer, TEXT)
    drafted = {"assistant_model": drafter, "assistant_tokenizer": tokenizer, "call": {"num_assistant_tokens": 5}}
    got, stats = run(target, tokenizer, TEXT, **drafted)
    assert got == expected
    assert stats.prefills == 1
