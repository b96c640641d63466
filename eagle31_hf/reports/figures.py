"""Figures of several prompts, each with the interval that bootstrap over prompts gives it (Efron, 1979): how far it may
be from that of other prompts like these. P prompts, K depths, D draws.

Takes rows, the counts of a prompt each, as `diagnostics.acceptance.counts_of` returns them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .document import NOTHING, Series

Row = Mapping[str, Any]
Counts = tuple[Tensor, Tensor]  # numerators and denominators (P,) of a ratio
DRAWS = 1000
LEVEL = 0.95  # of the draws, which an interval holds
# how a report says what its figures are
EXPLAINED = (
    "Accepted length is the tokens that a forward of the target gives, the bonus token included; accepted drafts are"
    f" those without it. In brackets and as bands: {LEVEL:.0%} intervals by bootstrap over prompts."
)


@dataclass(frozen=True)
class Figure:
    """A value, None where there is nothing to measure, and the ends of its interval, None where they are not known."""

    value: float | None
    low: float | None
    high: float | None

    @property
    def shown(self) -> str:
        """Returns it as people read it, its interval in brackets."""
        if self.value is None:
            return NOTHING
        is_narrow = self.low is None or self.high is None or self.low == self.high
        return f"{self.value:.2f}" + ("" if is_narrow else f" [{self.low:.2f}, {self.high:.2f}]")


def series_of(label: str, figures: Sequence[Figure]) -> Series:
    """Makes a line of a chart, with the figures' intervals as a band."""
    return Series(label, *([getattr(figure, name) for figure in figures] for name in ("value", "low", "high")))


def accepted_length(rows: Sequence[Row]) -> Figure:
    """Returns the tokens a target forward gives, the bonus token included, the prompt's forward excluded."""
    return _figure(_counts(rows, "tokens", "rounds"))


def accepted_drafts(rows: Sequence[Row]) -> Figure:
    """Returns the drafted tokens that are accepted a round, the bonus token excluded."""
    return _figure(_counts(rows, "accepted", "rounds"))


def acceptance_by_depth(rows: Sequence[Row], depth: int) -> list[Figure]:
    """Returns by depth (K,) the share of drafted tokens that are accepted."""
    accepted, drafted = (_by_depth(rows, name, depth) for name in ("accepted", "drafted"))
    return [_figure((accepted[:, k], drafted[:, k])) for k in range(depth)]


def kept(rows: Sequence[Row], before: Sequence[Row], is_same: bool = True) -> Figure:
    """Returns the accepted drafts a round as a multiple of those of `before`, which are of the same prompts, or of
    others, `is_same` False."""
    return _figure(_counts(rows, "accepted", "rounds"), _counts(before, "accepted", "rounds"), is_same)


def tokens_per_second(rows: Sequence[Row]) -> Figure:
    """Returns the tokens of a second of generate(), the prompt's forward included."""
    return _figure(_counts(rows, "new_tokens", "seconds"))


def speedup(rows: Sequence[Row], alone: Sequence[Row]) -> Figure:
    """Returns the tokens a second as a multiple of those of the target alone on the same prompts."""
    return _figure(_counts(rows, "new_tokens", "seconds"), _counts(alone, "new_tokens", "seconds"))


def mean_by_depth(rows: Sequence[Row], name: str) -> list[Figure]:
    """Returns by depth the mean over chains of a figure that `measure_drift` returned."""
    rows = [row for row in rows if row["chains"]]
    counts, values = _total(rows, "chains"), _by_depth(rows, name)
    return [_figure((values[:, k] * counts, counts)) for k in range(values.shape[1])]


def _by_depth(rows: Sequence[Row], name: str, depth: int = 0) -> Tensor:
    """Returns figures of every prompt by depth (P, K); depths nobody reached count 0."""
    width = max(depth, *(len(row[name]) for row in rows))
    return torch.tensor([row[name] + [0] * (width - len(row[name])) for row in rows], dtype=torch.double)


def _total(rows: Sequence[Row], name: str) -> Tensor:
    """Returns counts of every prompt (P,), of all depths together."""
    return torch.tensor([sum(row[name]) if isinstance(row[name], list) else row[name] for row in rows]).double()


def _counts(rows: Sequence[Row], numerators: str, denominators: str) -> Counts:
    return _total(rows, numerators), _total(rows, denominators)


def drawn_ratios(numerators: Tensor, denominators: Tensor, seed: int = 0) -> Tensor:
    """Returns the ratios sum / sum (D,) of counts (P,) of prompts, which are drawn with replacement, as many as there
    are. Calls of one seed draw the same of as many prompts, so that figures of the same prompts can be compared draw by
    draw; figures of other prompts take another seed."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(numerators), (DRAWS, len(numerators)), generator=generator)
    return numerators[chosen].sum(-1) / denominators[chosen].sum(-1)


def interval_of(draws: Tensor) -> tuple[float, float]:
    """Returns the ends of the interval that holds LEVEL of the draws (D,); NaN where none is a number."""
    tail = (1 - LEVEL) / 2
    return float(draws.nanquantile(tail)), float(draws.nanquantile(1 - tail))


def _figure(now: Counts, then: Counts | None = None, is_same: bool = True) -> Figure:
    """Makes the figure of a ratio of sums, or of it as a multiple of the ratio `then`: of the same prompts, drawn
    together, or of others, drawn apart. It has no interval where that would have no end, nor of a single prompt, which
    says nothing about others."""
    value, draws = now[0].sum() / now[1].sum(), drawn_ratios(*now)
    num_prompts = len(now[0])
    if then is not None:
        value = value / (then[0].sum() / then[1].sum())
        draws = draws / drawn_ratios(*then, seed=0 if is_same else 1)
        num_prompts = min(num_prompts, len(then[0]))
    if not value.isfinite():
        return Figure(None, None, None)
    low, high = interval_of(draws)
    has_interval = num_prompts > 1 and math.isfinite(low) and math.isfinite(high)
    return Figure(float(value), *(low, high) if has_interval else (None, None))
