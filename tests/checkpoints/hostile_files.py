"""Pickles, safetensors files and configs that are broken, hostile or something else, and the words they are
refused by: `test_hostile.py` tries them one by one, `fuzz_checkpoints.py` mixes them."""

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from writers import LLAMA, SIZES, nested


class Attack:
    """An object whose pickle calls a function when it is loaded: to write a file, unless another is named."""

    def __init__(self, path: Path):
        self.call: tuple = (open, (str(path), "w"))

    @classmethod
    def of(cls, function: Callable, *arguments: Any) -> "Attack":
        attack = cls(Path())
        attack.call = (function, arguments)
        return attack

    def __reduce__(self):
        return self.call


def archived(data: bytes) -> bytes:
    """Returns a file as torch.save lays it out, with `data` in place of the pickle of names and shapes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()


def bytearray_of(size: int) -> bytes:
    """Returns a pickle that asks for a bytearray of `size` zeros, which torch's unpickler allows."""
    return b"\x80\x02}X\x01\x00\x00\x00ac__builtin__\nbytearray\n\x8a\x08" + struct.pack("<q", size) + b"\x85Rs."


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "mine"
    return tensor


def stored(header: dict[str, Any] | bytes, size: int = 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(size)


def entry(start: int, end: int, shape: list | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


ONES = torch.ones(20, 60)
PICKLED: dict[str, tuple[Any, str]] = {
    "nested_state_dict": ({"state_dict": {"fc.weight": ONES}}, "'state_dict' is a dict.*expected names and.*Save"),
    "a_list": ([ONES], "holds a list; expected a dictionary of names and tensors"),
    "a_tensor": (ONES, "holds a Tensor; expected a dictionary"),
    "a_number": ({"fc.weight": 3}, "'fc.weight' is a int; expected names and tensors only"),
    "a_number_as_name": ({3: ONES}, "3 is a Tensor; expected names and tensors only"),
    "sparse": ({"norm.weight": ONES.to_sparse()}, "_rebuild_sparse_tensor.*plain dense tensors.*save them"),
    "sparse_rows": ({"norm.weight": ONES.to_sparse_csr()}, "_rebuild_sparse_tensor.*plain dense tensors"),
    "nested": ({"norm.weight": torch.nested.nested_tensor([ONES, ONES])}, "_rebuild_nested_tensor.*plain"),
    "attributes": ({"norm.weight": with_attribute(ONES.clone())}, "_rebuild_from_type_v2.*plain dense tensors"),
    "parameter_with_attributes": (
        {"norm.weight": with_attribute(nn.Parameter(ONES))},
        "_rebuild_parameter_with_state.*plain dense tensors",
    ),
    "negative_view": ({"norm.weight": torch._neg_view(ONES)}, "norm.weight is a view with its sign turned.*clone"),
    "conjugated": ({"fc.weight": ONES.to(torch.complex64).conj()}, "fc.weight.*expected"),
    "a_set": ({"fc.weight": ONES, "more": {1, 2}}, "asks for .*set when loaded"),
    "a_size": ({"fc.weight": ONES, "more": torch.Size([2])}, r"asks for torch\.Size when loaded"),
    "stride_0": ({"fc.weight": ONES[:1, :1].clone().expand(20, 60)}, "fc.weight of shape.*larger than what is stored"),
    "stride_0_of_a_terabyte": (
        {"fc.weight": ONES[0, :1].clone().expand(2**30, 2**10)},
        "fc.weight of shape.*larger than what is stored",
    ),
    "no_memory_at_all": ({"fc.weight": ONES.to("meta")}, "_rebuild_meta_tensor_no_storage.*plain"),
    "complex": ({"fc.weight": ONES.to(torch.complex64)}, "fc.weight is stored as torch.complex64; expected one of"),
    "int8": ({"fc.weight": ONES.to(torch.int8)}, "fc.weight is stored as torch.int8.*Quantized"),
    "fp8": (
        {"fc.weight": ONES.to(torch.float8_e4m3fn)},
        "torch.float8_e4m3fn.*plain|fc.weight is stored as.*Quantized",
    ),
    "unsigned": ({"fc.weight": ONES.to(torch.uint16)}, "torch.uint16.*plain"),
    "quantized": ({"fc.weight": torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8)}, "_rebuild_qtensor.*plain"),
    "empty": ({}, "expected"),
}

BOMBS = {
    "a_tensor_without_data": pickle.dumps({"a": Attack.of(torch.Tensor, 2**20, 2**12)}, 2),
    "a_storage_without_data": pickle.dumps({"a": Attack.of(torch.UntypedStorage, 2**40)}, 2),
    "a_million_lists": b"\x80\x02" + b"]" * 10**6 + b".",
    "a_hundred_thousand_sets": b"\x80\x02" + b"c__builtin__\nset\nq\x00" + b"h\x00]\x85R" * 10**5 + b".",
}

NOT_PICKLES = {
    "empty": b"",
    "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 536948\n",
    "zeros": bytes(1000),
    "zip_of_nothing": b"PK\x05\x06" + bytes(18),
    "not_a_zip_inside": b"PK\x03\x04" + bytes(100),
    "persistent_id": b"\x80\x02}X\x01\x00\x00\x00aX\x01\x00\x00\x00bQs.",
    "bottomless": b"\x80\x02" + b"(" * 20_000 + b".",
    "nested": b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".",
    "memo": b"\x80\x02j\xff\xff\xff\xff.",
    "long_string": b"\x80\x02X\xff\xff\xff\x7f.",
    "long_integer": b"\x80\x02\x8b\xff\xff\xff\x7f.",
}

SOUND = {"a": entry(0, 8)}
NOT_SAFETENSORS = {
    "empty": b"",
    "seven_bytes": bytes(7),
    "header_of_2**60": stored(SOUND, length=2**60),
    "header_of_2**64-1": stored(SOUND, length=2**64 - 1),
    "header_past_the_end": stored(SOUND, length=10_000),
    "header_of_0": stored(b""),
    "no_json": stored(b"{nothing}"),
    "not_utf8": stored(b'{"\xff": 1}'),
    "an_array": stored(b"[]"),
    "nan": stored(b'{"a": NaN}'),
    "deep": stored(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "truncated": stored(SOUND, size=4),
    "oversized": stored(SOUND, size=12),
    "overlapping": stored({"a": entry(0, 8), "b": entry(4, 8)}),
    "a_gap": stored({"a": entry(0, 4), "b": entry(8, 12)}, size=12),
    "backwards": stored({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}),
    "negative": stored({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}),
    "negative_offset": stored({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}),
    "wrong_size": stored({"a": entry(0, 8, [3])}),
    "a_shape_that_overflows": stored({"a": entry(0, 8, [2**32, 2**32, 2])}),
    "a_number_too_large": stored({"a": entry(0, 8, [2**70])}),
    "fractions": stored({"a": entry(0, 8, [1.5])}),
    "unknown_dtype": stored({"a": entry(0, 8, dtype="F31")}),
    "no_dtype": stored({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "metadata_of_numbers": stored({"__metadata__": {"a": 1}} | SOUND),
    "a_pickle": pickle.dumps({}),
    "a_large_file_pointer": NOT_PICKLES["text"],
    "html": b"<!DOCTYPE html><html><body>Not found</body></html>" * 20,
}

NOT_CONFIGS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not valid JSON.*Download it again"),
    "deep": (b"[" * 100_000 + b"]" * 100_000, "is not valid JSON"),
    "deep_objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is not valid JSON"),
    "nan": (b'{"rms_norm_eps": NaN}', "is not valid JSON.*NaN is not JSON"),
    "infinity": (b'{"rms_norm_eps": -Infinity}', "is not valid JSON.*-Infinity is not JSON"),
    "not_utf8": (b'{"a": "\xff\xfe"}', "is not valid JSON"),
    "an_array": (b"[]", "holds a list.*expected one JSON object"),
    "a_number": (b"1", "holds a int.*expected one JSON object"),
    "null": (b"null", "holds a NoneType.*expected one JSON object"),
    "a_long_number": (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "is not valid JSON"),
    "cut_off": (b'{"vocab_size": 61', "is not valid JSON"),
    "python": (b"{'vocab_size': 61}", "is not valid JSON"),
}

KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "a_billion_layers": ({"num_hidden_layers": 10**9}, ""),  # the weights say how many there are
    "a_draft_vocabulary_of_a_trillion": (
        {"draft_vocab_size": 10**12},
        r"draft_vocab_size=1000000000000.*37 rows.*expected",
    ),
    "a_vocabulary_of_a_trillion": ({"vocab_size": 10**12}, "expected"),
    "a_negative_vocabulary": ({"vocab_size": -5}, "expected"),
    "a_vocabulary_of_words": ({"vocab_size": "61"}, "vocab_size is '61'.*expected"),
    "heads_of_words": ({"num_attention_heads": "4"}, "num_attention_heads is '4'.*expected a number"),
    "no_heads": ({"num_attention_heads": None}, "num_attention_heads is None.*expected a number"),
    "zero_heads": ({"num_attention_heads": 0}, "num_attention_heads is 0.*expected"),
    "zero_states": ({"num_aux_hidden_states": 0}, "0.*expected"),
    "states_of_words": ({"num_aux_hidden_states": "three"}, "three.*expected"),
    "four_states": ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4; expected 3, as many as"),
    "a_flag_of_words": ({"norm_output": "false"}, "norm_output.*expected|Expected|not"),
    "another_width": ({"hidden_size": 21}, "config.json says hidden_size=21, the weights have 20.*expected"),
    "width_of_an_object": ({"hidden_size": {}}, "hidden_size|fc.weight.*expected|Expected|not"),
    "a_target_of_another_width": (
        {"target_hidden_size": 28},
        "fc.weight reads 60 values.*3 states.*28.*no number of states fits",
    ),
    "a_missing_norm": (
        {"fc_norm": True},
        "config.json says fc_norm=True.*the weights have no fc_norm.0.weight.*expected both",
    ),
    "a_missing_input_norm": ({"norm_before_fc": True}, "norm_before_fc=True.*no input_norm.weight.*expected both"),
    "a_contradiction": (
        {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}},
        "norm_before_fc twice.*one value",
    ),
    "two_thetas": (
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}},
        "rope_theta as 1.0 and 2.0.*expected one value",
    ),
    "a_negative_theta": ({"rope_theta": -1.0}, r"rope_theta is \[-1.0\].*expected a number above 0"),
    "a_huge_theta": ({"rope_theta": 10**400}, "config.json.*401 digits"),
    "a_huge_eps": ({"rms_norm_eps": 10**400}, "config.json.*401 digits"),
    "an_unknown_rope": ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "config.json.*spiral"),
    "a_rope_of_words": ({"rope_scaling": "linear"}, "rope_scaling is 'linear'.*expected an object"),
    "a_rope_per_layer_type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "differ by layer type.*expected one set",
    ),
    "an_unknown_activation": ({"hidden_act": "boom"}, "config.json.*hidden_act.*boom"),
    "ids_not_ascending": (nested([5, 3, 1]), r"\[5, 3, 1\].*ascending order"),
    "ids_twice": (nested([1, 1, 2]), r"\[1, 1, 2\].*distinct layer ids"),
    "ids_negative": (nested([-3, 1, 2]), r"\[-3, 1, 2\].*layer ids >= 0"),
    "ids_of_words": (nested("1,2,3"), "1,2,3.*expected 1 to 16 distinct layer ids"),
    "ids_of_flags": (nested([False, True, 2]), "expected 1 to 16 distinct layer ids"),
    "too_many_ids": (nested([*range(1, 5)]), "fc.weight reads 60.*4 states"),
    "very_many_ids": (nested([*range(10**4)]), "expected 1 to 16 distinct layer ids"),
    "an_eagle_config_of_words": ({"eagle_config": "none"}, ""),  # as good as none
    "without_states": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state is False.*no fc.*expected True",
    ),
    "parallel": ({"parallel_drafting": True}, "P-EAGLE .*no mask_hidden; expected both or neither"),
    "an_mtp_head": ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True.*MTP.*expected False"),
    "no_last_norm": (
        {"use_last_layernorm": False},
        "use_last_layernorm is False.*no norm before its head.*expected True",
    ),
    "hawk": ({"eagle_aux_injection_mode": "hawk"}, "eagle_aux_injection_mode is hawk.*expected fused_fc"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*quantized: use the original"),
    "speculators_of_another_kind": (
        {"speculators_model_type": "hass"},
        "speculators_model_type is 'hass'.*expected 'eagle3' or 'peagle'",
    ),
    "speculators_of_dflash": ({"speculators_config": {"algorithm": "dflash"}}, "'dflash'.*expected 'eagle3'"),
    "speculators_of_a_list": ({"speculators_config": ["eagle3"]}, "speculators_config.*expected"),
    "a_verifier_of_words": (
        {"speculators_config": {"verifier": "a/target"}, "transformer_layer_config": LLAMA},
        "verifier.*expected",
    ),
    "a_layer_of_words": (
        {"transformer_layer_config": "llama"},
        "transformer_layer_config is 'llama'; expected an object",
    ),
    "a_layer_of_another_kind": (
        {"transformer_layer_config": SIZES | {"model_type": "gpt2"}},
        "model_type is 'gpt2'.*expected one of",
    ),
    "transformers_weights_outside": (
        {"transformers_weights": "../outside.safetensors"},
        "transformers_weights.*plain file name",
    ),
    "transformers_weights_absolute": ({"transformers_weights": "/etc/passwd"}, "transformers_weights.*plain file name"),
    "transformers_weights_of_a_number": ({"transformers_weights": 3}, "transformers_weights.*plain file name"),
    "transformers_weights_gone": ({"transformers_weights": "gone.safetensors"}, "gone.safetensors.*not there"),
    "transformers_weights_in_a_pickle": (
        {"transformers_weights": "pytorch_model.bin"},
        "transformers_weights.*safetensors",
    ),
}

# Fields another model has, with an effect on transformers or on memory: a drafter's config has none of them.
UNREAD = {
    "num_labels": 10**9,
    "attn_implementation": "someone/kernel",
    "_attn_implementation": "someone/kernel",
    "experts_implementation": "someone/kernel",
    "return_dict": False,
    "output_hidden_states": True,
    "is_encoder_decoder": True,
    "chunk_size_feed_forward": 10**9,
    "problem_type": "x",
    "id2label": {"a": "b"},
    "per_layer_config": {"0": {"hidden_size": 8}},
    "configuration_files": ["config.4.0.0.json"],
    "auto_map": {"AutoModel": "modeling.Model"},
}

KNOBS: dict[str, tuple[bytes, str]] = {
    "a_list": (b"[1]", "holds a list; expected one JSON object"),
    "no_json": (b"{", "is not valid JSON"),
    "deep": (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "nested more than 32 deep"),
    "a_depth_of_words": (
        b'{"num_assistant_tokens": "many"}',
        "num_assistant_tokens is 'many'; expected 'auto' or an integer from 1",
    ),
    "a_depth_of_a_trillion": (
        b'{"num_assistant_tokens": 1000000000000}',
        "expected 'auto' or an integer from 1 to 4096",
    ),
    "a_tree_of_a_trillion": (b'{"draft_tree_total_tokens": 1000000000000}', "draft_tree_total_tokens is 1000000000000"),
    "a_tree_of_one": (
        b'{"draft_tree_total_tokens": 1}',
        "draft_tree_total_tokens is 1; expected 'auto' or an integer from 2 to 4096",
    ),
    "a_flag_as_depth": (b'{"draft_tree_top_k": true}', "draft_tree_top_k is True"),
    "a_threshold_of_words": (
        b'{"assistant_confidence_threshold": "x"}',
        "assistant_confidence_threshold is 'x'; expected 0 .never stop a chain early. to less than 1",
    ),
}

NO_VALUES = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
NAMES = {"many": [f"x{i}" for i in range(30_000)], "long": ["x" * 1000], "code_of_a_terminal": ["\x1b[2J"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
NATIVE_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "a_billion_layers": (
        {"num_hidden_layers": 10**9, "layer_types": None},
        "num_hidden_layers is 1000000000.*expected at most 256",
    ),
    "very_many_states": ({"aux_hidden_state_layer_ids": [*range(10**4)]}, "expected 1 to 16 distinct layer ids"),
    "a_draft_vocabulary_of_a_trillion": (
        {"draft_vocab_size": 10**12},
        "draft_vocab_size is 1000000000000.*expected at most 16777216",
    ),
    "both_vocabularies_of_a_trillion": ({"draft_vocab_size": 10**12, "vocab_size": 10**12}, "expected"),
    "a_vocabulary_of_a_trillion": ({"vocab_size": 10**12}, "expected"),
    "a_size_of_words": ({"hidden_size": "20"}, "config.json.*hidden_size"),
    "a_flag_of_words": ({"fc_norm": "true"}, "config.json.*fc_norm"),
    "a_list_of_words": ({"aux_hidden_state_layer_ids": "abc"}, "config.json.*aux_hidden_state_layer_ids"),
    "a_size_of_nothing": ({"num_attention_heads": 0}, "num_attention_heads is 0.*expected sizes above 0"),
    "a_dtype_of_a_number": ({"dtype": 3}, "config.json.*dtype"),
    "a_dtype_of_integers": ({"dtype": "int8"}, "dtype is torch.int8|dtype is int8.*expected float32"),
    "a_dtype_nobody_knows": ({"dtype": "float31"}, "config.json.*float31"),
    "one_layer_less": ({"num_hidden_layers": 1}, "num_hidden_layers=1, the weights have 2; expected as many"),
    "many_layers": ({"num_hidden_layers": 256, "layer_types": None}, "=256, the weights have 2; expected as many"),
    "a_head_of_millions": ({"head_dim": 2**24}, "head_dim .* is 16777216; expected at most 65536"),
    "a_head_of_millions_of_its_width": (
        {"hidden_size": 2**24, "target_hidden_size": 2**24, "num_attention_heads": 1, "num_key_value_heads": 1}
        | {"head_dim": None},
        "head_dim .* is 16777216; expected at most 65536",
    ),
    "sizes_that_overflow": (
        dict.fromkeys(("hidden_size", "target_hidden_size", "num_attention_heads", "num_key_value_heads"), 2**24)
        | {"head_dim": 2**16},
        "config.json: .*overflow.*; expected the sizes",
    ),
    "a_rope_that_overflows": (
        {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_norm": False}
        | {"rope_parameters": YARN | {"mscale_all_dim": 1e200}},
        "config.json: .*expected the sizes and the rope of a drafter",
    ),
    "a_norm_less": ({"fc_norm": False}, "unexpected.*fc_norm.0.weight.*fc_norm, norm_before_fc"),
    "both_norms": ({"norm_before_fc": True}, "fc_norm and norm_before_fc are both true.*expected at most one"),
    "another_width": ({"hidden_size": 40, "target_hidden_size": 40}, "has shape.*expected.*Check the sizes there"),
}
