"""The chance that the target accepts a draft, learned from what it accepted.

B sequences, F nodes of a level, k children of a node.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

MAX_DEPTH = 16  # levels; no draft is deeper
EXTREME = 3e-4  # probabilities are clamped to this distance from 0 and 1


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
