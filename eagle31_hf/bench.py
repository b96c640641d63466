"""Speed and acceptance of drafters, always beside the target alone and within one run: machines are shared and
noisy."""

import os
import platform
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from .acceptance import AcceptanceStats, track_acceptance
from .checkpoints.knobs import AUTO_KNOBS
from .generation.planning.calibration import MAX_DEPTH
from .modeling import Eagle31DrafterModel
from .version import __version__


class ForwardClock:
    """Seconds spent inside a module's forward, waiting for the device before and after it."""

    def __init__(self, module: PreTrainedModel):
        self.module, self.seconds = module, 0.0

    def _start(self, *args) -> None:
        synchronize(self.module.device)
        self._began = time.perf_counter()

    def _stop(self, *args) -> None:
        synchronize(self.module.device)
        self.seconds += time.perf_counter() - self._began

    @contextmanager
    def running(self):
        handles = [self.module.register_forward_pre_hook(self._start), self.module.register_forward_hook(self._stop)]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()


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
        usual = {"assistant_confidence_threshold": 0.0, "prompt_lookup_num_tokens": 0}
        return self.knobs if self.is_auto else usual | self.knobs

    @property
    def name(self) -> str:
        chain = str(self.depth)
        return "auto" if self.is_auto else chain if self.top_k == 1 else f"{chain}, tree {self.total_tokens}"


AUTO_SHAPE = Shape(MAX_DEPTH, is_auto=True)
TREE_SHAPE = Shape(7, top_k=4, total_tokens=24)  # the tree where nothing else is chosen


class Contestant:
    """One way to decode: the target alone, or with a drafter in a shape. Collects its own figures, prompt by prompt."""

    def __init__(
        self,
        target: PreTrainedModel,
        name: str = "target",
        drafter: Eagle31DrafterModel | None = None,
        shape: Shape = Shape(0),
    ):
        self.target = target
        self.name = name
        self.drafter = drafter
        self.shape = shape
        self.seconds = 0.0
        self.tokens = 0
        self.identical = True
        self.stats, self.profile = AcceptanceStats(), dict[str, float]()

    def generate(self, prompt: Tensor, max_new_tokens: int) -> tuple[Tensor, float]:
        """Greedily, a prompt (1, L) -> the sequence and the seconds it took."""
        options: dict[str, Any] = {}
        if self.drafter is not None:
            options = {"assistant_model": self.drafter, **self.shape.measured_knobs}
        mask = torch.ones_like(prompt)
        synchronize(self.target.device)
        began = time.perf_counter()
        sequence = self.target.generate(
            prompt, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, **options
        )
        synchronize(self.target.device)
        return sequence, time.perf_counter() - began

    def run(self, prompt: Tensor, max_new_tokens: int) -> Tensor:
        with track_acceptance(self.stats):
            sequence, seconds = self.generate(prompt, max_new_tokens)
        self.seconds += seconds
        self.tokens += sequence.shape[1] - prompt.shape[1]
        return sequence

    def run_profiled(self, prompt: Tensor, max_new_tokens: int) -> None:
        """Decodes a prompt and notes where the seconds go; clocks on the models' forwards make a GPU wait, so `run`
        has none."""
        target, drafter = ForwardClock(self.target), ForwardClock(self.drafter)
        with target.running(), drafter.running(), track_acceptance() as stats:
            _, seconds = self.generate(prompt, max_new_tokens)
        phases = stats.seconds
        self.profile = {
            "target forwards": target.seconds,
            "drafter forwards": drafter.seconds,
            "drafting, the rest": phases["draft"] - drafter.seconds,
            "verification, the rest": phases["prefill"] + phases["verify"] - target.seconds,
            "acceptance and caches": phases["accept"],
            "generate() before and after": seconds - sum(phases.values()),
        }

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def overhead(self) -> float:
        """Share of a generate() call's wall time outside the two models' forwards."""
        return 1 - (self.profile["target forwards"] + self.profile["drafter forwards"]) / sum(self.profile.values())


def measure(
    target: PreTrainedModel,
    drafters: dict[str, Eagle31DrafterModel],
    prompts: list[Tensor],
    shapes: list[Shape],
    max_new_tokens: int,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Decodes every prompt by the target alone and by every drafter in every shape, in turn -> the object `eagle31 demo
    --json` prints, with a `profile` (seconds by part, one call) added to each run."""
    alone = Contestant(target)
    contestants = [Contestant(target, name, drafter, shape) for name, drafter in drafters.items() for shape in shapes]
    for contestant in (alone, *contestants):
        contestant.generate(prompts[0], 8)  # warm up
    for i, prompt in enumerate(prompts):
        progress(f"prompt {i + 1} of {len(prompts)}")
        expected = alone.run(prompt, max_new_tokens)
        for contestant in contestants:
            contestant.identical &= torch.equal(contestant.run(prompt, max_new_tokens), expected)
    progress("profile")
    for contestant in contestants:
        contestant.run_profiled(prompts[0], max_new_tokens)
    return {
        "target": {"tokens_per_second": alone.tokens_per_second},
        "runs": [_figures(contestant, alone) for contestant in contestants],
        "environment": environment(target, prompts=len(prompts), max_new_tokens=max_new_tokens),
    }


def _figures(contestant: Contestant, alone: Contestant) -> dict[str, Any]:
    stats = contestant.stats
    return {
        "drafter": contestant.name,
        "depth": contestant.shape.depth,
        "tree": contestant.shape.top_k > 1,
        "auto": contestant.shape.is_auto,
        "name": contestant.shape.name,
        "shape": contestant.shape.knobs,
        "tokens_per_second": contestant.tokens_per_second,
        "speedup": contestant.tokens_per_second / alone.tokens_per_second,
        "mean_accepted_length": stats.mean_accepted_length,
        "accepted_per_position": stats.accepted_per_position,
        "drafted_per_position": stats.drafted_per_position,
        "identical": contestant.identical,
        "overhead": contestant.overhead,
        "profile": contestant.profile,
    }


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
