"""Two processes train what one process does: the same losses, figures and weights, whatever is sharded, and whoever has
no answers."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from close import EXACT, assert_close
from distributed_run import RESUMED, RUNS, STOPPED_AT, main, trainer_of
from programs import in_two_processes
from training_runs import Run, run

from eagle31_hf import Eagle31DrafterModel

SUMMED = 1e-5  # fp32: gradients of two processes are added up in another order
# Adam divides gradients by their size, Muon by their singular values: where they are nearly zero, what rounding left of
# them counts in full. So weights are compared as a whole: a share of their norm. Another depth or another mean of the
# losses changes ten times as much and more.
ADAPTED = 1e-3
BF16 = 0.02
FIGURE = 3e-5  # training's are logged to five digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder in which two processes have left the outcomes of all runs."""
    made = tmp_path_factory.mktemp("two")
    in_two_processes(made, main, made)
    return made


@cache
def alone(folder: Path, name: str) -> Run:
    """The run in this process."""
    return run(trainer_of(folder / "alone" / name, name, processes=1))


def left(folder: Path, name: str) -> Run:
    """The run of the two: the logs of both are one."""
    weights = Eagle31DrafterModel.from_pretrained(folder / name / "final").state_dict()
    logs = [torch.load(folder / name / f"logs-{index}.pt") for index in range(2)]
    assert logs[0] == logs[1]
    return Run(weights, logs[0], [])


def assert_same(found: Run, expected: Run, tolerance: float) -> None:
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert_close(name, found.weights[name], weight, tolerance)
    assert_close("losses", found.losses, expected.losses, tolerance)


def assert_same_as_a_whole(found: Run, expected: Run) -> None:
    """As behind an optimizer that normalises."""
    assert found.weights.keys() == expected.weights.keys()
    whole = torch.cat([weight.double().flatten() for weight in expected.weights.values()])
    differences = torch.cat([found.weights[name].double().flatten() for name in expected.weights]) - whole
    assert_close("norm of differences", differences.norm(), torch.tensor(0.0).double(), ADAPTED, float(whole.norm()))
    assert_close("losses", found.losses, expected.losses, 2 * ADAPTED)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(folder, name):
    found, expected = left(folder, name), alone(folder, name)
    if "bf16" in name:
        assert found.losses.tolist() == pytest.approx(expected.losses.tolist(), rel=BF16)
        return
    if name in RESUMED:
        assert_same_as_a_whole(found, expected)
    else:
        assert_same(found, expected, SUMMED)


@pytest.mark.parametrize("name", [name for name in RUNS if "eval_rows" in RUNS[name] and name not in RESUMED])
def test_figures_of_all_processes_are_those_of_one(folder, name):
    """Figures of training and of five examples held out: a mean of means would be another number, as would an example
    that is counted twice."""
    for found, expected in zip(left(folder, name).logs, alone(folder, name).logs, strict=True):
        is_served = {key for key in expected if "served" in key}
        assert found.keys() == expected.keys() - (is_served if "target" in name or "fsdp" in name else set())
        assert found == pytest.approx({key: expected[key] for key in found}, abs=FIGURE, rel=1e-4)


def test_what_a_tensor_parallel_target_cannot_do_is_said(folder):
    for rank in range(2):
        said = json.loads((folder / f"refused-{rank}.json").read_text())
        assert "expected one of the two" in said["shard_target"]


def test_all_processes_stop_where_one_has_to(folder):
    said = [json.loads((folder / f"refused-{rank}.json").read_text()) for rank in range(2)]
    for name in ("diverged_token", "diverged_fsdp", "output"):
        assert said[0][name] == said[1][name]
    assert "of-process-0: is there already; expected a folder that is new or empty" in said[1]["output"]
    for name in ("token", "fsdp"):
        assert "weights are not finite after step" in said[1][f"diverged_{name}"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_run_bit_for_bit(folder, name):
    assert (folder / f"{name}_resumed" / f"checkpoint-{STOPPED_AT}").is_dir()
    found, expected = left(folder, f"{name}_resumed"), left(folder, name)
    assert_same(found, expected, EXACT)
    assert found.logs == expected.logs


@pytest.mark.parametrize("name", RESUMED)
def test_every_checkpoint_is_a_whole_drafter(folder, name):
    for path in (folder / name).glob("checkpoint-*"):
        saved = Eagle31DrafterModel.from_pretrained(path).state_dict()
        assert saved.keys() == alone(folder, name).weights.keys()
