"""Fuzzing of command lines, over all commands and options of the real parser.

`python tests/fuzz_commands.py --runs 1000 --seed 0` runs each in the process, and a share of them as programs of their
own. Each must end with a status of 0, 1 or 2 and at most one line that says why, show no traceback, print one JSON
object or nothing where --json was given, and write nothing outside the folder it was given.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from conftest import build_drafter, build_target, letters
from huggingface_hub import constants

from eagle31_hf.checkpoints import export_checkpoint
from eagle31_hf.cli import COMMANDS, main, parser
from eagle31_hf.cli.loading import KNOBS
from eagle31_hf.cli.parsing import count, path, positive

# What makes a command line short to run; appended where it is of the command, so that it wins over what was drawn.
SMALL = {
    "--max-new-tokens": "3",
    "--prompts": "1",
    "--max-length": "24",
    "--steps": "1",
    "--megabytes": "1",
    "--rounds": "1",
    "--shape": "tiny",
    "--prompt-tokens": "8",
    "--depth": "1",
    "--depths": "1",
    "--num-prompts": "1",
    "--accumulate": "1",
    "--batch-size": "1",
    "--eval-every": "1",
    "--eval-rows": "2",
    "--dtype": "float32",
}
SLOW = (("demo",),)  # of any size; drawn with one argument that is wrong
ENDLESS = (("serve",), ("app",))  # drawn with a port that is none
LINES = "abc\n/compare\n/depth 2\n/tree 5\nabcd\n/save said.json\n/nope\n/exit\n"  # said to `chat`
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-300",
    "0.5",
    "1.5",
    "99999999999999999999",
    "9" * 5000,
    "",
    "x",
    "\u0663",
    "0x10",
    "1_0",
    " 1",
)
HOSTILE = (
    "",
    " ",
    "-",
    "--",
    "x",
    "é",
    "\udcff",
    "a\udc80b",
    "a\nb",
    "\x1b[31m",
    "a" * 5000,
    "../..",
    "~",
    "$HOME",
    "*",
    "a b",
    "%s",
    "{}",
    "{0}",
    "null",
    "[1]",
    "true",
    "\\",
    "'",
    '"',
    "owner/name",
    "a/b/c",
    "http://x",
    "/dev/null",
    "/proc/self/mem",
    "/etc/passwd",
    "\u202e",
    "🦅",
)
FIELDS = (
    "norm_output=false",
    "fc_norm=NaN",
    "hidden_size=-1",
    "hidden_size=1e9",
    "hidden_act=nope",
    "rope_parameters=[]",
    "vocab_size=[1]",
    "target_model=5",
    "aux_hidden_state_layer_ids=[9,1]",
    "aux_hidden_state_layer_ids=x",
    "nope=1",
    "=",
    "a=",
    "revision=1",
    "layer_types=7",
    "dtype=x",
    "max_steps=x",
    "max_grad_norm=x",
    "optim=zzz",
    "depth=0",
    "loss=1",
    "output_dir=",
    "lr_scheduler_type=5",
    "eval_strategy=no",
    "head_dim=0",
    "use_cpu=1",
    "token=x",
    "subfolder=nope",
    "torch_dtype=1",
    "num_hidden_layers=0",
    "rms_norm_eps=-1",
    "tie_word_embeddings=3",
    "logging_steps=-1",
)


# What an argument of this name may well be: a value, or one of the files that were made.
VALUES = {
    "prompt": ["abcabc"],
    "repo_id": ["me/name"],
    "device": ["cpu"],
    "set": FIELDS,
    "field": FIELDS,
    "template_option": ["a=1"],
    "part": ["0/1", "1/2"],
    "layers": ["2"],
    "temperature": ["0", "0.7"],
    "top_p": ["0.9"],
    "template_augmentation": ["0.5"],
    "seed": ["1"],
    "loss": ["kl", "kl=0.5,ce=0.5"],
    "report_to": ["none"],
    "learning_rate": ["0.001"],
    "epochs": ["1"],
    "device_map": ["cpu", "auto"],
}
FILES = {
    "target": ["target"],
    "drafter": ["drafter", "eagle3", "foreign"],
    "data": ["texts.jsonl", "plain.txt", "mixed.jsonl"],
    "eval_data": ["texts.jsonl"],
    "texts": ["texts.jsonl", "plain.txt"],
    "prompts": ["texts.jsonl", "plain.txt", "mixed.jsonl", "nothing"],
    "compare": ["drafter", "eagle3", "foreign"],
    "chat_template": ["plain.txt"],
}
BROKEN = (
    ("config.json", "[1]"), ("config.json", "{"), ("config.json", '{"model_type": "llama"}'), ("tokenizer.json", "{}"),
    ("model.safetensors", "x" * 90), ("generation_config.json", "[1]"),
)  # fmt: skip


class World:
    """Tiny models, data and broken things, made once, and a folder for each run."""

    def __init__(self, folder: Path):
        self.folder, self.made = folder, folder / "made"
        self.made.mkdir(parents=True)
        target = build_target()
        target.save_pretrained(self.made / "target")
        letters(unk_token="k").save_pretrained(self.made / "target")
        build_drafter(target).save_pretrained(self.made / "drafter")
        build_drafter(target, "eagle3").save_pretrained(self.made / "eagle3")
        export_checkpoint(str(self.made / "eagle3"), self.made / "foreign", "speculators")
        self._write_data()
        self._break()
        self.before = self.contents()

    def _write_data(self) -> None:
        records = [{"text": "abcdefghij"[i % 5 :] + "abc"} for i in range(12)]
        (self.made / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
        (self.made / "plain.txt").write_text("abcdefghijabcdefghij" * 9)
        mixed = [
            *records[:2],
            {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "defg"}]},
            {"text": 5}, {"text": "\ud800"}, {"text": float("nan")}, {"input_ids": [1.5, 2]}, {"input_ids": [True]},
            {"messages": [{}]}, 7, None,
        ]  # fmt: skip
        (self.made / "mixed.jsonl").write_text("\n".join(map(json.dumps, mixed)))

    def _break(self) -> None:
        (self.made / "empty").mkdir()
        (self.made / "binary").write_bytes(bytes(range(256)) * 3)
        (self.made / "nothing").write_bytes(b"")
        (self.made / "loop").symlink_to(self.made / "loop")
        for name, text in BROKEN:
            for kind in ("target", "drafter"):
                broken = self.made / f"{kind}-{len(list(self.made.iterdir()))}"
                shutil.copytree(self.made / kind, broken)
                (broken / name).write_text(text)

    def contents(self) -> dict[str, tuple[int, int]]:
        """Returns all files that no run may touch."""
        found = (path for path in self.made.rglob("*") if not path.is_symlink())
        return {str(path): (path.stat().st_size if path.is_file() else 0, path.stat().st_mtime_ns) for path in found}

    def places(self, own: Path) -> list[str]:
        """Returns paths to draw from: things that were made, a copy of a drafter in the run's folder, and new names."""
        new = [
            own / "new",
            own / "a" / "b" / "c",
            own / "file",
            own / "file" / "below",
            own / "ünï cödé",
            own / ("x" * 300),
        ]
        (own / "file").write_text("mine")
        return [*map(str, sorted(self.made.iterdir())), *map(str, new), "new", "."]


def drawn_command(random_state: random.Random) -> tuple[list[str], list[argparse.Action]]:
    """Returns the words of a command, as in "bench engine", and all its arguments, from the parser's own table."""
    words, found = list[str](), parser()
    while commands := [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]:
        words.append(random_state.choice([*commands[0].choices]))
        found = commands[0].choices[words[-1]]
    return words, [action for action in found._actions if not isinstance(action, argparse._HelpAction)]


def draw(random_state: random.Random, world: World, own: Path) -> list[str]:
    """Draws a command line: mostly a sound one with some arguments wrong, missing, twice or out of place."""
    line, known = drawn_command(random_state)
    command, places = line[0], world.places(own)
    is_slow, is_endless = tuple(line) in SLOW, tuple(line) in ENDLESS
    for action in known:
        wanted = action.required or not action.option_strings
        if random_state.random() < (0.97 if wanted else 0.12):
            line += argument(random_state, action, command, world, own, places)
    # a name may stand for a count or for a file
    there = {name for action in known for name in action.option_strings if action.type is not path}
    there -= {"--max-new-tokens"} if command == "prepare-data" and "--regenerate" not in line else set()
    line += [word for name, value in SMALL.items() for word in (name, value) if name in there]
    if is_slow:
        line += [
            random_state.choice(["--device", "--prompts", "--rounds", "--nope"]),
            random_state.choice(["cuda", "0", "x"]),
        ]
    line += ["--port", "0"] if is_endless else []
    # without data the target makes up thousands of chats
    line += ["--self-prompts", "2"] if command in ("train", "prepare-data") and "--data" not in line else []
    if random_state.random() < 0.1:
        line.insert(
            random_state.randrange(len(line) + 1), random_state.choice([*HOSTILE, "--nope", "--help", "--json"])
        )
    return line


def argument(
    random_state: random.Random, action: argparse.Action, command: str, world: World, own: Path, places: list[str]
) -> list[str]:
    if action.nargs == 0:
        return [action.option_strings[0]]
    is_sound = random_state.random() < 0.92
    value = sound(random_state, action, command, world, own) if is_sound else None
    if value is None:
        value = random_state.choice(random_state.choice([NUMBERS, HOSTILE, FIELDS, places]))
    if value.startswith("-") and action.option_strings and random_state.random() < 0.5:
        return [f"{action.option_strings[0]}={value}"]
    return [*action.option_strings[:1], value]


def sound(random_state: random.Random, action: argparse.Action, command: str, world: World, own: Path) -> str | None:
    """Returns a value that the command may well accept for an argument, by the argument's name."""
    made = world.made
    if action.dest == "load_in":
        return "8bit"  # on some CPUs bitsandbytes packs 4 bits for widths only that these tiny targets do not have
    if action.choices:
        return random_state.choice([*action.choices])
    if action.dest in ("source", "folder") or (command == "convert" and action.dest == "drafter"):
        copy = own / "copy"
        if not copy.exists():
            shutil.copytree(made / random_state.choice(["foreign", "drafter"]), copy)
        return str(copy)
    options = VALUES.get(action.dest) or [made / name for name in FILES.get(action.dest, ())] or None
    if action.dest in ("destination", "output"):
        options = [own / "new"]
    if options is None and (action.type in (positive, count) or action.dest in KNOBS):
        options = ["1", "2", "5"]
    return None if options is None else str(random_state.choice(options))


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    stdin = sys.stdin
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            sys.stdin = io.StringIO(LINES)
            yield out, err
    finally:
        sys.stdin = stdin
        os.chdir(before)


def run_here(line: list[str], own: Path) -> tuple[int | str | None, str, str]:
    """Runs a command line in this process. Returns status, stdout and stderr; an exception is a status of its own."""
    status: int | str | None
    with inside(own) as (out, err):
        try:
            status = main(line)
        except SystemExit as end:
            status = end.code
        except BaseException:
            status = "an exception"
            err.write(traceback.format_exc())
    return status, out.getvalue(), err.getvalue()


def run_as_program(line: list[str], own: Path) -> tuple[int | str | None, str, str]:
    line = [word.replace("\0", "") for word in line]
    done = subprocess.run(
        [sys.executable, "-m", "eagle31_hf", *line],
        cwd=own,
        capture_output=True,
        env=environment(),
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def environment() -> dict[str, str]:
    package = str(Path(__file__).parents[1])
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
    }


def faults(line: list[str], status: int | str | None, out: str, err: str) -> list[str]:
    """Returns the faults in how a command line ended."""
    told = [text for text in err.splitlines() if text.startswith(("eagle31: error:", "eagle31: failed:"))]
    found = []
    if status not in (0, 1, 2):
        found.append(f"status {status}")
    if "Traceback" in err:
        found.append("a traceback")
    is_verdict = "check" in line and status == 1 and not told  # what it found is on stdout
    if len(told) != (status in (1, 2)) and not is_verdict:
        found.append(f"{len(told)} lines that say why")
    if told and len(told[0]) > 1500:
        found.append(f"a line of {len(told[0])} characters")
    if "--json" in line and "--" not in line and status == 0 and "--help" not in line and "-h" not in line:
        try:
            json.loads(out, parse_constant=lambda text: int("x"))
        except ValueError:
            found.append("stdout is not one JSON value")
    if status in (1, 2) and out and "--json" in line and not is_verdict:
        found.append("stdout of a command that failed")
    return found


def fuzz(
    runs: int, seed: int, folder: Path, every: int = 0, seconds: float = float("inf")
) -> tuple[list[str], Counter]:
    """Runs many command lines. Returns descriptions of the faults, and statuses with their counts.

    Every `every`-th run is a program. It ends after `seconds`.
    """
    world, problems, statuses, begun = World(folder), [], Counter[str](), time.monotonic()
    for number in range(runs):
        if time.monotonic() - begun > seconds:
            break
        own = folder / f"run-{number}"
        own.mkdir()
        line = draw(random.Random(f"{seed}-{number}"), world, own)
        as_program = every and number % every == every - 1
        status, out, err = run_as_program(line, own) if as_program else run_here(line, own)
        found = faults(line, status, out, err)
        after = world.contents()
        if after != world.before:
            touched = sorted(
                path for path in after.keys() | world.before.keys() if after.get(path) != world.before.get(path)
            )
            found.append(f"{touched[:3]} changed")
            world.before = after
        statuses[f"{line[0] if line[0] in COMMANDS else 'none'}: {status}"] += 1
        if found:
            shown = ascii([word[:200] for word in line])
            problems.append(f"run {number}: {'; '.join(found)}\n  eagle31 {shown}\n  {out[-300:]}\n  {err[-1800:]}")
        shutil.rmtree(own, ignore_errors=True)
    return problems, statuses


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """A context without network and with quiet libraries."""
    was = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--programs", type=int, default=100, help="every so many runs one is a program of its own; 0: none"
    )
    options.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    chosen = options.parse_args()
    start = time.monotonic()
    with prepared(), tempfile.TemporaryDirectory() as temporary:
        wrong, counted = fuzz(chosen.runs, chosen.seed, Path(temporary, "world"), chosen.programs, chosen.seconds)
    print("\n".join([*wrong, *(f"{times:>5} {name}" for name, times in sorted(counted.items()))]))
    print(f"{sum(counted.values())} runs, seed {chosen.seed}, {time.monotonic() - start:.0f} s: {len(wrong)} problems")
    sys.exit(bool(wrong))
