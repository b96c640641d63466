"""A seam that measures: marks around whatever is replayed, the seconds that captures take, and waits forbidden."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from eagle31_hf.bench import synchronize
from eagle31_hf.clock import Clock
from eagle31_hf.generation.captured.seam import Seam


class Marked(Seam):
    """Another seam, measured. `capture_seconds`: what captures took, first uses of kernels included; `spans`: marks
    before and after whatever was run, in order.

    With `forbids_waits` a replay, or the start of a copy to the host, that makes the host wait for a GPU raises.
    """

    def __init__(self, seam: Seam, device: torch.device, forbids_waits: bool = False):
        self.seam = seam
        self.name = seam.name
        self.clock = Clock(device)
        self.forbids_waits = forbids_waits and device.type == "cuda"
        self.capture_seconds = 0.0
        self.spans = list[tuple[str, Any, Any]]()

    def capture(self, function: Callable[[], None], part: str) -> Callable[[], None]:
        synchronize()
        began = time.perf_counter()
        captured = self.seam.capture(function, part)
        synchronize()
        self.capture_seconds += time.perf_counter() - began

        def run() -> None:
            begin = self.clock.mark()
            with self._no_waits():
                captured()
            self.spans.append((part, begin, self.clock.mark()))

        return run

    def start_reading(self, tensor: Tensor) -> Callable[[], Tensor]:
        with self._no_waits():
            return self.seam.start_reading(tensor)

    def wait_for_last(self) -> None:
        self.seam.wait_for_last()

    def note_last(self) -> None:
        self.seam.note_last()

    @contextmanager
    def _no_waits(self) -> Iterator[None]:
        if not self.forbids_waits:
            yield
            return
        found = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(found)

    def split(self) -> dict[str, Any]:
        """Milliseconds of the rounds that were run, means: of drafting, those that were of no use included, of
        verifying, of a round from the first mark to the last verification's, and of the gaps in it, in which the device
        had nothing to do."""
        synchronize()
        parts = [part for part, _, _ in self.spans]
        if "verify" not in parts:
            return {}
        spans = self.spans[: len(parts) - parts[::-1].index("verify")]  # the last draft is of a round that never was
        taken = [1000 * self.clock.seconds(begin, end) for _, begin, end in spans]
        whole = 1000 * self.clock.seconds(spans[0][1], spans[-1][2])
        drafts, verifications = (
            [value for (part, _, _), value in zip(spans, taken, strict=True) if part == wanted]
            for wanted in ("draft", "verify")
        )
        count = len(verifications)
        return {
            "round_ms": whole / count,
            "draft_ms": sum(drafts) / count,
            "verify_ms": sum(verifications) / count,
            "gap_ms": (whole - sum(taken)) / count,
            "drafts": [round(value, 4) for value in drafts],
            "verifications": [round(value, 4) for value in verifications],
        }
