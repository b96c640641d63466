"""Recurrent states lag one round behind: the host reads how many tokens a round accepted while the next draft is under
way, and before the next verification `Round.keep`, captured for each such count, advances the states over them."""

from collections.abc import Callable
from functools import partial

from ..planning.plan import Plan
from .round import Round

Part = tuple[str, Plan, Callable[[], None]]  # its name, the plan it is of, and what is captured


class StateKeeper:
    """Advances the recurrent states of one call's target over accepted tokens; does nothing where there are none."""

    def __init__(self, rounds: Round):
        self.rounds = rounds
        # Of the last verification, while the states are to be advanced: its plan, and the tokens that each sequence has
        # accepted.
        self.plan: Plan | None = None
        self.counts: list[int] = []

    def note_accepted(self, plan: Plan, counts: list[int]) -> None:
        """Notes how many tokens each sequence accepted in a verification, 0 where its states are not to be advanced."""
        if self.rounds.unsettled[plan] is not None:
            self.plan, self.counts = plan, list(counts)

    def parts(self) -> list[Part]:
        """The parts that `keep` is about to run."""
        plan = self.plan
        if plan is None:
            return []
        counts = sorted({*self.counts} - {0})
        return [(_name(count), plan, partial(self.rounds.keep, plan, count)) for count in counts]

    def rows(self, part: str) -> set[int]:
        """The sequences whose states a part of this name advances."""
        return {b for b, count in enumerate(self.counts) if part == _name(count)}

    def keep(self, run: Callable[[Part], None]) -> None:
        """Advances the states over all tokens that are committed; `run` runs each part."""
        for part in self.parts():
            run(part)
        self.forget()

    def forget(self) -> None:
        """Drops what is still to be done."""
        self.plan = None


def _name(count: int) -> str:
    return f"keep {count}"
