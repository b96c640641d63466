"""Runs the rounds of one call as captured functions of tensors. The host reads what came of a round while the next
draft is under way.

B sequences, M tokens a round commits at most.
"""

import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers.utils import logging

from ...cache import adopt as cache
from ...targets.probe import FAILURES
from ..executor import EagerExecutor
from ..planning.plan import NO_DRAFTS, UNLIMITED, Plan
from ..rejection_sampler import Accepted
from ..sequences import Ends
from ..unread_states import AuxStates
from .drafting import fitted
from .proof import ROUNDS, WrongRoundError, verify_and_prove, write_cache_again
from .round import Part, Round, unpacked
from .seam import Seam

logger = logging.get_logger(__name__)


class CapturedExecutor:
    """Runs rounds by `rounds` and a seam. The eager executor runs the prompt, and goes on where a capture fails.

    Held between calls: what was captured, by `rounds`; why a part could not be, or was wrong, in `failures`.
    """

    def __init__(self, eager: EagerExecutor, rounds: Round, seam: Seam, failures: list[str]):
        self.eager = eager
        self.sequences, self.recorder = eager.sequences, eager.recorder
        self.rounds, self.carry = rounds, rounds.carry
        self.seam = seam
        self.failures = failures
        rounds.due = None
        self.has_failed = False
        self.was_short = False  # as the eager executor's
        self.num_unread = [0] * len(eager.sequences)  # tokens of each sequence that the carry holds for the drafter
        self.drafted: Plan | None = None  # whose drafts are made, or under way
        self.drafting: tuple[Any, Any] = None, None  # marks around it
        self.next_noise = [0] * len(eager.sequences)  # the first slot of each sequence whose noise the carry lacks

    def prefill(self) -> Accepted:
        accepted = self.eager.prefill()
        self._fill_carry()
        return accepted

    def room(self) -> tuple[int, int, int]:
        """Rounds may go past the end of a text, which is cut: a shorter plan would be captured for the last round
        alone."""
        if self.has_failed:
            return self.eager.room()
        return 0 if self.was_short else self.carry.width - 1, UNLIMITED, max(self.num_unread)

    def round(self, plan: Plan) -> Accepted:
        plan = fitted(plan) if plan.depth > 0 else NO_DRAFTS  # eager rounds, too: an arena has room for so many nodes
        callers = sys.exc_info()[1]  # an error that the caller is handling
        try:
            if not self.has_failed:
                self._capture(plan)
        except Exception as failure:
            if not _is_of_capturing(failure):
                raise
            self._hand_back(f"capturing failed ({_cause_of(failure, callers)})")
        try:
            if not self.has_failed:
                return self._replay(plan)
        except WrongRoundError as failure:
            self._hand_back(f"a captured round was wrong: {failure}")
            write_cache_again(self.eager)  # those it has written may be wrong, too
        depth = min(plan.depth, self.eager.room()[0])  # past the longest text a target may have no positions
        return self.eager.round(replace(plan, depth=depth))

    def result(self) -> Any:
        return self.eager.result()

    def settle(self) -> None:
        """Has the eager executor's parts hold what captured rounds have committed, also after an error."""
        if not self.rounds.parts.target.placement.outlives_call:
            self.rounds.due = None
        if not self.has_failed and (self.drafted is not None or any(self.num_unread)):  # else the carry holds nothing
            self._give_back()
        self.eager.settle()

    def _capture(self, plan: Plan) -> None:
        """Captures what is missing: what keeps the states of the last round, and the plan's draft and verify."""
        rounds = self.rounds
        _, accepted = rounds.due or (plan, [])
        own: list[Part] = [("draft", plan, partial(rounds.draft, plan)), ("verify", plan, partial(rounds.verify, plan))]
        for part, of, function in (*rounds.parts_due(), *own):
            if part in rounds.captured.get(of, {}):
                continue
            # Of a plan that has been proved the next round is compared, too, in the rows that read what is new.
            rounds.num_proved[plan] = min(rounds.num_proved[plan], ROUNDS - 1)
            rounds.unproved_rows |= {b for b, count in enumerate(accepted) if part == f"keep {count}"}
            if part == "verify":  # capturing has run nothing, and verifying needs drafts to warm up with
                self._run("draft", plan)
            with self.carry.restored(), rounds.parts.target.arena.states.restored(), self._placing():
                rounds.captured.setdefault(of, {})[part] = self.seam.capture(function, part)
            rounds.samplers.setdefault(of, []).extend((rounds.parts.draft_sampler, rounds.parts.sampler))

    @contextmanager
    def _placing(self):
        """A context after which caches are written to as their placements say; what a forward that failed has left is
        dropped."""
        try:
            yield
        except BaseException:
            self.rounds.parts.target.states.drop()
            raise
        finally:
            self.rounds.parts.target.placement.on_device = None
            self.rounds.parts.drafter.placement.on_device = None

    def _run(self, part: str, plan: Plan) -> None:
        with self._placing():
            self.rounds.captured[plan][part]()

    def _draft(self, plan: Plan) -> None:
        began = self.eager.clock.mark()
        self._run("draft", plan)
        self.drafted = plan
        self.drafting = began, self.eager.clock.mark()

    def _replay(self, plan: Plan) -> Accepted:
        if self.drafted != plan:
            self._draft(plan)
        drafting = self.drafting
        verifying: list[Any] = []  # marks around it, which the proof is no part of

        def verify() -> None:
            verifying.append(self.eager.clock.mark())
            self.rounds.keep_due(lambda part: self._run(*part[:2]))
            self._run("verify", plan)
            verifying.append(self.eager.clock.mark())

        verify_and_prove(self.rounds, plan, verify, self.eager)
        self.num_unread = [0] * len(self.sequences)  # of this round's tokens the host knows nothing before `_commit`
        read = self.seam.start_reading(self.rounds.out[plan])
        self._add_noise()
        self._draft(plan)  # of the next round: all it needs is on the device
        accepted = self._commit(plan, read())
        self.recorder.note("draft", *drafting)
        self.recorder.note("verify", *verifying)
        return accepted

    def _commit(self, plan: Plan, found: Tensor) -> Accepted:
        """Ends texts where they end; the device has committed all it accepted."""
        sequences = self.sequences
        drafts, spoiled, choices = unpacked(found[: len(sequences)], is_chain=plan.top_k == 1)  # no idle rows
        ends = Ends(self.eager.stopping, sequences)
        accepted = self.eager.sampler.walked(sequences, drafts, spoiled, choices, ends)
        has_ended = ends.finished != sequences.finished
        self.num_unread = [len(tokens) for tokens in accepted.tokens]  # of a text that has ended, up to its end
        sequences.grow(self.num_unread, ends.finished)
        self.rounds.note_accepted(plan, self.num_unread)
        if has_ended:  # with the last of their tokens states are advanced to there
            self.carry.send("going", [not finished for finished in ends.finished])
            self.carry.send("count", self.num_unread)
        self.was_short = accepted.is_short
        return accepted

    def _fill_carry(self) -> None:
        """Hands the carry what the prompt has left."""
        carry, sequences = self.carry, self.sequences
        rows = slice(len(sequences))
        carry.rest()
        runner = self.eager.runner
        self.rounds.parts.target.arena.states.take_over(runner.past_key_values)
        unread = self.eager.unread.take()
        carry.states[rows, : len(unread)] = unread.states
        carry.tokens[rows, : len(unread)] = unread.tokens
        self.num_unread = unread.counts.host
        sequences.hold_in(carry.text[rows])
        lengths = sequences.lengths.host
        offset = runner.last_position - (sequences.prompt_length - 1)
        carry.position[..., rows, :] = offset
        carry.most_position[..., rows, :] = offset + (self.eager.stopping.max_length - 1)
        carry.send("length", lengths)
        carry.send("count", self.num_unread)
        carry.send("padding", runner.num_padding)
        carry.send("going", [not finished for finished in sequences.finished])
        carry.send("first_slot", self.eager.unread.first_slots)
        self.next_noise = list(lengths)
        self._add_noise()

    def _add_noise(self) -> None:
        """Adds the noise of all slots that the round under way and the next one may draw at."""
        noise = self.eager.sampler.noise
        if noise is not None:
            self.next_noise = self.carry.add_noise(noise, self.sequences.lengths.host, self.next_noise)

    def _hand_back(self, reason: str) -> None:
        """Leaves the rest of the call to the eager executor."""
        self.failures.append(reason)
        logger.warning("EAGLE drafting: rounds run eagerly: %s.", reason)
        self.has_failed = True
        self.recorder.execution = f"eagerly: {reason}"
        try:
            self._give_back()
        except FAILURES:  # what keeps states fails, captured or not
            self.rounds.due = None
            self._give_back()
            write_cache_again(self.eager)
        self.sequences.commit_nothing()
        self.eager.was_short = self.was_short
        self.eager.holds_drafts = True  # rejected ones, past the end of the drafter's cache

    def _give_back(self) -> None:
        """Advances states, and sets the lengths of both caches, to what is committed, all but each text's last token,
        and hands back what the carry holds for the drafter."""
        self.rounds.keep_due(lambda part: part[2]())  # not captured: that may be what failed
        carry, eager = self.carry, self.eager
        lengths = [length - 1 for length in self.sequences.lengths.host]
        cache.settle(eager.runner.past_key_values, max(lengths))
        pairs = zip(lengths, eager.unread.first_slots, self.num_unread, strict=True)
        eager.proposer.runner.go_on_from([length - first - unread for length, first, unread in pairs])
        if any(self.num_unread):
            rows = slice(len(self.sequences))
            unread = AuxStates(carry.states[rows], carry.tokens[rows], self.num_unread)
            eager.unread.put(unread.at_most(self.num_unread).copied())


def _is_of_capturing(failure: Exception) -> bool:
    """Returns whether an error may come of a capture; a caller's own, as of a timer, may come at any time."""
    kind = type(failure).__module__.partition(".")[0]
    return kind in ("builtins", "torch", "triton", "subprocess") and not isinstance(failure, TimeoutError)


def _cause_of(failure: BaseException, callers: BaseException | None) -> str:
    """Says in a line the first of the errors of a failure, after the caller's own: ending a capture that has failed
    raises again."""
    while failure.__context__ is not None and failure.__context__ is not callers:
        failure = failure.__context__
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}"
