"""Every producer's layout loads to the drafter it was written from; an ambiguous one asks, and one argument decides.

B batch, T tokens, V target vocabulary, Vd draft vocabulary.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from close import assert_close
from factories import DRAFT_VOCAB, VOCAB, WIDTH, build, inputs, target
from folders import edited
from safetensors.torch import load_file
from transformers import PreTrainedConfig
from writers import LAYOUTS, write_weights

from eagle31_hf import Eagle31Config, Eagle31DrafterModel
from eagle31_hf.checkpoints import read_checkpoint

FIELDS = sorted(Eagle31Config.__annotations__.keys() - {"bos_token_id", "eos_token_id", "pad_token_id"})
SPECFORGE = LAYOUTS["specforge"]
ASKED = {name: layout for name, layout in LAYOUTS.items() if layout.options}


@torch.no_grad()
def assert_same(loaded: Eagle31DrafterModel, drafter: Eagle31DrafterModel) -> None:
    """Asserts that fields, tensors and logits are exactly the same."""
    for name in FIELDS:
        assert_close(name, getattr(loaded.config, name), getattr(drafter.config, name))
    assert set(loaded.state_dict()) == set(drafter.state_dict())
    for name, tensor in drafter.state_dict().items():
        assert_close(name, loaded.state_dict()[name], tensor)
    tokens, states = inputs(drafter)
    states = states.repeat(1, 1, 2)[..., : drafter.config.num_aux_states * drafter.config.target_hidden_size].to(
        drafter.dtype
    )
    logits, theirs = [], target(hidden_size=drafter.config.target_hidden_size)
    for model in (loaded, drafter):
        if model.config.share_target_embeddings:
            model.load_target_embeddings(theirs)
        first = model(tokens, target_hidden_states=states)
        logits.append((first.logits, model(tokens, hidden_states=first.last_hidden_state).logits))
    assert_close("logits", *logits)
    assert all(step.isfinite().all() for step in logits[0])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_a_producer_wrote_loads_as_it_was(layout, tmp_path):
    drafter = layout.write(tmp_path)
    loaded = Eagle31DrafterModel.from_pretrained(tmp_path, **layout.options)
    assert_same(loaded, drafter)
    assert loaded.dtype == layout.dtype
    assert loaded.checkpoint.source == str(tmp_path)


def test_a_special_token_of_the_config_is_kept(tmp_path):
    SPECFORGE.write(tmp_path)
    config = Eagle31DrafterModel.from_pretrained(tmp_path).config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)


PRODUCERS = {
    "original_release": "original EAGLE 3 release",
    "specforge": "SpecForge",
    "speculators": "speculators",
    "modelopt": "NVIDIA ModelOpt",
    "torchspec": "TorchSpec",
    "nemo": "NeMo Automodel",
    "nemo_older": "NeMo Automodel",
    "angelslim": "AngelSlim",
    "nebius": "nebius",
    "specdrift": "vLLM / SGLang layout",
    "native": "eagle31_hf",
}


@pytest.mark.parametrize(("name", "producer"), PRODUCERS.items(), ids=PRODUCERS)
def test_the_producer_is_told_with_a_reason(name, producer, tmp_path):
    LAYOUTS[name].write(tmp_path)
    checkpoint = read_checkpoint(str(tmp_path), LAYOUTS[name].options)
    assert checkpoint.format == producer
    assert checkpoint.reasons[0].startswith(f"{producer}: ")
    assert checkpoint.is_native == (name == "native")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("name", ["specforge", "nemo", "native"])
def test_files_and_shards(name, shards, file, tmp_path):
    layout = replace(LAYOUTS[name], file=file, shards=shards)
    drafter = layout.write(tmp_path)
    assert_same(Eagle31DrafterModel.from_pretrained(tmp_path), drafter)


@pytest.mark.parametrize("metadata", ["null", "{}", None], ids=["null", "none in it", "left out"])
def test_a_header_without_metadata_is_read(metadata, tmp_path):
    """Safetensors takes all three for a sound file."""
    drafter = SPECFORGE.write(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    del header["__metadata__"]
    if metadata is not None:
        header["__metadata__"] = json.loads(metadata)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[start:])
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.files.metadata == {}
    assert set(checkpoint.tensors) == set(drafter.state_dict())


@pytest.mark.parametrize("first", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_of_several_files_the_first_usual_name_is_read(first, tmp_path):
    order = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]
    drafter, tensors = (
        SPECFORGE.write(tmp_path),
        load_file(SPECFORGE.write(tmp_path) and tmp_path / "model.safetensors"),
    )
    (tmp_path / "model.safetensors").unlink()
    for name in order[order.index(first) :]:
        file, shards = name.removesuffix(".index.json"), 2 if name.endswith("index.json") else 1
        marked = tensors | {"norm.weight": tensors["norm.weight"] * (1 if name == first else 2)}
        write_weights(tmp_path, marked, file, shards)
    assert_same(Eagle31DrafterModel.from_pretrained(tmp_path), drafter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "float16"], ids=str)
@pytest.mark.parametrize("name", ["specforge", "original_release", "modelopt"])
@pytest.mark.usefixtures("poisoned_memory")
def test_another_dtype_leaves_the_map_alone(name, dtype, tmp_path):
    drafter = LAYOUTS[name].write(tmp_path)
    loaded = Eagle31DrafterModel.from_pretrained(tmp_path, dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert (loaded.d2t.dtype, loaded.t2d.dtype) == (torch.int64, torch.bool)
    for name, tensor in drafter.state_dict().items():
        assert_close(name, loaded.state_dict()[name], tensor.to(wanted) if tensor.is_floating_point() else tensor)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", ["specforge", "modelopt", "nemo", "biases"])
def test_on_a_device_map(name, tmp_path):
    drafter = LAYOUTS[name].write(tmp_path)
    assert_same(Eagle31DrafterModel.from_pretrained(tmp_path, device_map="cpu"), drafter)


@pytest.mark.parametrize("stated", ["float32", "bfloat16", "float16", None])
def test_the_dtype_is_the_weights_whatever_torch_dtype_says(stated, tmp_path):
    drafter = SPECFORGE.write(tmp_path)
    assert_same(Eagle31DrafterModel.from_pretrained(edited(tmp_path, torch_dtype=stated)), drafter)


# What may mean two things.


@pytest.mark.parametrize("name", ASKED)
def test_what_may_mean_two_things_asks_for_one_argument(name, tmp_path):
    ASKED[name].write(tmp_path)
    (option,) = ASKED[name].options
    with pytest.raises(ValueError, match=f"(?i)pass .*{option}=") as error:
        Eagle31DrafterModel.from_pretrained(tmp_path)
    assert str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize("norm_output", [True, False])
def test_norm_output_of_specforge_decides(norm_output, tmp_path):
    LAYOUTS["specforge_of_two_meanings"].write(tmp_path)
    assert Eagle31DrafterModel.from_pretrained(tmp_path, norm_output=norm_output).config.norm_output is norm_output


@pytest.mark.parametrize("flag", [True, False])
def test_norm_before_residual_of_speculators_decides(flag, tmp_path):
    LAYOUTS["speculators_older"].write(tmp_path)
    assert Eagle31DrafterModel.from_pretrained(tmp_path, norm_before_residual=flag).config.norm_before_residual is flag


@pytest.mark.parametrize(("convention", "boundary"), [("boundary", [24, 30, 36]), ("output", [25, 31, 37])])
def test_the_convention_of_layer_ids_decides(convention, boundary, tmp_path):
    LAYOUTS["gpt_oss_v3"].write(tmp_path)
    loaded = read_checkpoint(str(tmp_path), aux_layer_convention=convention)
    assert loaded.config.aux_hidden_state_layer_ids == boundary


def test_both_readings_of_layer_ids_are_shown(tmp_path):
    LAYOUTS["gpt_oss_v3"].write(tmp_path)
    with pytest.raises(ValueError, match=re.escape("the boundary ids are [24, 30, 36] or [25, 31, 37]")):
        read_checkpoint(str(tmp_path))


def test_layer_ids_given_outright_need_no_convention(tmp_path):
    LAYOUTS["gpt_oss_v3"].write(tmp_path)
    loaded = Eagle31DrafterModel.from_pretrained(tmp_path, aux_hidden_state_layer_ids=[5, 6, 7])
    assert loaded.config.aux_hidden_state_layer_ids == [5, 6, 7]


NESTED_IDS = {
    "trainers_default_of_94": ([1, 46, 90], [2, 47, 91]),
    "engines_default_of_94": ([2, 47, 91], [2, 47, 91]),
    "trainers_default_of_61": ([1, 29, 57], [2, 30, 58]),
    "engines_default_of_61": ([2, 30, 58], [2, 30, 58]),
    "starts_at_1": ([1, 11, 21], [2, 12, 22]),
    "starts_at_2": ([2, 12, 22], [2, 12, 22]),
    "five": ([1, 6, 11, 16, 21], [2, 7, 12, 17, 22]),
    "neither": ([24, 30, 36], None),
    "the_embedding": ([0, 5, 9], None),
}


@pytest.mark.parametrize(("ids", "boundary"), NESTED_IDS.values(), ids=NESTED_IDS)
def test_nested_ids_of_nobody_in_particular(ids, boundary, tmp_path):
    layout = replace(
        LAYOUTS["two_layers_with_hidden_norm"],
        fields=LAYOUTS["two_layers_with_hidden_norm"].fields | {"aux_hidden_state_layer_ids": ids},
    )
    layout.write(tmp_path)
    edited(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    if boundary is None:
        with pytest.raises(ValueError, match="aux_layer_convention"):
            read_checkpoint(str(tmp_path))
    else:
        assert read_checkpoint(str(tmp_path)).config.aux_hidden_state_layer_ids == boundary


@pytest.mark.parametrize("nested_ids", [[2, 16, 29], [1, 15, 28]])
def test_ids_in_both_places_are_the_top_ones(nested_ids, tmp_path):
    SPECFORGE.write(tmp_path)
    edited(
        tmp_path,
        eagle_aux_hidden_state_layer_ids=[2, 16, 29],
        eagle_config={"eagle_aux_hidden_state_layer_ids": nested_ids},
    )
    assert read_checkpoint(str(tmp_path)).config.aux_hidden_state_layer_ids == [2, 16, 29]


def test_ids_in_both_places_that_differ_are_refused(tmp_path):
    SPECFORGE.write(tmp_path)
    edited(
        tmp_path,
        eagle_aux_hidden_state_layer_ids=[2, 16, 29],
        eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 17, 30]},
    )
    with pytest.raises(ValueError, match="expected the same layers"):
        read_checkpoint(str(tmp_path))


def test_absent_ids_are_the_engines_default_and_noted(tmp_path):
    LAYOUTS["original_release"].write(tmp_path)
    checkpoint = read_checkpoint(str(tmp_path))
    assert checkpoint.config.aux_hidden_state_layer_ids is None
    assert any("names no target layers" in note and "aux_hidden_state_layer_ids" in note for note in checkpoint.notes)


# What the weights decide.


def test_a_norm_the_config_does_not_name_is_on_and_noted(tmp_path):
    LAYOUTS["norms_called_fcs"].write(tmp_path)
    checkpoint = read_checkpoint(str(tmp_path), aux_layer_convention="output")
    assert checkpoint.config.fc_norm is True
    assert any("fc_norm is on" in note for note in checkpoint.notes)


def test_the_number_of_layers_is_the_weights(tmp_path):
    LAYOUTS["nemo"].write(tmp_path)
    checkpoint = read_checkpoint(str(tmp_path))
    assert checkpoint.config.num_hidden_layers == 1
    assert any("num_hidden_layers=36" in note for note in checkpoint.notes)


@pytest.mark.parametrize("name", ["specforge", "inferact", "kimi_mla"])
@pytest.mark.parametrize("key", ["draft_vocab_size", "intermediate_size", "hidden_size"])
def test_a_size_the_config_leaves_out_is_the_weights(key, name, tmp_path):
    drafter = LAYOUTS[name].write(tmp_path)
    assert_same(Eagle31DrafterModel.from_pretrained(edited(tmp_path, **{key: None})), drafter)


def test_the_vocabulary_a_config_leaves_out_is_the_map(tmp_path):
    drafter = SPECFORGE.write(tmp_path)
    assert_same(Eagle31DrafterModel.from_pretrained(edited(tmp_path, vocab_size=None)), drafter)


def test_a_head_shared_with_the_target(tmp_path):
    LAYOUTS["inferact"].write(tmp_path)
    edited(tmp_path, {"lm_head.weight": None})
    loaded = Eagle31DrafterModel.from_pretrained(tmp_path)
    assert loaded.config.share_target_head
    assert loaded.lm_head is None


# The vocabulary map.


@pytest.mark.parametrize(
    "dtypes", [(torch.int32, torch.uint8), (torch.int64, torch.int32), (torch.int32, torch.bool)], ids=str
)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.usefixtures("poisoned_memory")
def test_the_map_in_other_integers(file, dtypes, tmp_path):
    drafter = replace(SPECFORGE, file=file).build()
    d2t, t2d = (w.to(dtype) for w, dtype in zip((drafter.d2t, drafter.t2d), dtypes, strict=True))
    replace(SPECFORGE, file=file, extra={"d2t": d2t, "t2d": t2d}).write(tmp_path)
    assert_same(Eagle31DrafterModel.from_pretrained(tmp_path), drafter)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "t2d", [torch.zeros(VOCAB), torch.ones(VOCAB), torch.arange(VOCAB) % 2], ids=["none", "all", "odd"]
)
def test_a_t2d_that_contradicts_is_rebuilt_and_noted(t2d, tmp_path):
    drafter = SPECFORGE.write(tmp_path)
    loaded = Eagle31DrafterModel.from_pretrained(edited(tmp_path, {"t2d": t2d.bool()}))
    assert_same(loaded, drafter)
    assert any("t2d" in note and "rebuilt from d2t" in note for note in loaded.checkpoint.notes)


@pytest.mark.parametrize("size", [VOCAB - 1, VOCAB + 3])
def test_a_t2d_of_another_size_is_rebuilt_and_noted(size, tmp_path):
    drafter = SPECFORGE.write(tmp_path)
    loaded = Eagle31DrafterModel.from_pretrained(edited(tmp_path, {"t2d": torch.ones(size).bool()}))
    assert_same(loaded, drafter)
    assert any("t2d" in note and "rebuilt from d2t" in note for note in loaded.checkpoint.notes)


def test_a_t2d_that_agrees_is_not_noted(tmp_path):
    SPECFORGE.write(tmp_path)
    assert not any("t2d" in note for note in read_checkpoint(str(tmp_path)).notes)


def test_trivial_maps_of_a_full_vocabulary_are_dropped_and_recorded(tmp_path):
    LAYOUTS["specforge_full_vocabulary"].write(tmp_path)
    assert sorted(read_checkpoint(str(tmp_path)).dropped) == ["d2t", "t2d"]


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_map_of_a_full_vocabulary_that_says_something_is_refused(name, tmp_path):
    LAYOUTS["specforge_full_vocabulary"].write(tmp_path)
    value = load_file(tmp_path / "model.safetensors")[name]
    value[3] = 1 - value[3].long()
    with pytest.raises(ValueError, match=f"{name} reorders or leaves out ids"):
        read_checkpoint(str(edited(tmp_path, {name: value})))


def test_the_older_nemo_map_is_noted(tmp_path):
    LAYOUTS["nemo_older"].write(tmp_path)
    assert any("eagle_meta.pt" in note for note in read_checkpoint(str(tmp_path)).notes)


def test_padding_rows_of_an_embedding_are_kept_and_noted(tmp_path):
    drafter = LAYOUTS["nemo"].build()
    padded = torch.cat([drafter.embed_tokens.weight.detach(), torch.zeros(3, WIDTH)])
    replace(LAYOUTS["nemo"], extra={"model.embed_tokens.weight": padded}, subfolder="").write(tmp_path)
    loaded = Eagle31DrafterModel.from_pretrained(tmp_path)
    assert (loaded.config.vocab_size, loaded.config.draft_vocab_size) == (VOCAB + 3, DRAFT_VOCAB)
    assert_close("rows", loaded.embed_tokens.weight.detach(), padded)
    assert any("padding, kept" in note for note in loaded.checkpoint.notes)


# What the caller insists on.


def test_fields_given_win(tmp_path):
    SPECFORGE.write(tmp_path)
    loaded = Eagle31DrafterModel.from_pretrained(tmp_path, target_model="a/target", logit_scale=0.5, rms_norm_eps=1e-4)
    assert (loaded.config.target_model, loaded.config.logit_scale, loaded.norm.eps) == ("a/target", 0.5, 1e-4)


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_config_elsewhere_wins(as_path, tmp_path):
    """It is given by its folder's name, as transformers takes it."""
    LAYOUTS["specforge_of_two_meanings"].write(tmp_path / "source")
    Eagle31DrafterModel.from_pretrained(tmp_path / "source", norm_output=False).config.save_pretrained(
        tmp_path / "config"
    )
    loaded = Eagle31DrafterModel.from_pretrained(tmp_path / "source", config=as_path(tmp_path / "config"))
    assert loaded.config.norm_output is False


@pytest.mark.parametrize(
    "config", [PreTrainedConfig(), {"norm_output": False}, 5], ids=["another class", "dict", "number"]
)
def test_a_config_of_another_kind_is_refused(config, tmp_path):
    SPECFORGE.write(tmp_path)
    with pytest.raises(ValueError, match="expected an Eagle31Config, or the folder"):
        Eagle31DrafterModel.from_pretrained(tmp_path, config=config)


def test_a_config_beside_weights_of_its_own_points_to_no_others(tmp_path):
    drafter = LAYOUTS["native"].write(tmp_path)
    edited(tmp_path, weights_from={"repo_id": "nobody/nothing", "revision": "main"})
    assert_close("norm", Eagle31DrafterModel.from_pretrained(tmp_path).norm.weight, drafter.norm.weight)


def test_an_unknown_convention_is_refused(tmp_path):
    SPECFORGE.write(tmp_path)
    with pytest.raises(ValueError, match="aux_layer_convention is 'outputs'; expected one of"):
        Eagle31DrafterModel.from_pretrained(tmp_path, aux_layer_convention="outputs")


def test_an_activation_with_weights_of_its_own_is_saved_and_loaded(tmp_path):
    drafter = build(hidden_act="prelu")
    drafter.save_pretrained(tmp_path)
    loaded = Eagle31DrafterModel.from_pretrained(tmp_path).state_dict()
    assert any("act_fn" in name for name in loaded)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded[name], tensor)
