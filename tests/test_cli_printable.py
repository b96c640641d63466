"""What commands print of strangers' models: control characters are shown, not sent, whichever library prints them."""

import io
import json
import sys

import pytest
from hostile import SPELLED, STEERING, steering_in, steering_target
from programs import programs
from safetensors.torch import load_file, save_file

from eagle31_hf import demo
from eagle31_hf.cli import main
from eagle31_hf.cli.parsing import to_json
from eagle31_hf.reports.journal import counted

DRAFTER = str(demo.FOLDER / "eagle31")
STEERED = "\x1b[2J\x07\x9b\u202e"  # as a file may be called
SHORT = ["--max-new-tokens", "12", "--dtype", "float32"]


@pytest.fixture
def target(tmp_path):
    return steering_target(tmp_path / "target")


def test_generate_shows_what_would_steer_the_terminal(target, capsys):
    command = ["generate", "--target", str(target), "--drafter", DRAFTER, *SHORT, "--explain", "class Parser(object):"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert not steering_in(shown)
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr().out
    assert not steering_in(said)
    text = json.loads(said)["text"]
    assert STEERING in text
    assert shown.strip() == text.replace(STEERING, SPELLED).strip()


def test_demo_shows_its_table_and_profile_and_what_would_steer_in_all_three_texts(target, capsys, monkeypatch):
    for name in demo.DRAFTERS:
        (target.parent / name).symlink_to(demo.FOLDER / name)
    monkeypatch.setattr(demo, "FOLDER", target.parent)
    assert main(["demo", "--profile", "--prompts", "1", "--max-new-tokens", "4"]) == 0
    shown = capsys.readouterr().out
    assert not steering_in(shown)
    assert "with the EAGLE 3.1 drafter" in shown
    assert "target forwards" in shown
    assert shown.count(" yes") == 10
    parts = shown.split("\n--- ")
    assert len(parts) == 3
    assert all(SPELLED in part for part in parts)


def test_chat_shows_it_where_it_is_piped(target, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("class Parser(object):\n"))
    assert main(["chat", "--target", str(target), "--drafter", DRAFTER, *SHORT, "--temperature", "0"]) == 0
    shown = capsys.readouterr().out
    assert not steering_in(shown)
    assert SPELLED in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", f"nowhere/{STEERED}"],
        ["info", f"{STEERED}\neagle31: error: another"],
        ["generate", "--target", f"{STEERED}/x/y", "--drafter", DRAFTER, "x"],
        ["convert", STEERED, "--set", f"{STEERED}=1"],
        ["drift", "--target", "t", "--drafter", "d", "--prompts", "p", "--depth", STEERED],
        [STEERED],
    ],
    ids=["source", "line", "target", "field", "number", "command"],
)
def test_errors_are_one_line_that_steers_nothing(arguments, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert not told.out
    assert not steering_in(told.err)
    lines = [line for line in told.err.splitlines() if line.startswith("eagle31: error:")]
    assert len(lines) == 1
    assert r"\x1b[2J\x07" in lines[0] or r"\\x1b[2J\\x07" in lines[0]


def test_a_files_name_in_an_error_is_one_line(tmp_path, capsys):
    folder = tmp_path / f"{STEERED}\neagle31: error: another"
    folder.mkdir()
    (folder / "config.json").mkdir()
    (folder / "texts").mkdir()
    assert main(["upgrade", "--target", "t", "--drafter", "d", "--texts", str(folder / "texts")]) == 2
    assert main(["info", str(folder)]) == 2
    told = capsys.readouterr().err
    assert not steering_in(told)
    assert len(told.splitlines()) == 2


def test_info_shows_what_a_checkpoint_says(tmp_path, capsys):
    """Control characters are refused in a config.json; marks that turn other text about are not."""
    config = json.loads((demo.FOLDER / "eagle31" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"target_model": "org/\u202e\u2066model"}))
    (tmp_path / "model.safetensors").symlink_to(demo.FOLDER / "eagle31" / "model.safetensors")
    assert main(["info", str(tmp_path)]) == 0
    assert r"org/\u202e\u2066model" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(config | {"target_model": STEERED}))
    assert main(["info", str(tmp_path)]) == 2
    assert not steering_in(capsys.readouterr().err)


def test_a_bar_names_a_drafter_by_what_can_be_shown(capsys):
    assert list(counted(range(2), f"{STEERED}, as served")) == [0, 1]
    told = capsys.readouterr().err
    assert r"\x1b[2J\x07\x9b\u202e, as served" in told
    assert not steering_in(told) - {"\r"}  # which the bar itself goes back by


def test_json_is_of_printable_letters_and_the_same_values():
    values = {STEERING: ["".join(map(chr, range(0x100))), "\u2028\udc80"]}
    assert not steering_in(to_json(values))
    assert json.loads(to_json(values)) == values


def test_logs_of_other_libraries_are_printable(target, tmp_path):
    """transformers reports on a tensor that no model of the config has, by its name, with styles of its own."""
    file = target / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{STEERED}.weight": tensors["model.norm.weight"].clone()}, file, {"format": "pt"})
    with programs() as start:
        program = start(tmp_path / "run", ["generate", "--target", target, "--drafter", DRAFTER, *SHORT, "x"])
        assert program.wait() == 0
    assert "LOAD REPORT" in program.err
    assert r"\x1b[2J\x07\x9b\u202e.weight" in program.err
    assert not steering_in(program.err) - {"\r"}
