"""The command line, run in the process with the demo pair."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest

import eagle31_hf
from eagle31_hf import demo
from eagle31_hf.cli import COMMANDS, main
from eagle31_hf.cli.loading import sampling_options
from eagle31_hf.generation.planning.costs import MAX_DEPTH

TARGET, DRAFTER = str(demo.FOLDER / "target"), str(demo.FOLDER / "eagle31")


def test_demo_json_has_the_names_of_the_contract(capsys):
    assert main(["demo", "--json", "--prompts", "1", "--max-new-tokens", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"target", "runs", "environment"}
    assert result["target"]["tokens_per_second"] > 0
    shapes = [(3, False, False), (5, False, False), (7, False, False), (7, True, False), (MAX_DEPTH, False, True)]
    runs = [(run["drafter"], run["depth"], run["tree"], run["auto"]) for run in result["runs"]]
    assert runs == [(drafter, *shape) for drafter in demo.DRAFTERS for shape in shapes]
    names = {
        "tokens_per_second",
        "speedup",
        "mean_accepted_length",
        "accepted_per_position",
        "drafted_per_position",
        "overhead",
    }
    for run in result["runs"]:
        assert names <= set(run)
        assert run["identical"] is True
        assert 0 < run["overhead"] < 1
        assert run["speedup"] == pytest.approx(run["tokens_per_second"] / result["target"]["tokens_per_second"])


@pytest.mark.parametrize(
    ("temperature", "options"),
    [(None, {}), (0.0, {"do_sample": False}), (0.7, {"do_sample": True, "temperature": 0.7})],
)
def test_a_temperature_says_whether_and_how_to_sample(temperature, options):
    assert sampling_options(Namespace(temperature=temperature)) == options


def test_generate_streams_what_json_returns(capsys):
    arguments = [
        "generate",
        "--target",
        TARGET,
        "--drafter",
        DRAFTER,
        "--max-new-tokens",
        "12",
        "--dtype",
        "float32",
        "import os\n",
    ]
    assert main(arguments) == 0
    streamed = capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert streamed.out.strip() == result["text"].strip()
    assert "mean accepted length" in streamed.err
    assert result["generated_tokens"] == 12


def test_the_end_of_a_text_is_not_shown(capsys, tmp_path):
    """Its last token is the special one that ends texts."""
    target = shutil.copytree(TARGET, tmp_path / "target")
    config = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(config | {"forced_eos_token_id": 1}))
    arguments = ["generate", "--target", str(target), "--drafter", DRAFTER, "--max-new-tokens", "6", "import os\n"]
    assert main([*arguments, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == text.strip()


@pytest.mark.parametrize(("name", "kind"), [("eagle31", "EAGLE 3.1"), ("eagle3", "EAGLE 3")])
def test_info_says_what_a_drafter_is(capsys, name, kind):
    assert main(["info", str(demo.FOLDER / name)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{kind}, 590," in lines[0]
    rows = {line[:22].strip(): line[23:] for line in lines}
    assert rows["fc_norm"] == ("true" if name == "eagle31" else "false")
    assert rows["vocabulary"] == "proposes 2,048 of 2,048 ids"
    assert {"captured target states", "layers", "embedding, head", "stored as", "rope", "exports"} <= rows.keys()
    assert main(["info", str(demo.FOLDER / name), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == kind


def test_a_contradicting_config_is_an_input_error_that_names_the_file(capsys, tmp_path):
    config = json.loads((demo.FOLDER / "eagle31" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"norm_before_fc": True}))
    (tmp_path / "model.safetensors").symlink_to(demo.FOLDER / "eagle31" / "model.safetensors")
    assert main(["info", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}: config.json" in error
    assert "fc_norm and norm_before_fc are both true" in error


def test_a_command_imports_no_other_s_module():
    """Trainers take as long to import as the library itself."""
    asked = (
        "import sys; from eagle31_hf.cli import parser; [parser(name) for name in ('chat', 'bench', 'convert')];"
        " print('transformers.trainer' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"eagle31_hf {eagle31_hf.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"example: eagle31 {name}" in " ".join(capsys.readouterr().out.split())
