"""Estimates for planning, learnt from rounds: the seconds that forwards take, by their size, the tokens a second that
decoding gives, and the chance that the target accepts a draft.

B sequences, F nodes of a level, k children of a node.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LATELY = 9  # times of a size that count
FAR = 2**20  # tokens: no forward is as large
FADE = 0.3  # the weight that is left to what may be out of date
MAX_DEPTH = 16  # levels; no draft is deeper
EXTREME = 3e-4  # probabilities are clamped to this distance from 0 and 1


class CostModel:
    """The seconds that forwards take, by their size, the tokens they run: the mean of the fastest six of the last
    nine (other load on the machine only ever makes them slower), interpolated linearly between sizes."""

    def __init__(self):
        self.seconds: dict[int, deque[float]] = {}
        self._known: list[tuple[int, float]] | None = []

    def add(self, size: int, seconds: float) -> None:
        """Adds the time that one forward of a size took."""
        self.seconds.setdefault(size, deque(maxlen=LATELY)).append(seconds)
        self._known = None

    @classmethod
    def of(cls, kept: dict[str, list[float]]) -> "CostModel":
        """Makes a model of what `as_dict` returned."""
        model = cls()
        for size, times in kept.items():
            for seconds in times:
                model.add(int(size), float(seconds))
        return model

    def as_dict(self) -> dict[str, list[float]]:
        """Returns the times that count, by size, as plain values, for JSON."""
        return {str(size): list(times) for size, times in self.seconds.items()}

    def usual(self, size: int) -> float:
        """Returns the seconds that forwards of a size take, of which there was one at least."""
        lately = sorted(self.seconds[size])
        kept = lately[: max(1, 3 * len(lately) // 4)]
        return sum(kept) / len(kept)

    @property
    def known(self) -> list[tuple[int, float]]:
        """Sizes and their seconds, ascending: a larger forward is never taken to be the faster one."""
        if self._known is None:
            sizes = sorted(self.seconds)
            levels = rising([self.usual(one) for one in sizes], [len(self.seconds[one]) for one in sizes])
            self._known = list(zip(sizes, levels, strict=True))
        return self._known

    def estimate(self, sizes: tuple[int, ...]) -> list[float]:
        """Returns the seconds for sizes in ascending order; see the function `estimate`."""
        return estimate(self.known, sizes)


def rising(means: list[float], weights: list[int]) -> list[float]:
    """The sequence that never falls and is nearest to the means, weighted: isotonic regression by pooling adjacent
    violators."""
    pools: list[tuple[float, float, int]] = []  # weight, mean, and how many of the means are in it
    for weight, mean in zip(weights, means, strict=True):
        pool = (float(weight), mean, 1)
        while pools and pools[-1][1] > pool[1]:
            before = pools.pop()
            total = before[0] + pool[0]
            pool = (total, (before[0] * before[1] + pool[0] * pool[1]) / total, before[2] + pool[2])
        pools.append(pool)
    return [mean for _, mean, count in pools for _ in range(count)]


def estimate(points: Sequence[tuple[int, float]], sizes: tuple[int, ...]) -> list[float]:
    """Seconds for `sizes` from known `points` of (size, seconds), both ascending: linear between points; beyond the
    last one each token costs the average slope or, where there is one point, a twentieth of its seconds."""
    if not points:
        return [0.0] * len(sizes)
    first, last = points[0], points[-1]
    slope = (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else first[1] / 20
    end = last[0] + FAR, last[1] + slope * FAR
    known_sizes, seconds = zip(*points, end, strict=True)
    return np.interp(sizes, known_sizes, seconds).tolist()


@dataclass
class Rate:
    """Tokens a second, and a round, in which recent rounds count more: each counts `memory` times as much as the one
    after it."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0
    memory: float = 0.97

    def add(self, tokens: float, seconds: float = 0.0) -> None:
        self.tokens = self.memory * self.tokens + tokens
        self.seconds = self.memory * self.seconds + seconds
        self.rounds = self.memory * self.rounds + 1

    def fade(self) -> None:
        """Reduces the weight of all rounds so far: they may say little about the text at hand."""
        self.tokens *= FADE
        self.seconds *= FADE
        self.rounds *= FADE

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def per_round(self) -> float:
        """Tokens a round."""
        return self.tokens / self.rounds if self.rounds else 0.0


@dataclass
class Calibration:
    """Probability that the target accepts a draft whose parent it accepted: a logistic function of the drafter's
    log-odds. An offset for every depth accounts for the drafter getting worse from step to step.

    Source: vLLM's adaptive verification.
    """

    slope: float = 1.0
    intercept: float = 0.0
    offsets: list[float] = field(default_factory=lambda: [0.0] * MAX_DEPTH)
    seen: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    going_on: list[float] = field(default_factory=lambda: [0.7] * MAX_DEPTH)  # accepted nodes with an accepted child

    def __call__(self, log_probs: Tensor, depth: int) -> Tensor:
        """The drafter's log-probabilities (B, F, k) of k children of F nodes -> log-probabilities that they are
        accepted."""
        return logsigmoid(torch.logit(log_probs.exp(), EXTREME) * self.slope + self.intercept + self.offsets[depth])

    def learn(self, log_prob: float, depth: int, accepted: bool) -> None:
        """One step of online logistic regression."""
        chance = min(max(math.exp(log_prob), EXTREME), 1 - EXTREME)
        log_odds = math.log(chance / (1 - chance))
        error = accepted - 1 / (1 + math.exp(-self.slope * log_odds - self.intercept - self.offsets[depth]))
        self.seen[depth] += 1
        self.intercept += error * max(0.02, 4 / (20 + sum(self.seen)))
        self.offsets[depth] += error * 0.03
        self.slope = min(max(self.slope + 0.02 * error * log_odds, 0.05), 4.0)

    def note_going_on(self, depth: int, went_on: bool) -> None:
        """Learns whether an accepted node at a depth had an accepted child. The first nodes count more: what is taken
        for usual before any of them says little of this drafter."""
        self.going_on[depth] += max(0.05, 1 / (6 + self.seen[depth])) * (went_on - self.going_on[depth])

    def copy(self) -> "Calibration":
        """A copy that what is learnt later does not change."""
        return Calibration(**self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Returns what was learnt as plain values, for JSON."""
        return {name: [*value] if isinstance(value, list) else value for name, value in vars(self).items()}
