"""A run of `benchmarks/gpu.py` that survives its sections: a child process measures them one after the other, and where
one crashes or hangs, a new child goes on with the next."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle31_hf.storage.folders import replace_json

PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "gpu.py"))
GRACE = 30.0  # seconds that a section may take beyond its limit: its last row is begun within it
START = 120.0  # seconds to the beginning of a child's first section
PAUSE = 0.2  # seconds between two looks at a child
Progress = Callable[[str], None]


@dataclass
class Watch:
    """Watches over a run. `options`: those of the command, besides sections, budget and output. `program`: what runs
    the benchmark."""

    output: Path
    budget: float
    options: Sequence[str]
    progress: Progress = lambda message: None
    program: Sequence[str] = PROGRAM
    grace: float = GRACE
    results: dict[str, Any] = field(default_factory=lambda: {"sections": {}})
    began: float = field(default_factory=time.perf_counter)

    def measure(self, names: Sequence[str]) -> dict[str, Any]:
        """Measures the sections of these names, in this order. Writes {"environment", "sections", "seconds"} to
        `output`, and returns it."""
        left, failures = list(names), 0
        while left:
            fate = self._child(left)
            sections = self.results["sections"]
            begun = [name for name in left if name in sections]
            # Three cases: a section broke the child; nothing was begun, which is the first one's fault; all went well.
            unfinished = [name for name in begun if not _is_over(sections[name])]
            if fate is not None and (unfinished or not begun):
                victim = (unfinished or left)[0]
                sections[victim] = {"title": victim, "rows": []} | sections.get(victim, {}) | {"error": fate}
                self.progress(f"{victim}: {fate}")
                begun = [*begun, victim]
            failures = 0 if begun else failures + 1
            left = [name for name in left if name not in begun]
            if failures > 1:  # it ends without a word, and would again
                break
            self._write()
        self._write()
        return self.results

    def _child(self, names: list[str]) -> str | None:
        """Runs sections in a child. Returns how it was ended before its time, or ended by itself; None where it came to
        its end."""
        beside = self.output.with_name(f".{self.output.name}.child")
        rest = max(1, round(self.budget - (time.perf_counter() - self.began)))
        command = ["--here", "--output", str(beside), "--only", ",".join(names), "--budget", str(rest)]
        beside.unlink(missing_ok=True)  # what an earlier run has left
        program = [*self.program, *command, *self.options]
        child = subprocess.Popen(program, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            fate = self._watched(child, beside)
        finally:
            _end(child)
            self._take(beside)
            beside.unlink(missing_ok=True)
        return fate

    def _watched(self, child: subprocess.Popen, beside: Path) -> str | None:
        """Waits for a child's end, or ends it where a section goes on past its limit."""
        section, ends = "its first section", time.perf_counter() + START
        while child.poll() is None:
            self._take(beside)
            under_way = [name for name, found in self.results["sections"].items() if not _is_over(found)]
            if under_way and under_way[-1] != section:
                section = under_way[-1]
                ends = time.perf_counter() + self.results["sections"][section]["limit"] + self.grace
            if time.perf_counter() > ends:
                _end(child)
                return f"{section} went on past its limit; its process was ended"
            time.sleep(PAUSE)
        if child.returncode == 0:
            return None
        return f"its process ended by {_how(child.returncode)}"

    def _take(self, beside: Path) -> None:
        """Takes over what a child has written so far."""
        try:
            found = json.loads(beside.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        self.results["sections"] |= found.pop("sections", {})
        self.results = found | self.results
        self._write()

    def _write(self) -> None:
        self.results["seconds"] = time.perf_counter() - self.began
        replace_json(self.output, self.results)


def _end(child: subprocess.Popen) -> None:
    """Ends a child, where it has not ended, and the processes it has begun: they use the device, too."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _is_over(section: dict[str, Any]) -> bool:
    return not {"seconds", "left_out", "error"}.isdisjoint(section)


def _how(status: int) -> str:
    """The end of a process in words."""
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
