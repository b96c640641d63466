"""Targets with adapters that put tokens into the cache are refused. Those that change weights are rows of
`test_cases.py`."""

import copy

import pytest
import torch
from batches import left_padded
from close import assert_close
from conftest import build_drafter, build_target, import_peft
from draftings import DRAFTINGS
from observers import Puts, num_hooks
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from eagle31_hf.cache_names import cache_in

IDS, MASK = left_padded([[1, 2, 3, 5, 8], [4, 4], [9, 0, 7]])
COMPANY = {"alone": {"input_ids": IDS[:1]}, "batch": {"input_ids": IDS, "attention_mask": MASK}}
PLAIN = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 6}


@pytest.fixture(scope="module")
def pair():
    target = build_target("qwen3")
    return target, build_drafter(target)


def soft_prompt(target: PreTrainedModel) -> PreTrainedModel:
    """Three embeddings before every prompt, as prompt tuning has them; no library but ours knows of it."""
    prepare, table = target.prepare_inputs_for_generation, target.get_input_embeddings()

    def with_virtual_tokens(input_ids: Tensor, **kwargs):
        inputs = prepare(input_ids, **kwargs)
        if cache_in(kwargs).get_seq_length() == 0:
            embeds = table(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = torch.cat((0.1 * embeds.new_ones(len(embeds), 3, embeds.shape[2]), embeds), dim=1)
        inputs["position_ids"] = inputs["attention_mask"] = None
        return inputs

    target.prepare_inputs_for_generation = with_virtual_tokens
    return target


def tuned(name: str, **kwargs):
    def build(target: PreTrainedModel):
        peft = import_peft() if name == "PrefixTuningConfig" else pytest.importorskip("peft")
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
