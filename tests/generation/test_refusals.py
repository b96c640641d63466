"""Bad input gets one clear error that says what was found and what was expected, and nothing is half-done."""

import copy

import pytest
import torch
from conftest import NO_SPECIAL_TOKENS, PROMPT, ROPED, build_drafter
from observers import Puts, num_hooks
from transformers import (
    GenerationConfig,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    QuantizedCache,
    RoFormerConfig,
    RoFormerForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from eagle31_hf import Eagle31Config, Eagle31DrafterModel
from eagle31_hf.cache_names import CACHE, IS_RENAMED
from eagle31_hf.generation.planning.plan import DraftingSettings, resolve_settings

GREEDY = {"max_new_tokens": 8, "do_sample": False}


def with_drafter(drafter):
    return {"assistant_model": drafter}


def with_custom_generate(drafter):
    return {"custom_generate": drafter.decode}


ENTRIES = pytest.mark.parametrize(
    "entry", [with_drafter, with_custom_generate], ids=["assistant_model", "custom_generate"]
)


def static_cache(target, **kwargs) -> StaticCache:
    return StaticCache(config=target.config, max_cache_len=40, offloading=True, **kwargs)


def quantized_cache(target) -> QuantizedCache:
    past = object.__new__(QuantizedCache)  # building one needs quanto or hqq; it is refused by its class
    past.layers, past.layer_class_to_replicate, past.offloading = [], None, False
    return past


EMPTY = torch.zeros((1, 0), dtype=torch.long)
REQUESTS = {  # what is asked, which may depend on the target
    "beams": ({"num_beams": 2}, r"num_beams is 2; expected 1"),
    "group_beams": ({"num_beams": 2, "num_return_sequences": 2}, r"num_beams is 2; expected 1"),
    "offloaded_static": (
        {"cache_implementation": "offloaded_static"},
        r"cache_implementation is 'offloaded_static'; expected one of .*'static'",
    ),
    "quantized_cache": (
        lambda target: {"past_key_values": quantized_cache(target)},
        rf"{CACHE} is a QuantizedCache: .* pass a DynamicCache",
    ),
    "offloaded_static_cache": (
        lambda target: {"past_key_values": static_cache(target)},
        rf"{CACHE} is a StaticCache that is offloaded",
    ),
    "offloaded_windows_too": (
        lambda target: {"past_key_values": static_cache(target, offload_only_non_sliding=False)},
        rf"{CACHE} is a StaticCache that is offloaded",
    ),
    "no_cache": ({"use_cache": False}, r"use_cache is False; expected True"),
    "ensemble": (
        {"assistant_ensemble_weight": 0.5},
        r"assistant_ensemble_weight makes the output lossy; expected None",
    ),
    "empty_inputs": ({"inputs": EMPTY}, r"the prompt is empty; expected at least one token"),
    "empty_input_ids": ({"inputs": None, "input_ids": EMPTY}, r"the prompt is empty; expected at least one token"),
    "embeddings": (
        lambda target: {"inputs": None, "inputs_embeds": target.get_input_embeddings()(torch.tensor(PROMPT)).detach()},
        r"got inputs_embeds; expected input_ids",
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
@pytest.mark.parametrize(("asked", "message"), REQUESTS.values(), ids=REQUESTS)
def test_requests(target, drafter, entry, asked, message):
    refused(target, drafter, message, entry, **(asked(target) if callable(asked) else asked))


def refused(target, drafter, message, entry=with_drafter, **kwargs):
    """One ValueError, before the target runs; no token streamed, no hook left, no config changed."""
    streamer, configs = Puts(), [model.generation_config.to_dict() for model in (target, drafter)]
    streaming = {"streamer": streamer} if entry is with_drafter and kwargs.get("num_beams", 1) == 1 else {}
    handle = target.register_forward_pre_hook(lambda *_: pytest.fail("the target ran"))
    try:
        with pytest.raises(ValueError, match=message) as caught:
            target.generate(**{"inputs": torch.tensor(PROMPT)} | GREEDY | entry(drafter) | streaming | kwargs)
    finally:
        handle.remove()
    assert caught.value.__cause__ is None, "one error, not two"
    assert len(streamer.calls) <= 1, "more than the prompt was streamed"
    assert num_hooks(target) == 0
    assert [model.generation_config.to_dict() for model in (target, drafter)] == configs


BY_GENERATE = {  # that transformers itself would not let come as far as `custom_generate`
    "quantized": ({"cache_implementation": "quantized"}, r"cache_implementation is 'quantized'; expected one of"),
    "synced_gpus": ({"synced_gpus": True}, r"synced_gpus is set .* expected False"),
}


@pytest.mark.parametrize(("asked", "message"), BY_GENERATE.values(), ids=BY_GENERATE)
def test_requests_to_generate_itself(target, drafter, asked, message):
    refused(target, drafter, message, **asked)


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
def test_another_target(drafter, make_target, entry, fields, message):
    refused(make_target(**fields), drafter, message, entry)


@ENTRIES
def test_layer_ids_out_of_range(target, make_target, entry):
    drafter = build_drafter(target, aux_hidden_state_layer_ids=[1, 4, 7])
    message = r"aux_hidden_state_layer_ids .*1, 4, 7.* reach past the target: it has 4 layers, so ids may be 0 to 4"
    refused(make_target("qwen3"), drafter, message, entry)


def test_a_message_names_the_target_the_drafter_was_made_for(make_target):
    config = Eagle31Config(
        hidden_size=36, vocab_size=11, num_attention_heads=2, intermediate_size=40, target_model="org/that-target"
    )
    refused(make_target(hidden_size=24), Eagle31DrafterModel(config), r"made for org/that-target; pass that target")


def encoder_decoder():
    sizes = {"vocab_size": 11, "d_model": 36, "d_kv": 12, "d_ff": 40, "num_heads": 3, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, num_layers=2, num_decoder_layers=3)).eval()


def encoder():
    config = RoFormerConfig(vocab_size=11, hidden_size=36, num_hidden_layers=2, num_attention_heads=3)
    return RoFormerForCausalLM(config).eval()


def stateful():
    config = MiniMaxConfig(
        vocab_size=11, **ROPED | NO_SPECIAL_TOKENS | {"num_hidden_layers": 7, "num_local_experts": 2}
    )
    return MiniMaxForCausalLM(config).eval()


def cross_attending():
    sizes = {"vocab_size": 11, "hidden_size": 36, "num_hidden_layers": 4, "cross_attention_layers": [1]}
    text = sizes | {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 40, "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision |= {"num_hidden_layers": 1, "num_global_layers": 1, "intermediate_layers_indices": [0]}
    return MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=vision)).eval()


NO_TARGETS = {
    "cross_attending": (cross_attending, r"MllamaForConditionalGeneration keeps an image's states among its cached"),
    "encoder": (encoder, r"RoFormerForCausalLM is an encoder, .*; expected a decoder: load it with is_decoder=True"),
    "encoder_decoder": (encoder_decoder, r"T5ForConditionalGeneration is an encoder-decoder; expected a decoder-only"),
    "stateful": (stateful, r"MiniMaxForCausalLM makes a cache of its own kind; expected a target for which"),
}


@ENTRIES
@pytest.mark.parametrize(("make", "message"), NO_TARGETS.values(), ids=NO_TARGETS)
def test_what_is_no_target(drafter, entry, make, message):
    refused(make(), drafter, message, entry)


@pytest.mark.parametrize(
    "kwargs", [{"dola_layers": "low"}, {"penalty_alpha": 0.6, "top_k": 4}], ids=["dola", "contrastive"]
)
def test_a_mode_that_is_neither_greedy_nor_sampling(target, drafter, kwargs):
    message = r"generation mode is (dola_generation|contrastive_search); expected greedy search or sampling"
    refused(target, drafter, message, with_custom_generate, **kwargs)


def test_the_next_call_is_none_the_worse(target, drafter, prompt):
    refused(target, drafter, r"num_assistant_tokens is 0", num_assistant_tokens=0)
    assert target.generate(prompt, assistant_model=drafter, **GREEDY).shape[1] == prompt.shape[1] + 8


def test_a_drafters_own_bad_knob_is_refused_too(target):
    drafter = build_drafter(target)
    drafter.generation_config.num_assistant_tokens = 0
    refused(target, drafter, r"num_assistant_tokens is 0, in the drafter.s generation_config; expected")


DEPTH, THRESHOLD = "num_assistant_tokens", "assistant_confidence_threshold"
STOCK = {DEPTH: 20, THRESHOLD: 0.4}  # what transformers fills in
DEFAULT = DraftingSettings(None, 0.0, None, None)
KNOBS = {  # given in the call, generation config, drafter's own: the result
    "default": ({}, {}, {}, DEFAULT),
    "drafter": ({}, {}, {DEPTH: 3, THRESHOLD: 0.2}, DraftingSettings(3, 0.2, None, None)),
    "config": ({}, {DEPTH: 7, THRESHOLD: 0.1}, {DEPTH: 3}, DraftingSettings(7, 0.1, None, None)),
    "stock_defaults": ({}, STOCK, {}, DEFAULT),
    "call": (STOCK, {DEPTH: 7}, {}, DraftingSettings(20, 0.4, None, None)),
    "call_of_auto": ({DEPTH: "auto"}, {DEPTH: 7}, {}, DEFAULT),
    "call_of_zero": ({THRESHOLD: 0.0}, {}, {THRESHOLD: 0.9}, DEFAULT),
    "none_in_call": ({DEPTH: None}, {}, {DEPTH: 2}, DraftingSettings(2, 0.0, None, None)),
    "none_in_drafter": ({}, {}, {DEPTH: None, THRESHOLD: None}, DEFAULT),
    "tree": ({"draft_tree_top_k": 4}, {}, {DEPTH: 6, "draft_tree_total_tokens": 24}, DraftingSettings(6, 0.0, 4, 24)),
    "tree_of_auto": (
        {"draft_tree_top_k": "auto", DEPTH: 2},
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
    """As one with gradient checkpointing does while it trains, before transformers 5.24."""
    theirs = copy.deepcopy(target).train()
    theirs.gradient_checkpointing_enable()
    if IS_RENAMED:
        asked = {"max_new_tokens": 9, "do_sample": False}
        drafted = theirs.generate(prompt, assistant_model=drafter, **asked)
        assert torch.equal(drafted, theirs.generate(prompt, **asked))
        return
    with pytest.raises(ValueError, match=r"LlamaForCausalLM kept nothing in a cache; .*target\.eval\(\)"):
        theirs.generate(prompt, assistant_model=drafter, max_new_tokens=4)
