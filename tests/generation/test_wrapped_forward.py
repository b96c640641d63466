"""Targets whose forward is not the one of their class: what `generate` reads off its signature is then not there."""

import functools
from inspect import Parameter, Signature

import pytest
from batches import left_padded
from close import assert_close
from conftest import build_drafter, build_target
from draftings import DRAFTINGS, steady_clock
from observers import speculate
from transformers import PreTrainedModel, StaticCache

from eagle31_hf.cache_names import CACHE
from eagle31_hf.targets import probe

LENGTH = 9
IDS, MASK = left_padded([[1, 2, 3, 5, 8], [4, 4], [9, 0, 7]])
COMPANY = {
    "alone": lambda target: {"inputs": IDS[:1]},
    "padded": lambda target: {"inputs": IDS[1:2], "attention_mask": MASK[1:2]},
    "batch": lambda target: {"inputs": IDS, "attention_mask": MASK},
    "static": lambda target: {
        "inputs": IDS[:1],
        "past_key_values": StaticCache(config=target.config, max_cache_len=80),
    },
    "second_turn": lambda target: {"inputs": IDS[:1], "past_key_values": target(IDS[:1, :3]).past_key_values},
}


def hidden(target: PreTrainedModel) -> None:
    """As a closure does that only passes on."""
    original = target.forward
    target.forward = lambda *args, **kwargs: original(*args, **kwargs)


def hidden_but_for_ids(target: PreTrainedModel) -> None:
    original = target.forward
    target.forward = lambda input_ids, **kwargs: original(input_ids, **kwargs)


def takes_only(target: PreTrainedModel, *names: str) -> None:
    """Gives a target a forward that takes these arguments and what every model takes, and says so; others are an
    error."""
    original, names = target.forward, ("attention_mask", CACHE, "use_cache", *names)

    def forward(input_ids=None, return_dict=None, **given):
        if given.keys() - {*names}:
            raise TypeError(f"got {', '.join(given)}; expected {', '.join(names)}")
        return original(input_ids, **given)

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in ("input_ids", *names)]
    forward.__signature__ = Signature([*parameters, Parameter("return_dict", Parameter.KEYWORD_ONLY, default=None)])
    target.forward = forward


def without_positions(target: PreTrainedModel) -> None:
    takes_only(target, "logits_to_keep")


def without_logits_to_keep(target: PreTrainedModel) -> None:
    takes_only(target, "position_ids")


def dropping_positions(target: PreTrainedModel) -> None:
    """As models do that were written before `generate` made positions."""
    original = target.prepare_inputs_for_generation

    def prepare(*args, **kwargs):
        inputs = original(*args, **kwargs)
        inputs.pop("position_ids", None)
        return inputs

    target.prepare_inputs_for_generation = prepare


def subclassed(target: PreTrainedModel) -> None:
    class Subclass(type(target)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    target.__class__ = Subclass


def wrapped(target: PreTrainedModel) -> None:
    """Shows the signature it had."""
    original = target.forward
    target.forward = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))


HIDDEN = (hidden, hidden_but_for_ids, without_positions, dropping_positions, subclassed)
WRAPPINGS = (*HIDDEN, without_logits_to_keep, wrapped)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_text_is_the_same_as_alone(wrapping):
    """Positions a model finds for itself may go by row of the cache; left padding then moves them."""
    target = build_target("gpt2")
    drafter = build_drafter(target)
    wrapping(target)
    for company, inputs in COMPANY.items():
        expected = target.generate(**inputs(target), max_new_tokens=LENGTH, do_sample=False, pad_token_id=6)
        with steady_clock(target, drafter):
            output = target.generate(
                **inputs(target),
                max_new_tokens=LENGTH,
                do_sample=False,
                pad_token_id=6,
                assistant_model=drafter,
                **DRAFTINGS["auto" if company == "batch" else "tree"],
            )
        assert_close(company, output, expected)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_chains_where_positions_are_hidden_and_one_line_says_so(wrapping, monkeypatch):
    target, lines = build_target("qwen3"), []
    drafter = build_drafter(target)
    wrapping(target)
    monkeypatch.setattr(probe, "_verdicts", {})
    monkeypatch.setattr(probe.logger, "warning", lambda text, *values: lines.append(text % values))
    _, stats = speculate(target, drafter, IDS[:1], max_new_tokens=LENGTH, do_sample=False, **DRAFTINGS["tree"])
    assert len(lines) == (wrapping in HIDDEN)
    assert all("chains instead of trees for" in line for line in lines)
    assert stats.drafted_per_position[0] > 0
