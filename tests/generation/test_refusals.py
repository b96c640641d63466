"""Bad input gets one clear error that says what was found and what was expected, and nothing is half-done."""

import copy

import pytest
import torch
from close import assert_close
from conftest import NO_SPECIAL_TOKENS, build_drafter
from observers import Puts, num_hooks
from transformers import (
    DynamicCache,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    QuantizedCache,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from eagle31_hf import Eagle31Config, Eagle31DrafterModel
from eagle31_hf.generation.planning.settings import DraftingSettings, resolve_settings

GREEDY = {"max_new_tokens": 8, "do_sample": False}


def with_drafter(drafter):
    return {"assistant_model": drafter}


def with_custom_generate(drafter):
    return {"custom_generate": drafter.decode}


ENTRIES = pytest.mark.parametrize(
    "entry", [with_drafter, with_custom_generate], ids=["assistant_model", "custom_generate"]
)
REQUESTS = {
    "beams": ({"num_beams": 2}, r"num_beams is 2; expected 1"),
    "group_beams": ({"num_beams": 2, "num_return_sequences": 2}, r"num_beams is 2; expected 1"),
    "offloaded_static": (
        {"cache_implementation": "offloaded_static"},
        r"cache_implementation is 'offloaded_static'; expected one of",
    ),
    "no_cache": ({"use_cache": False}, r"use_cache is False; expected True"),
    "ensemble": (
        {"assistant_ensemble_weight": 0.5},
        r"assistant_ensemble_weight makes the output lossy; expected None",
    ),
    "no_drafts": (
        {"num_assistant_tokens": 0},
        r"num_assistant_tokens is 0; expected 'auto' or an integer from 1 to 4096 \(to decode without drafts, drop",
    ),
    "negative_drafts": ({"num_assistant_tokens": -3}, r"num_assistant_tokens is -3; expected"),
    "half_a_draft": ({"num_assistant_tokens": 2.5}, r"num_assistant_tokens is 2\.5; expected"),
    "word_drafts": ({"num_assistant_tokens": "many"}, r"num_assistant_tokens is 'many'; expected 'auto' or an integer"),
    "no_children": ({"draft_tree_top_k": 0}, r"draft_tree_top_k is 0; expected 'auto' or an integer from 1 to 4096\."),
    "no_tree": (
        {"draft_tree_total_tokens": 1},
        r"draft_tree_total_tokens is 1; expected 'auto' or an integer from 2 to 4096\.",
    ),
    "true_drafts": ({"num_assistant_tokens": True}, r"num_assistant_tokens is True; expected"),
    "threshold_1": ({"assistant_confidence_threshold": 1.0}, r"assistant_confidence_threshold is 1\.0; expected 0"),
    "threshold_negative": (
        {"assistant_confidence_threshold": -0.1},
        r"assistant_confidence_threshold is -0\.1; expected",
    ),
    "threshold_nan": (
        {"assistant_confidence_threshold": float("nan")},
        r"assistant_confidence_threshold is nan; expected",
    ),
}


@ENTRIES
@pytest.mark.parametrize(("kwargs", "message"), REQUESTS.values(), ids=REQUESTS)
def test_requests(target, drafter, prompt, entry, kwargs, message):
    refused(target, drafter, entry, message, inputs=prompt, **kwargs)


def refused(target, drafter, entry, message, **kwargs):
    """One ValueError; no token streamed, no hook left, no config changed."""
    streamer, configs = Puts(), [model.generation_config.to_dict() for model in (target, drafter)]
    streaming = {"streamer": streamer} if entry is with_drafter and kwargs.get("num_beams", 1) == 1 else {}
    with pytest.raises(ValueError, match=message) as caught:
        target.generate(**GREEDY | entry(drafter) | streaming | kwargs)
    assert caught.value.__cause__ is None, "one error, not two"
    assert len(streamer.calls) <= 1, "more than the prompt was streamed"
    assert num_hooks(target) == 0
    assert [model.generation_config.to_dict() for model in (target, drafter)] == configs


BATCHES = {  # refused before, and no more: (prompts, what is asked, sequences that come back)
    "batch": (3, {}, 3),
    "return_sequences": (1, {"num_return_sequences": 2, "do_sample": True}, 2),
    "batch_of_return_sequences": (2, {"num_return_sequences": 3, "do_sample": True}, 6),
}


@ENTRIES
@pytest.mark.parametrize(("num_sequences", "kwargs", "expected"), BATCHES.values(), ids=BATCHES)
def test_a_batch_is_not_refused(target, drafter, prompt, entry, num_sequences, kwargs, expected):
    output = target.generate(
        prompt.repeat(num_sequences, 1), num_assistant_tokens=3, **GREEDY | entry(drafter) | kwargs
    )
    assert output.shape == (expected, prompt.shape[1] + 8)
    if "do_sample" not in kwargs:
        assert_close("text", output, target.generate(prompt, **GREEDY).repeat(num_sequences, 1))


@ENTRIES
@pytest.mark.parametrize("given", ["inputs", "input_ids"])
def test_an_empty_prompt(target, drafter, entry, given):
    empty = torch.zeros((1, 0), dtype=torch.long)
    refused(target, drafter, entry, r"the prompt is empty; expected at least one token", **{given: empty})


@ENTRIES
def test_embeddings_in_place_of_a_prompt(target, drafter, prompt, entry):
    embeds = target.get_input_embeddings()(prompt).detach()
    refused(target, drafter, entry, r"got inputs_embeds; expected input_ids", inputs_embeds=embeds)


@ENTRIES
@pytest.mark.parametrize("given", ["cache", "implementation"])
def test_a_static_cache_is_not_refused(target, drafter, prompt, entry, given):
    past = StaticCache(config=target.config, max_cache_len=32)
    kwargs = {"past_key_values": past} if given == "cache" else {"cache_implementation": "static"}
    output = target.generate(prompt, num_assistant_tokens=3, **GREEDY | entry(drafter) | kwargs)
    assert_close("text", output, target.generate(prompt, **GREEDY))
    assert past.get_seq_length() == (output.shape[1] - 1 if given == "cache" else 0)


@ENTRIES
def test_a_static_cache_of_another_kind(target, drafter, prompt, entry):
    past = StaticCache(config=target.config, max_cache_len=32, offloading=True, offload_only_non_sliding=False)
    refused(
        target,
        drafter,
        entry,
        r"past_key_values is a StaticCache that is offloaded",
        inputs=prompt,
        past_key_values=past,
    )


@ENTRIES
def test_a_cache_that_rounds_its_tokens_together(target, drafter, prompt, entry):
    past = object.__new__(QuantizedCache)  # building one needs quanto or hqq; it is refused by its class
    past.layers, past.layer_class_to_replicate, past.offloading = [], None, False
    refused(
        target,
        drafter,
        entry,
        r"past_key_values is a QuantizedCache: .* pass a DynamicCache",
        inputs=prompt,
        past_key_values=past,
    )


def test_a_quantized_cache(target, drafter, prompt):
    message = r"cache_implementation is 'quantized'; expected one of"
    refused(target, drafter, with_drafter, message, inputs=prompt, cache_implementation="quantized")


def test_synced_gpus(target, drafter, prompt):
    refused(target, drafter, with_drafter, r"synced_gpus is set .* expected False", inputs=prompt, synced_gpus=True)


def test_a_refused_cache_is_not_written_to(target, drafter, prompt):
    past = target(prompt[:, :3]).past_key_values
    refused(
        target,
        drafter,
        with_drafter,
        r"num_assistant_tokens is 0",
        inputs=prompt,
        past_key_values=past,
        num_assistant_tokens=0,
    )
    assert isinstance(past, DynamicCache)
    assert past.get_seq_length() == 3


OTHER_TARGETS = {  # fields of a target the drafter was not made for
    "width": ({"hidden_size": 24}, r"the target's width is 24, the drafter expects 36: the drafter was made for"),
    "vocabulary": (
        {"vocab_size": 500},
        r"the target's vocabulary has 500 ids, the drafter's 11 \(more than padding apart\)",
    ),
    "depth": ({"num_hidden_layers": 3}, r"has 3 layers|target of 3 layers has no default capture points"),
}


@ENTRIES
@pytest.mark.parametrize(("fields", "message"), OTHER_TARGETS.values(), ids=OTHER_TARGETS)
def test_another_target(drafter, make_target, prompt, entry, fields, message):
    refused(make_target(**fields), drafter, entry, message, inputs=prompt)


@ENTRIES
def test_layer_ids_out_of_range(target, make_target, prompt, entry):
    drafter = build_drafter(target, aux_hidden_state_layer_ids=[1, 4, 7])
    message = r"aux_hidden_state_layer_ids .*1, 4, 7.* reach past the target: it has 4 layers, so ids may be 0 to 4"
    refused(make_target("qwen3"), drafter, entry, message, inputs=prompt)


def test_a_message_names_the_target_the_drafter_was_made_for(make_target, prompt):
    config = Eagle31Config(
        hidden_size=36, vocab_size=11, num_attention_heads=2, intermediate_size=40, target_model="org/that-target"
    )
    other = make_target(hidden_size=24)
    refused(
        other, Eagle31DrafterModel(config), with_drafter, r"made for org/that-target; pass that target", inputs=prompt
    )


@pytest.fixture(scope="module")
def encoder_decoder():
    config = T5Config(vocab_size=11, d_model=36, d_kv=12, d_ff=40, num_layers=2, num_heads=3, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def stateful():
    return MambaForCausalLM(MambaConfig(vocab_size=11, hidden_size=36, num_hidden_layers=7, **NO_SPECIAL_TOKENS)).eval()


@ENTRIES
def test_an_encoder_decoder(encoder_decoder, drafter, prompt, entry):
    refused(
        encoder_decoder,
        drafter,
        entry,
        r"T5ForConditionalGeneration is an encoder-decoder; expected a decoder-only",
        inputs=prompt,
    )


@ENTRIES
def test_a_stateful_target(stateful, drafter, prompt, entry):
    refused(
        stateful,
        drafter,
        entry,
        r"MambaForCausalLM keeps a recurrent state .* expected an attention-only target",
        inputs=prompt,
    )


@pytest.mark.parametrize(
    "kwargs", [{"dola_layers": "low"}, {"penalty_alpha": 0.6, "top_k": 4}], ids=["dola", "contrastive"]
)
def test_a_mode_that_is_neither_greedy_nor_sampling(target, drafter, prompt, kwargs):
    message = r"generation mode is (dola_generation|contrastive_search); expected greedy search or sampling"
    refused(target, drafter, with_custom_generate, message, inputs=prompt, **kwargs)


def test_the_next_call_is_none_the_worse(target, drafter, prompt):
    refused(target, drafter, with_drafter, r"num_assistant_tokens is 0", inputs=prompt, num_assistant_tokens=0)
    assert target.generate(prompt, assistant_model=drafter, **GREEDY).shape[1] == prompt.shape[1] + 8


def test_a_drafters_own_bad_knob_is_refused_too(target, prompt):
    drafter = build_drafter(target)
    drafter.generation_config.num_assistant_tokens = 0
    refused(
        target,
        drafter,
        with_drafter,
        r"num_assistant_tokens is 0, in the drafter.s generation_config; expected",
        inputs=prompt,
    )


KNOBS = {  # given in the call, generation config, drafter's own: the result
    "default": ({}, {}, {}, DraftingSettings(None, 0.0, None, None)),
    "drafter": (
        {},
        {},
        {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.2},
        DraftingSettings(3, 0.2, None, None),
    ),
    "config": (
        {},
        {"num_assistant_tokens": 7, "assistant_confidence_threshold": 0.1},
        {"num_assistant_tokens": 3},
        DraftingSettings(7, 0.1, None, None),
    ),
    "stock_defaults": (
        {},
        {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4},
        {},
        DraftingSettings(None, 0.0, None, None),
    ),
    "call": (
        {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4},
        {"num_assistant_tokens": 7},
        {},
        DraftingSettings(20, 0.4, None, None),
    ),
    "call_of_auto": (
        {"num_assistant_tokens": "auto"},
        {"num_assistant_tokens": 7},
        {},
        DraftingSettings(None, 0.0, None, None),
    ),
    "call_of_zero": (
        {"assistant_confidence_threshold": 0.0},
        {},
        {"assistant_confidence_threshold": 0.9},
        DraftingSettings(None, 0.0, None, None),
    ),
    "none_in_call": (
        {"num_assistant_tokens": None},
        {},
        {"num_assistant_tokens": 2},
        DraftingSettings(2, 0.0, None, None),
    ),
    "none_in_drafter": (
        {},
        {},
        {"num_assistant_tokens": None, "assistant_confidence_threshold": None},
        DraftingSettings(None, 0.0, None, None),
    ),
    "tree": (
        {"draft_tree_top_k": 4},
        {},
        {"num_assistant_tokens": 6, "draft_tree_total_tokens": 24},
        DraftingSettings(6, 0.0, 4, 24),
    ),
    "tree_of_auto": (
        {"draft_tree_top_k": "auto", "num_assistant_tokens": 2},
        {},
        {"draft_tree_top_k": 4},
        DraftingSettings(2, 0.0, None, None),
    ),
}


@pytest.mark.parametrize(("given", "configured", "own", "expected"), KNOBS.values(), ids=KNOBS)
def test_resolve_settings(target, given, configured, own, expected):
    drafter = build_drafter(target)
    drafter.generation_config.update(**own)
    for name in ("draft_tree_top_k", "draft_tree_total_tokens"):
        setattr(drafter.generation_config, name, own.get(name))  # `update` keeps to what a config knows
    assert resolve_settings(drafter, GenerationConfig(**configured), given) == expected


MAY_DRAW_TREES = [  # auto may, unless one child a node was asked for; a fixed depth only when asked
    (DraftingSettings(None, 0.0, None, None), True),
    (DraftingSettings(None, 0.0, 1, None), False),
    (DraftingSettings(None, 0.0, 4, None), True),
    (DraftingSettings(5, 0.0, None, None), False),
    (DraftingSettings(5, 0.0, 1, 60), False),
    (DraftingSettings(5, 0.0, 2, None), True),
]


@pytest.mark.parametrize(("settings", "expected"), MAY_DRAW_TREES, ids=str)
def test_which_settings_may_draw_trees(settings, expected):
    assert settings.may_draw_trees == expected


def test_a_target_that_keeps_no_cache_is_refused(target, drafter, prompt):
    theirs = copy.deepcopy(target).train()
    theirs.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM kept nothing in a cache; .*target\.eval\(\)"):
        theirs.generate(prompt, assistant_model=drafter, max_new_tokens=4)
