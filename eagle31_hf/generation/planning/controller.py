"""Decides in one round of drafting which levels pay, by what was known when the round began."""

import math

from torch import Tensor

from ...clock import Clock
from .costs import MAX_DEPTH, estimate
from .knowledge import Knowledge
from .plan import Selection

TOP_K = 4  # children of a node, where nobody said how many
WIDTHS = (1, 2, 3, 4, 6, 8)  # how many nodes of a level may get children
COUNTS = (*range(9), 10, 12, 16, 24, 32, 48, 60)  # drafts that may be verified: few, so that each one's cost is known
# A level is worth this many times its own tokens: expanding it also shows whether the next one pays.
EXPLORATION_BONUS = 1.15


class LevelController:
    """Decides level by level whether the next one pays. `top_k`: children a node may have; `trial`: drafts to verify
    whatever they promise, to learn what they cost, or None.

    A step of t seconds pays when it is expected to add more tokens than are generated in t seconds at the present rate:
    Dinkelbach's method for maximising a ratio.
    """

    def __init__(
        self, known: Knowledge, clock: Clock, top_k: int, going: list[int], num_unread: int, trial: int | None
    ):
        self.top_k = top_k
        self.going = going
        self.num_unread = num_unread
        self.trial = trial
        self.calibration = known.calibration.copy()
        self.rate = known.exploration.rate * len(going)  # tokens a second of all sequences
        self.verify = known.costs["verify"].known  # lists that are replaced, never changed
        self.step = known.costs["step"].known
        self.widths: list[int] = []  # of the levels that were run
        self.totals: list[list[list[float]]] = []  # log-chances of every level's candidates, by sequence that is going
        low, high = estimate(self.verify, (2, 10))
        # tokens lost by verifying one more draft
        self._draft_tokens = self.rate * max(high - low, 0.0) / 8 / len(going)
        self._clock = clock
        self._marks = [clock.mark()]

    @property
    def max_width(self) -> int:
        return WIDTHS[-1] if self.top_k > 1 else 1

    def width(self, scores: Tensor, level: int) -> int:
        """Log-chances (B, C) that a level's candidates are reached and accepted, the first level being 0 -> how many of
        the best the next level starts from; 0 ends the expansion."""
        by_sequence = scores.tolist()
        self.totals.append([by_sequence[b] for b in self.going])
        self._marks.append(self._clock.mark())
        best = [sorted(map(math.exp, row), reverse=True)[: self.max_width] for row in self.totals[-1]]
        width = self._best_width(best, level)
        if width:
            self.widths.append(width)
        return width

    def _best_width(self, best: list[list[float]], level: int) -> int:
        if self.trial is not None:
            width = max(1, self.trial // 4) if self.top_k > 1 else 1
            return min(width, len(best[0])) if (level + 1) * width < self.trial else 0
        hope = EXPLORATION_BONUS * self.calibration.going_on[min(level + 1, MAX_DEPTH - 1)]
        widths = [width for width in WIDTHS if width <= len(best[0])]
        values = []
        gained = 0.0
        done = 0
        for width, seconds in zip(widths, estimate(self.step, tuple(widths)), strict=True):
            gained += sum(max(0.0, chance * hope - self._draft_tokens) for row in best for chance in row[done:width])
            done = width
            values.append(gained - self.rate * seconds)
        return widths[values.index(max(values))] if max(values) > 0 else 0

    def select(self, limit: int) -> Selection:
        """The candidates to verify, at most `limit`: as many as bring more than they cost."""
        ranked = [self._ranked(b) for b in range(len(self.totals[0]))]
        count = min(limit, len(ranked[0]), self._best_count(ranked, limit) if self.trial is None else self.trial)
        if count == 0:
            return Selection(0)
        depths = [1 + max(level for _, level in row[:count]) for row in ranked]
        return Selection(count, max(depths), min(depths) == count)

    def _best_count(self, ranked: list[list[tuple[float, int]]], limit: int) -> int:
        """Returns how many of the best candidates bring more than they cost."""
        sums, gained = [0.0], 0.0
        for place in zip(*ranked, strict=True):
            gained += sum(math.exp(score) for score, _ in place)
            sums.append(gained)
        counts = [count for count in COUNTS if count <= min(limit, len(sums) - 1)]
        seconds = estimate(self.verify, tuple(count + 1 for count in counts))
        values = [sums[count] - self.rate * cost for count, cost in zip(counts, seconds, strict=True)]
        return counts[values.index(max(values))]

    def _ranked(self, b: int) -> list[tuple[float, int]]:
        """Log-chance and level of sequence b's candidates, best first; of equals the earlier one first."""
        every = [(score, level) for level, totals in enumerate(self.totals) for score in totals[b]]
        return sorted(every, key=lambda one: -one[0])[: COUNTS[-1]]

    def seconds(self) -> tuple[float, list[tuple[int, float]]]:
        """Seconds that reading took, and (nodes, seconds) of every level that was run; when the round is over."""
        spans = [self._clock.seconds(*span) for span in zip(self._marks[:-1], self._marks[1:], strict=True)]
        return spans[0], list(zip(self.widths, spans[1:], strict=False))
