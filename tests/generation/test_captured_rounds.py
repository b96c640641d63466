"""Captured rounds, run as the tensors they are made of: they give the text that plain decoding gives, for every family
of targets, and are used wherever they can be."""

import pytest
import torch
import transformers
from conftest import PROMPT
from families import (
    DRAFTINGS,
    FAMILIES,
    IN_STEP,
    NOT_DRAFTED,
    REFUSED,
    NotThereError,
    build_batch,
    build_drafter,
    build_target,
)
from packaging.version import Version
from recurrent_families import RECURRENT_FAMILIES
from transformers import PreTrainedModel

from eagle31_hf import AcceptanceStats, Eagle31DrafterModel, track_acceptance
from eagle31_hf.cache.states import HAS_METHODS
from eagle31_hf.generation.captured import kept
from eagle31_hf.generation.captured.seam import Uncaptured, seams
from eagle31_hf.targets.probe import bytes_of_a_slot

AS_TENSORS = f"as {Uncaptured.name}"
PLANS = DRAFTINGS | {"auto": {"num_assistant_tokens": "auto"}}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 12, "top_p": 0.95}
GREEDY = {"do_sample": False}
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
    "HY-V4 (sparse)": "layers",
    "Qwen4-Exp": "layers",
    "GLM5-Next": "layers",
    "DeepSeek-V4": "layers",
    "Exaone4.5 multimodal": "positions",
    "Mamba": "positions",
    "Mamba2": "positions",
    "FalconMamba": "positions",
    "Inkling": "arena",
    "Inkling2": "arena",
    "Inkling2, loops": "arena",
}
if Version(transformers.__version__) >= Version("5.24"):  # they attend by its common interface
    del EAGER["GPT-J"], EAGER["CodeGen"]
if not HAS_METHODS:
    EAGER |= dict.fromkeys(RECURRENT_FAMILIES, "layers")
if Version(transformers.__version__) < Version("5.23"):  # sdpa leaves out the softcap there, and the probe sees it
    EAGER |= dict.fromkeys(("Gemma2, window, softcap", "VaultGemma, window, softcap"), "arena")
FAMILIES_TRIED = [name for name, family in FAMILIES.items() if REFUSED not in (family.chain, family.tree)]


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


# All ways for one family a mask, as in test_families.py; one of the five, in turn, for the others.
IN_FULL = ("Llama", "Mistral, window", "Gemma3 text, window", "DeepSeek-V3 (MLA)", "Qwen2.5-VL", "Falcon, alibi")
CASES = [
    (name, way)
    for i, name in enumerate(FAMILIES_TRIED)
    for j, way in enumerate(WAYS)
    if name in IN_FULL or (i + j) % len(WAYS) == 0
]


@pytest.mark.parametrize(("name", "way"), CASES, ids=lambda value: value)
def test_text_of_every_family(name, way):
    plan, sampling, is_batch = WAYS[way]
    has_states = HAS_METHODS and name in RECURRENT_FAMILIES
    plan = "chain" if has_states and is_batch else plan
    target, drafter = models(name)
    ids = torch.tensor(PROMPT)
    inputs = build_batch(name) if is_batch else {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    asked = {**inputs, **sampling, "max_new_tokens": 20}
    torch.manual_seed(5)
    if (
        sampling is SAMPLED
    ):  # the text of a seed is that of the eager loop where its noise belongs to slots, as in trees
        if name in EAGER:
            pytest.skip("an eager chain is drawn by rejection sampling")
        expected = target.generate(**asked, assistant_model=drafter, **PLANS["tree"])
    else:
        expected = target.generate(**asked)
    torch.manual_seed(5)
    got, stats = captured(target, drafter, **asked, **PLANS[plan])
    assert got.tolist() == expected.tolist()
    (execution,) = stats.executions
    is_windowed = "window" in name or name in ("LFM3", "Lara-Mini", "ZAYA", "ModernBERT decoder", "Gemma3n text")
    if way == "auto" and is_windowed and name not in EAGER:
        assert "a window of 8 tokens is no longer than a draft is deep" in execution
    elif has_states and plan == "tree":
        assert execution == "eagerly: recurrent states are kept along chains alone"
    elif name in EAGER or FAMILIES[name].expected("tree", 4 if is_batch else 1) in (IN_STEP, NOT_DRAFTED):
        assert EAGER.get(name, "") in execution or "lock-step" in execution
    else:
        assert execution == AS_TENSORS
        assert stats.generated_tokens == 20 * len(got)
        assert sum(stats.accepted_per_position) > 0 or sampling is SAMPLED  # of which drafters know little
        for one in kept._kept[drafter][target].values():
            held = sum(buffer.nbytes for buffer in one.arenas[0].stacks)
            assert held == bytes_of_a_slot(target) * one.arenas[0].capacity * one.carry.num_rows
