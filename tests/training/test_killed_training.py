"""Training that is killed, wherever it is, goes on from the newest whole checkpoint as if nothing had happened."""

import fcntl
import gc
import os
import select
import shutil
import signal
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from close import assert_close
from distributed_run import begin
from programs import forkserver, launched
from training_runs import MUCH_TO_RESUME, Run, make_examples, make_trainer, run
from transformers import TrainerCallback

from eagle31_hf.training.saving import last_checkpoint

STEPS = 6
PIPE_BYTES = 4096  # the least a pipe can be made to hold: a longer file stops its writer in the middle
LONGEST = 60  # seconds a run may take

# By the step: the file that was being written when it was killed. Of the first checkpoint none is whole to resume from.
# safetensors writes beside and renames: weights are whole or not there.
TORN = {1: "optimizer.pt", 2: "training_args.bin", 3: "rng_state.pth", 6: "optimizer.pt"}


def trainer_in(folder: Path):
    return make_trainer(folder, eval_dataset=make_examples(3, seed=1), **MUCH_TO_RESUME)


def train(folder: Path, resumes: bool = True) -> None:
    """Trains as a person, or a queue, does: started again after every end but the good one."""
    gc.freeze()  # what the process was forked with, which every training would look through
    resume = resumes and last_checkpoint(folder) is not None
    torch.save(tuple(run(trainer_in(folder), resume)), folder / "outcome.pt")


@pytest.fixture(scope="module")
def start():
    """Starts a process that trains: `start(folder, resumes)`."""
    context, started = forkserver(), []

    def begin(*arguments: Any):
        started.append(context.Process(target=train, args=arguments))
        started[-1].start()
        return started[-1]

    yield begin
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    return run(trainer_in(tmp_path_factory.mktemp("undisturbed")))


def kill(process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def assert_finishes(process, folder: Path, expected: Run) -> None:
    process.join(LONGEST)
    assert process.exitcode == 0
    found = Run(*torch.load(folder / "outcome.pt"))
    assert found.logs == expected.logs
    assert_close("optimizer", found.optimizer, expected.optimizer)
    for name, weight in expected.weights.items():
        assert_close(name, found.weights[name], weight)


@contextmanager
def half_written(path: Path):
    """Stops whoever writes the file in the middle of it; in the block it has got there. Afterwards the file is what was
    written."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    reader, head = os.open(path, os.O_RDONLY | os.O_NONBLOCK), b""
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield lambda: select.select([reader], [], [], LONGEST)[0]
    while more := os.read(reader, PIPE_BYTES):
        head += more
    os.close(reader)
    path.unlink()
    path.write_bytes(head)


def test_runs_killed_while_they_write_a_checkpoint_come_to_the_same(tmp_path, start, undisturbed):
    for step, name in TORN.items():
        with half_written(tmp_path / f"checkpoint-{step}" / name) as is_begun:
            process = start(tmp_path)
            assert is_begun(), f"{name} was never written"
            kill(process)
        assert last_checkpoint(tmp_path) == (None if step == 1 else str(tmp_path / f"checkpoint-{step - 1}"))
    assert_finishes(start(tmp_path), tmp_path, undisturbed)


def test_a_checkpoint_is_whole_once_all_processes_have_written_their_part(tmp_path):
    with half_written(tmp_path / "checkpoint-1" / "rng_state_1.pth") as is_begun:
        processes = launched(tmp_path, begin, tmp_path, "muon")
        try:
            assert is_begun(), "the second process never wrote its part"
            until = time.monotonic() + LONGEST
            while not (tmp_path / "checkpoint-1" / "optimizer.pt").exists():
                assert time.monotonic() < until, "the first process never wrote its part"
                time.sleep(0.01)
        finally:
            for process in processes:
                kill(process)
    assert last_checkpoint(tmp_path) is None


class TakenBack(TrainerCallback):
    """Has a scheduler take the machine back at the second step, as transformers waits for: in three seconds."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(3.5)


def test_a_run_that_is_asked_to_end_writes_a_checkpoint_first(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    settings = MUCH_TO_RESUME | {"save_strategy": "no", "eval_strategy": "no"}
    expected = run(make_trainer(tmp_path / "undisturbed", **settings))
    settings |= {"enable_jit_checkpoint": True}
    try:
        trainer = make_trainer(tmp_path / "run", callbacks=[TakenBack()], **settings)
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert trainer.state.global_step < STEPS
    assert last_checkpoint(tmp_path / "run") is not None
    found = run(make_trainer(tmp_path / "run", **settings), True)
    for name, weight in expected.weights.items():
        assert_close(name, found.weights[name], weight)


def test_what_an_earlier_run_left_does_not_count(tmp_path, start):
    """A run that begins anew in the same folder, and is killed before its first checkpoint is whole."""
    train(tmp_path)
    for step in range(2, STEPS + 1):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    with half_written(tmp_path / "checkpoint-1" / "optimizer.pt") as is_begun:
        process = start(tmp_path, False)
        assert is_begun()
        kill(process)
    assert last_checkpoint(tmp_path) is None


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path):
    """The machine may have gone, and with it what had been written last."""
    make_trainer(tmp_path, **MUCH_TO_RESUME | {"eval_strategy": "no", "max_steps": 2}).train()
    for name, size in product(("trainer_state.json", "model.safetensors"), (None, 0, 100)):
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
        path = tmp_path / "checkpoint-2" / name
        data = path.read_bytes()
        path.unlink()
        if size is not None:
            path.write_bytes(data[:size])
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1"), (name, size)
        path.write_bytes(data)
