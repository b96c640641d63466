"""Targets in 4 and 8 bits by bitsandbytes, loaded as users load them: drafting gives the text of the same target alone,
but where its own logits move with the tokens beside a token; and drafters that transformers quantizes."""

import logging

import pytest
import torch
from conftest import PROMPT, build_drafter, build_target
from draftings import CHAIN_OR_TREE as PLANS
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.utils import ModelOutput

from eagle31_hf import Eagle31DrafterModel, track_acceptance
from eagle31_hf.checking.trial import departures
from eagle31_hf.generation.captured.seam import Uncaptured, seams

pytest.importorskip("bitsandbytes")

# Its kernels take rows of whole blocks of 32 on some CPUs.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 16, "num_hidden_layers": 4, "initializer_range": 0.25}
OF_DRAFTER = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
FOUR_BITS = {
    "fp4": {"load_in_4bit": True},
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    },
}
EIGHT_BITS = {
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "int8 with outliers": {"load_in_8bit": True},  # by the threshold that is the default
}
KINDS = FOUR_BITS | EIGHT_BITS
SEAMS = {"eager": None, "as tensors": Uncaptured()}
LENGTH = 24
ALLOWED = 2.0  # times what the target's logits move by themselves: each of two tokens may have moved the other way


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("target")
    build_target("llama", **SIZES).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def pair_of(folder):
    """Returns a function of a kind that returns the target of this kind and a drafter fitted to it."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    made: dict[str, tuple[PreTrainedModel, Eagle31DrafterModel]] = {}

    def pair(kind: str) -> tuple[PreTrainedModel, Eagle31DrafterModel]:
        if kind not in made:
            config = BitsAndBytesConfig(**KINDS[kind])
            target = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
            made[kind] = target.eval(), build_drafter(target, **OF_DRAFTER)
        return made[kind]

    return pair


def asked(**options) -> dict:
    ids = torch.tensor(PROMPT)
    given = {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": LENGTH, "pad_token_id": 6}
    return given | {"do_sample": False} | options


@torch.no_grad()
def movement(target: PreTrainedModel, alone: ModelOutput) -> float:
    """Returns by how much the target's own logits of a text differ at most between single steps and one forward."""
    steps = torch.cat(alone.logits).float()
    return float((target(alone.sequences[:, :-1]).logits[0, -len(steps) :].float() - steps).abs().max())


def assert_is_the_targets(target: PreTrainedModel, text: Tensor, alone: ModelOutput) -> None:
    """Asserts that a text is the target's own up to where its two best tokens are nearer than its logits move."""
    for _, step, difference in departures(text, alone):
        most = ALLOWED * movement(target, alone)
        assert difference <= most, f"token {step} departs by {difference}, where rounding explains {most}"


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize(
    ("kind", "plan"), [("fp4", "chain"), ("nf4", "tree"), ("int8", "chain"), ("int8 with outliers", "tree")]
)
def test_text_is_that_of_the_same_target_alone(pair_of, kind, plan, seam):
    target, drafter = pair_of(kind)
    alone = target.generate(**asked(), return_dict_in_generate=True, output_logits=True)
    with seams(lambda device: SEAMS[seam]), track_acceptance() as stats:
        text = target.generate(**asked(), assistant_model=drafter, **PLANS[plan])
    assert_is_the_targets(target, text, alone)
    assert text.shape == alone.sequences.shape
    assert sum(stats.accepted_per_position) > 0
    if kind in FOUR_BITS:
        assert torch.equal(text, alone.sequences)
    if SEAMS[seam] is not None:
        (execution,) = stats.executions
        if kind == "int8 with outliers":
            assert "the target is in 8 bits by LLM.int8, which has the host look for outliers" in execution
        else:
            assert "outliers" not in execution
            assert kind not in FOUR_BITS or execution == f"as {Uncaptured.name}"


def test_sampled_text_is_one_whatever_is_drafted(pair_of):
    target, drafter = pair_of("nf4")
    options = {"do_sample": True, "top_k": 7, "temperature": 0.8, "assistant_model": drafter}
    texts = []
    for knobs, seam in ((PLANS["tree"], None), (PLANS["chain"], Uncaptured())):
        torch.manual_seed(3)
        with seams(lambda device, seam=seam: seam):
            texts.append(target.generate(**asked(**options), **knobs).tolist())
    assert texts[0] == texts[1]


def test_a_wrong_verification_is_told_from_rounding(pair_of):
    """With LLM.int8's outliers logits move most; a text of second best tokens departs by more all the same."""
    target, _ = pair_of("int8 with outliers")
    alone = target.generate(**asked(), return_dict_in_generate=True, output_logits=True)
    margins = torch.cat(alone.logits).topk(2).values.diff(dim=1).abs()
    step = int(margins.argmax())
    text = alone.sequences.clone()
    text[0, len(PROMPT[0]) + step] = alone.logits[step][0].topk(2).indices[1]
    with pytest.raises(AssertionError, match="departs by"):
        assert_is_the_targets(target, text, alone)


@pytest.mark.parametrize(("kind", "plan"), [("fp4", "tree"), ("int8 with outliers", "chain")])
def test_drafters_that_transformers_quantizes(tmp_path, folder, kind, plan):
    """They draft as they are; they are neither saved nor quantized again."""
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    build_drafter(target, **OF_DRAFTER).save_pretrained(tmp_path / "drafter")
    config = BitsAndBytesConfig(**KINDS[kind])
    drafter = Eagle31DrafterModel.from_pretrained(tmp_path / "drafter", quantization_config=config, dtype=torch.float32)
    expected = target.generate(**asked())
    for seam in SEAMS.values():
        with seams(lambda device, seam=seam: seam), track_acceptance() as stats:
            assert torch.equal(target.generate(**asked(), assistant_model=drafter, **PLANS[plan]), expected)
        assert sum(stats.accepted_per_position) > 0
    with pytest.raises(ValueError, match=r"expected a plain nn\.Linear"):
        drafter.quantize("int8")
    with pytest.raises(ValueError, match="bitsandbytes weights cannot be saved"):
        drafter.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()
