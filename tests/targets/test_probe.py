"""What is tried of a target before it verifies anything: trees, and errors that are not the target's; and attentions,
beside which nothing is drafted."""

from copy import deepcopy

import families
import pytest
import torch
from close import assert_close
from conftest import TARGETS, build_drafter, build_target
from observers import InterruptError, speculate
from transformers import LlamaForCausalLM

from eagle31_hf import track_acceptance
from eagle31_hf.targets import probe
from eagle31_hf.targets.layers import decoder_layers

IDS = torch.tensor([[1, 2, 3, 5, 8, 4]])
PROMPTS = torch.tensor([[1, 2, 3, 5, 8, 4], [0, 0, 9, 7, 7, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 6}
WAYS = {"chain": {"num_assistant_tokens": 5}, "tree": {"num_assistant_tokens": 3, "draft_tree_top_k": 3}, "auto": {}}


@pytest.mark.parametrize(
    ("num_prompts", "way", "returns_dict"), [(1, "chain", True), (2, "tree", True), (1, "auto", False)]
)
def test_a_target_whose_attentions_would_see_the_drafts(num_prompts, way, returns_dict):
    """Falcon's own code for attentions adds sdpa's boolean mask: a token then sees the drafts after it."""
    target = families.build_target("Falcon, rope", "sdpa")
    drafter = build_drafter(target)
    inputs = {"input_ids": IDS} if num_prompts == 1 else {"input_ids": PROMPTS, "attention_mask": MASK}
    asked = GREEDY | {"output_attentions": True, "return_dict_in_generate": returns_dict}
    alone = target.generate(**inputs, **asked)
    with track_acceptance() as stats:
        ours = target.generate(**inputs, **asked, assistant_model=drafter, **WAYS[way])
    if returns_dict:
        assert_close("text", ours.sequences, alone.sequences)
        for mine, other in zip(ours.attentions, alone.attentions, strict=True):
            for layer, expected in zip(mine, other, strict=True):
                assert_close("attentions", layer, expected)
    else:
        assert_close("text", ours, alone)
    assert sum(stats.drafted_per_position) == 0


# --- trees ---

TAKEN = [
    *((kind, torch.float32) for kind in (*TARGETS, "Falcon, rope", "DeepSeek-V3 (MLA)")),
    *((kind, torch.bfloat16) for kind in ("llama", "gemma3_window_8")),
]


@pytest.mark.parametrize(("kind", "dtype"), TAKEN, ids=[f"{kind}-{dtype}" for kind, dtype in TAKEN])
def test_targets_that_take_trees(logged_by_probe, kind, dtype):
    target = build_target(kind).to(dtype) if kind in TARGETS else families.build_target(kind, "eager")
    assert probe.why_no_trees(target) is None
    assert logged_by_probe == []


@pytest.mark.parametrize("kind", ["BLOOM", "MPT", "Falcon, alibi"])
def test_targets_that_do_not(logged_by_probe, prompt, kind):
    """Positions counted by slot: they fall back to chains, and say so once."""
    target = families.build_target(kind, "eager")
    drafter = build_drafter(target)
    greedy = {"max_new_tokens": 16, "do_sample": False}
    chain, chain_stats = speculate(target, drafter, prompt, num_assistant_tokens=5, **greedy)
    assert logged_by_probe == []
    for _ in range(2):
        output, stats = speculate(target, drafter, prompt, num_assistant_tokens=5, draft_tree_top_k=4, **greedy)
        assert_close("text", output, target.generate(prompt, **greedy))
        assert_close("text of chains", output, chain)
        assert stats.accepted_per_round == chain_stats.accepted_per_round
        assert stats.drafted_per_position == chain_stats.drafted_per_position
    assert len(logged_by_probe) == 1
    assert f"chains instead of trees for {type(target).__name__}" in logged_by_probe[0]


@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2"])
def test_an_implementation_without_masks_is_not_even_tried(logged_by_probe, monkeypatch, implementation):
    target = build_target("llama")
    monkeypatch.setattr(target.config, "_attn_implementation_internal", implementation)
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: pytest.fail("the target was run"))
    assert f"attention implementation {implementation}" in probe.why_no_trees(target)
    assert len(logged_by_probe) == 1


def test_layers_of_another_type_are_not_even_tried(logged_by_probe, monkeypatch):
    target = build_target("gemma3_window_8")
    monkeypatch.setattr(target.config, "layer_types", ["chunked_attention", "full_attention"] * 2)
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: pytest.fail("the target was run"))
    assert "layers of type chunked_attention" in probe.why_no_trees(target)


def wrong_mask(original):
    """A target that reads a tree as if it were a sequence."""

    def forward(*args, attention_mask=None, **kwargs):
        masks = attention_mask.values() if isinstance(attention_mask, dict) else [attention_mask]
        if "position_ids" in kwargs:  # a tree, not a sequence
            for mask in masks:
                mask[..., -mask.shape[2] :] = mask.new_full((mask.shape[2],) * 2, torch.finfo(mask.dtype).min).triu(1)
        return original(*args, attention_mask=attention_mask, **kwargs)

    return forward


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gpt2", torch.float32), ("gemma3_window_8", torch.float32), ("llama", torch.bfloat16)]
)
def test_a_tree_read_as_a_sequence_is_noticed(logged_by_probe, monkeypatch, kind, dtype):
    target = build_target(kind).to(dtype)
    monkeypatch.setattr(target, "forward", wrong_mask(target.forward))
    assert "differ from those over its paths" in probe.why_no_trees(target)


def test_positions_read_by_slot_are_noticed(logged_by_probe, monkeypatch):
    target = build_target("gpt2")
    original = target.forward
    monkeypatch.setattr(target, "forward", lambda *args, position_ids=None, **kwargs: original(*args, **kwargs))
    assert "differ from those over its paths" in probe.why_no_trees(target)


def test_the_self_test_runs_once_and_draws_no_random_numbers(logged_by_probe, prompt, monkeypatch):
    target = build_target("llama")
    drafter, calls, tried = build_drafter(target), [], probe._error
    monkeypatch.setattr(probe, "_error", lambda model: calls.append(model) or tried(model))
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        assert probe.why_no_trees(target) is None
        assert torch.get_rng_state().equal(state)
        speculate(target, drafter, prompt, max_new_tokens=6, num_assistant_tokens=5, draft_tree_top_k=3)
    assert len(calls) == 1


@pytest.mark.parametrize("order", [("Falcon, rope", "Falcon, alibi"), ("Falcon, alibi", "Falcon, rope")], ids="-".join)
def test_a_verdict_is_not_that_of_another_config(logged_by_probe, order):
    for kind in order:
        assert (probe.why_no_trees(families.build_target(kind, "eager")) is None) == (kind == "Falcon, rope")


# --- rounding ---


class Coarse(LlamaForCausalLM):
    """Rounds its logits by a tenth of their spread, otherwise for every number of tokens read: as kernels of few digits
    do."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        noise = torch.rand(out.logits.shape, generator=torch.Generator().manual_seed(out.logits.shape[1])) - 0.5
        out.logits = out.logits + (self.noise * out.logits.std() * noise).to(out.logits)
        return out


@pytest.mark.parametrize(
    ("dtype", "takes_trees"), [(torch.bfloat16, True), (torch.float32, False)], ids=["bf16", "fp32"]
)
def test_in_low_precision_a_tree_may_be_as_coarse_as_a_sequence(logged_by_probe, dtype, takes_trees):
    target = Coarse(build_target("llama").config).to(dtype).eval()
    target.noise = 0.3
    assert probe._error(target) > probe.LOW_PRECISION_TOLERANCE
    assert (probe.why_no_trees(target) is None) == takes_trees


def test_in_low_precision_a_wrong_mask_is_found(logged_by_probe):
    target = deepcopy(families.build_target("MPT", "eager")).bfloat16()
    assert "differ from those over its paths" in probe.why_no_trees(target)


# --- errors that are not the target's ---


def raising(calls: range, error: type[BaseException]):
    """A hook that fails at these calls."""
    count = iter(range(10**6))

    def hook(*args):
        if next(count) in calls:
            raise error("the caller's own")

    return hook


@pytest.mark.parametrize(
    ("error", "first"),
    [
        *((ValueError, first) for first in range(5)),
        *((RuntimeError, 1), (InterruptError, 2), (KeyboardInterrupt, 1), (torch.OutOfMemoryError, 1)),
    ],
)
def test_an_error_of_a_callers_hook_is_raised_and_is_no_verdict(logged_by_probe, error, first):
    """Once, in any of the forwards of the self-test or just after it."""
    target = build_target("llama")
    drafter = build_drafter(target)
    expected = target.generate(IDS, **GREEDY)
    handle = decoder_layers(target)[1].register_forward_pre_hook(raising(range(first, first + 1), error))
    try:
        with pytest.raises(error, match="the caller's own"):
            target.generate(IDS, **GREEDY, assistant_model=drafter, **WAYS["tree"])
    finally:
        handle.remove()
    assert_close("text", target.generate(IDS, **GREEDY, assistant_model=drafter, **WAYS["tree"]), expected)
    assert logged_by_probe == []
    assert list(probe._verdicts.values()) == [None]


def test_a_hook_that_goes_on_failing_is_not_remembered(logged_by_probe):
    """Its error comes out of the prompt's forward; the next call tries the target again."""
    target = build_target("llama")
    drafter = build_drafter(target)
    handle = decoder_layers(target)[1].register_forward_pre_hook(raising(range(10**6), ValueError))
    try:
        with pytest.raises(ValueError, match="the caller's own"):
            target.generate(IDS, **GREEDY, assistant_model=drafter, **WAYS["tree"])
    finally:
        handle.remove()
    assert probe.why_no_trees(target) is None


def test_a_target_that_refuses_trees_says_so_once(logged_by_probe):
    target = families.build_target("Falcon, alibi", "eager")
    for _ in range(3):
        assert "its forward refuses a tree" in probe.why_no_trees(target)
    assert len(logged_by_probe) == 1


@pytest.mark.parametrize(
    ("errors", "is_raised"),
    [(["its own"] * 2, False), (["caller's", "its own", "its own"], True), (["its own", "caller's", "its own"], True)],
)
def test_only_an_error_that_comes_again_is_a_refusal(errors, is_raised):
    """A hook of the caller's may fail in the trial of a target that refuses, too."""
    left = [*errors]

    def fails(target):
        raise ValueError(left.pop(0))

    if is_raised:
        with pytest.raises(ValueError, match="caller's"):
            probe._judged(build_target(), fails, "it refuses", "it differs")
    else:
        assert probe._judged(build_target(), fails, "it refuses", "it differs") == "it refuses (ValueError: its own)"
    assert not left
