"""Commands that are stopped: by a signal, wherever they are, by a closed output, or by a full disk."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import build_target
from programs import ABANDONED, heeded, programs

from eagle31_hf import Eagle31DrafterModel, demo, starting
from eagle31_hf.checkpoints import export_checkpoint
from eagle31_hf.cli import endings, parser
from eagle31_hf.training.output import REPLACED
from eagle31_hf.training.saving import last_checkpoint

DRAFTER, EAGLE3 = (str(demo.FOLDER / name) for name in ("eagle31", "eagle3"))
QUICK = ["--depth", "1", "--max-length", "40", "--accumulate", "1", "--eval-every", "2", "--eval-rows", "0"]


@pytest.fixture(scope="module")
def start():
    with programs() as begin:
        yield begin


@pytest.fixture
def folder(tmp_path, tokenizer) -> Path:
    """A target with its tokenizer, and texts it can read."""
    build_target("llama").save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": "abcdefghij"[i % 7 :] + "abcdef"}) for i in range(64))
    )
    return tmp_path


def reading(folder: Path) -> list:
    return ["--target", folder / "target", "--data", folder / "texts.jsonl"]


def stopped(program, number: int) -> str:
    """Returns the line that a program left which a signal ended; no other line tells of it."""
    assert program.wait() == -number, program.err
    assert "Traceback" not in program.err
    [line] = [line for line in program.err.splitlines() if "stopped" in line]
    return line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_torch_is_imported(number):
    """Python itself says what it imports: the program's own first module has just been loaded when the signal comes."""
    command = [sys.executable, "-X", "importtime", "-m", "eagle31_hf", "info", DRAFTER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeded) as process:
        for line in process.stderr:
            if line.endswith("eagle31_hf.starting\n"):
                process.send_signal(number)
                break
        left = [line for line in process.stderr if not line.startswith("import time:")]
    assert process.returncode == -number
    assert left == ["eagle31: stopped while starting; nothing was done\n"]


def test_importing_the_library_leaves_signals_alone():
    assert signal.getsignal(signal.SIGTERM) is not starting._end
    assert signal.getsignal(signal.SIGINT) is not starting._end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_while_it_generates(start, tmp_path, number):
    program = start(tmp_path, ["demo", "--prompts", "2000"])
    program.wait_for("loading")
    program.signal(number)
    assert stopped(program, number).endswith(f"stopped by {number.name}. Nothing was written.")


def test_a_signal_that_is_to_be_ignored_is(start, tmp_path):
    """The program is started as by `nohup`."""
    program = start(tmp_path, ["info", DRAFTER], ignored=[signal.SIGHUP])
    program.wait_for("")
    while program.process.is_alive():
        program.signal(signal.SIGHUP)
        program.process.join(0.002)
    assert program.wait() == 0, program.err


def test_prepared_shards_are_kept(start, folder):
    arguments = ["prepare-data", *reading(folder), "--output", folder / "store", "--records-per-shard", "1", "--states"]
    program = start(folder / "first", arguments)
    program.wait_for("shard 2 of 64")
    program.signal(signal.SIGINT)
    line = stopped(program, signal.SIGINT)
    count = len(list((folder / "store").glob("shard-*")))
    assert 2 <= count < 64
    assert f"Complete shards are kept in {folder / 'store'}" in line
    again = start(folder / "again", arguments)
    assert again.wait() == 0, again.err
    assert f"shard {64 - count} of {64 - count}" in again.err


def test_the_last_checkpoint_is_kept_and_resumed(start, folder):
    training = ["train", *reading(folder), "--output", folder / "drafter", *QUICK, "--steps"]
    program = start(folder / "first", [*training, 5000])
    while not list((folder / "drafter").glob("checkpoint-*/trainer_state.json")) and program.process.is_alive():
        time.sleep(0.01)
    program.signal(signal.SIGTERM)
    line = stopped(program, signal.SIGTERM)
    assert f"If {folder / 'drafter'} holds a complete checkpoint or rows, the same command with --resume" in line
    kept = Path(last_checkpoint(folder / "drafter"))
    steps = json.loads((kept / "trainer_state.json").read_text())["global_step"]
    again = start(folder / "again", [*training, steps + 2, "--resume", "--json"])
    assert again.wait() == 0, again.err
    assert json.loads(again.out)["steps"] == steps + 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "from"], "from is as it was, or native by now; the same command finishes the work."),
        (["export", "from", "to"], "to is complete if it is there; otherwise nothing was written."),
        (["publish", "from", "--repo-id", "a/b"], "Nothing was committed; the same command goes on"),
        (["train", "--target", "t", "--output", "to"], f"kept, by then in to/{REPLACED}."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_a_stopped_command_leaves_is_said_with_its_own_names(arguments, words):
    assert words in endings.outlook(parser().parse_args(arguments))


def test_a_conversion_in_place_that_is_stopped_leaves_a_drafter(start, tmp_path):
    foreign = export_checkpoint(EAGLE3, tmp_path / "foreign", "speculators")
    for i in range(4):
        copy = tmp_path / f"copy-{i}"
        shutil.copytree(foreign, copy)
        program = start(tmp_path / f"run-{i}", ["convert", copy])
        program.wait_for("converting")
        program.process.join(0.005 * i)
        program.signal(signal.SIGINT)
        status = program.wait()
        is_native = json.loads((copy / "config.json").read_text()).get("model_type") == "eagle31"
        # a signal that comes behind the last step finds nothing to stop: it ends the process without a word
        if status != 0 and not (is_native and "stopped" not in program.err):
            assert str(copy) in stopped(program, signal.SIGINT)
        Eagle31DrafterModel.from_pretrained(copy)
        assert start(tmp_path / f"again-{i}", ["convert", copy]).wait() == 0
        assert json.loads((copy / "config.json").read_text())["model_type"] == "eagle31"


@pytest.mark.parametrize("arguments", [["info", DRAFTER], ["info", DRAFTER, "--json"], ["--help"], ["info", "--help"]])
def test_a_reader_that_went_away_ends_it_quietly(start, tmp_path, arguments):
    program = start(tmp_path, arguments, stdout=ABANDONED)
    assert program.wait() == -signal.SIGPIPE
    assert program.err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a system without /dev/full")
def test_output_that_cannot_be_written_is_one_line(start, tmp_path):
    program = start(tmp_path, ["info", DRAFTER], stdout="/dev/full")
    assert program.wait() == 1
    assert program.err == "eagle31: failed: writing: the disk is full. Free some space first. Nothing was written.\n"


def test_a_terminal_that_knows_only_ascii_gets_all_there_is(start, tmp_path):
    copy = tmp_path / "dräfter"
    shutil.copytree(DRAFTER, copy)
    program = start(tmp_path, ["info", copy], encoding="ascii")
    assert program.wait() == 0, program.err
    assert "dr\\xe4fter" in program.out


def test_outputs_that_were_closed_end_quietly(monkeypatch, tmp_path):
    for name in ("stdout", "stderr"):
        with (tmp_path / name).open("w") as file:
            monkeypatch.setattr(sys, name, file)
    endings.flush_outputs()
