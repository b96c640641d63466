"""Scores that are no distribution end a call as they end plain decoding; what the drafter makes of them never shows in
a text."""

import copy
import math

import pytest
import torch
from batches import Idle, left_padded
from close import assert_close
from conftest import VOCAB, build_drafter, greedy_text
from draftings import DRAFTINGS, steady_clock
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from eagle31_hf.generation.planning import knowledge

LENGTH = 12
NAN, INF = float("nan"), float("inf")
IDS, MASK = left_padded([[1, 2, 3, 5, 8], [4, 4], [9, 0, 7]])
COMPANY = {  # who is decoded together: one prompt, a batch at each sequence's own pace, a batch in lock-step
    "alone": lambda: {"inputs": IDS[:1]},
    "batch": lambda: {"inputs": IDS, "attention_mask": MASK},
    "in_step": lambda: {"inputs": IDS, "attention_mask": MASK, "stopping_criteria": StoppingCriteriaList([Idle()])},
}


class From(LogitsProcessor):
    """Makes all scores of texts of at least `length` tokens, or one of them, what is no score."""

    def __init__(self, length: int, value: float, everywhere: bool):
        self.length, self.value, self.which = length, value, slice(None) if everywhere else 3

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        if input_ids.shape[1] >= self.length:
            scores[:, self.which] = self.value
        return scores


FAULTS = {
    "nan": (NAN, True),
    "one_nan": (NAN, False),
    "one_infinity": (INF, False),
    "nothing_left": (-INF, True),
}  # fmt: skip


def generate(target, drafter=None, way: str = "chain", **kwargs) -> Tensor:
    kwargs = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 6} | kwargs
    if drafter is None:
        return target.generate(**kwargs)
    with steady_clock(target, drafter):
        return target.generate(**kwargs, assistant_model=drafter, **DRAFTINGS[way])


def raised(function, *args, **kwargs) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one, plain decoding says
        function(*args, **kwargs)
    return type(caught.value), str(caught.value)


def poisoned(target: PreTrainedModel, token: int) -> PreTrainedModel:
    """A copy whose text is all NaN from this token on."""
    target = copy.deepcopy(target)
    with torch.no_grad():
        target.get_input_embeddings().weight[token] = NAN
    return target


# --- the target's scores ---


RAISED = [
    ("chain", "alone", "nan"),
    ("tree", "alone", "one_nan"),
    ("tree", "alone", "nothing_left"),
    ("auto", "in_step", "one_infinity"),
    ("chain", "in_step", "nothing_left"),
]


@pytest.mark.parametrize(("way", "company", "fault"), RAISED)
def test_sampling_raises_what_plain_decoding_raises(target, drafter, way, company, fault):
    def inputs():
        return COMPANY[company]() | {
            "do_sample": True,
            "logits_processor": LogitsProcessorList([From(9, *FAULTS[fault])]),
        }

    expected = raised(generate, target, **inputs())
    assert expected[0] is RuntimeError
    assert raised(generate, target, drafter, way, **inputs()) == expected


@pytest.mark.parametrize(("way", "kwargs"), [("chain", {"suppress_tokens": list(range(VOCAB))}), ("tree", {})])
def test_rows_at_their_own_pace_raise_it_too(target, drafter, way, kwargs):
    target = target if kwargs else poisoned(target, 3)
    inputs = COMPANY["batch"]() | {"do_sample": True, "max_new_tokens": 40} | kwargs
    assert raised(generate, target, drafter, way, **inputs) == raised(generate, target, **inputs)


TAKEN = [("chain", "alone", "one_nan"), ("tree", "alone", "nothing_left"), ("auto", "in_step", "one_nan")]


@pytest.mark.parametrize(("way", "company", "fault"), TAKEN)
def test_greedy_takes_what_plain_decoding_takes(target, drafter, way, company, fault):
    def inputs():
        return COMPANY[company]() | {"logits_processor": LogitsProcessorList([From(9, *FAULTS[fault])])}

    assert_close("text", generate(target, drafter, way, **inputs()), generate(target, **inputs()))


@pytest.mark.parametrize(("way", "company"), [("auto", "alone"), ("tree", "batch"), ("chain", "in_step")])
def test_greedy_takes_what_plain_decoding_takes_of_the_targets_own(target, drafter, way, company):
    target = copy.deepcopy(target)
    with torch.no_grad():
        target.lm_head.weight[3] = NAN
    assert_close("text", generate(target, drafter, way, **COMPANY[company]()), generate(target, **COMPANY[company]()))
    suppressed = COMPANY[company]() | {"suppress_tokens": list(range(VOCAB))}
    assert_close("nothing is left", generate(target, drafter, way, **suppressed), generate(target, **suppressed))


def test_what_comes_after_the_end_is_not_looked_at(target, drafter, prompt):
    """Scores that are no distribution, behind a token that ends the text, raise nothing."""

    class At(Idle):
        def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
            return torch.tensor([input_ids.shape[1] >= 9])

    for seed in range(4):
        torch.manual_seed(seed)
        output = generate(
            target,
            drafter,
            "chain",
            inputs=prompt,
            do_sample=True,
            top_k=1,
            stopping_criteria=StoppingCriteriaList([At()]),
            logits_processor=LogitsProcessorList([From(9, NAN, True)]),
        )
        assert_close("text", output, greedy_text(target)[:, :9])


# --- the drafter's ---


def broken(target: PreTrainedModel, part: str, value: float):
    drafter = build_drafter(target)
    with torch.no_grad():
        {"head": drafter.lm_head.weight[3], "norm": drafter.norm.weight, "fc": drafter.fc.weight}[part].fill_(value)
    return drafter


BROKEN = [("head", NAN), ("norm", INF), ("fc", NAN)]
CALLED = [("chain", "alone"), ("tree", "alone"), ("auto", "batch")]


@pytest.mark.parametrize(("part", "value"), BROKEN)
@pytest.mark.parametrize(("way", "company"), CALLED)
def test_a_broken_drafter_changes_no_text(target, way, company, part, value):
    drafter = broken(target, part, value)
    assert_close("greedy", generate(target, drafter, way, **COMPANY[company]()), generate(target, **COMPANY[company]()))
    if (way, company) == ("chain", "alone"):  # rejection sampling: other random numbers
        generate(target, drafter, way, do_sample=True, **COMPANY[company]())
        return
    texts = []
    for one in (drafter, build_drafter(target)):
        torch.manual_seed(0)
        texts.append(generate(target, one, way, do_sample=True, **COMPANY[company]()))
    assert_close("sampled", *texts)


@pytest.mark.parametrize(("part", "value"), BROKEN)
def test_auto_learns_nothing_that_is_no_number(target, part, value):
    drafter = broken(target, part, value)
    for kwargs in ({}, {"do_sample": True}):
        target.generate(
            IDS, attention_mask=MASK, assistant_model=drafter, max_new_tokens=LENGTH, pad_token_id=6, **kwargs
        )
    known = list(knowledge._known[drafter][target].values())
    assert len(known) == 2
    for calibration in (one.calibration for one in known):
        numbers = [calibration.slope, calibration.intercept, *calibration.offsets, *calibration.going_on]
        assert all(map(math.isfinite, numbers)), numbers
