"""The recurrent states of a target in captured rounds. The host reads how many tokens a round accepted while the next
draft is under way; before the next verification the states come to stand after them, by a captured part for each count
that occurs."""

from collections.abc import Callable
from functools import partial

from ..planning.plan import Plan
from .round import Round

Part = tuple[str, Plan, Callable[[], None]]  # its name, the plan it is of, and what is captured


class StateKeeper:
    """Has the states of one call's target follow what is committed; does nothing where there are none."""

    def __init__(self, rounds: Round):
        self.rounds = rounds
        # Of the last round, where the states do not stand after its tokens yet: its plan, and the tokens that each
        # sequence has accepted.
        self.plan: Plan | None = None
        self.counts: list[int] = []

    def is_behind(self, plan: Plan, counts: list[int]) -> None:
        """Notes that a verification by this plan has accepted so many tokens of every sequence, 0 of one that had ended
        before."""
        if self.rounds.unsettled[plan] is not None:
            self.plan, self.counts = plan, list(counts)

    def parts(self) -> dict[int, Part]:
        """The parts that `keep` is about to run, by the count of tokens."""
        plan = self.plan
        if plan is None:
            return {}
        counts = sorted({*self.counts} - {0})
        return {count: (f"keep {count}", plan, partial(self.rounds.keep, plan, count)) for count in counts}

    def keep(self, run: Callable[[str, Plan], None] | None) -> None:
        """Has the states stand after all tokens that are committed, by captured parts, which `run` runs; None: by what
        was captured."""
        for count, (name, plan, function) in self.parts().items():
            if run is None:
                function()
            else:
                run(name, plan)
            self.counts = [0 if each == count else each for each in self.counts]  # not again after an error
        self.forget()

    def forget(self) -> None:
        """Leaves the states where they stand: nobody will read them."""
        self.plan = None
