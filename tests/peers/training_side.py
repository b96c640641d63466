"""One side of `compare_training.py`: what both sides share, and no library of either. Runs in each side's own
environment.

A side is a process that waits for commands, one JSON object a line, does them and answers with one line. So several can
take turns on the same cores without loading anything twice. The plan says which sequences make each batch, at which
learning rate, how deep to unroll.

N sequences of T tokens, n aux hidden states, h width.
"""

import argparse
import json
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

MIB = 2**20
BATCHINGS = ("whole", "sequences")


def load_tensors(path: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Reads copies, so that no page of the file counts as memory of the steps."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in names}


def memory_now() -> float:
    """Returns the MiB in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def memory_peak() -> float:
    """Returns the most MiB in memory since the program began; `ru_maxrss` counts the process that started it, too."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / MIB


class Side:
    """Trains one model by the plan. A subclass names its `library`, sets `model` and says what a batch and its loss
    are."""

    library: str
    model: torch.nn.Module

    def __init__(self, workspace: Path, batching: str):
        self.workspace, self.batching = workspace, batching
        self.plan = json.loads((workspace / "plan.json").read_text())
        self.step = 0

    def batch(self, sequences: list[int]) -> Any:
        raise NotImplementedError

    def backward(self, batch: Any) -> float:
        """Adds the gradients of the loss, and returns it."""
        raise NotImplementedError

    def exact_losses(self, sequences: list[int]) -> list[float]:
        """Returns the losses by depth, over the predictions that both sides count; adds the gradients of their weighted
        sum."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def trained(self) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def start(self) -> None:
        self.optimizers = [torch.optim.AdamW(self.trained().values(), **self.plan["optimizer"])]
        self.memory_before = memory_now()

    # The commands, by their names.

    def describe(self) -> dict:
        return {
            "versions": {name: version(name) for name in ("torch", "transformers", self.library)},
            "parameters": {name: list(parameter.shape) for name, parameter in sorted(self.trained().items())},
            "threads": torch.get_num_threads(),
        }

    def first_batch(self) -> dict:
        """Returns the loss by depth and the norm of every parameter's gradient, before any step."""
        losses = self.exact_losses(self.plan["batches"][0])
        norms = {name: parameter.grad.norm().item() for name, parameter in sorted(self.trained().items())}
        self.model.zero_grad(set_to_none=True)
        return {"losses": losses, "gradient_norms": norms}

    def train(self, count: int) -> dict:
        """Trains the next steps; returns the seconds, the processor's seconds and the loss of each. Putting a batch
        together is a loader's work, and not counted."""
        seconds = []
        processor = []
        losses = []
        for _ in range(count):
            which = self.step % len(self.plan["batches"])
            batch = self.batch(self.plan["batches"][which])
            for group in [group for optimizer in self.optimizers for group in optimizer.param_groups]:
                group["lr"] = self.plan["learning_rates"][which]
            start, began = time.perf_counter(), time.process_time()
            losses.append(self.backward(batch))
            torch.nn.utils.clip_grad_norm_(self.trained().values(), self.plan["clip"])
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            seconds.append(time.perf_counter() - start)
            processor.append(time.process_time() - began)
            self.step += 1
        return {"seconds": seconds, "processor": processor, "losses": losses}

    def memory(self) -> dict:
        """Returns the MiB before the first step, and how much more at most since."""
        return {"before": self.memory_before, "steps": memory_peak() - self.memory_before}

    def write(self, folder: str) -> dict:
        self.save(Path(folder))
        return {}


COMMANDS = {
    "describe": Side.describe,
    "first_batch": Side.first_batch,
    "train": Side.train,
    "memory": Side.memory,
    "write": Side.write,
}


def arguments(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, required=True, help="what compare_training.py prepared")
    parser.add_argument(
        "--batching",
        choices=BATCHINGS,
        default="whole",
        help="a batch at once, or sequence by sequence, adding up gradients",
    )
    return parser


def serve(side: Side) -> None:
    """Does commands until the input ends. Only answers go to the output: whatever libraries print goes elsewhere."""
    answers, sys.stdout = sys.stdout, sys.stderr
    side.start()
    for line in sys.stdin:
        command = json.loads(line)
        answer = COMMANDS[command.pop("command")](side, **command)
        print(json.dumps(answer), file=answers, flush=True)
