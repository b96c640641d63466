"""Every family of `families.FAMILIES`, with both attention implementations: what it does is what the table says, and never a wrong text."""

from itertools import product

import pytest
import torch
import transformers
from conftest import PROMPT
from families import (
    ASKED,
    ATTENTIONS,
    CHAINS,
    DRAFTINGS,
    FAMILIES,
    LOSSLESS,
    REFUSED,
    VOCAB,
    NotThereError,
    agree,
    build_drafter,
    build_target,
    decode,
)
from packaging.version import Version

from eagle31_hf.generation import selftest

IMAGE_TOKEN = VOCAB - 1  # as `families.build_target` configures it
TEXT_AROUND = ([1, 0], [4, 5, 3, 8, 2])


def known_bug(name: str, drafting: str) -> list[pytest.MarkDecorator]:
    bug = FAMILIES[name].bug
    if bug is None or drafting not in bug.draftings or Version(transformers.__version__) < Version(bug.since):
        return []
    return [pytest.mark.xfail(reason=bug.reason, strict=True, raises=(AssertionError, ValueError))]


def combinations() -> list:
    return [
        pytest.param(name, attention, drafting, marks=known_bug(name, drafting), id=f"{name}-{attention}-{drafting}")
        for name, attention, drafting in product(FAMILIES, ATTENTIONS, DRAFTINGS)
    ]


def decode_or_skip(*args):
    try:
        return decode(*args)
    except NotThereError as absence:
        pytest.skip(str(absence))


@pytest.mark.parametrize(("name", "attention", "drafting"), combinations())
def test_family(name, attention, drafting):
    outcome = decode_or_skip(name, attention, drafting)
    assert outcome.word == FAMILIES[name].expected(drafting), outcome
    if outcome.word == REFUSED:
        assert outcome.reason.startswith("EAGLE drafting: ")
    else:
        assert min(outcome.accepted, outcome.rejected) > 0, outcome
    assert ("chains instead of trees" in outcome.reason) == (outcome.word == CHAINS)


def image_prompt(name: str) -> dict[str, torch.Tensor]:
    """An image and text around it. Qwen's positions fall behind the number of tokens, as an image takes fewer of them."""
    torch.manual_seed(3)
    num_tokens = {"LLaVA": 4, "Gemma3 multimodal, window": 4}.get(name, 6)
    ids = torch.tensor([[*TEXT_AROUND[0], *[IMAGE_TOKEN] * num_tokens, *TEXT_AROUND[1]]])
    types = (ids == IMAGE_TOKEN).long()
    if name == "LLaVA":
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28)}
    if name == "Gemma3 multimodal, window":
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": types}
    vision = build_target(name, "eager").config.vision_config
    patches = torch.randn(4 * num_tokens, 3 * vision.temporal_patch_size * vision.patch_size**2)
    return {"input_ids": ids, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 6]]), "mm_token_type_ids": types}


@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["Gemma3 multimodal, window", "Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "LLaVA"])
def test_text_after_an_image(name, attention, drafting):
    outcome = decode_or_skip(name, attention, drafting, image_prompt(name))
    assert outcome.word == LOSSLESS, outcome
    assert min(outcome.accepted, outcome.rejected) > 0, outcome


def test_a_verdict_is_not_taken_over_by_another_config_of_the_class(monkeypatch):
    monkeypatch.setattr(selftest, "_verdicts", {})
    for name in ("Falcon, rope", "Falcon, alibi"):
        target, drafter = build_target(name, "eager"), build_drafter(name)
        prompt = torch.tensor(PROMPT)
        ours = target.generate(prompt, assistant_model=drafter, **ASKED, **DRAFTINGS["tree"])
        assert agree(ours, target.generate(prompt, **ASKED))
