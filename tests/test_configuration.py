"""Every field is written out and read back; every contradiction is refused: what was found, what was expected."""

import json
import pickle
from copy import deepcopy
from dataclasses import fields
from functools import partial

import pytest
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from eagle31_hf import Eagle31Config
from eagle31_hf.configuration import default_layer_ids

# Everything this class adds to PreTrainedConfig, none at its default. MLA and the link to weights elsewhere exclude
# some of it.
NOT_DEFAULT = {
    "vocab_size": 101,
    "draft_vocab_size": 53,
    "hidden_size": 24,
    "target_hidden_size": 40,
    "aux_hidden_state_layer_ids": [0, 3, 5, 6],
    "fc_norm": False,
    "norm_output": False,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "attention_bias": True,
    "attention_dropout": 0.25,
    "qk_norm": True,
    "fc_bias": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 17,
    "intermediate_size": 36,
    "hidden_act": "gelu",
    "mlp_bias": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0, "partial_rotary_factor": 0.4},
    "max_position_embeddings": 77,
    "initializer_range": 0.03,
    "logit_scale": 0.5,
    "share_target_embeddings": False,
    "share_target_head": True,
    "q_lora_rank": 3,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "mask_token_id": 5,
    "target_model": "a/target",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 4,
}
ROUND_TRIPS = {
    "defaults": {},
    "nothing_default": NOT_DEFAULT | {"share_target_head": False},
    "shared_head": {"share_target_head": True},
    "mla": {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5},
}
# Fields, what the message says was found, what it says was expected.
REFUSALS = {
    "mla_sizes_missing": (
        {"kv_lora_rank": 16},
        "qk_nope_head_dim is None, qk_rope_head_dim is None",
        "expected sizes above 0",
    ),
    "mla_with_qk_norm": (
        {"kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "qk_norm": True},
        "qk_norm=True",
        "no qk_norm",
    ),
    "mla_odd_rope": (
        {"kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 3, "v_head_dim": 4},
        "qk_rope_head_dim=3",
        "even qk_rope_head_dim",
    ),
    "a_million_layers": ({"num_hidden_layers": 1_000_000}, "num_hidden_layers is 1000000", "at most 256"),
    "no_head": ({"num_attention_heads": 0}, "num_attention_heads is 0", "above 0"),
    "no_layer": ({"num_hidden_layers": 0}, "num_hidden_layers is 0", "at least 1"),
    "empty_draft_vocabulary": ({"draft_vocab_size": 0}, "draft_vocab_size is 0", "1 to vocab_size (32000)"),
    "draft_vocabulary_above_v": ({"draft_vocab_size": 32001}, "draft_vocab_size is 32001", "1 to vocab_size (32000)"),
    "heads_not_grouped": (
        {"num_key_value_heads": 5},
        "num_attention_heads (32)",
        "multiple of num_key_value_heads (5)",
    ),
    "no_kv_head": ({"num_key_value_heads": 0}, "num_key_value_heads is 0", "above 0"),
    "two_input_norms": ({"norm_before_fc": True}, "fc_norm and norm_before_fc are both true", "at most one"),
    "no_ids": (
        {"aux_hidden_state_layer_ids": []},
        "aux_hidden_state_layer_ids is []",
        "distinct ids >= 0 in ascending order",
    ),
    "ids_descend": ({"aux_hidden_state_layer_ids": [5, 3]}, "is [5, 3]", "ascending order"),
    "ids_repeat": ({"aux_hidden_state_layer_ids": [3, 3]}, "is [3, 3]", "distinct ids"),
    "a_vocabulary_of_a_billion": ({"vocab_size": 10**9}, "vocab_size is 1000000000", "at most 16777216"),
    "a_width_of_a_trillion": ({"hidden_size": 10**12}, "hidden_size is 1000000000000", "at most 16777216"),
    "a_window_of_2**63": ({"sliding_window": 2**63}, "sliding_window is 9223372036854775808", "at most 2147483648"),
    "a_rope_of_a_million": (
        {"rope_parameters": {str(i): i for i in range(10**6)}},
        "rope_parameters are 1000000",
        "a rope of",
    ),
    "a_rope_over_more_than_a_head": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}},
        "1000000000.0",
        "at most 1",
    ),
    "a_scale_that_is_not_finite": ({"logit_scale": float("nan")}, "logit_scale is nan", "finite numbers"),
    "negative_id": ({"aux_hidden_state_layer_ids": [-1, 3]}, "is [-1, 3]", "ids >= 0"),
    "layer_types_too_many": (
        {"layer_types": ["full_attention"] * 2},
        "['full_attention', 'full_attention']",
        "expected 1 of",
    ),
    "layer_type_unknown": (
        {"layer_types": ["chunked_attention"]},
        "is ['chunked_attention']",
        "'full_attention', 'sliding_attention'",
    ),
    "no_window": ({"layer_types": ["sliding_attention"]}, "sliding_window is None", "tokens > 0"),
    "empty_window": ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "sliding_window is 0", "tokens > 0"),
    "shared_table_of_another_width": ({"target_hidden_size": 64}, "hidden_size (4096)", "== target_hidden_size (64)"),
    "shared_head_of_another_width": (
        {"target_hidden_size": 64, "share_target_embeddings": False, "share_target_head": True},
        "(4096, 64)",
        "needs equal widths",
    ),
    "shared_head_pruned": (
        {"share_target_head": True, "draft_vocab_size": 100},
        "(100 of 32000)",
        "full draft vocabulary",
    ),
}
WRONG_TYPES = {
    "string_for_bool": ({"fc_norm": "false"}, "'fc_norm' expected bool, got str"),
    "int_for_bool": ({"norm_output": 1}, "'norm_output' expected bool, got int"),
    "string_for_int": ({"hidden_size": "4096"}, "'hidden_size' expected int, got str"),
}


def test_eagle31_is_the_default():
    config = Eagle31Config()
    assert config.is_eagle31
    assert (config.fc_norm, config.norm_output, config.norm_before_fc, config.norm_before_residual) == (
        True,
        True,
        False,
        False,
    )
    assert not Eagle31Config(fc_norm=False).is_eagle31
    assert not Eagle31Config(norm_output=False).is_eagle31


def test_absent_sizes_follow_the_given_ones():
    config = Eagle31Config(vocab_size=101, hidden_size=48, num_attention_heads=6, num_hidden_layers=2)
    derived = (
        config.draft_vocab_size,
        config.target_hidden_size,
        config.num_key_value_heads,
        config.head_dim,
        config.layer_types,
    )
    assert derived == (101, 48, 6, 8, ["full_attention"] * 2)


def test_not_default_covers_every_field():
    own = {field.name for field in fields(Eagle31Config)} - {field.name for field in fields(PreTrainedConfig)}
    own |= {name for name in NOT_DEFAULT if name in {field.name for field in fields(PreTrainedConfig)}}
    assert own - set(NOT_DEFAULT) == {"kv_lora_rank", "weights_from"}
    defaults = Eagle31Config()
    assert [name for name, value in NOT_DEFAULT.items() if getattr(defaults, name) == value] == []


@pytest.mark.parametrize("given", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
@pytest.mark.parametrize("reader", [Eagle31Config, AutoConfig])
def test_json_round_trip(given, reader, tmp_path):
    config = Eagle31Config(**given)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    read = reader.from_pretrained(tmp_path)
    assert written["model_type"] == "eagle31"
    assert type(read) is Eagle31Config
    for name in (*NOT_DEFAULT, "kv_lora_rank"):
        assert name in written  # readers disagree on defaults
        assert getattr(read, name) == getattr(config, name), name
    assert {name: getattr(read, name) for name in given} == given


def test_another_models_config_is_refused(tmp_path):
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_type 'llama'; expected 'eagle31'"):
        Eagle31Config.from_pretrained(tmp_path)


@pytest.mark.parametrize(("given", "found", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_contradictions_are_refused(given, found, expected):
    with pytest.raises((StrictDataclassClassValidationError, ValueError)) as error:
        Eagle31Config(**given)
    assert found in str(error.value)
    assert expected in str(error.value)


@pytest.mark.parametrize(("given", "message"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_wrong_types_are_refused(given, message):
    with pytest.raises(StrictDataclassFieldValidationError, match=message):
        Eagle31Config(**given)


def test_a_truth_value_is_no_layer_id():
    # which check finds it depends on huggingface-hub
    with pytest.raises(StrictDataclassError, match="aux_hidden_state_layer_ids"):
        Eagle31Config(aux_hidden_state_layer_ids=[True, 3])


@pytest.mark.parametrize(("num_layers", "ids"), [(7, [2, 3, 4]), (24, [2, 12, 21]), (61, [2, 30, 58])])
def test_default_capture_points(num_layers, ids):
    assert default_layer_ids(num_layers) == ids
    assert Eagle31Config().resolve_layer_ids(num_layers) == ids


def test_ids_reach_up_to_the_last_layer():
    config = Eagle31Config(aux_hidden_state_layer_ids=[0, 8])
    assert config.resolve_layer_ids(8) == [0, 8]
    assert config.num_aux_states == 2


@pytest.mark.parametrize(
    ("given", "num_layers", "fragments"),
    [
        pytest.param(
            {}, 6, ("6 layers", "gives [2, 3, 3]", "set aux_hidden_state_layer_ids"), id="no_defaults_for_6_layers"
        ),
        pytest.param(
            {"aux_hidden_state_layer_ids": [1, 9]}, 8, ("[1, 9]", "0 to 8", "not named"), id="ids_past_the_target"
        ),
        pytest.param(
            {"aux_hidden_state_layer_ids": [9], "target_model": "a/b"},
            8,
            ("[9]", "8 layers", "a/b"),
            id="target_is_named",
        ),
    ],
)
def test_layer_ids_that_do_not_fit_the_target(given, num_layers, fragments):
    with pytest.raises(ValueError, match="layers") as error:
        Eagle31Config(**given).resolve_layer_ids(num_layers)
    assert all(fragment in str(error.value) for fragment in fragments)


# What a person misspelt -> what was meant.
MISSPELT = {
    "norm_ouput": "norm_output",
    "fc_nrom": "fc_norm",
    "num_layers_hidden": None,
    "draft_vocabsize": "draft_vocab_size",
    "nope": None,
}


@pytest.mark.parametrize(("name", "meant"), MISSPELT.items(), ids=MISSPELT)
def test_a_keyword_that_is_no_field_is_refused_with_the_nearest_name(name, meant, tmp_path):
    Eagle31Config().save_pretrained(tmp_path)
    hint = f": did you mean {meant}" if meant else "$"
    readers = [partial(reader.from_pretrained, tmp_path) for reader in (Eagle31Config, AutoConfig)]
    for way in (Eagle31Config, *readers, partial(Eagle31Config.from_dict, {})):
        with pytest.raises(ValueError, match=f"got {name}; expected fields of Eagle31Config{hint}"):
            way(**{name: False})
    config, unused = Eagle31Config.from_pretrained(tmp_path, return_unused_kwargs=True, **{name: False})
    assert unused == {name: False}
    assert not hasattr(config, name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_hidden_layers": 2}, "layer_types"),
        ({"norm_before_fc": True}, "fc_norm and norm_before_fc"),
        ({"aux_hidden_state_layer_ids": [3, 2]}, "aux_hidden_state_layer_ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_given_are_checked_with_those_of_the_file(given, message, tmp_path):
    Eagle31Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"(?s){tmp_path}: config\.json: .*{message}"):
        Eagle31Config.from_pretrained(tmp_path, **given)
    given = {"num_hidden_layers": 2, "layer_types": None, "draft_vocab_size": None}
    config, unused = Eagle31Config.from_pretrained(tmp_path, return_unused_kwargs=True, **given)
    assert (len(config.layer_types), config.draft_vocab_size, unused) == (2, config.vocab_size, {})


def test_what_transformers_takes_is_taken(tmp_path):
    given = {
        "name_or_path": "a/b",
        "torch_dtype": "bfloat16",
        "num_labels": 3,
        "output_attentions": True,
        "attn_implementation": "eager",
        "architectures": ["A"],
        "return_dict": False,
        "rope_theta": 5.0,
        "use_cache": False,
    }
    config = Eagle31Config(**given)
    assert (str(config.dtype), config.num_labels, config.rope_parameters["rope_theta"]) == ("torch.bfloat16", 3, 5.0)
    for again in (Eagle31Config(**config.to_dict()), deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert again.to_dict() == config.to_dict()
    plain = Eagle31Config(norm_output=False, name_or_path="a/b")
    assert Eagle31Config.from_dict(plain.to_dict()).to_dict() == plain.to_dict()
    plain.save_pretrained(tmp_path)
    read = Eagle31Config.from_pretrained(tmp_path, attn_implementation="eager", dtype="auto", norm_output=True)
    assert (read._attn_implementation, read.norm_output) == ("eager", True)
    assert Eagle31Config.from_json_file(tmp_path / "config.json").norm_output is False


# Fields of a config.json that would fill memory, name code, or change what the model returns.
UNREAD = {
    "num_labels": 1_000_000_000,
    "id2label": {str(i): "x" for i in range(1000)},
    "attn_implementation": "someone/kernel",
    "_attn_implementation": "someone/kernel",
    "_attn_implementation_internal": "someone/kernel",
    "experts_implementation": "someone/kernel",
    "auto_map": {"AutoModel": "modeling.Model"},
    "quantization_config": {"quant_method": "gptq"},
    "return_dict": False,
    "output_hidden_states": True,
    "is_encoder_decoder": True,
    "chunk_size_feed_forward": 10**9,
    "per_layer_config": {"0": {"head_dim": 3}},
    "problem_type": "x",
    "transformers_weights": "other.safetensors",
    "configuration_files": ["config.4.0.0.json"],
    "to_dict": 3,
    "some_other_models_field": [1, 2],
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("reader", [Eagle31Config, AutoConfig])
def test_a_file_sets_this_models_fields_only(name, reader, tmp_path):
    if (reader, name) == (AutoConfig, "configuration_files"):
        pytest.skip("transformers reads the other file before this class is asked")
    expected = Eagle31Config(hidden_size=64, num_attention_heads=4)
    expected.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {name: UNREAD[name]}))
    read = reader.from_pretrained(tmp_path)
    assert read.to_dict() | {"_name_or_path": ""} == expected.to_dict()
    assert read._attn_implementation is None


NOT_READ: dict[str, tuple[str, str]] = {
    "deep": ('{"model_type": "eagle31", "a": ' + "[" * 900 + "]" * 900 + "}", "nested more than 32 deep"),
    "deeper": ('{"model_type": "eagle31", "a": ' + "[" * 100_000 + "]" * 100_000 + "}", "is not valid JSON|more than"),
    "a_long_number": ('{"model_type": "eagle31", "vocab_size": ' + "9" * 5000 + "}", "has 5000 digits"),
    "nan": ('{"model_type": "eagle31", "logit_scale": NaN}', "NaN is not JSON"),
    "twice": ('{"model_type": "eagle31", "vocab_size": 11, "vocab_size": 12}', "'vocab_size' twice"),
    "half_a_character": ('{"model_type": "eagle31", "target_model": "\\ud800"}', "control characters"),
    "a_terminals_code": ('{"model_type": "eagle31", "target_model": "\\u001b[2J"}', "control characters"),
    "a_million_values": ('{"model_type": "eagle31", "a": [' + "0," * 10**6 + "0]}", "more than 200000 values"),
    "a_list": ("[1]", "holds a list"),
    "a_dtype_that_is_a_function": ('{"model_type": "eagle31", "dtype": "ones"}', "dtype is ones; expected float32"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), NOT_READ.values(), ids=NOT_READ)
def test_a_file_that_is_not_sound_is_refused(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        Eagle31Config.from_pretrained(tmp_path)
