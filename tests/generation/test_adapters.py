"""Targets with adapters: those that change weights say what they say alone; those that put tokens into the cache are
refused."""

import copy

import pytest
import torch
from batches import left_padded
from close import assert_close
from conftest import build_drafter, build_target
from draftings import DRAFTINGS, steady_clock
from observers import Puts, num_hooks
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

IDS, MASK = left_padded([[1, 2, 3, 5, 8], [4, 4], [9, 0, 7]])
COMPANY = {"alone": {"input_ids": IDS[:1]}, "batch": {"input_ids": IDS, "attention_mask": MASK}}
PLAIN = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 6}


@pytest.fixture(scope="module")
def pair():
    target = build_target("qwen3")
    return target, build_drafter(target)


# --- adapters that change weights ---


def lora(peft, seed: int = 0, **kwargs):
    torch.manual_seed(seed)
    return peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights=False, **kwargs
    )


def ia3(peft):
    modules = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return peft.IA3Config(task_type="CAUSAL_LM", init_ia3_weights=False, **modules)


def second_adapter(peft, target):
    model = peft.get_peft_model(target, lora(peft))
    model.add_adapter("second", lora(peft, seed=1, r=4))
    model.set_adapter("second")
    return model


WEIGHTS = {
    "lora": lambda peft, target: peft.get_peft_model(target, lora(peft)),
    "ia3": lambda peft, target: peft.get_peft_model(target, ia3(peft)),
    "merged": lambda peft, target: peft.get_peft_model(target, lora(peft)).merge_and_unload(),
    "second": second_adapter,
}


def check_text(model, drafter, way: str) -> None:
    for company, inputs in COMPANY.items():
        expected = model.generate(**inputs, **PLAIN)
        with steady_clock(model, drafter):
            output = model.generate(**inputs, **PLAIN, assistant_model=drafter, **DRAFTINGS[way])
        assert_close(company, output, expected)
    assert num_hooks(model) == 0


@pytest.mark.parametrize("kind", WEIGHTS)
def test_adapters_that_change_weights(pair, kind):
    peft = pytest.importorskip("peft")
    target, drafter = pair
    model = WEIGHTS[kind](peft, copy.deepcopy(target)).eval()
    for way in DRAFTINGS if kind == "lora" else ["tree"]:
        check_text(model, drafter, way)


def test_a_disabled_adapter(pair):
    peft = pytest.importorskip("peft")
    target, drafter = pair
    model = peft.get_peft_model(copy.deepcopy(target), lora(peft)).eval()
    with model.disable_adapter():
        assert_close("text", model.generate(**COMPANY["alone"], **PLAIN), target.generate(**COMPANY["alone"], **PLAIN))
        check_text(model, drafter, "tree")


def test_sampling_with_an_adapter(pair):
    """Coupled draws: with a seed the text is the same whatever is drafted."""
    peft = pytest.importorskip("peft")
    target, drafter = pair
    model, texts = peft.get_peft_model(copy.deepcopy(target), lora(peft)).eval(), []
    for way in ("tree", "auto"):
        torch.manual_seed(0)
        texts.append(
            model.generate(**COMPANY["batch"], **PLAIN | {"do_sample": True}, assistant_model=drafter, **DRAFTINGS[way])
        )
    assert_close("text", *texts)


# --- adapters that put tokens into the cache ---


def soft_prompt(target: PreTrainedModel) -> PreTrainedModel:
    """Three embeddings before every prompt, as prompt tuning has them; no library but ours knows of it."""
    prepare, table = target.prepare_inputs_for_generation, target.get_input_embeddings()

    def with_virtual_tokens(input_ids: Tensor, past_key_values=None, **kwargs):
        inputs = prepare(input_ids, past_key_values=past_key_values, **kwargs)
        if past_key_values.get_seq_length() == 0:
            embeds = table(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = torch.cat((0.1 * embeds.new_ones(len(embeds), 3, embeds.shape[2]), embeds), dim=1)
        inputs["position_ids"] = inputs["attention_mask"] = None
        return inputs

    target.prepare_inputs_for_generation = with_virtual_tokens
    return target


def tuned(name: str, **kwargs):
    def build(target: PreTrainedModel):
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(
            target, getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=3, **kwargs)
        ).eval()

    return build


VIRTUAL = {
    "soft_prompt": soft_prompt,
    "prompt_tuning": tuned("PromptTuningConfig"),
    "p_tuning": tuned("PromptEncoderConfig", encoder_hidden_size=8),
    "prefix_tuning": tuned("PrefixTuningConfig"),
}


@pytest.mark.parametrize("kind", VIRTUAL)
def test_adapters_that_put_tokens_into_the_cache(pair, kind):
    """Before anything is generated; plain decoding goes on working, with the same cache too."""
    target, drafter = copy.deepcopy(pair[0]), pair[1]
    model = VIRTUAL[kind](target)
    expected = model.generate(**COMPANY["alone"], **PLAIN)
    for company, inputs in COMPANY.items():
        streamer, past = Puts(), DynamicCache(config=target.config)
        kwargs = {"streamer": streamer, "past_key_values": past} if company == "alone" else {}
        message = r"after a prompt of 5 tokens the target's cache holds 8; expected the prompt and nothing"
        with pytest.raises(ValueError, match=message):
            model.generate(**inputs, **PLAIN, assistant_model=drafter, **DRAFTINGS["tree"], **kwargs)
        assert len(streamer.calls) <= 1, "more than the prompt was streamed"
        assert past.get_seq_length() == 0
    assert num_hooks(target) == 0
    assert_close("text", model.generate(**COMPANY["alone"], **PLAIN), expected)


def test_a_prompt_read_in_chunks_too(pair):
    target, drafter = copy.deepcopy(pair[0]), pair[1]
    with pytest.raises(ValueError, match=r"after a prompt of 5 tokens the target's cache holds 8"):
        soft_prompt(target).generate(**COMPANY["alone"], **PLAIN, assistant_model=drafter, prefill_chunk_size=2)
