"""All that can be measured on a GPU in ten minutes. Results are rewritten after each row, so that a run that is killed
has given what it had measured."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle31_hf.bench import environment_of
from eagle31_hf.storage.folders import replace_json

from .run import SMALL, LoadDemo, Row, Run, Section, Sizes
from .sections import SECTIONS
from .subprocesses import without_folders

LEAST = 2.0  # seconds that a section needs to be begun
Progress = Callable[[str], None]


def measure_gpu(
    output: Path,
    device: str,
    shapes: tuple[str, ...],
    names: tuple[str, ...],
    budget: float,
    load_demo: LoadDemo,
    progress: Progress = lambda message: None,
) -> dict[str, Any]:
    """Runs the sections of these `names` in their own order, within `budget` seconds, in this process; `watched` has
    another one do so. Writes {"environment", "sections"} to `output`, row by row, and returns it. Where the device is
    of no use any more the others are left to another process."""
    place = torch.device(device)
    sizes = Sizes() if place.type == "cuda" else SMALL
    runner = Runner(Run(place, shapes, load_demo, sizes), output, budget, progress)
    runner.results["environment"] = environment_of(place, str(runner.run.dtype).removeprefix("torch."))
    # cuDNN makes a plan for every length of keys. The rivals meet more lengths than we do, and would pay for it.
    torch.backends.cuda.enable_cudnn_sdp(False)
    runner.results["environment"]["attention"] = "without cuDNN"
    for section in SECTIONS:
        if section.name in names:
            runner.measure(section)
            if runner.has_failed and not is_usable(place):  # an invalid access has every later call fail
                break
    runner.results["seconds"] = runner.spent()
    runner.write()
    return runner.results


@dataclass
class Runner:
    """Measures sections one after the other and writes what came of them."""

    run: Run
    output: Path
    budget: float
    progress: Progress = lambda message: None
    results: dict[str, Any] = field(default_factory=lambda: {"sections": {}})
    began: float = field(default_factory=time.perf_counter)
    has_failed: bool = False

    def spent(self) -> float:
        return time.perf_counter() - self.began

    def write(self) -> None:
        replace_json(self.output, self.results)

    def measure(self, section: Section) -> None:
        """Measures a section row by row, as far as its limit and the budget reach."""
        limit = min(section.limit * self.run.sizes.patience, self.budget - self.spent())
        figures: dict[str, Any] = {"title": section.title, "limit": limit, "rows": []}
        self.results["sections"][section.name] = figures
        if limit < LEAST:
            figures["left_out"] = f"the budget of {self.budget:g} s is spent"
            self.write()
            return
        self.progress(section.title)
        self.write()
        began = time.perf_counter()
        self.run.ends = began + limit
        try:
            self._measure_rows(section, figures)
        except Exception:  # whatever it is, the next section may do better
            figures["error"] = self._told()
        figures["seconds"] = time.perf_counter() - began
        self.write()

    def _measure_rows(self, section: Section, figures: dict[str, Any]) -> None:
        for name, task in section.tasks(self.run):
            if self.run.left() <= 0:
                figures["left_out"] = f"from {name!r} on: the section's {figures['limit']:.0f} s are spent"
                return
            figures["rows"].append({"name": name, **self._row(task)})
            self.write()

    def _row(self, task: Callable[[], Row]) -> Row:
        began = time.perf_counter()
        try:
            row = task()
        except Exception:
            row = {"error": self._told()}
        return {**row, "seconds_of_row": time.perf_counter() - began}

    def _told(self) -> str:
        """The traceback of the error under way."""
        self.has_failed = True
        self.progress(traceback.format_exc(limit=-1).splitlines()[-1][:200])
        return without_folders(traceback.format_exc())


def is_usable(device: torch.device) -> bool:
    """Returns whether a device still computes."""
    try:
        return int(torch.ones(1, device=device).add(1)) == 2
    except RuntimeError:
        return False
