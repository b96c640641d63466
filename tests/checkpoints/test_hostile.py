"""Checkpoints that are broken, hostile or something else: one error says where, what and what to do, and nothing is
written."""

import json
import os
import pickle
import re
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import DRAFT_VOCAB, VOCAB, WIDTH
from folders import contents, edited
from hostile_files import (
    BOMBS,
    KEYS,
    KNOBS,
    NAMES,
    NATIVE_KEYS,
    NO_VALUES,
    NOT_CONFIGS,
    NOT_PICKLES,
    NOT_SAFETENSORS,
    PICKLED,
    UNREAD,
    Attack,
    archived,
    bytearray_of,
    entry,
    stored,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel
from writers import LAYOUTS, SIZES, write_weights

from eagle31_hf import Eagle31DrafterModel, convert_checkpoint, export_checkpoint
from eagle31_hf.checkpoints import read_checkpoint
from eagle31_hf.checkpoints.files import open_files
from eagle31_hf.cli import main

SPECFORGE, WEIGHTS, PICKLE = LAYOUTS["specforge"], "model.safetensors", "pytorch_model.bin"
BIN = replace(SPECFORGE, file=PICKLE)
SHARDED = replace(SPECFORGE, shards=2)
INDEX = f"{WEIGHTS}.index.json"
MAX_MESSAGE = 4000


def refused(folder: Path, *patterns: str, error=(ValueError, OSError), **options) -> None:
    """Asserts that every way in is one error whose text matches all patterns, and that files stay as they were."""
    before = contents(folder.parent)
    ways: tuple[Callable, ...] = (
        lambda: Eagle31DrafterModel.from_pretrained(folder, **options),
        lambda: convert_checkpoint(folder, **options),
        lambda: convert_checkpoint(folder, folder.parent / "converted", **options),
        lambda: export_checkpoint(folder, folder.parent / "exported", **options),
    )
    for way in ways:
        with pytest.raises(error) as raised:
            way()
        assert type(raised.value) in (ValueError, OSError, FileNotFoundError)
        text = str(raised.value)
        assert text.startswith(str(folder)), text
        assert len(text) < MAX_MESSAGE, f"{len(text)} characters: {text[:400]}"
        for pattern in patterns:
            assert re.search(pattern, text, re.DOTALL), f"{pattern!r} not in {text!r}"
        assert contents(folder.parent) == before


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "drafter"


# Pickles.


@pytest.mark.parametrize("place", ["value", "name", "state_dict", "whole"])
@pytest.mark.parametrize("how", ["torch", "legacy", "plain_pickle"])
def test_a_pickle_with_code_is_not_run(how, place, folder, tmp_path):
    BIN.write(folder)
    attack = Attack(tmp_path / "attacked")
    weights = {
        "value": {"fc.weight": attack},
        "name": {attack: torch.ones(1)},
        "state_dict": {"a": {"a": attack}},
        "whole": attack,
    }
    if how == "plain_pickle":
        (folder / PICKLE).write_bytes(pickle.dumps(weights[place]))
    else:
        torch.save(weights[place], folder / PICKLE, _use_new_zipfile_serialization=how == "torch")
    if how == "torch":
        refused(folder, PICKLE, r"asks for \w+\.open when loaded, and was not", "do not load it elsewhere")
    else:
        refused(folder, PICKLE, "not a zip archive", "save it again")
    assert not (tmp_path / "attacked").exists()


def test_a_side_file_with_code_is_not_run(folder, tmp_path):
    LAYOUTS["nemo_older"].write(folder)
    torch.save({"selected_token_ids": Attack(tmp_path / "attacked")}, folder / "eagle_meta.pt")
    refused(folder, r"eagle_meta\.pt", r"asks for \w+\.open when loaded, and was not")
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("ids", [3, "ids", [1.5], [[1]], torch.ones(37), {"a": 1}, None], ids=str)
def test_a_side_file_without_ids(ids, folder):
    LAYOUTS["nemo_older"].write(folder)
    torch.save({"selected_token_ids": ids}, folder / "eagle_meta.pt")
    refused(folder, "there is no d2t", "expected d2t")


@pytest.mark.parametrize("name", PICKLED)
def test_a_pickle_of_something_else(name, folder):
    value, pattern = PICKLED[name]
    BIN.write(folder)
    try:
        torch.save(value, folder / PICKLE)
    except Exception as error:
        pytest.skip(f"PyTorch does not write it so: {error}")
    refused(folder, pattern)


def test_parameters_load_and_the_format_before_1_6_does_not(folder):
    drafter = BIN.write(folder)
    tensors = torch.load(folder / PICKLE)
    torch.save({name: nn.Parameter(w) if w.is_floating_point() else w for name, w in tensors.items()}, folder / PICKLE)
    loaded = Eagle31DrafterModel.from_pretrained(folder)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    (folder / PICKLE).unlink()  # it is mapped
    torch.save(tensors, folder / PICKLE, _use_new_zipfile_serialization=False)
    refused(folder, PICKLE, "not a zip archive", "save it again")


def test_tensors_of_one_storage_load(folder):
    """Views that share memory, or lie in it in another order, have the values that they show."""
    drafter = BIN.write(folder)
    tensors = torch.load(folder / PICKLE)
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    shared = torch.cat([tensors[name].flatten() for name in names])
    views = dict(zip(names, shared.split([tensors[name].numel() for name in names]), strict=True))
    tensors |= {name: view.view(tensors[name].shape) for name, view in views.items()}
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous().T
    (folder / PICKLE).unlink()  # it is mapped
    torch.save(tensors, folder / PICKLE)
    loaded = Eagle31DrafterModel.from_pretrained(folder)
    convert_checkpoint(folder, folder.parent / "converted")
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert torch.equal(load_file(folder.parent / "converted" / WEIGHTS)[name], tensor)


def test_a_storage_that_is_cut_off_inside_its_archive(folder):
    """torch maps as many bytes as the pickle says, the next record's among them."""
    BIN.write(folder)
    with zipfile.ZipFile(folder / PICKLE) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = max((name for name in records if "/data/" in name), key=lambda name: len(records[name]))
    with zipfile.ZipFile(folder / PICKLE, "w") as archive:
        for record, data in records.items():
            archive.writestr(record, data[:-8] if record == name else data)
    refused(folder, PICKLE, "larger than what is stored")


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_a_small_pickle_builds_nothing_large(data, folder):
    BIN.write(folder)
    (folder / PICKLE).write_bytes(archived(data))
    tracemalloc.start()
    refused(folder, PICKLE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**25


def test_a_compressed_pickle_is_not_unpacked(folder):
    BIN.write(folder)
    with zipfile.ZipFile(folder / PICKLE, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(50_000_000))
    refused(folder, PICKLE, "compressed")


@pytest.mark.parametrize("layout", [bytes, archived], ids=["bare", "archived"])
@pytest.mark.parametrize("data", NOT_PICKLES.values(), ids=NOT_PICKLES)
def test_a_file_that_is_no_pickle(data, layout, folder):
    BIN.write(folder)
    (folder / PICKLE).write_bytes(layout(data))
    refused(folder, PICKLE)


@pytest.mark.parametrize("name", ["text", "empty", "zeros"])
def test_a_damaged_pickle_is_not_accused_of_code(name, folder):
    BIN.write(folder)
    (folder / PICKLE).write_bytes(NOT_PICKLES[name])
    with pytest.raises(ValueError, match=r"is not a sound PyTorch file.*Download it again"):
        convert_checkpoint(folder)


def test_a_small_pickle_cannot_ask_for_much_memory(folder):
    BIN.write(folder)
    (folder / PICKLE).write_bytes(archived(bytearray_of(2**34)))
    refused(folder, PICKLE, "bytearray")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_pickle(share, folder):
    BIN.write(folder)
    data = (folder / PICKLE).read_bytes()
    (folder / PICKLE).write_bytes(data[: int(share * len(data))])
    refused(folder, PICKLE, "Download it again")


# Safetensors files.


@pytest.mark.parametrize("data", NOT_SAFETENSORS.values(), ids=NOT_SAFETENSORS)
def test_a_file_that_is_no_safetensors_file(data, folder):
    SPECFORGE.write(folder)
    (folder / WEIGHTS).write_bytes(data)
    refused(folder, WEIGHTS, "is not a sound safetensors file", "Download it again")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.9999])
def test_a_truncated_safetensors_file(share, folder):
    SPECFORGE.write(folder)
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: int(share * len(data))])
    refused(folder, WEIGHTS, "is not a sound safetensors file", "Download it again")


def test_a_safetensors_file_that_is_cut_while_it_is_read(folder):
    """Its bytes are read, not mapped: of a mapped file's lost pages the system ends the process."""
    SPECFORGE.write(folder)
    save_file({"fc.weight": torch.ones(4 * 2**20)}, folder / WEIGHTS)
    chunks = open_files(str(folder)).tensors["fc.weight"].entry().chunks()
    next(chunks)
    with open(folder / WEIGHTS, "r+b") as stream:
        stream.truncate(2**20)
    with pytest.raises(OSError, match=r"ends .* bytes early. Download the file again"):
        list(chunks)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U16", "F4"])
def test_a_quantized_dtype(dtype, folder):
    SPECFORGE.write(folder)
    width = 2 if dtype == "U16" else 1
    (folder / WEIGHTS).write_bytes(
        stored({"fc.weight": entry(0, 8, [16 if dtype == "F4" else 8 // width], dtype=dtype)})
    )
    refused(folder, WEIGHTS, f"fc.weight is stored as {dtype}|not a sound safetensors file")


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "lm_head.weight", "midlayer.mlp.up_proj.weight"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool, torch.int64])
def test_weights_of_integers(dtype, name, folder):
    SPECFORGE.write(folder)
    edited(folder, {name: torch.ones_like(load_file(folder / WEIGHTS)[name]).to(dtype)})
    refused(folder, WEIGHTS, f"{name} is stored as", "expected one of F64, F32, F16, BF16", "use the original")


# Sharded files.


def index_edited(folder: Path, edit: Callable[[dict], Any]) -> Path:
    SHARDED.write(folder)
    value = json.loads((folder / INDEX).read_text())
    edited_value = edit(value)
    (folder / INDEX).write_text(json.dumps(value if edited_value is None else edited_value))
    return folder


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "a\\b.safetensors",
        "..",
        ".",
        "",
        3,
        None,
        ["a"],
        {"a": "b"},
        "0" * 5000,
    ],
    ids=lambda shard: str(shard)[:20],
)
def test_a_shard_outside_the_folder(shard, folder):
    index_edited(folder, lambda index: index["weight_map"].__setitem__("fc.weight", shard))
    write_weights(folder.parent, {"fc.weight": torch.ones(20, 60)}, "outside.safetensors")
    refused(folder, INDEX, r"weight_map\['fc.weight'\] names the file", "expected a plain file name beside it")


INDICES: dict[str, tuple[Callable[[dict], Any], str]] = {
    "missing_shard": (
        lambda i: i["weight_map"].__setitem__("fc.weight", "gone.safetensors"),
        "gone.safetensors.*not there",
    ),
    "no_weight_map": (lambda i: {"metadata": {}}, "has no weight_map.*expected an object"),
    "empty_weight_map": (lambda i: {"metadata": {}, "weight_map": {}}, "has no weight_map.*expected an object"),
    "weight_map_of_a_list": (lambda i: {"metadata": {}, "weight_map": ["a"]}, "has no weight_map.*expected an object"),
    "metadata_of_a_flag": (lambda i: i | {"metadata": True}, "metadata is True.*expected an object"),
    "no_metadata": (lambda i: i.pop("metadata") and None, "metadata is None.*expected an object"),
    "an_array": (lambda i: [1], "holds a list.*expected one JSON object"),
}


@pytest.mark.parametrize(("edit", "pattern"), INDICES.values(), ids=INDICES)
def test_an_index_that_does_not_fit(edit, pattern, folder):
    refused(index_edited(folder, edit), INDEX, pattern)


MISPLACED: dict[str, Callable[[dict[str, str]], Any]] = {
    "other_shard": lambda places: places.update({"fc.weight": min({*places.values()} - {places["fc.weight"]})}),
    "unnamed_tensor": lambda places: places.pop("fc.weight"),
    "tensor_too_many": lambda places: places.update(more=places["fc.weight"]),
}


@pytest.mark.parametrize("edit", MISPLACED.values(), ids=MISPLACED)
def test_an_index_says_which_files_there_are_and_their_headers_what_they_hold(edit, folder):
    drafter = SHARDED.write(folder)
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    loaded = Eagle31DrafterModel.from_pretrained(folder)
    convert_checkpoint(folder, folder.parent / "converted")
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert torch.equal(load_file(folder.parent / "converted" / WEIGHTS)[name], tensor)


def test_a_tensor_in_two_shards(folder):
    SHARDED.write(folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    first = load_file(shards[0])
    save_file(load_file(shards[1]) | dict([next(iter(first.items()))]), shards[1], {"format": "pt"})
    refused(folder, next(iter(first)), "is also in", "expected each tensor once")


def test_a_shard_that_is_an_index(folder):
    index_edited(folder, lambda index: index["weight_map"].__setitem__("fc.weight", INDEX))
    refused(folder, INDEX)


# Configs.


@pytest.mark.parametrize(("data", "pattern"), NOT_CONFIGS.values(), ids=NOT_CONFIGS)
def test_a_config_that_is_none(data, pattern, folder):
    SPECFORGE.write(folder)
    (folder / "config.json").write_bytes(data)
    refused(folder, r"config\.json", pattern)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_json_file_of_100_mb_is_not_read(name, folder):
    SHARDED.write(folder)
    with open(folder / name, "r+b") as file:
        file.truncate(100 * 10**6)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: is 100000000 bytes; expected at most 16777216"):
        Eagle31DrafterModel.from_pretrained(folder)


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "logit_scale"])
def test_a_number_that_is_infinite(key, folder):
    SPECFORGE.write(folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace("{", f'{{"{key}_": 0, ', 1).replace(f'"{key}_": 0', f'"{key}": 1e999', 1)
        if f'"{key}"' not in text
        else re.sub(rf'"{key}": [^,}}]+', f'"{key}": 1e999', text)
    )
    refused(folder, r"config\.json", "1e999|inf", "expected")


@pytest.mark.parametrize("name", KEYS)
def test_a_key_that_cannot_be(name, folder):
    config, pattern = KEYS[name]
    SPECFORGE.write(folder)
    edited(folder, **config)
    if pattern:
        refused(folder, pattern)
    else:
        Eagle31DrafterModel.from_pretrained(folder)


@pytest.mark.parametrize("layout", ["native", "specforge"])
def test_fields_of_other_models_are_not_read(layout, folder):
    """Each by itself: tests/test_configuration.py."""
    drafter = replace(LAYOUTS[layout], shards=1).write(folder)
    expected = read_checkpoint(folder).config.to_dict()
    loaded = Eagle31DrafterModel.from_pretrained(edited(folder, **UNREAD))
    assert read_checkpoint(folder).config.to_dict() == expected
    assert loaded.config._attn_implementation == "sdpa"
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_a_misspelt_field_of_a_native_config_is_told(folder):
    replace(LAYOUTS["native"], shards=1).write(folder)
    edited(folder, norm_ouput=False, some_other_models_field=1)
    assert read_checkpoint(folder).notes == [
        "config.json has 'norm_ouput', which is no field and not read: is norm_output meant"
    ]


def test_a_misspelt_argument_is_refused_with_the_nearest_name(folder):
    replace(LAYOUTS["native"], shards=1).write(folder)
    export = partial(export_checkpoint, destination=folder.parent / "exported")
    for way in (Eagle31DrafterModel.from_pretrained, AutoModel.from_pretrained, convert_checkpoint, export):
        with pytest.raises(
            ValueError, match=r"got norm_ouput; expected fields of Eagle31Config.*: did you mean norm_output"
        ):
            way(folder, norm_ouput=False)
    with pytest.raises(ValueError, match="got nope; expected fields of Eagle31Config"):
        AutoModel.from_config(Eagle31DrafterModel.from_pretrained(folder).config, nope=1)


def test_a_misspelt_field_over_weights_elsewhere_is_refused_before_they_are_fetched(folder):
    folder.mkdir()
    link = {"model_type": "eagle31", "weights_from": {"repo_id": "owner/name"}, "norm_ouput": False}
    (folder / "config.json").write_text(json.dumps(link))
    refused(folder, r"config\.json: got norm_ouput; expected fields of Eagle31Config", "did you mean norm_output")


@pytest.mark.parametrize(("data", "words"), KNOBS.values(), ids=KNOBS)
def test_knobs_that_cannot_be(data, words, folder, capsys):
    replace(LAYOUTS["native"], shards=1).write(folder)
    (folder / "generation_config.json").write_bytes(data)
    refused(folder, r"generation_config\.json", words)
    assert main(["info", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_knobs_are_read_and_nothing_else_of_their_file(folder):
    replace(LAYOUTS["native"], shards=1).write(folder)
    stated = {
        "num_assistant_tokens": 4,
        "draft_tree_top_k": 2,
        "max_new_tokens": -5,
        "watermarking_config": {"a": 1},
        "to_dict": 3,
        "nobody_knows": 1,
    }
    (folder / "generation_config.json").write_text(json.dumps(stated))
    config = Eagle31DrafterModel.from_pretrained(folder).generation_config
    assert (config.num_assistant_tokens, config.draft_tree_top_k, config.watermarking_config) == (4, 2, None)
    assert not hasattr(config, "nobody_knows")
    convert_checkpoint(folder, folder.parent / "again")
    assert json.loads((folder.parent / "again" / "generation_config.json").read_text()) == {
        "num_assistant_tokens": 4,
        "draft_tree_top_k": 2,
    }


def test_an_adapter_beside_the_weights_is_not_added_to_them(folder):
    SPECFORGE.write(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/etc"}')
    refused(folder, "adapter_config.json", "LoRA adapter")


@pytest.mark.parametrize("name", ["original", "eagle31-converting"])
def test_a_link_in_place_of_a_folder_that_conversion_writes_to(name, folder, tmp_path):
    """Through the link, a file of that name elsewhere would be overwritten."""
    SPECFORGE.write(folder)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / WEIGHTS).write_text("mine")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{name}: is a link or a file"):
        convert_checkpoint(folder)
    assert {path.name: path.read_text() for path in (tmp_path / "elsewhere").iterdir()} == {WEIGHTS: "mine"}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_a_header_of_names_nobody_gives(names, folder):
    SPECFORGE.write(folder)
    (folder / WEIGHTS).write_bytes(stored(dict.fromkeys(names, NO_VALUES), 0))
    refused(folder, WEIGHTS, "its header is to have|a tensor is named|control characters")


@pytest.mark.parametrize(("config", "pattern"), NATIVE_KEYS.values(), ids=NATIVE_KEYS)
def test_a_native_field_that_cannot_be(config, pattern, folder):
    replace(LAYOUTS["native"], shards=1).write(folder)
    refused(edited(folder, **config), pattern)


# Tensors.


def vocabulary(**values: int) -> torch.Tensor:
    d2t = torch.arange(DRAFT_VOCAB) % 2
    return d2t.sort().values.index_fill(0, torch.tensor([int(k[1:]) for k in values]), 0) + sum(
        torch.eye(DRAFT_VOCAB, dtype=torch.int64)[int(k[1:])] * v for k, v in values.items()
    )


TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "fc_of_another_width": (
        {"fc.weight": torch.ones(WIDTH, 61)},
        "fc.weight reads 61 values.*3 states.*no number of states fits",
    ),
    "fc_of_two_states": ({"fc.weight": torch.ones(WIDTH, 40)}, "fc.weight reads 40 values.*2 states would fit"),
    "fc_of_more_rows": (
        {"fc.weight": torch.ones(WIDTH + 1, 60)},
        r"model.safetensors.*fc.weight has shape \(21, 60\).*expected \(20, 60\)",
    ),
    "fc_of_one_dimension": ({"fc.weight": torch.ones(60)}, r"fc.weight has shape \(60,\).*expected two dimensions"),
    "fc_of_no_dimension": ({"fc.weight": torch.ones(())}, r"fc.weight has shape \(\).*expected two dimensions"),
    "norm_of_no_dimension": ({"norm.weight": torch.ones(())}, "norm.weight.*expected"),
    "gate_of_no_dimension": (
        {"midlayer.mlp.gate_proj.weight": torch.ones(())},
        "midlayer.mlp.gate_proj.weight.*expected",
    ),
    "head_of_no_dimension": ({"lm_head.weight": torch.ones(())}, "lm_head.weight.*expected"),
    "no_rows": ({"fc.weight": torch.ones(WIDTH, 0)}, "fc.weight reads 0 values.*expected"),
    "q_of_a_plain_layer": (
        {"midlayer.self_attn.q_proj.weight": torch.ones(24, 20)},
        r"midlayer.self_attn.q_proj.weight.*\(24, 20\)",
    ),
    "k_of_another_head": (
        {"midlayer.self_attn.k_proj.weight": torch.ones(10, 40)},
        r"midlayer.self_attn.k_proj.weight .*\(10, 40\)",
    ),
    "missing": (
        {"midlayer.mlp.up_proj.weight": None},
        r"missing \['layers.0.mlp.up_proj.weight'\].*In the file.*midlayer.mlp.gate",
    ),
    "unexpected": (
        {"midlayer.extra": torch.ones(2)},
        r"unexpected \['layers.0.extra'\].*Expected exactly.*midlayer.extra",
    ),
    "under_two_names": (
        {"layers.0.hidden_norm.weight": torch.ones(WIDTH)},
        "both mean layers.0.hidden_norm.weight.*expected one of",
    ),
    "head_of_other_rows": ({"lm_head.weight": torch.ones(36, WIDTH)}, "draft_vocab_size=37.*36 rows.*expected as many"),
    "no_d2t": ({"d2t": None, "t2d": None}, "lm_head.weight has 37 rows for a vocabulary of 61.*no d2t.*expected d2t"),
    "d2t_of_another_length": (
        {"d2t": torch.zeros(36, dtype=torch.int64)},
        r"model.safetensors.*d2t has shape \(36,\).*expected \(37,\)",
    ),
    "d2t_of_two_dimensions": (
        {"d2t": torch.zeros(37, 1, dtype=torch.int64)},
        "d2t is I64 of shape.*integers in one dimension",
    ),
    "d2t_of_floats": ({"d2t": torch.zeros(37)}, "d2t is F32.*expected integers"),
    "d2t_of_flags": ({"d2t": torch.zeros(37, dtype=torch.bool)}, "d2t is BOOL.*expected integers"),
    "d2t_out_of_range": (
        {"d2t": vocabulary(i36=25)},
        r"model.safetensors.*d2t\[36\] = 25 maps draft id 36 to target id 61.*expected 0 to 60",
    ),
    "d2t_below_0": ({"d2t": vocabulary(i0=-1)}, r"d2t\[0\] = -1.*expected 0 to 60"),
    "d2t_of_the_largest": ({"d2t": vocabulary(i36=2**63 - 1)}, r"d2t\[36\].*expected 0 to 60"),
    "d2t_twice": ({"d2t": vocabulary(i0=1)}, "d2t maps several draft ids to target id 1.*expected one draft id each"),
    "d2t_absolute": ({"d2t": torch.arange(DRAFT_VOCAB) + 24}, "look like absolute ids.*d2t holds offsets"),
    "t2d_of_floats": ({"t2d": torch.ones(VOCAB)}, "t2d is F32.*expected integers"),
    "nan": (
        {"norm.weight": torch.full((WIDTH,), torch.nan)},
        "norm.weight holds NaN or infinite values.*expected finite weights",
    ),
}


@pytest.mark.parametrize(("tensors", "pattern"), TENSORS.values(), ids=TENSORS)
def test_a_tensor_that_cannot_be(tensors, pattern, folder):
    SPECFORGE.write(folder)
    refused(edited(folder, tensors), pattern)


@pytest.mark.parametrize(
    "names",
    [[f"midlayer.{i}.hidden_norm.weight" for i in range(1, 2_000)], [f"x{i}" for i in range(5_000)]],
    ids=["layers", "names"],
)
def test_very_many_tensors_are_one_short_error(names, folder):
    SPECFORGE.write(folder)
    refused(edited(folder, dict.fromkeys(names, torch.ones(0))))


def test_a_layer_number_of_many_digits(folder):
    SPECFORGE.write(folder)
    refused(
        edited(folder, {"layers.99999999999999999999.extra": torch.ones(1)}),
        "layers.99999999999999999999.extra",
        "Expected exactly",
    )


# Something else altogether.


def plain_layer(i: int, width: int = WIDTH) -> dict[str, torch.Tensor]:
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    names = [*(f"self_attn.{name}" for name in attention), *(f"mlp.{name}" for name in mlp)]
    return {f"layers.{i}.{name}.weight": torch.ones(width, width) for name in names} | {
        f"layers.{i}.input_layernorm.weight": torch.ones(width),
        f"layers.{i}.post_attention_layernorm.weight": torch.ones(width),
    }


TARGET = {f"model.{name}": w for i in range(4) for name, w in plain_layer(i).items()} | {
    "model.embed_tokens.weight": torch.ones(VOCAB, WIDTH),
    "model.norm.weight": torch.ones(WIDTH),
    "lm_head.weight": torch.ones(VOCAB, 20),
}
OTHERS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "the_target": (
        TARGET,
        "4 layers and no fc.weight.*looks like the target itself.*expected the drafter's checkpoint",
    ),
    "eagle1": (
        plain_layer(0) | {"fc.weight": torch.ones(WIDTH, 2 * WIDTH), "embed_tokens.weight": torch.ones(VOCAB, WIDTH)},
        "EAGLE-1 or EAGLE-2 head.*expected an EAGLE 3",
    ),
    "dflash": (
        plain_layer(0) | plain_layer(1) | {"hidden_norm.weight": torch.ones(WIDTH)},
        "marks a DFlash head.*expected an EAGLE 3",
    ),
    "lora": (
        {"base_model.model.fc.lora_A.weight": torch.ones(2, 2)},
        "marks a LoRA adapter: merge it.*expected an EAGLE 3",
    ),
    "mtp": ({"eh_proj.weight": torch.ones(2, 2)}, "marks an MTP head.*expected an EAGLE 3"),
    "hawk": ({"fuse_w1.weight": torch.ones(2, 2), "fc.weight": torch.ones(2, 2)}, "hawk.*expected an EAGLE 3"),
    "experts": ({"layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, "mixture-of-experts.*expected an EAGLE 3"),
    "an_output_gate": ({"layers.0.self_attn.g_proj.weight": torch.ones(2, 2)}, "gated attention.*expected an EAGLE 3"),
    "nothing_known": (
        {"weight": torch.ones(2)},
        "no fc.weight.*is no EAGLE 3 drafter.*expected the drafter's checkpoint",
    ),
    "one_plain_layer": (plain_layer(0), "no fc.weight.*expected the drafter's checkpoint"),
}


@pytest.mark.parametrize("file", [WEIGHTS, PICKLE])
@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_checkpoint_is_called_by_its_name(name, file, folder):
    tensors, pattern = OTHERS[name]
    folder.mkdir()
    write_weights(folder, tensors, file)
    (folder / "config.json").write_text(
        json.dumps(SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    refused(folder, pattern)


def test_mla_without_its_sizes(folder):
    LAYOUTS["kimi_mla"].write(folder)
    refused(edited(folder, kv_lora_rank=None), "kv_a_proj_with_mqa", "no kv_lora_rank", "expected MLA's sizes")


def test_a_native_config_over_foreign_tensors(folder):
    LAYOUTS["torchspec"].write(folder)
    (folder / "config.json").write_text(json.dumps(LAYOUTS["native"].config | {"hidden_size": 40}))
    refused(folder)


def test_weights_without_a_config(folder):
    SPECFORGE.write(folder)
    (folder / "config.json").unlink()
    refused(folder, "has weights but no config.json", "expected the config.json its trainer wrote")


def test_a_config_without_weights(folder):
    SPECFORGE.write(folder)
    (folder / WEIGHTS).unlink()
    refused(folder, "config.json without weights", "expected model.safetensors or pytorch_model.bin", "weights_from")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_folder_of_that_name(name, folder):
    SPECFORGE.write(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    refused(folder, "config.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe")
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_pipe_of_that_name_is_not_waited_for(name, tmp_path, folder):
    SPECFORGE.write(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises((ValueError, OSError), match=r"config\.json"):
        Eagle31DrafterModel.from_pretrained(folder)


# Configs that point to their weights.

LINKS: dict[str, Any] = {
    "a_string": "owner/name",
    "a_list": ["owner/name"],
    "a_number": 3,
    "no_name": {"revision": "main"},
    "a_name_of_numbers": {"repo_id": 3},
    "a_revision_of_numbers": {"repo_id": "owner/name", "revision": 3},
    "parent": {"repo_id": "../x"},
    "parents": {"repo_id": "../../etc"},
    "absolute": {"repo_id": "/etc"},
    "a_local_folder": {"repo_id": "drafter"},
    "no_owner": {"repo_id": "gpt2"},
    "three_parts": {"repo_id": "a/b/c"},
    "an_address": {"repo_id": "https://example.com/a/b"},
    "spaces": {"repo_id": "a b/c"},
    "empty": {"repo_id": ""},
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_a_link_that_leads_nowhere_allowed(link, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SPECFORGE.write(folder)
    (folder / WEIGHTS).unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "eagle31", "weights_from": link}))
    refused(folder, r"config\.json: weights_from", "expected")


def test_a_link_to_a_local_folder_of_that_name(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SPECFORGE.write(tmp_path / "owner" / "name")
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "eagle31", "weights_from": {"repo_id": "owner/name"}})
    )
    refused(folder, "weights_from names 'owner/name'", "is a local path", "expected a Hub repository")


def test_nothing_of_a_checkpoint_is_run(folder, tmp_path):
    """`auto_map`, and code beside the weights, are not even looked at."""
    SPECFORGE.write(folder)
    code = f"open({str(tmp_path / 'attacked')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    for name in ("modeling.py", "configuration.py"):
        (folder / name).write_text(code)
    edited(folder, auto_map={"AutoModel": "modeling.Model", "AutoConfig": "configuration.Config", "": "modeling.Model"})
    Eagle31DrafterModel.from_pretrained(folder, trust_remote_code=True)
    convert_checkpoint(folder)
    Eagle31DrafterModel.from_pretrained(folder, trust_remote_code=True)
    assert not (tmp_path / "attacked").exists()
    assert "auto_map" not in (folder / "config.json").read_text()
