"""Statistics of speculation: `with track_acceptance() as stats:` around any `generate`.

Sequences are those of a batch, in order.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from .clock import Clock

# kinds of rounds
PREFILL = "prefill"  # the prompts' forward
PLAIN = "plain"
CHAINS = "chains"
TREES = "trees"
LOCK_STEP = "lock-step"
SHOWN = 7  # positions that people are shown: chains from the text have many more


def by_position(rates: Sequence[float]) -> str:
    """Rates by position, in words."""
    return " ".join([f"{rate:.2f}" for rate in rates[:SHOWN]] + ["..."] * (len(rates) > SHOWN))


@dataclass(frozen=True)
class Round:
    """The outcome of a forward of the target, by sequence: `tokens`, the accepted drafts and then the target's own
    token, the bonus token, unless a draft ended the text; `num_accepted`, how many of them were drafted, None for a
    sequence that had ended before; `drafts`, the drafted ids; `parents`, of a tree the node that each of them follows
    (0: the last token before the round, k: the k-th draft, from 1), None of a chain. The prompt's forward is a round
    without drafts."""

    tokens: list[list[int]]
    num_accepted: list[int | None]
    drafts: list[list[int]]
    parents: list[list[int]] | None


_watchers: ContextVar[tuple[Callable[[Round], None], ...]] = ContextVar("eagle31_watchers", default=())
_trackers: ContextVar[tuple["AcceptanceStats", ...]] = ContextVar("eagle31_trackers", default=())


@dataclass
class SequenceStats:
    """Counts of one sequence. Lists are by depth: `accepted_per_position[i]` of `drafted_per_position[i]` tokens
    drafted at depth i + 1 were accepted. `accepted_per_round` has one entry a verification."""

    prefills: int = 0
    generated_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    accepted_per_round: list[int] = field(default_factory=list)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target forward, the bonus token included, prefills excluded; 0.0 before the first one."""
        rounds = len(self.accepted_per_round)
        return (self.generated_tokens - self.prefills) / rounds if rounds else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """Accepted over drafted, by depth."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    def _add(self, is_prefill: bool, drafted: int, accepted: int, tokens: int) -> None:
        self.generated_tokens += tokens
        if is_prefill:
            self.prefills += 1
            return
        self.accepted_per_round.append(accepted)
        missing = drafted - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for depth in range(drafted):
            self.drafted_per_position[depth] += 1
            self.accepted_per_position[depth] += depth < accepted


_counting = threading.Lock()  # of all statistics: counting takes microseconds, and without one they can be copied


@dataclass
class AcceptanceStats(SequenceStats):
    """Counts over every generate() call inside one `track_acceptance()`, all sequences of a batch taken together;
    `sequences[b]` has those of sequence b.

    `target_forwards` counts verification forwards, each of which serves every sequence that has not ended; the
    prompts' forwards, each of which gives the first token of a text, are not among them, but counted by text in
    `prefills`. `seconds` is the time of the decoding loop by phase, on a GPU the device's. `kinds` counts rounds of
    PLAIN, CHAINS, TREES and LOCK_STEP; `executions` counts how they were run: on a GPU as CUDA graphs, or eagerly and
    why, on a CPU in which dtype, and over how much of packed weights; `choices` counts the rounds of each choice of
    `num_assistant_tokens="auto"`, and those whose drafts are from the text; `explanation` says why.
    """

    target_forwards: int = 0
    sequences: list[SequenceStats] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "accept": 0.0}
    )
    kinds: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    executions: Counter[str] = field(default_factory=Counter)
    explanation: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The figures of all sequences taken together as plain values, for JSON."""
        names = (
            "generated_tokens",
            "target_forwards",
            "mean_accepted_length",
            "accepted_per_position",
            "drafted_per_position",
        )
        return {name: getattr(self, name) for name in names}

    def summary(self) -> str:
        """A few lines for people."""
        rates = by_position(self.acceptance_rates) or "nothing was drafted"
        unit = "target forward and sequence" if len(self.sequences) > 1 else "target forward"
        lines = [
            f"{self.generated_tokens} tokens in {self.prefills} prefills and {self.target_forwards} target forwards",
            f"mean accepted length {self.mean_accepted_length:.2f} tokens per {unit}, bonus included",
            f"accepted by position: {rates}",
        ]
        if len(self.sequences) > 1:
            lines.append("by sequence: " + " ".join(f"{one.mean_accepted_length:.2f}" for one in self.sequences))
        lines += [f"{count} rounds {how}" for how, count in self.executions.most_common()]
        if self.choices:
            lines.append("chosen: " + ", ".join(f"{count} rounds {name}" for name, count in self.choices.most_common()))
        lines += filter(None, [self.explanation])
        return "\n".join(lines)

    def add(self, kind: str, found: Round, drafted: list[int], seconds: dict[str, float], execution: str = "") -> None:
        """Adds a round of a kind, whose drafts for sequence b were a chain or tree `drafted[b]` tokens deep. `seconds`:
        of its phases; `execution`: the way in which it was run."""
        with _counting:
            for phase, taken in seconds.items():
                self.seconds[phase] += taken
            if kind != PREFILL:
                self.target_forwards += 1
                self.kinds[kind] += 1
                self.executions.update(filter(None, [execution]))
            for b, (count, tokens) in enumerate(zip(found.num_accepted, found.tokens, strict=True)):
                if count is not None:
                    self.sequences += [SequenceStats() for _ in range(b + 1 - len(self.sequences))]
                    for counts in (self, self.sequences[b]):
                        counts._add(kind == PREFILL, drafted[b], count, len(tokens))

    def add_choices(self, choices: Counter[str], explanation: str) -> None:
        """Adds what was chosen in one call, and why."""
        with _counting:
            self.choices += choices
            self.explanation = explanation or self.explanation


class Recorder:
    """Reports what one generate() call does to every tracker and watcher open in its context. Phases are timed by the
    device's clock, so their seconds are known when the round is over."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._stats = _trackers.get()
        self._watchers = _watchers.get()
        self._spans: dict[str, tuple[Any, Any]] = {}
        self._began: Any = None
        self.execution = ""  # how rounds are run, where there are several ways; for people

    def show(self, kind: str, accepted: Any) -> dict[str, float]:
        """Shows what was accepted in a round that is over. Returns the seconds of each of its phases: the host has read
        what came of it."""
        seconds = {phase: self._clock.seconds(*span) for phase, span in self._spans.items()}
        self._spans = {}
        drafts = accepted.drafts
        shown = Round(accepted.tokens, accepted.num_drafts, drafts.ids, drafts.parents)
        for stats in self._stats:
            stats.add(kind, shown, drafts.depths(), seconds, self.execution)
        for watcher in self._watchers:  # who may look at statistics
            watcher(shown)
        return seconds

    def choices(self, choices: Counter[str], explanation: str) -> None:
        for stats in self._stats:
            stats.add_choices(choices, explanation)

    def begin(self) -> None:
        """The first phase of the round begins."""
        self._began = self._clock.mark()

    def end(self, phase: str) -> None:
        """A phase ends, and the next one begins."""
        now = self._clock.mark()
        self._spans[phase] = self._began, now
        self._began = now

    def note(self, phase: str, began: Any, ended: Any) -> None:
        """Notes the marks around a phase, which the device has passed."""
        self._spans[phase] = began, ended


def track_acceptance(stats: AcceptanceStats | None = None) -> AbstractContextManager[AcceptanceStats]:
    """Collects the statistics of every generate() call made inside it by this thread (more precisely: in this context).

    `stats`: go on counting into these. Threads have statistics of their own; to count calls of another thread here,
    start it with `contextvars.copy_context().run`. Blocks may be nested.
    """
    return _added(_trackers, AcceptanceStats() if stats is None else stats)


def watch_rounds(watcher: Callable[[Round], None]) -> AbstractContextManager[Any]:
    """Calls `watcher` with every `Round` of every generate() call inside it, by this thread, as soon as it is over.
    What it raises ends the call."""
    return _added(_watchers, watcher)


@contextmanager
def _added(observers: ContextVar[tuple[Any, ...]], observer: Any) -> Iterator[Any]:
    """Adds an observer to those of this context, within the block."""
    token = observers.set((*observers.get(), observer))
    try:
        yield observer
    finally:
        observers.reset(token)
