"""What is tried of a target before it verifies anything: attentions beside several tokens, and errors that are not the
target's."""

import pytest
import torch
from close import assert_close
from conftest import build_drafter, build_target
from observers import InterruptError
from other_targets import OTHER_TARGETS, OTHERS, build_other
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from eagle31_hf import track_acceptance
from eagle31_hf.features import decoder_layers
from eagle31_hf.generation import selftest

IDS = torch.tensor([[1, 2, 3, 5, 8, 4]])
ROWS = torch.tensor([[1, 2, 3, 5, 8, 4], [0, 0, 9, 7, 7, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 6}
WAYS = {"chain": {"num_assistant_tokens": 5}, "tree": {"num_assistant_tokens": 3, "draft_tree_top_k": 3}, "auto": {}}


def build_falcon(attention: str):
    config_class, fields = OTHER_TARGETS["falcon"]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(**OTHERS | fields), attn_implementation=attention).eval()


@pytest.mark.parametrize("returns_dict", [True, False], ids=["dict", "ids"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_target_whose_attentions_see_the_drafts_is_given_none(logged_by_selftest, rows, way, returns_dict):
    """Falcon's own code for attentions adds sdpa's boolean mask: a token then sees the drafts after it."""
    target = build_falcon("sdpa")
    drafter = build_drafter(target)
    inputs = {"input_ids": IDS} if rows == 1 else {"input_ids": ROWS, "attention_mask": MASK}
    asked = GREEDY | {"output_attentions": True, "return_dict_in_generate": returns_dict}
    alone = target.generate(**inputs, **asked)
    with track_acceptance() as stats:
        for _ in range(2):
            ours = target.generate(**inputs, **asked, assistant_model=drafter, **WAYS[way])
    if returns_dict:
        assert_close("text", ours.sequences, alone.sequences)
        for mine, other in zip(ours.attentions, alone.attentions, strict=True):
            for layer, expected in zip(mine, other, strict=True):
                assert_close("attentions", layer, expected)
    else:
        assert_close("text", ours, alone)
    assert sum(stats.drafted_per_position) == 0
    assert len(logged_by_selftest) == 1
    assert "nothing is drafted while attentions are returned for FalconForCausalLM" in logged_by_selftest[0]
    assert "attn_implementation='eager'" in logged_by_selftest[0]


@pytest.mark.parametrize(
    ("kind", "attention", "asks"), [("falcon", "eager", True), ("falcon", "sdpa", False), ("llama", "sdpa", True)]
)
def test_others_are(logged_by_selftest, kind, attention, asks):
    target = build_falcon(attention) if kind == "falcon" else build_target(kind, attention)
    with track_acceptance() as stats:
        target.generate(
            IDS,
            **GREEDY,
            output_attentions=asks,
            return_dict_in_generate=True,
            assistant_model=build_drafter(target),
            **WAYS["chain"],
        )
    assert sum(stats.drafted_per_position) > 0
    assert logged_by_selftest == []


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
def test_in_low_precision_a_tree_may_be_as_coarse_as_a_sequence(logged_by_selftest, dtype, takes_trees):
    target = Coarse(build_target("llama").config).to(dtype).eval()
    target.noise = 0.1
    assert selftest._error(target) > selftest.LOW_PRECISION_TOLERANCE
    assert (selftest.why_no_trees(target) is None) == takes_trees


def test_in_low_precision_a_wrong_mask_is_found(logged_by_selftest):
    assert "differ from those over its paths" in selftest.why_no_trees(build_other("mpt").to(torch.bfloat16))


# --- errors that are not the target's ---


def raising(calls: range, error: type[Exception]):
    """A hook that fails at these calls."""
    count = iter(range(10**6))

    def hook(*args):
        if next(count) in calls:
            raise error("the caller's own")

    return hook


@pytest.mark.parametrize("error", [ValueError, RuntimeError, InterruptError])
@pytest.mark.parametrize("first", range(5))
def test_an_error_of_a_callers_hook_is_raised_and_is_no_verdict(logged_by_selftest, error, first):
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
    assert logged_by_selftest == []
    assert list(selftest._verdicts.values()) == [None]


def test_a_hook_that_goes_on_failing_is_not_remembered(logged_by_selftest):
    """Its error comes out of the prompt's forward; the next call tries the target again."""
    target = build_target("llama")
    drafter = build_drafter(target)
    handle = decoder_layers(target)[1].register_forward_pre_hook(raising(range(10**6), ValueError))
    try:
        with pytest.raises(ValueError, match="the caller's own"):
            target.generate(IDS, **GREEDY, assistant_model=drafter, **WAYS["tree"])
    finally:
        handle.remove()
    assert selftest.why_no_trees(target) is None


def test_a_target_that_refuses_trees_says_so_once(logged_by_selftest):
    config_class, fields = OTHER_TARGETS["falcon_alibi"]
    target = AutoModelForCausalLM.from_config(config_class(**OTHERS | fields), attn_implementation="eager").eval()
    for _ in range(3):
        assert "its forward refuses a tree" in selftest.why_no_trees(target)
    assert len(logged_by_selftest) == 1
