"""Random calls of `generate`, with a drafter and without, which must not differ in anything a caller can see.

python tests/soak.py --runs 2000 --seed 0
python tests/soak.py --seconds 60 --seed 0
python tests/soak.py --runs 5000 --recurrent    of these runs those of targets with recurrent states
python tests/soak.py --seed 0 --only 317        one run again, with its description
"""

import argparse
import gc
import logging
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent / "generation"))  # of families.py

import psutil
import torch
import transformers
from recurrent_families import RECURRENT_FAMILIES
from soaking import models
from soaking.trial import Result, Trial, draw, run

REPEATED = 40  # runs made twice more, between which memory is measured
GROWTH = 0.001
COUNTED = ("blocks", "tensors")


@dataclass
class Report:
    """`failures`: descriptions of runs that went wrong; `ties`: of those in which rounding alone decided."""

    failures: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    words: Counter = field(default_factory=Counter)
    runs: int = 0
    drafted: int = 0
    accepted: int = 0
    runs_with_accepted: int = 0

    def add(self, trial: Trial, result: Result) -> None:
        self.runs += 1
        self.words[result.word] += 1
        stats = result.outcome.stats
        self.drafted += sum(stats.drafted_per_position)
        self.accepted += sum(stats.accepted_per_position)
        self.runs_with_accepted += any(stats.accepted_per_position)
        for one in result.differences:
            (self.ties if one.is_tie else self.failures).append(f"{one}\n  {again(trial)}\n  {trial}")

    def summary(self, seed: int, seconds: float) -> str:
        words = ", ".join(f"{count} {word}" for word, count in self.words.most_common())
        return (
            f"seed {seed}: {self.runs} runs in {seconds:.0f} s ({words}): {len(self.failures)} differences,"
            f" {len(self.ties)} ties; {self.accepted} of {self.drafted} drafted levels accepted, some in"
            f" {self.runs_with_accepted} runs"
        )


def again(trial: Trial) -> str:
    return f"python tests/soak.py --seed {trial.seed} --only {trial.number}"


def one(trial: Trial, report: Report) -> None:
    try:
        result = run(trial)
    except Exception:
        report.runs += 1
        report.failures.append(f"{traceback.format_exc()}\n  {again(trial)}\n  {trial}")
        models.forget_models()
        return
    report.add(trial, result)
    if result.differences:
        models.forget_models()  # whatever was spoilt


def soak(seed: int, numbers: Iterable[int], seconds: float | None = None, report: Report | None = None) -> Report:
    """Runs these numbers, as many as begin within so many seconds, and says at once what fails."""
    report, began = report or Report(), time.monotonic()
    for number in numbers:
        if seconds is not None and time.monotonic() - began > seconds:
            break
        told = len(report.failures), len(report.ties)
        one(draw(seed, number), report)
        for failure in report.failures[told[0] :]:
            print(f"FAILED {failure}", flush=True)
        for tie in report.ties[told[1] :]:
            print(f"a tie, which rounding decided: {tie}", flush=True)
    return report


def memory() -> dict[str, int]:
    """What is held when no model is: `blocks`, Python's own count of what its objects take, and the bytes of all
    `tensors` Python can reach.

    Both are counts, the same on every machine whatever its allocator gives back to the system. `resident` bytes are
    what the system says; they also show what is lost outside Python, but move by a few percent by themselves.
    """
    models.forget_models()
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.layout is torch.strided]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return {
        "blocks": sys.getallocatedblocks(),
        "tensors": sum(storages.values()),
        "resident": psutil.Process().memory_info().rss,
    }


def flat(seed: int, numbers: list[int]) -> dict[str, tuple[int, int]]:
    """Memory before and after runs that have been made before: all code they need is read and all caches by value are
    filled, so that whatever grows is lost. (Between runs made for the first time a percent or two grows: each meets
    code nothing has needed yet.)
    """
    held = []
    for _ in range(2):
        soak(seed, numbers, report=Report())
        held.append(memory())
    return {name: (was, held[1][name]) for name, was in held[0].items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="begin no run after so many")
    parser.add_argument("--recurrent", action="store_true", help="only runs of targets with recurrent states")
    parser.add_argument("--only", type=int, help="this run alone")
    arguments = parser.parse_args()
    quiet()
    for package, entries in models.ABSENT.items():
        print(f"without {package}: no {', '.join(entries)}")
    if arguments.only is not None:
        print(draw(arguments.seed, arguments.only))
        return bool(soak(arguments.seed, [arguments.only]).failures)
    began, report = time.monotonic(), Report()
    choices = {n: draw(arguments.seed, n).choices for n in range(arguments.first, arguments.first + arguments.runs)}
    if arguments.recurrent:
        choices = {number: chosen for number, chosen in choices.items() if chosen["family"] in RECURRENT_FAMILIES}
    compiled = [number for number, chosen in choices.items() if chosen["wrapper"].startswith("compiled")]
    usual = sorted({*choices} - {*compiled})
    soak(arguments.seed, usual, arguments.seconds, report)
    held = flat(arguments.seed, usual[: min(REPEATED, report.runs)])
    left = None if arguments.seconds is None else arguments.seconds - (time.monotonic() - began)
    soak(arguments.seed, compiled, left, report)  # last: a compiler keeps what it has compiled
    print(report.summary(arguments.seed, time.monotonic() - began))
    for name, (was, now) in held.items():
        print(f"{name} held: {was:,} before, {now:,} after ({(now - was) / max(was, 1):+.2%})")
    grown = [name for name in COUNTED if held[name][1] > held[name][0] * (1 + GROWTH)]
    if grown:
        print(f"FAILED {', '.join(grown)} grew by more than {GROWTH:.1%}")
    return bool(report.failures or grown)


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in ("torch._dynamo", "eagle31_hf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.logging.get_logger("eagle31_hf").setLevel(logging.ERROR)
    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
