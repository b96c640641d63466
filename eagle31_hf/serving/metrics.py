"""Counts of a server over all its requests, and the text in which Prometheus reads them."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest

from ..acceptance import track_acceptance

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# name, what it counts; names behind the prefix are vLLM's where it counts the same
COUNTERS = (
    ("requests", "requests answered to their end"),
    ("requests_stopped", "requests that ended early: their client went away, or an error"),
    ("requests_not_drafted", "requests that the target answered alone, as for beams"),
    ("prefix_cache_queries", "tokens of drafted requests' prompts"),
    ("prefix_cache_hits", "those of them that an earlier request had read"),
    ("generation_tokens", "tokens generated, of drafted requests"),
    ("generation_seconds", "seconds spent in generate(), of drafted requests, one after another"),
    ("spec_decode_num_drafts", "rounds of drafting, each verified by one forward of the target"),
    ("spec_decode_num_draft_tokens", "tokens drafted; of a tree as many as it is deep"),
    ("spec_decode_num_accepted_tokens", "tokens drafted and accepted"),
)
BY_POSITION = ("spec_decode_num_accepted_tokens_per_pos", "tokens accepted, by position in the draft, from 0")


class Metrics:
    """Counts of all requests together; of a request itself nothing is kept. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {name: 0.0 for name, _ in COUNTERS}
        self._by_position = list[int]()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts the generate() call inside it as one request."""
        began, outcome = time.perf_counter(), "requests_stopped"
        try:
            with track_acceptance() as stats:
                yield
            outcome = "requests"
        finally:
            added = {
                outcome: 1,
                "generation_tokens": stats.generated_tokens,
                "generation_seconds": time.perf_counter() - began if stats.generated_tokens else 0.0,
                "spec_decode_num_drafts": len(stats.accepted_per_round),
                "spec_decode_num_draft_tokens": sum(stats.drafted_per_position),
                "spec_decode_num_accepted_tokens": sum(stats.accepted_per_position),
            }
            with self._lock:
                for name, count in added.items():
                    self._counts[name] += count
                pairs = zip_longest(self._by_position, stats.accepted_per_position, fillvalue=0)
                self._by_position = [old + new for old, new in pairs]

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counts[name] += number

    def as_text(self) -> str:
        """Returns all counts in Prometheus' text format."""
        with self._lock:
            counts, by_position = dict(self._counts), [*self._by_position]
        found = [(name, meaning, {"": counts[name]}) for name, meaning in COUNTERS]
        found.append((*BY_POSITION, {f'{{position="{i}"}}': count for i, count in enumerate(by_position)}))
        lines = list[str]()
        for name, meaning, values in found:
            lines += [f"# HELP eagle31:{name}_total {meaning}", f"# TYPE eagle31:{name}_total counter"]
            lines += [f"eagle31:{name}_total{label} {count:.15g}" for label, count in values.items()]
        return "\n".join(lines) + "\n"
