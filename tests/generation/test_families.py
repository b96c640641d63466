"""Every family of `families.FAMILIES`, with both attention implementations: what it does is what the table says, and
never a wrong text."""

from itertools import product

import pytest
import torch
import transformers
from close import FORWARD, assert_close
from conftest import PROMPT
from families import (
    ASKED,
    ATTENTIONS,
    CHAINS,
    DRAFTINGS,
    FAMILIES,
    IN_STEP,
    LOSSLESS,
    NOT_DRAFTED,
    REFUSED,
    VOCAB,
    NotThereError,
    Outcome,
    build_drafter,
    build_target,
    decode,
    difference,
)
from packaging.version import Version

from eagle31_hf.targets import probe
from eagle31_hf.targets.layers import capture_states
from eagle31_hf.training.target import TargetReader

IMAGE_TOKEN = VOCAB - 1  # as `families.build_target` configures it
TEXT_AROUND = ([1, 0], [4, 5, 3, 8, 2])
BATCH = 4
# One prompt runs in chains with eager and in trees with sdpa, or with eager where there is no sdpa; a batch in trees:
# chains of unequal lengths are verified under the masks of trees, and in step there are only chains. All combinations
# run for one family a mask: without a window, with one everywhere, with one in some layers, of latent keys, with
# positions on three axes, in step. `family_table.py` has the others.
IN_FULL = ("Llama", "Mistral, window", "Gemma3 text, window", "DeepSeek-V3 (MLA)", "Qwen2.5-VL", "Falcon, alibi")

WITH_IMAGES = ("Gemma3 multimodal, window", "Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "LLaVA")


def known_bug(name: str, drafting: str, num_prompts: int = 1) -> list[pytest.MarkDecorator]:
    bug = FAMILIES[name].bug
    if bug is None or FAMILIES[name].expected(drafting, num_prompts) not in bug.words:
        return []
    if Version(transformers.__version__) < Version(bug.since):
        return []
    return [pytest.mark.xfail(reason=bug.reason, strict=True, raises=AssertionError)]


def combinations(num_prompts: int, *of_others: tuple[str, str]) -> list:
    """Families with attention and drafting: all of both for some, `of_others` for the others."""
    chosen = [(name, *ways) for name in FAMILIES if name not in IN_FULL for ways in of_others]
    return [
        pytest.param(*each, marks=known_bug(each[0], each[2], num_prompts), id="-".join(each))
        for each in (*product(IN_FULL, ATTENTIONS, DRAFTINGS), *chosen)
    ]


def decode_or_skip(name: str, attention: str, *args, **kwargs) -> Outcome:
    if attention == "sdpa or eager":
        attention = best_attention(name)
    try:
        return decode(name, attention, *args, **kwargs)
    except NotThereError as absence:
        pytest.skip(str(absence))


def check_word(outcome: Outcome, expected: str) -> None:
    assert outcome.word == expected, outcome
    if outcome.word == REFUSED:
        assert outcome.reason.startswith("EAGLE drafting: ")
    elif outcome.word != NOT_DRAFTED:
        assert min(outcome.accepted, outcome.rejected) > 0, outcome
    assert ("chains instead of trees" in outcome.reason) == (outcome.word in (CHAINS, IN_STEP)), outcome


TREES = ("sdpa or eager", "tree")


@pytest.mark.parametrize(("name", "attention", "drafting"), combinations(1, ("eager", "chain"), TREES))
def test_family(name, attention, drafting):
    outcome = decode_or_skip(name, attention, drafting)
    check_word(outcome, FAMILIES[name].expected(drafting))


@pytest.mark.parametrize(("name", "attention", "drafting"), combinations(BATCH, TREES))
def test_family_in_a_batch(name, attention, drafting):
    outcome = decode_or_skip(name, attention, drafting, BATCH)
    check_word(outcome, FAMILIES[name].expected(drafting, BATCH))
    # At their own pace sequences do differ in length, or nothing was tried; in step they never do.
    has_pace = outcome.word in (LOSSLESS, CHAINS)
    assert (outcome.num_ragged > 0) == has_pace, outcome
    assert (outcome.num_trees > 0) == (outcome.word == LOSSLESS and drafting == "tree"), outcome
    assert (len(set(outcome.accepted_by_sequence)) > 1) == has_pace, outcome


def best_attention(name: str) -> str:
    try:
        build_target(name, "sdpa")
    except NotThereError:
        return "eager"
    return "sdpa"


def image_prompt(name: str) -> dict[str, torch.Tensor]:
    """An image and text around it. Qwen's positions fall behind the tokens' number, as an image takes fewer of them."""
    # seeds torch where the model is not built yet: before the seed of the picture
    config = build_target(name, "eager").config
    torch.manual_seed(3)
    num_tokens = {"LLaVA": 4, "Gemma3 multimodal, window": 4}.get(name, 6)
    ids = torch.tensor([[*TEXT_AROUND[0], *[IMAGE_TOKEN] * num_tokens, *TEXT_AROUND[1]]])
    types = (ids == IMAGE_TOKEN).long()
    if name == "LLaVA":
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28)}
    if name == "Gemma3 multimodal, window":
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": types}
    vision = config.vision_config
    patches = torch.randn(4 * num_tokens, 3 * vision.temporal_patch_size * vision.patch_size**2)
    return {
        "input_ids": ids,
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "mm_token_type_ids": types,
    }


@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_text_after_an_image(name, attention, drafting):
    outcome = decode_or_skip(name, attention, drafting, prompt=image_prompt(name))
    assert outcome.word == LOSSLESS, outcome
    assert min(outcome.accepted, outcome.rejected) > 0, outcome


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_training_reads_an_image_as_a_prompt_is_read(name):
    target, prompt = build_target(name, "eager"), image_prompt(name)
    ids = prompt.pop("input_ids")
    reader = TargetReader(target, [0, 1, 3])
    states, last = reader.of_images(ids[0], prompt)
    with torch.no_grad(), capture_states(target, reader.layer_ids) as captured:
        outputs = target.generate(ids, **prompt, **ASKED | {"max_new_tokens": 1})
    assert_close("states", states, captured.take()[0], FORWARD)
    assert_close("logits", reader.logits(last[-1:]), outputs.logits[0], FORWARD)


def test_a_verdict_is_not_taken_over_by_another_config_of_the_class(monkeypatch):
    monkeypatch.setattr(probe, "_verdicts", {})
    for name in ("Falcon, rope", "Falcon, alibi"):
        target, drafter = build_target(name, "eager"), build_drafter(name)
        prompt = torch.tensor(PROMPT)
        ours = target.generate(prompt, assistant_model=drafter, **ASKED, **DRAFTINGS["tree"])
        assert not difference(ours, target.generate(prompt, **ASKED))
