# ruff: noqa: E402
"""Fuzzing of checkpoint folders: each is damaged or made to do harm, and must load or be refused in one line.

Time and memory are bounded. `python tests/fuzz_checkpoints.py --runs 10000 --seed 0` prints the outcomes, and every
finding with the seed that repeats it.
"""

import argparse
import collections
import contextlib
import faulthandler
import io
import json
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "checkpoints")]

import torch
import transformers
from folder_damage import KNOBS, PICKLE, PLAIN_KNOBS, mutate, unlink
from huggingface_hub import constants
from writers import LAYOUTS, Layout

from eagle31_hf import Eagle31Config, Eagle31DrafterModel, convert_checkpoint
from eagle31_hf.checkpoints import read_checkpoint
from eagle31_hf.cli import main

FIXTURES = Path(__file__).parent / "fixtures"
MEBIBYTE = 2**20
ALLOWED_MEMORY = 200 * MEBIBYTE  # besides twice the folder's size
# of one way in: far more than any takes; a machine under load may be slow, a hang never ends
CPU_SECONDS, WALL_SECONDS = 20, 300
MAX_MESSAGE = 4000
REFUSALS = (ValueError, OSError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


class TookTooLong(BaseException):
    """An exception that the timers raise, past every `except Exception`."""


# What has to hold of each.


def folder_size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def reset_peak() -> int:
    """Begins a new peak of resident memory, and returns the present figure in bytes (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def run_out(*_: Any) -> None:
    raise TookTooLong


def attempt(way: Callable[[], Any]) -> Exception | None:
    """Returns the error of one way in, None where there is none. Raises AssertionError for one that is no refusal."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        way()
    except TookTooLong:
        raise AssertionError("did not come to an end: " + traceback.format_exc(limit=-3)) from None
    except Exception as error:
        if type(error) not in REFUSALS:
            raise AssertionError(
                f"a {type(error).__name__} came out: {traceback.format_exc(limit=-4)[-1500:]}"
            ) from error
        return error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def info(folder: Path, is_read: bool) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["info", str(folder)])
    assert code == (0 if is_read else 2), f"eagle31 info ended with {code}: {err.getvalue()[:500]}"
    assert code == 0 or err.getvalue().count("\n") == 1, f"not one line: {err.getvalue()[:500]}"
    out.getvalue().encode()


def read_as_the_model(*args: Any, **hub: Any) -> None:
    """Reads a checkpoint, and asserts that its tensors are those of a model with its config."""
    checkpoint = read_checkpoint(*args, **hub)
    with torch.device("meta"):
        expected = Eagle31DrafterModel(checkpoint.config).state_dict()
    found = {**checkpoint.tensors, **checkpoint.made}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }


def check(folder: Path, options: dict[str, Any], marker: Path) -> str:
    """Tries all ways in, and returns their common outcome. Raises AssertionError for a finding."""
    hub, target = {"local_files_only": True}, folder.parent / "converted"
    shutil.rmtree(target, ignore_errors=True)
    limit = ALLOWED_MEMORY + 2 * folder_size(folder)
    fields = {name: value for name, value in options.items() if name != "aux_layer_convention"}
    ways: dict[str, Callable[[], Any]] = {
        "read": lambda: read_as_the_model(str(folder), fields, options.get("aux_layer_convention"), **hub),
        "load": lambda: Eagle31DrafterModel.from_pretrained(folder, **options, **hub),
        "convert": lambda: convert_checkpoint(folder, target, **options, **hub),
        "config": lambda: Eagle31Config.from_pretrained(folder, **hub),
        "info": lambda: info(folder, refusals["read"] is None) if not options else None,
        "in place": lambda: convert_checkpoint(folder, **options),
    }  # fmt: skip
    refusals: dict[str, Exception | None] = {}
    for name, way in ways.items():
        before = reset_peak()
        try:
            refusals[name] = attempt(way)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        grown = status("VmHWM") - before
        assert grown <= limit, f"{name}: memory grew by {grown / MEBIBYTE:.0f} MiB, {limit / MEBIBYTE:.0f} are allowed"
        assert not marker.exists(), f"{name}: code of the checkpoint was run"
    return agree(refusals, folder)


def agree(refusals: dict[str, Exception | None], folder: Path) -> str:
    """Asserts that the ways in agree, and that errors name the checkpoint."""
    for name in ("read", "load", "convert"):
        text = str(refusals[name] or folder)
        assert str(folder) in text, f"{name}: the refusal does not name the checkpoint: {text[:500]}"
        assert len(text) < MAX_MESSAGE, f"{name}: {len(text)} characters: {text[:300]}"
    if refusals["read"] is not None:
        assert refusals["load"] is not None, f"loaded, though reading refuses it: {refusals['read']}"
        assert refusals["convert"] is not None, f"converted, though reading refuses it: {refusals['read']}"
        return "refused"
    for name in ("load", "convert"):
        assert refusals[name] is None or "NaN or infinite" in str(refusals[name]), (
            f"{name}: read, yet refused: {refusals[name]}"
        )
    return "not finite" if refusals["load"] else "loaded"


def bases() -> dict[str, Layout | Path]:
    """Returns every producer's layout, of safetensors and of pickles, and the folders that the producers themselves
    wrote."""
    layouts: dict[str, Layout | Path] = dict(LAYOUTS)
    layouts |= {f"{name}.bin": replace(layout, file=PICKLE) for name, layout in LAYOUTS.items()}
    written = {f"written by {path.parent.name}": path.parent for path in sorted(FIXTURES.glob("formats/*/config.json"))}
    return layouts | written


def write_base(base: Layout | Path, root: Path) -> Path:
    """Writes a sound checkpoint below `root`, and returns its folder."""
    if isinstance(base, Path):
        return Path(shutil.copytree(base, root / "drafter"))
    base.write(root / "whole")
    folder = Path(shutil.copytree(root / "whole" / base.subfolder, root / "drafter"))
    shutil.rmtree(root / "whole")
    if base is LAYOUTS["native"]:
        (folder / KNOBS).write_text(json.dumps(PLAIN_KNOBS))
    return folder


def run(seed: int, root: Path) -> tuple[str, str]:
    """Fuzzes one folder. Returns the changes made to it and the outcome; raises AssertionError for a finding."""
    rng, marker = random.Random(seed), root / "attacked"
    for path in root.iterdir():
        unlink(path)
    name = rng.choice(sorted(BASES))
    folder = write_base(BASES[name], root)
    kind = mutate(folder, rng, marker)
    options = getattr(BASES[name], "options", {}) if rng.random() < 0.8 else {}
    return kind, check(folder, dict(options), marker)


def run_all(first: int, runs: int, report: Callable[[str], None]) -> tuple[collections.Counter, list[str]]:
    """Fuzzes in this process, whose timers, logs and way to the hub are then others."""
    constants.HF_HUB_OFFLINE = True  # a config may name any repository
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    outcomes: collections.Counter = collections.Counter()
    findings: list[str] = []
    for timer in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(timer, run_out)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for base in WARM:  # what is loaded for the first time is not counted
            check(write_base(BASES[base], root), dict(BASES[base].options), root / "attacked")
            shutil.rmtree(root / "drafter")
        for seed in range(first, first + runs):
            faulthandler.dump_traceback_later(2 * WALL_SECONDS, exit=True)
            try:
                outcomes[run(seed, root)] += 1
            except AssertionError as error:
                findings.append(f"seed {seed}: {error}")
                report(findings[-1])
            if (seed - first) % 250 == 249:
                report(f"{seed - first + 1} folders, {time.process_time():.0f} s of processor time")
        faulthandler.cancel_dump_traceback_later()
    return outcomes, findings


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first; each folder has one of its own")
    return parser.parse_args()


BASES = bases()
WARM = ("specforge", "original_release", "native", "kimi_mla.bin")

if __name__ == "__main__":
    args, start = parse(), time.time()
    outcomes, findings = run_all(args.seed, args.runs, partial(print, flush=True))
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"{count:7} {kind:10} {outcome}")
    seconds = f"{time.time() - start:.0f} s, {time.process_time():.0f} s of processor time"
    print(f"{args.runs} folders from seed {args.seed}: {len(findings)} findings, {seconds}")
    sys.exit(bool(findings))
