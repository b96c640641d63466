"""Captured rounds, run as the tensors they are made of: they give the text that plain decoding gives, for every family
of targets, and are used wherever they can be."""

import pytest
import torch
import transformers
from conftest import PROMPT
from families import DRAFTINGS, FAMILIES, IN_STEP, REFUSED, NotThereError, build_batch, build_drafter, build_target
from packaging.version import Version
from recurrent_families import RECURRENT_FAMILIES
from transformers import PreTrainedModel

from eagle31_hf import AcceptanceStats, Eagle31DrafterModel, track_acceptance
from eagle31_hf.generation.captured.seam import Uncaptured, seams

AS_TENSORS = f"as {Uncaptured.name}"
PLANS = DRAFTINGS | {"auto": {"num_assistant_tokens": "auto"}}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 12, "top_p": 0.95}
GREEDY = {"do_sample": False}
LENGTH = 14
# Ways to decode: the plan, the sampling options, and whether a batch of prompts of different lengths is decoded.
WAYS = {
    "chain": ("chain", GREEDY, False),
    "tree": ("tree", GREEDY, False),
    "auto": ("auto", GREEDY, False),
    "batch": ("tree", GREEDY, True),
    "sampled": ("chain", SAMPLED, False),
}
# Families whose rounds run eagerly, with a word of the reason.
EAGER = {
    "GPT-J": "arena",
    "CodeGen": "arena",
    "Falcon, rope": "arena",
    "Falcon, alibi": "arena",
    "XGLM": "arena",
    "GPT-Neo, window": "arena",
    "GPT-Neo, longer window": "arena",
    "Llama4 text, chunks": "arena",
    "BLOOM": "positions",
    "MPT": "positions",
    "MPT, faint alibi": "positions",
    "DeepSeek-V3.2 (sparse)": "layers",
    "GLM-MoE-DSA (sparse)": "layers",
    "Qwen3-Next": "layers",
    "LFM2": "layers",
}
if Version(transformers.__version__) >= Version("5.24"):  # they attend by its common interface
    del EAGER["GPT-J"], EAGER["CodeGen"]
if Version(transformers.__version__) < Version("5.23"):  # sdpa leaves out the softcap there, and the probe sees it
    EAGER |= dict.fromkeys(("Gemma2, window, softcap", "VaultGemma, window, softcap"), "arena")
FAMILIES_TRIED = [name for name, family in FAMILIES.items() if REFUSED not in (family.chain, family.tree)]
# all states are in layers of one kind, for which rounds are not captured
FAMILIES_TRIED = [name for name in FAMILIES_TRIED if name not in RECURRENT_FAMILIES or name in EAGER]


def captured(target: PreTrainedModel, drafter: Eagle31DrafterModel, **asked) -> tuple[torch.Tensor, AcceptanceStats]:
    """Decodes with rounds as tensors; returns what `generate` returns, and its statistics."""
    with seams(lambda device: Uncaptured()), track_acceptance() as stats:
        return target.generate(**asked, assistant_model=drafter), stats


def models(name: str) -> tuple[PreTrainedModel, Eagle31DrafterModel]:
    """A family's target, with sdpa where there is one, and its drafter."""
    try:
        target = build_target(name, "sdpa")
    except NotThereError:
        try:
            target = build_target(name, "eager")
        except NotThereError as absence:
            pytest.skip(str(absence))
    return target, build_drafter(name)


# All ways for families of which each has another mask, or latent keys; one of them, in turn, for the others.
IN_FULL = ("Llama", "Gemma3 text, window", "DeepSeek-V3 (MLA)", "Qwen2.5-VL")


def ways_of(name: str) -> tuple[str, ...]:
    if name in IN_FULL:
        return tuple(WAYS)
    if name in EAGER or FAMILIES[name].fields.get("sliding_window"):  # where "auto" is eager, too
        return (("tree", "batch")[FAMILIES_TRIED.index(name) % 2],)
    return (tuple(WAYS)[FAMILIES_TRIED.index(name) % len(WAYS)],)


CASES = [(name, way) for name in FAMILIES_TRIED for way in ways_of(name)]


@pytest.mark.parametrize(("name", "way"), CASES, ids=lambda value: value)
def test_text_of_every_family(name, way):
    plan, sampling, is_batch = WAYS[way]
    target, drafter = models(name)
    ids = torch.tensor(PROMPT)
    inputs = build_batch(name) if is_batch else {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    asked = {**inputs, **sampling, "max_new_tokens": LENGTH}
    torch.manual_seed(5)
    if sampling is SAMPLED:  # the text of a seed is that of eager trees, where the noise belongs to slots, too
        expected = target.generate(**asked, assistant_model=drafter, **PLANS["tree"])
    else:
        expected = target.generate(**asked)
    torch.manual_seed(5)
    got, stats = captured(target, drafter, **asked, **PLANS[plan])
    assert got.tolist() == expected.tolist()
    (execution,) = stats.executions
    if way == "auto" and "window" in name and name not in EAGER:
        assert "a window of 8 tokens is no longer than a draft is deep" in execution
    elif name in EAGER or FAMILIES[name].expected("tree", 4 if is_batch else 1) == IN_STEP:
        assert EAGER.get(name, "") in execution or "lock-step" in execution
    else:
        assert execution == AS_TENSORS
        assert stats.generated_tokens == LENGTH * len(got)
        assert sum(stats.accepted_per_position) > 0 or sampling is SAMPLED  # of which drafters know little
