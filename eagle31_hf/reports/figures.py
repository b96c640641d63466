"""Figures of several prompts, each with the interval that bootstrap over prompts gives it. P prompts, K depths.

Takes rows, the counts of a prompt each, as `diagnostics.acceptance.counts_of` returns them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..diagnostics.bootstrap import drawn_ratios, interval_of
from .document import NOTHING, Series

Row = Mapping[str, Any]


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

    def as_dict(self) -> dict[str, float | None]:
        """Returns plain values, for JSON."""
        return vars(self).copy()


def series_of(label: str, figures: Sequence[Figure]) -> Series:
    """Makes a line of a chart, with the figures' intervals as a band."""
    return Series(label, *([getattr(figure, name) for figure in figures] for name in ("value", "low", "high")))


def accepted_length(rows: Sequence[Row]) -> Figure:
    """Returns the tokens a target forward gives, the bonus token included, the prompt's forward excluded."""
    return _ratio(_column(rows, "tokens"), _column(rows, "rounds"))


def accepted_drafts(rows: Sequence[Row]) -> Figure:
    """Returns the drafted tokens that are accepted a round, the bonus token excluded."""
    return _ratio(_column(rows, "accepted").sum(-1), _column(rows, "rounds"))


def acceptance_by_depth(rows: Sequence[Row], depth: int) -> list[Figure]:
    """Returns by depth (K,) the share of drafted tokens that are accepted."""
    accepted, drafted = (_column(rows, name, depth) for name in ("accepted", "drafted"))
    return [_ratio(accepted[:, k], drafted[:, k]) for k in range(depth)]


def kept(rows: Sequence[Row], before: Sequence[Row], is_same: bool = True) -> Figure:
    """Returns the accepted drafts a round as a multiple of those of `before`, which are of the same prompts, or of
    others, `is_same` False."""
    now, then = ((_column(part, "accepted").sum(-1), _column(part, "rounds")) for part in (rows, before))
    return _quotient(now, then, is_same)


def tokens_per_second(rows: Sequence[Row]) -> Figure:
    """Returns the tokens of a second of generate(), the prompt's forward included."""
    return _ratio(_column(rows, "new_tokens"), _column(rows, "seconds"))


def speedup(rows: Sequence[Row], alone: Sequence[Row]) -> Figure:
    """Returns the tokens a second as a multiple of those of the target alone on the same prompts."""
    now, then = ((_column(part, "new_tokens"), _column(part, "seconds")) for part in (rows, alone))
    return _quotient(now, then)


def mean_by_depth(rows: Sequence[Row], name: str) -> list[Figure]:
    """Returns by depth the mean over chains of a figure that `measure_drift` returned."""
    rows = [row for row in rows if row["chains"]]
    counts, values = _column(rows, "chains"), _column(rows, name)
    return [_ratio(values[:, k] * counts, counts) for k in range(values.shape[1])]


def _column(rows: Sequence[Row], name: str, depth: int = 0) -> Tensor:
    """Returns counts of every prompt, (P,) or by depth (P, K) where they are so; depths nobody reached count 0."""
    values = [row[name] for row in rows]
    if not isinstance(values[0], list):
        return torch.tensor(values, dtype=torch.double)
    width = max(depth, *map(len, values))
    return torch.tensor([value + [0] * (width - len(value)) for value in values], dtype=torch.double)


def _ratio(numerators: Tensor, denominators: Tensor) -> Figure:
    return _figure(_over(numerators, denominators), drawn_ratios(numerators, denominators), len(numerators))


def _quotient(now: tuple[Tensor, Tensor], then: tuple[Tensor, Tensor], is_same: bool = True) -> Figure:
    """Returns a ratio of sums over another one: of the same prompts, drawn together, or of others, drawn apart."""
    before = _over(*then)
    value = _over(*now) / before if before else math.nan
    draws = drawn_ratios(*now) / drawn_ratios(*then, seed=0 if is_same else 1)
    return _figure(value, draws, min(len(now[0]), len(then[0])))


def _over(numerators: Tensor, denominators: Tensor) -> float:
    total = float(denominators.sum())
    return float(numerators.sum()) / total if total else math.nan


def _figure(value: float, draws: Tensor, num_prompts: int) -> Figure:
    """Makes a figure. It has no interval where that would have no end, nor of a single prompt, which says nothing about
    others."""
    low, high = map(float, interval_of(draws))
    if not math.isfinite(value):
        return Figure(None, None, None)
    has_interval = num_prompts > 1 and math.isfinite(low) and math.isfinite(high)
    return Figure(value, low, high) if has_interval else Figure(value, None, None)
