"""Random damage to configs, headers, indices and pickles: each file is read or refused, soon and in little memory.

`python tests/checkpoints/test_fuzz.py 10000 [first seed]` runs more and prints the outcomes.
"""

import collections
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from damage import damage_header, damage_json, damage_pickle

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.checkpoints import read_checkpoint

# in the suite; of processor time for one case; more than before for all of them
CASES, SECONDS, MEBIBYTES = 1000, 2.0, 400
WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"
BASES = (
    "specforge",
    "speculators",
    "modelopt",
    "nemo",
    "kimi_mla",
    "native",
    "norms_called_fcs",
    "biases",
    "nemo_older",
    "nebius",
)


def damage_one(folder: Path, rng: random.Random) -> str:
    """Damages one file of a checkpoint, and returns the kind of damage."""
    ways: dict[str, Callable[[Path, random.Random], None]] = {
        ".json": damage_json, ".bin": damage_pickle, ".safetensors": damage_header
    }  # fmt: skip
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pt")
    path = rng.choice([p for p in files if p.name == "config.json"] * 2 + files)
    ways[path.suffix](path, rng)
    return path.name if path.suffix == ".json" else path.suffix


def write_bases(root: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    from writers import LAYOUTS  # not before the run as a script has put its path

    bases = {}
    for name in BASES:
        for suffix, layout in (("", LAYOUTS[name]), (".bin", replace(LAYOUTS[name], file=PICKLE))):
            layout.write(root / (name + suffix))
            bases[name + suffix] = (root / (name + suffix), layout.options)
    return bases


def run(seed: int, bases: dict[str, tuple[Path, dict[str, Any]]], folder: Path) -> tuple[str, str]:
    """Reads one damaged checkpoint. Returns the damage and the outcome; raises errors that are no refusals."""
    rng = random.Random(seed)
    base, options = bases[rng.choice(sorted(bases))]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    options = dict(options) if rng.random() < 0.8 else {}
    convention = options.pop("aux_layer_convention", None)
    what, start = damage_one(folder, rng), time.process_time()
    outcome = refusal = ""
    try:
        checkpoint = read_checkpoint(str(folder), options, convention, local_files_only=True)
    except (ValueError, OSError) as error:
        outcome, refusal = type(error).__name__, str(error)
    if outcome:
        assert str(folder) in refusal, f"seed {seed}: {what}: the error does not name the checkpoint: {refusal}"
        assert len(refusal) < 10_000, f"seed {seed}: {what}: {len(refusal)} characters"
    else:
        outcome = "read"
        with torch.device("meta"):
            model = Eagle31DrafterModel(checkpoint.config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        read = {n: t.shape for n, t in checkpoint.tensors.items()} | {
            n: tuple(t.shape) for n, t in checkpoint.made.items()
        }
        assert read == shapes, f"seed {seed}: {what}: read as something else than the model"
    seconds = time.process_time() - start
    assert seconds < SECONDS, f"seed {seed}: {what}: {seconds:.1f} s"
    return what, outcome


def run_all(seeds: range, root: Path) -> collections.Counter:
    bases, outcomes, before = (
        write_bases(root / "bases"),
        collections.Counter(),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            try:
                outcomes[run(seed, bases, root / "drafter")] += 1
            except AssertionError:
                raise
            except Exception as error:
                raise AssertionError(f"seed {seed}: a {type(error).__name__} came out: {error}") from error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEBIBYTES, f"memory grew by {grown:.0f} MiB"
    return outcomes


def test_damage_is_read_or_refused_soon_and_in_little_memory(tmp_path):
    outcomes = run_all(range(CASES), tmp_path)
    assert sum(count for (_, outcome), count in outcomes.items() if outcome == "read") > CASES / 50
    assert sum(count for (_, outcome), count in outcomes.items() if outcome != "read") > CASES / 2
    assert {what for what, _ in outcomes} == {
        "config.json",
        f"{WEIGHTS}.index.json",
        f"{PICKLE}.index.json",
        ".safetensors",
        ".bin",
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else CASES
    failures: list[str] = []
    totals: collections.Counter = collections.Counter()
    start, peak = time.time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = write_bases(Path(folder, "bases"))
        for seed in range(first, first + count):
            try:
                totals[run(seed, written, Path(folder, "drafter"))] += 1
            except Exception as error:
                failures.append(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
    for (what, outcome), number in sorted(totals.items()):
        print(f"{number:7} {what:32} {outcome}")
    print(*failures, sep="\n")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    print(
        f"{count} cases from seed {first}: {len(failures)} failures, {time.time() - start:.0f} s, {grown:.0f} MiB more"
        " memory"
    )
    sys.exit(bool(failures))
