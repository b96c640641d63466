"""What speculation achieved: `with track_acceptance() as stats:` around any `generate`."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_trackers: ContextVar[tuple["AcceptanceStats", ...]] = ContextVar("eagle31_trackers", default=())


@dataclass
class AcceptanceStats:
    """Counts over every generate() call inside one `track_acceptance()`.

    `target_forwards` counts verification forwards; prefills, each of which gives the first token of its text, are in `prefills`.
    Lists are by depth: `accepted_per_position[i]` of `drafted_per_position[i]` tokens drafted at depth i + 1 were accepted.
    `accepted_per_round` has one entry a verification forward. `seconds` is wall time of the decoding loop by phase.
    """

    prefills: int = 0
    target_forwards: int = 0
    generated_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    accepted_per_round: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "accept": 0.0})
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target forward, the bonus token included, prefills excluded; 0.0 before the first one."""
        return (self.generated_tokens - self.prefills) / self.target_forwards if self.target_forwards else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """Accepted over drafted, by depth."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted_per_position, self.drafted_per_position, strict=True)]

    def summary(self) -> str:
        """A few lines for people."""
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance_rates) or "nothing was drafted"
        return (
            f"{self.generated_tokens} tokens in {self.prefills} prefills and {self.target_forwards} target forwards\n"
            f"mean accepted length {self.mean_accepted_length:.2f} tokens per target forward, bonus included\n"
            f"accepted by position: {rates}"
        )

    def add_prefill(self, tokens: int) -> None:
        with self._lock:
            self.prefills += 1
            self.generated_tokens += tokens

    def add_round(self, drafted: int, accepted: int, tokens: int) -> None:
        with self._lock:
            self.target_forwards += 1
            self.generated_tokens += tokens
            self.accepted_per_round.append(accepted)
            missing = drafted - len(self.drafted_per_position)
            self.drafted_per_position += [0] * missing
            self.accepted_per_position += [0] * missing
            for depth in range(drafted):
                self.drafted_per_position[depth] += 1
                self.accepted_per_position[depth] += depth < accepted

    def add_seconds(self, phase: str, seconds: float) -> None:
        with self._lock:
            self.seconds[phase] += seconds


class Recorder:
    """What one generate() call reports to: every tracker open in its context."""

    def __init__(self):
        self._stats = _trackers.get()

    def prefill(self, tokens: int) -> None:
        for stats in self._stats:
            stats.add_prefill(tokens)

    def round(self, drafted: int, accepted: int, tokens: int) -> None:
        for stats in self._stats:
            stats.add_round(drafted, accepted, tokens)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        for stats in self._stats:
            stats.add_seconds(phase, time.perf_counter() - began)


@contextmanager
def track_acceptance(stats: AcceptanceStats | None = None) -> Iterator[AcceptanceStats]:
    """Collects the statistics of every generate() call made inside it by this thread (more precisely: in this context).

    `stats`: go on counting into these. Threads have statistics of their own; to count calls of another thread here, start it with
    `contextvars.copy_context().run`. Blocks may be nested.
    """
    stats = AcceptanceStats() if stats is None else stats
    token = _trackers.set((*_trackers.get(), stats))
    try:
        yield stats
    finally:
        _trackers.reset(token)
