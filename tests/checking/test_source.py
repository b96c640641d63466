"""Targets and drafters as they are named: `~`, the files that are weights, a drafter in a target's place."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlavaConfig

from eagle31_hf import demo
from eagle31_hf.checking import check_target
from eagle31_hf.checking.source import read_target
from eagle31_hf.cli import loading
from eagle31_hf.json_file import MAX_BYTES

SHARDS = {"model-00001-of-00002.safetensors": 50, "model-00002-of-00002.safetensors": 30}
INDEX = json.dumps({"metadata": {}, "weight_map": dict(zip("ab", SHARDS, strict=True))})
LARGE_INDEX = INDEX + " " * MAX_BYTES


def write(folder: Path, config: dict) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_tilde_is_the_home_folder_in_both_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(demo.FOLDER / "target", tmp_path / "target")
    shutil.copytree(demo.FOLDER / "eagle31", tmp_path / "drafter")
    report = check_target("~/target", "~/drafter")
    weights = sum(file.stat().st_size for file in (tmp_path / "target").glob("*.safetensors"))
    assert (report.works, report.num_bytes) == (True, weights)


@pytest.mark.parametrize(
    ("files", "num_bytes"),
    [
        (SHARDS | {"model.safetensors.index.json": INDEX, "consolidated.safetensors": 80}, 80),
        ({"model.safetensors": 80, "consolidated.safetensors": 80, "training_args.bin": 5}, 80),
        ({"consolidated.safetensors": 80, "pytorch_model.bin": 81}, 81),
        ({"consolidated-1.safetensors": 50, "consolidated-2.safetensors": 30, "scheduler.bin": 5}, 80),
        ({"model-00001-of-00002.safetensors": 50, "model.safetensors.index.json": INDEX}, None),
        (SHARDS | {"model.safetensors.index.json": LARGE_INDEX}, None),
        ({}, None),
    ],
    ids=["shards and a copy", "one file and a copy", "pickled", "other names", "a shard is missing", "large", "none"],
)
def test_the_size_of_a_target_is_that_of_the_weights_it_is_loaded_from(tmp_path, files, num_bytes):
    folder = write(tmp_path / "target", LlamaConfig().to_dict())
    for name, content in files.items():
        (tmp_path / "target" / name).write_bytes(content.encode() if isinstance(content, str) else bytes(content))
    assert read_target(folder).num_bytes == num_bytes


@pytest.mark.parametrize(
    ("config", "sign"),
    [
        ({"model_type": "eagle31"}, "model_type 'eagle31'"),
        ({"model_type": "llama", "speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3'"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "architecture 'LlamaForCausalLMEagle3'"),
    ],
    ids=["native", "speculators", "SpecForge"],
)
def test_a_drafter_in_a_targets_place_is_refused_everywhere(tmp_path, config, sign):
    folder = write(tmp_path / "drafter", config)
    for read in (read_target, loading.refuse_drafter):
        with pytest.raises(ValueError, match="is a drafter") as refusal:
            read(folder)
        assert folder in str(refusal.value)
        assert sign in str(refusal.value)


def test_a_config_that_is_asked_about_stays_as_it_was():
    config = LlavaConfig(text_config=LlamaConfig(dtype="float16").to_dict(), dtype="bfloat16")
    before, attention = config.to_dict(), config._attn_implementation_internal
    assert read_target(config).outline is not None
    assert config.to_dict() == before
    assert config._attn_implementation_internal == attention


def test_a_target_that_is_only_called_eagle_is_none(tmp_path):
    folder = write(
        tmp_path / "target", {"model_type": "eagle_2_5_vl", "architectures": ["Eagle2_5_VLForConditionalGeneration"]}
    )
    loading.refuse_drafter(folder)
    assert read_target(folder).model_class is None
