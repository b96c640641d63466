"""The kind of the next round: the fastest that is known and, now and then, another one, to learn whether it is faster.

A multi-armed bandit whose arms are plain rounds, chains and trees. What exploring may lose is bounded: an exploration
ends when it has lost what one and a half rounds give, and each one that was in vain makes the pause before the next
one longer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...acceptance import CHAINS, PLAIN, TREES
from .costs import Rate

ALLOWED_LOSS = 1.5  # rounds' worth of tokens that one exploration may lose beside the fastest kind
FIRST_PAUSE = 32  # rounds before a kind is explored again
SHORT_PAUSE = 2  # before chains are, where they promise more than plain rounds give
LONGEST_PAUSE = 1024
GROWTH = 2  # of the pause, whenever one begins
HOPELESS = 0.8  # trees are not explored where chains give less than this share of the fastest kind's rate


@dataclass
class Arm:
    """One kind of rounds. `trials`: drafts to verify in its first rounds, to learn what they cost, those that were
    begun left out; `longest`: rounds that an exploration takes at most; `rounds`: how many there were; `due`: the
    round, as `Exploration.rounds` counts, from which on it may be explored; `pause`: rounds that the next pause
    takes."""

    trials: tuple[int, ...] = ()
    longest: int = 16
    rate: Rate = field(default_factory=Rate)
    rounds: int = 0
    pause: int = FIRST_PAUSE
    due: int = 0

    def next_trial(self) -> int | None:
        """The drafts to verify in the round that begins, to learn what they cost; None where enough is known. One that
        fails, for want of memory, say, is not tried again."""
        first, self.trials = (self.trials[0], self.trials[1:]) if self.trials else (None, ())
        return first

    def postpone(self, rounds: int) -> None:
        """Puts its next exploration off by a pause that begins at round `rounds`."""
        self.due = rounds + self.pause
        self.pause = min(GROWTH * self.pause, LONGEST_PAUSE)


class Exploration:
    """Chooses the kind of every round, by the tokens a second that each kind gave."""

    def __init__(self):
        self.arms = {PLAIN: Arm(longest=1), CHAINS: Arm((4, 2)), TREES: Arm((8, 16, 32, 4))}
        self.rounds = 0
        self.last = PLAIN
        self.fastest = PLAIN
        self.explored: str | None = None
        self._lost = 0.0  # rounds' worth of tokens, in this exploration
        self._left = 0  # rounds of it

    def as_dict(self) -> dict[str, Any]:
        """Returns what each arm has given and what of it is still to be tried, as plain values, for JSON."""
        return {
            kind: {"trials": [*arm.trials], "rate": [arm.rate.tokens, arm.rate.seconds, arm.rate.rounds]}
            for kind, arm in self.arms.items()
        }

    @classmethod
    def of(cls, kept: dict[str, Any]) -> "Exploration":
        """Goes on from what `as_dict` returned: arms that have been tried are explored again after a pause."""
        made = cls()
        for kind, arm in made.arms.items():
            arm.trials, arm.rate = tuple(map(int, kept[kind]["trials"])), Rate(*kept[kind]["rate"])
            arm.rate.fade()
            if arm.rate.rounds:
                arm.due = arm.pause
        made.fastest = max(made.arms, key=lambda kind: made.arms[kind].rate.value)
        return made

    @property
    def rate(self) -> float:
        """Tokens a second and sequence of the fastest kind: what a second has to bring."""
        return max(arm.rate.value for arm in self.arms.values())

    def choose(self, kinds: Sequence[str], promise: Callable[[], float] = lambda: 0.0) -> str:
        """The kind of the next round, one of `kinds`. `promise`: gives the tokens a second that chains are expected to
        give; it is asked after plain rounds, since the few chains of an exploration may have been unlucky."""
        self.rounds += 1
        chains, plain = self.arms[CHAINS], self.arms[PLAIN]
        is_plain = self.explored is None and self.last == PLAIN and not chains.trials
        if is_plain and promise() > plain.rate.value:
            chains.due = min(chains.due, self.rounds + SHORT_PAUSE)
            chains.pause = FIRST_PAUSE
        fastest = max(kinds, key=lambda kind: self.arms[kind].rate.value)
        if self.explored is not None and self._is_over(fastest):
            self.arms[self.explored].postpone(self.rounds)
            self.explored = None
        if self.explored is None:
            self._change(fastest)
            self.explored = next((kind for kind in kinds if self._is_due(kind)), None)
            self._lost = 0.0
            self._left = self.arms[self.explored].longest if self.explored else 0
        chosen = self.explored or fastest
        if self.explored is not None:
            self._left -= 1
        if chosen != self.last:
            self.arms[chosen].rate.fade()  # the text may have changed since its last round
        self.last = chosen
        return chosen

    def _is_over(self, fastest: str) -> bool:
        """Returns whether the exploration has shown what it can, or lost what it may."""
        assert self.explored is not None
        is_known = not self.arms[self.explored].trials
        return self._left <= 0 or self._lost > ALLOWED_LOSS or (is_known and fastest == self.explored)

    def _change(self, fastest: str) -> None:
        """Notes which kind is the fastest now. The one that was is explored again after its pause; the pause of the new
        one, should it fall behind, is the first one again."""
        if fastest == self.fastest:
            return
        self.arms[fastest].pause = FIRST_PAUSE
        self.arms[self.fastest].postpone(self.rounds)
        self.fastest = fastest

    def _is_due(self, kind: str) -> bool:
        """Returns whether a kind that is not the fastest is to be explored now: plain rounds come first, then chains,
        then, where chains are not hopeless, trees."""
        if kind == self.fastest or self.rounds < max(2, self.arms[kind].due):
            return False
        return kind != TREES or self.arms[CHAINS].rate.value >= HOPELESS * self.rate

    def add(self, kind: str, num_tokens: float, seconds: float, is_trial: bool = False) -> None:
        """Learns from a round of `kind` that gave so many tokens, the mean of the sequences, in so many seconds, the
        usual ones of such a round; `is_trial`: it was drafted to learn what it costs."""
        arm = self.arms[kind]
        if kind == self.explored:
            other = max((one.rate for one in self.arms.values() if one is not arm), key=lambda rate: rate.value)
            if other.rounds:
                self._lost += (seconds * other.value - num_tokens) / other.per_round
        if kind == PLAIN:  # always gives one token, and its usual seconds are a mean already
            arm.rate = Rate()
        arm.rounds += 1
        if not is_trial:  # drafted to measure and not to be fast
            arm.rate.add(num_tokens, seconds)
