"""Random calls of `generate`, with a drafter and without, which must not differ in anything a caller can see.

    python tests/soak.py --runs 2000 --seed 0
    python tests/soak.py --seconds 60 --seed 0
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
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS / "generation")]

import psutil
import torch
import transformers
from soaking import models
from soaking.trial import Result, Trial, draw, run


@dataclass
class Report:
    """`failures`: descriptions of runs that went wrong; `ties`: of those in which rounding alone decided."""

    failures: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    words: Counter = field(default_factory=Counter)
    runs: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, trial: Trial, result: Result) -> None:
        self.runs += 1
        self.words[result.word] += 1
        stats = result.outcome.stats
        self.drafted += sum(stats.drafted_per_position)
        self.accepted += sum(stats.accepted_per_position)
        for one in result.differences:
            (self.ties if one.is_tie else self.failures).append(f"{one}\n  {again(trial)}\n  {trial}")


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


def soak(seed: int, numbers, seconds: float | None = None, tell=print) -> Report:
    """Runs these numbers, as many as begin within so many seconds."""
    report, began = Report(), time.monotonic()
    for number in numbers:
        if seconds is not None and time.monotonic() - began > seconds:
            break
        known = len(report.failures)
        one(draw(seed, number), report)
        for failure in report.failures[known:]:
            tell(f"FAILED {failure}")
    return report


def memory() -> dict[str, int]:
    """What is held when no model is. Blocks are Python's own count of its objects, tensors the bytes of all that Python can reach."""
    models.forget_models()
    torch._dynamo.reset()
    gc.collect()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects() if type(x) is torch.Tensor}
    return {"blocks": sys.getallocatedblocks(), "tensors": sum(storages.values()), "rss": psutil.Process().memory_info().rss}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="begin no run after so many")
    parser.add_argument("--only", type=int, help="this run alone")
    arguments = parser.parse_args()
    quiet()
    if arguments.only is not None:
        trial = draw(arguments.seed, arguments.only)
        print(trial)
        report = soak(arguments.seed, [arguments.only])
    else:
        report = soak(arguments.seed, range(arguments.first, arguments.first + arguments.runs), arguments.seconds)
    print(dict(report.words), report.runs, report.drafted, report.accepted, len(report.failures), len(report.ties))
    return bool(report.failures)


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
