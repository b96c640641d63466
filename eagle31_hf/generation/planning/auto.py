"""`num_assistant_tokens="auto"`: a plan chosen every round from what has been measured, for the most tokens a second.

Expected tokens come from the drafter's own probabilities, calibrated by depth on what the target accepted; expected
seconds from what forwards of that size usually took.
"""

from collections import Counter
from collections.abc import Mapping

from ...clock import Clock
from ..rejection_sampler import Accepted
from .calibration import MAX_DEPTH
from .controller import COUNTS, TOP_K, LevelController
from .knowledge import Knowledge
from .plan import PLAIN, Plan

TRIALS = (4, 8, 16, 32, 8, 16)  # drafts verified in the first rounds, before anything is measured
FEWEST_TRIALS, HOPELESS = 2, 0.8  # trials end early where drafting gives less than this share of plain decoding's rate
PLAIN_EVERY = 128  # every so many rounds one without drafting measures what drafting is compared with
# Plain rounds after drafting was slower than plain decoding: at first, and at most; each pause is longer than the one
# before by GROWTH. With PROBES drafted rounds between pauses, a target for which drafting never pays loses some ten
# rounds of the first thousand.
FIRST_PAUSE = 8
LONGEST_PAUSE = 512
GROWTH = 4
PROBES = 2
USUAL_READ = 8  # tokens: a longer reading catches up on a pause, which drafting is not to be blamed for
MAX_NODES = COUNTS[-1] + 1


class AutoPlanner:
    """Chooses the plan of every round of one call; no tree is larger than `max_nodes`."""

    def __init__(self, known: Knowledge, clock: Clock, top_k: int = TOP_K, max_nodes: int = MAX_NODES):
        self.known = known
        self.clock = clock
        self.top_k = top_k
        self.max_nodes = max_nodes
        self.choices: Counter[str] = Counter()
        self.drafts_by_count: Counter[int] = Counter()
        self.controller: LevelController | None = None
        self.pause_left = 0
        self.probes_left = 0

    def plan(self, max_depth: int, max_nodes: int, going: list[int], num_unread: int) -> Plan:
        """The plan of a round in which no draft may be deeper than `max_depth`, no tree larger than `max_nodes`;
        the drafter reads `num_unread` tokens of each of the sequences that are `going` first."""
        self.controller = None
        with self.known.lock:
            self.known.rounds += 1
            if max_depth < 1 or self._is_plain():
                return PLAIN
            trial = TRIALS[self.known.drafting.rounds] if self._is_trial() else None
            self.controller = LevelController(self.known, self.clock, self.top_k, going, num_unread, trial)
        width = self.controller.max_width
        nodes = min(self.max_nodes, max_nodes)
        return Plan(min(MAX_DEPTH, max_depth), self.top_k, width, nodes, self.controller)

    def _is_trial(self) -> bool:
        """Returns whether a round is drafted to learn what drafts of a size cost."""
        known = self.known
        if known.drafting.rounds < FEWEST_TRIALS:
            return True
        return known.drafting.rounds < len(TRIALS) and known.drafting.value > HOPELESS * known.plain.value

    def _is_plain(self) -> bool:
        """Returns whether this round does without drafts: in a pause, or to measure plain decoding."""
        known = self.known
        if self.pause_left > 0:
            self.pause_left -= 1
            return True
        if known.plain.rounds == 0 or known.rounds % PLAIN_EVERY == 0:
            return True
        if self.probes_left > 0:
            self.probes_left -= 1
            return False
        if not self._is_trial() and known.drafting.value < known.plain.value:
            pause = known.pause or FIRST_PAUSE
            self.pause_left = pause - 1
            known.pause = min(GROWTH * pause, LONGEST_PAUSE)
            self.probes_left = PROBES
            known.drafting.fade()
            return True
        known.pause = FIRST_PAUSE
        return False

    def observe(self, num_nodes: int, accepted: Accepted, seconds: Mapping[str, float]) -> None:
        """Learns from a round that is over: `num_nodes` of each sequence were verified; `seconds` its phases took."""
        known, num_tokens = self.known, sum(len(tokens) for tokens in accepted.tokens)
        with known.lock:
            known.verify.add(num_nodes, seconds["verify"] + seconds["accept"])
            # The usual seconds of such a round, not those of this one: machines are shared, and one hiccup outweighs
            # many rounds.
            usual = known.verify.estimate((num_nodes,))[0]
            if self.controller is None:
                known.plain.add(num_tokens, usual)
                self.choices["plain"] += 1
                return
            usual += self._drafting_seconds(self.controller, seconds["draft"])
            if self.controller.trial is not None:  # drafted to measure and not to be fast
                known.drafting.fade()
            known.drafting.add(num_tokens, usual)
            self._note_choice(accepted)
            self._calibrate(accepted)

    def _drafting_seconds(self, controller: LevelController, seconds: float) -> float:
        """Adds the times of a round's drafting, `seconds` in all; returns the seconds that such drafting usually
        takes."""
        known = self.known
        reading, levels = controller.seconds()
        known.read.add(controller.num_unread, reading)
        for width, taken in levels:
            known.step.add(width, taken)
        known.rest.add(0, seconds - reading - sum(taken for _, taken in levels))
        steps = sum(known.step.estimate((width,))[0] for width, _ in levels)
        reading = known.read.estimate((min(controller.num_unread, USUAL_READ),))[0]
        return reading + steps + known.rest.estimate((0,))[0]

    def _note_choice(self, accepted: Accepted) -> None:
        drafts = accepted.drafts
        count = len(drafts.ids[0])
        kind = "of trees" if drafts.parents is not None else "of chains" if count else "with drafts not worth verifying"
        self.choices[kind] += 1
        self.drafts_by_count[count] += 1

    def _calibrate(self, accepted: Accepted) -> None:
        """Learns from every draft whose parent was accepted, and from a guess that was not worth verifying."""
        calibration, drafts = self.known.calibration, accepted.drafts
        for b, tokens in enumerate(accepted.tokens):
            if drafts.guess is not None and drafts.guess_log_probs is not None and tokens:
                calibration.learn(drafts.guess_log_probs[b][0], 0, tokens[0] == drafts.guess[b][0])
        if drafts.log_probs is None:
            return
        for b, path in enumerate(accepted.paths):
            children, log_probs = drafts.children(b), drafts.log_probs[b]
            for depth, node in enumerate(path):
                next_node = children[node].get(accepted.tokens[b][depth])  # accepted, also where it ended the text
                if children[node]:
                    went_on = next_node is not None
                    calibration.going_on[depth] += 0.05 * (went_on - calibration.going_on[depth])
                for child in children[node].values():
                    calibration.learn(log_probs[child - 1], depth, child == next_node)

    def explain(self) -> str:
        """Figures behind the choices, for people."""
        with self.known.lock:
            return explanation(self.known, self.drafts_by_count)


def explanation(known: Knowledge, drafts_by_count: Counter[int]) -> str:
    """Returns what auto knows, and how many drafts it verified a round, in two lines for people."""
    sizes = known.verify.known
    ends = sizes[:1] + sizes[-1:] if len(sizes) > 1 else sizes
    verify = ", ".join(f"{1000 * seconds:.1f} ms for {count}" for count, seconds in ends)
    step = known.step.estimate((1,))[0]
    typical = ", ".join(f"{count} ({times} times)" for count, times in drafts_by_count.most_common(3)) or "none"
    seen = zip(known.calibration.going_on, known.calibration.seen, strict=True)
    chances = " ".join(f"{chance:.2f}" for chance, count in seen if count)
    return (
        f"auto knows: target forwards take {verify} tokens; a draft step {1000 * step:.1f} ms, which pays where it"
        f" brings {known.rate * step:.2f} tokens or more at {known.rate:.1f} tokens/s\n"
        f"auto knows: drafting gives {known.drafting.value:.1f} tokens/s, plain decoding"
        f" {known.plain.value:.1f}; drafts a round: {typical}; rounds that go on, by depth: {chances or 'not known'}"
    )
