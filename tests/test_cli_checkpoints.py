"""`eagle31 info | convert | export | publish | upgrade`, in the process, with the demo pair and its exports."""

import json
import shlex

import pytest

from eagle31_hf import Eagle31DrafterModel, demo
from eagle31_hf.checkpoints import EXPORT_FORMATS, export_checkpoint, read_checkpoint
from eagle31_hf.cli import main
from eagle31_hf.demo import HELD_OUT, held_out_file

TARGET, DRAFTER, EAGLE3 = (str(demo.FOLDER / name) for name in ("target", "eagle31", "eagle3"))


@pytest.fixture
def foreign(tmp_path) -> str:
    """The demo's EAGLE 3 drafter in speculators' format."""
    return str(export_checkpoint(EAGLE3, tmp_path / "foreign", "speculators"))


def json_of(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def error_of(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eagle31: error:")]
    return line


def test_info_names_the_format_and_why(capsys, foreign):
    assert main(["info", foreign]) == 0
    lines = capsys.readouterr().out
    assert "converted while loading" in lines
    assert "[2, 12, 21] are boundary ids" in lines
    report = json_of(capsys, "info", foreign)
    assert (report["native"], report["kind"], report["exports"]["vllm"]) == (False, "EAGLE 3", "yes")
    assert json_of(capsys, "info", DRAFTER)["native"] is True


def test_info_says_what_cannot_be_exported_and_why(capsys):
    report = json_of(capsys, "info", DRAFTER, "--set", "norm_before_residual=true")
    assert report["exports"]["vllm"] == "yes"
    assert "no norm_before_residual" in report["exports"]["sglang"]


def test_convert_in_place_then_again_then_for_good(capsys, foreign, tmp_path):
    assert main(["convert", foreign]) == 0
    assert "native checkpoint" in capsys.readouterr().out
    assert (tmp_path / "foreign" / "original" / "model.safetensors").is_file()
    assert read_checkpoint(foreign).is_native
    assert main(["convert", foreign, "--discard-original"]) == 0
    assert {path.name for path in (tmp_path / "foreign").iterdir()} == {"config.json", "model.safetensors"}


def test_convert_takes_fields_that_win(capsys, foreign, tmp_path):
    destination = str(tmp_path / "native")
    assert json_of(
        capsys, "convert", foreign, destination, "--set", "target_model=me/target", "--set", "sliding_window=9"
    )["result"]
    config = Eagle31DrafterModel.from_pretrained(destination).config
    assert (config.target_model, config.sliding_window) == ("me/target", 9)
    assert "is there already" in error_of(capsys, "convert", foreign, destination)
    assert "norm_outptu" in error_of(capsys, "convert", foreign, str(tmp_path / "other"), "--set", "norm_outptu=true")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("format", EXPORT_FORMATS)
def test_export_prints_the_line_that_serves_it(capsys, tmp_path, format):
    destination = str(tmp_path / format)
    report = json_of(capsys, "export", DRAFTER, destination, "--format", format, "--num-speculative-tokens", "7")
    words = shlex.split(report["command"])
    assert destination in report["command"]
    assert any("7" in word for word in words)
    if "--speculative-config" in words:
        config = json.loads(words[words.index("--speculative-config") + 1])
        assert config == {"method": "eagle3", "model": destination, "num_speculative_tokens": 7}
    assert read_checkpoint(destination).config.to_dict() == read_checkpoint(DRAFTER).config.to_dict()
    assert len(report["notes"]) == (format == "sglang")


def test_export_says_how_layers_were_counted(capsys, tmp_path):
    assert main(["export", DRAFTER, str(tmp_path / "there"), "--format", "sglang", "--target-type", "deepseek_v3"]) == 0
    assert "eagle31: layer ids are written as SGLang's DeepSeek class reads them" in capsys.readouterr().err


def test_an_exported_drafter_drafts_the_same(capsys, tmp_path):
    shape = ["--num-assistant-tokens", "5"]  # auto drafts by the clock
    options = ["--target", TARGET, "--max-new-tokens", "8", "--dtype", "float32", *shape, "import os\n"]
    expected = json_of(capsys, "generate", "--drafter", DRAFTER, *options)
    for format in EXPORT_FORMATS:
        exported = str(export_checkpoint(DRAFTER, tmp_path / format, format))
        assert json_of(capsys, "generate", "--drafter", exported, *options) == expected, format


def test_upgrade_saves_and_reports(capsys, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": held_out_file(name)[1000:1800]}) for name in HELD_OUT[:3]))
    sizes = ["--prompts", "1", "--max-new-tokens", "8"]
    options = ["upgrade", "--target", TARGET, "--drafter", EAGLE3, "--texts", str(texts), *sizes]
    report = json_of(capsys, *options, "--output", str(tmp_path / "upgraded"))
    assert report["before"]["generated_tokens"] == report["after"]["generated_tokens"] == 8
    assert Eagle31DrafterModel.from_pretrained(tmp_path / "upgraded").config.is_eagle31
    assert 'from_pretrained("upgraded"' in (tmp_path / "upgraded" / "README.md").read_text()
    assert "is there already" in error_of(capsys, *options, "--output", str(tmp_path / "upgraded"))
    for content, words in (
        ('{"text": "a"}\n{"words": 1}\n', "line 2: holds no"),
        ('{"text": "a\\ud800"}\n', "line 1: text holds half a surrogate pair"),
        ("\n", "holds no records"),
    ):
        texts.write_text(content)
        assert words in error_of(capsys, *options)
