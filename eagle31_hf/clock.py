"""Time as a device sees it: work that a GPU has been given is not done when Python goes on."""

import time
from typing import Any

import torch


class Clock:
    """Marks moments in a device's work. On a CUDA device a mark is an event that the device reaches in its turn, so
    taking one waits for nothing; elsewhere it is the host's time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.uses_events = device.type == "cuda"

    def mark(self) -> Any:
        """The present moment, for `seconds`."""
        if not self.uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks. Waits for a device that has not reached the later one yet: ask when the host has
        read something that came after it, or shortly before it."""
        if not self.uses_events:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000
