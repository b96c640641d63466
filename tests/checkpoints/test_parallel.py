"""P-EAGLE checkpoints: read from the layouts of NeMo and speculators, converted, and exported to vLLM."""

import json
from pathlib import Path

import pytest
import torch
from factories import EAGLE3, build
from safetensors.torch import load_file, save_file
from writers import LLAMA_EAGLE3, SIZES

from eagle31_hf import Eagle31DrafterModel, convert_checkpoint, export_checkpoint
from eagle31_hf.checkpoints import read_checkpoint
from eagle31_hf.checkpoints.export import launch_line
from eagle31_hf.hub import render_card

IDS = [1, 2, 4]
FIELDS = EAGLE3 | {"num_hidden_layers": 2, "mask_token_id": 9, "aux_hidden_state_layer_ids": IDS}
CONFIGS = {
    "flat, as NeMo and vLLM name it": (
        LLAMA_EAGLE3
        | {"num_hidden_layers": 2, "parallel_drafting": True, "ptd_token_id": 9}
        | {"eagle_aux_hidden_state_layer_ids": IDS},
        (1, 60),
    ),
    "speculators": (
        {
            "architectures": ["PEagleSpeculator"],
            "speculators_model_type": "peagle",
            "draft_vocab_size": 37,
            "mask_token_id": 9,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": IDS,
            "speculators_config": {"algorithm": "peagle", "verifier": {"name_or_path": None}},
            "transformer_layer_config": SIZES | {"model_type": "llama", "num_hidden_layers": 2},
        },
        (1, 1, 60),
    ),
}


def written(folder: Path, config: dict, shape: tuple[int, ...], **changed: torch.Tensor | None) -> Eagle31DrafterModel:
    """Writes a drafter as another library would, some tensors changed or, where they are None, left out."""
    drafter = build(**FIELDS)
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    tensors["mask_hidden"] = tensors["mask_hidden"].view(shape)
    tensors |= changed
    folder.mkdir()
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return drafter


def assert_same(found: Eagle31DrafterModel, expected: Eagle31DrafterModel) -> None:
    assert found.config.mask_token_id == 9
    states = expected.state_dict()
    assert found.state_dict().keys() == states.keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, states[name]), name


@pytest.mark.parametrize("case", CONFIGS)
def test_it_loads_converts_and_is_exported(case, tmp_path):
    config, shape = CONFIGS[case]
    folder = tmp_path / "drafter"
    drafter = written(folder, config, shape)
    assert_same(Eagle31DrafterModel.from_pretrained(folder), drafter)
    convert_checkpoint(folder)
    assert read_checkpoint(str(folder)).is_native
    assert "# P-EAGLE drafter" in render_card(drafter.config)
    assert_same(Eagle31DrafterModel.from_pretrained(folder), drafter)
    exported = export_checkpoint(folder, tmp_path / "exported", format="vllm")
    stated = json.loads((Path(exported) / "config.json").read_text())
    assert (stated["parallel_drafting"], stated["ptd_token_id"]) == (True, 9)
    assert load_file(Path(exported) / "model.safetensors")["mask_hidden"].numel() == 60  # vLLM flattens it
    assert '"parallel_drafting": true' in launch_line(drafter.config, exported, "vllm")
    assert_same(Eagle31DrafterModel.from_pretrained(exported), drafter)
    for format in ("sglang", "speculators"):
        with pytest.raises(ValueError, match=r"P-EAGLE.*Nothing was written"):
            export_checkpoint(folder, tmp_path / format, format=format)


@pytest.mark.parametrize("fields", [{"aux_hidden_state_layer_ids": [1, 2]}, {"target_hidden_size": 24}])
def test_vllm_reads_as_many_states_as_the_drafter(fields, tmp_path):
    drafter = build(**FIELDS | fields)
    exported = export_checkpoint(drafter, tmp_path / "exported", format="vllm")
    mask, config = load_file(exported / "model.safetensors")["mask_hidden"], drafter.config
    assert mask.numel() == config.num_aux_states * config.target_hidden_size
    assert_same(Eagle31DrafterModel.from_pretrained(exported), drafter)


FLAT = CONFIGS["flat, as NeMo and vLLM name it"][0]
WRONG = {
    "no_token": ({"ptd_token_id": None}, {}, "states no token as mask_token_id, .*Pass mask_token_id="),
    "two_tokens": ({"mask_token_id": 5}, {}, r"states \[5, 9\] as mask_token_id, .*Pass mask_token_id="),
    "no_state": ({}, {"mask_hidden": None}, "config.json says .* P-EAGLE .*no mask_hidden; expected both or neither"),
    "not_parallel": ({"parallel_drafting": False}, {}, "says parallel_drafting=False.*expected both or neither"),
    "another_size": ({}, {"mask_hidden": torch.ones(1, 40)}, r"mask_hidden has shape \(1, 40\); expected \(60,\)"),
    "another_order": ({}, {"mask_hidden": torch.ones(3, 20)}, r"mask_hidden has shape \(3, 20\); expected \(60,\)"),
    "no_id": ({"ptd_token_id": 61}, {}, r"mask_token_id is 61; expected an id below vocab_size \(61\)"),
    "nan": ({}, {"mask_hidden": torch.full((1, 60), torch.nan)}, "mask_hidden holds NaN"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_told(fault, tmp_path):
    config, tensors, message = WRONG[fault]
    written(tmp_path / "drafter", FLAT | config, (1, 60), **tensors)
    with pytest.raises(ValueError, match=message):
        Eagle31DrafterModel.from_pretrained(tmp_path / "drafter")


def test_the_caller_says_which_token_is_the_mask(tmp_path):
    folder = tmp_path / "drafter"
    drafter = written(folder, FLAT | {"mask_token_id": 5, "ptd_token_id": 7}, (1, 60))
    assert_same(Eagle31DrafterModel.from_pretrained(folder, mask_token_id=9), drafter)
    written(tmp_path / "another", FLAT | {"parallel_drafting": False}, (1, 60), mask_hidden=None)
    with pytest.raises(ValueError, match=r"the caller says .* P-EAGLE .*no mask_hidden; expected both or neither"):
        Eagle31DrafterModel.from_pretrained(tmp_path / "another", mask_token_id=9)


@pytest.mark.parametrize("key", ["speculators_model_type", "speculators_config"])
def test_speculators_own_kind_needs_the_state(key, tmp_path):
    """Either key names the kind."""
    others = {"speculators_model_type", "speculators_config"} - {key}
    config = {name: value for name, value in CONFIGS["speculators"][0].items() if name not in others}
    written(tmp_path / "drafter", config, (1, 60), mask_hidden=None)
    with pytest.raises(ValueError, match=r"P-EAGLE .*no mask_hidden; expected both or neither"):
        Eagle31DrafterModel.from_pretrained(tmp_path / "drafter")


def test_a_mask_token_of_a_targets_tokenizer_means_nothing(tmp_path):
    folder = tmp_path / "drafter"
    drafter = build(**FIELDS | {"mask_token_id": None})
    written(folder, FLAT | {"parallel_drafting": False, "mask_token_id": 5}, (1, 60), mask_hidden=None)
    loaded = Eagle31DrafterModel.from_pretrained(folder)
    assert loaded.config.mask_token_id is None
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
