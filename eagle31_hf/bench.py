"""Ways to draft, and what their figures need: waiting for a device, the parts of a call, hardware and versions."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from .acceptance import track_acceptance
from .checkpoints.knobs import AUTO_KNOBS
from .diagnostics.acceptance import chain_knobs
from .generation.planning.costs import MAX_DEPTH
from .modeling import Eagle31DrafterModel
from .version import __version__


@contextmanager
def forward_times(module: PreTrainedModel) -> Iterator[list[tuple[float, float]]]:
    """Notes when each of a module's forwards begins and ends, waiting for the device before and after it."""
    begins, times = list[float](), list[tuple[float, float]]()

    def begin(*args: Any) -> None:
        synchronize(module.device)
        begins.append(time.perf_counter())

    def end(*args: Any) -> None:
        synchronize(module.device)
        times.append((begins.pop(), time.perf_counter()))

    with module.register_forward_pre_hook(begin), module.register_forward_hook(end):
        yield times


@dataclass(frozen=True)
class Shape:
    """A way to draft: chains of `depth`, trees of `top_k` children a node and `total_tokens` nodes, or what auto
    chooses, at most `depth` deep."""

    depth: int
    top_k: int = 1
    total_tokens: int = 60
    is_auto: bool = False

    @property
    def knobs(self) -> dict[str, Any]:
        """The arguments of generate() that say so."""
        if self.is_auto:
            return dict(AUTO_KNOBS)
        chain = {"num_assistant_tokens": self.depth, "draft_tree_top_k": self.top_k}
        return chain if self.top_k == 1 else chain | {"draft_tree_total_tokens": self.total_tokens}

    @property
    def measured_knobs(self) -> dict[str, Any]:
        """The same, whatever the drafter's own settings are of what a fixed way leaves out."""
        return self.knobs if self.is_auto else chain_knobs(self.depth) | self.knobs

    @property
    def name(self) -> str:
        chain = str(self.depth)
        return "auto" if self.is_auto else chain if self.top_k == 1 else f"{chain}, tree {self.total_tokens}"


AUTO_SHAPE = Shape(MAX_DEPTH, is_auto=True)
TREE_SHAPE = Shape(7, top_k=4, total_tokens=24)  # the tree where nothing else is chosen


def profile(
    target: PreTrainedModel, drafter: Eagle31DrafterModel, shape: Shape, prompt: Tensor, max_new_tokens: int
) -> dict[str, Any]:
    """Decodes a prompt (1, L) greedily, on a GPU in eager rounds. Returns its `profile`, the seconds by part, and
    `overhead`, the share of them outside the two models' forwards. Clocks on these make a GPU wait, so that no speed is
    measured by it."""
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": max_new_tokens, "do_sample": False}
    generate: Any = target.generate
    with forward_times(target) as verifying, forward_times(drafter) as drafting, track_acceptance() as stats:
        synchronize(target.device)
        began = time.perf_counter()
        generate(prompt, assistant_model=drafter, disable_compile=True, **options, **shape.measured_knobs)
        synchronize(target.device)
        seconds = time.perf_counter() - began
    # the drafter reads a prompt within the target's forward
    nested = [times for times in drafting if any(begin < times[0] < end for begin, end in verifying)]
    of_nested, of_drafter = _sum(nested), _sum(drafting)
    of_target = _sum(verifying) - of_nested
    phases = stats.seconds
    parts = {
        "target forwards": of_target,
        "drafter forwards": of_drafter,
        "drafting, the rest": phases["draft"] - (of_drafter - of_nested),
        "verification, the rest": phases["prefill"] + phases["verify"] - of_target - of_nested,
        "acceptance and caches": phases["accept"],
        "generate() before and after": seconds - sum(phases.values()),
    }
    return {"profile": parts, "overhead": 1 - (of_target + of_drafter) / seconds}


def _sum(times: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in times)


def environment(target: PreTrainedModel, **sizes: Any) -> dict[str, Any]:
    """Hardware, versions and sizes a figure needs beside it."""
    return {**environment_of(target.device, str(target.dtype).removeprefix("torch.")), **sizes}


def environment_of(device: torch.device, dtype: str) -> dict[str, Any]:
    """Hardware and versions."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "eagle31_hf": __version__,
    }


def synchronize(device: torch.device | None = None) -> None:
    """Waits for a device, and no other; without one for the GPU, or another accelerator, that is current."""
    if torch.accelerator.is_available() and (device is None or device.type != "cpu"):
        torch.accelerator.synchronize(device)
