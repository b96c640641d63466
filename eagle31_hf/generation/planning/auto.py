"""`num_assistant_tokens="auto"`: a plan chosen every round from what has been measured, for the most tokens a
second.

A round is plain, drafts a chain or drafts a tree, as `exploration.py` chooses; how far it drafts, `controller.py`
decides. Expected tokens come from the drafter's own probabilities, calibrated by depth on what the target accepted;
expected seconds from what forwards of that size usually took.
"""

from collections import Counter
from collections.abc import Mapping

from ...acceptance import CHAINS, PLAIN, TREES
from ...clock import Clock
from ..rejection_sampler import Accepted
from .controller import COUNTS, TOP_K, LevelController
from .costs import MAX_DEPTH
from .knowledge import Knowledge
from .plan import NO_DRAFTS, Plan, Planner

USUAL_READ = 8  # tokens: a longer reading catches up on a pause, which drafting is not to be blamed for
LEAST_TIME = 1e-9  # seconds: no part of a round takes less
MAX_NODES = COUNTS[-1] + 1


class AutoPlanner(Planner):
    """Chooses the plan of every round of one call; no tree is larger than `max_nodes`, no draft deeper than
    `max_depth`."""

    def __init__(
        self, known: Knowledge, clock: Clock, top_k: int = TOP_K, max_nodes: int = MAX_NODES, max_depth: int = MAX_DEPTH
    ):
        super().__init__()
        self.known = known
        self.clock = clock
        self.top_k = top_k
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.kinds = (PLAIN, CHAINS, TREES) if top_k > 1 else (PLAIN, CHAINS)
        self.loads_kernels = clock.uses_events  # a GPU does, when it first meets a size: up to a second
        self.drafts_by_count: Counter[int] = Counter()
        self.kind = PLAIN  # of the round under way
        self.controller: LevelController | None = None

    def plan(self, max_depth: int, max_nodes: int, going: list[int], num_unread: int) -> Plan:
        """The plan of a round in which no draft may be deeper than `max_depth`, no tree larger than `max_nodes`;
        the drafter reads `num_unread` tokens of each of the sequences that are `going` first."""
        self.controller = None
        known = self.known
        with known.lock:
            self.kind = known.exploration.choose(self.kinds, known.promise) if max_depth > 0 else PLAIN
            if self.kind == PLAIN:
                return NO_DRAFTS
            top_k = 1 if self.kind == CHAINS else self.top_k
            trial = known.exploration.arms[self.kind].next_trial()
            self.controller = LevelController(known, self.clock, top_k, going, num_unread, trial)
        nodes = min(self.max_nodes, max_nodes)
        return Plan(min(self.max_depth, max_depth), top_k, self.controller.max_width, nodes, self.controller)

    def lookup_depth(self, gains: list[float]) -> int:
        """Returns the depth that gives most tokens more than the fastest kind of rounds would in the same seconds; 0
        where none gives more, and while nothing is known. The target's own token counts, too."""
        known, counts = self.known, [count for count in COUNTS if 0 < count <= len(gains)]
        with known.lock:
            rate, seconds = known.exploration.rate, known.costs["verify"].estimate(tuple(count + 1 for count in counts))
        if not rate:
            return 0
        values = [1 + gains[count - 1] - rate * cost for count, cost in zip(counts, seconds, strict=True)]
        return counts[values.index(max(values))] if max(values) > 0 else 0

    def observe_lookup(self, num_nodes: int, seconds: Mapping[str, float]) -> None:
        """Learns what verifying so many nodes takes, but for the first time, which may load kernels."""
        with self.known.lock:
            if not self._is_first(CHAINS, num_nodes):
                self.known.add_verify(num_nodes, seconds["verify"] + seconds["accept"])

    def observe(self, num_nodes: int, accepted: Accepted, seconds: Mapping[str, float]) -> None:
        """Learns from a round that is over: `num_nodes` of each sequence were verified; `seconds` its phases took."""
        controller = self.controller
        with self.known.lock:
            if self._is_first(self.kind, num_nodes):
                if controller is not None and controller.trial is not None:  # made again: nothing was learnt of it
                    arm = self.known.exploration.arms[self.kind]
                    arm.trials = (controller.trial, *arm.trials)
            else:
                self._learn_rate(num_nodes, accepted, seconds)
            if controller is None:
                self.choices["plain"] += 1
                return
            drafts, count = accepted.drafts, len(accepted.drafts.ids[0])
            kind = "of chains" if count else "with drafts not worth verifying"
            self.choices["of trees" if drafts.parents is not None else kind] += 1
            self.drafts_by_count[count] += 1
            self._calibrate(accepted)

    def _is_first(self, kind: str, num_nodes: int) -> bool:
        """Returns whether this was a size's first round, which has loaded kernels: nothing is learnt from its times.
        The next one is none any more."""
        is_first = self.loads_kernels and (kind, num_nodes) not in self.known.met
        self.known.met.add((kind, num_nodes))
        return is_first

    def _learn_rate(self, num_nodes: int, accepted: Accepted, seconds: Mapping[str, float]) -> None:
        """Learns the tokens and the seconds of a round: the usual ones of such a round, not those of this one, since
        machines are shared, and one hiccup outweighs many rounds."""
        known, controller = self.known, self.controller
        pairs = zip(accepted.tokens, accepted.num_drafts, strict=True)
        counts = [len(new) for new, was_going in pairs if was_going is not None]
        num_tokens = sum(counts) / max(1, len(counts))
        known.add_verify(num_nodes, seconds["verify"] + seconds["accept"])
        if controller is None:
            known.exploration.add(self.kind, num_tokens, known.costs["verify"].usual(num_nodes))
            return
        usual = known.costs["verify"].estimate((num_nodes,))[0] + self._drafting_seconds(controller, seconds["draft"])
        known.exploration.add(self.kind, num_tokens, usual, is_trial=controller.trial is not None)

    def _drafting_seconds(self, controller: LevelController, seconds: float) -> float:
        """Adds the times of a round's drafting, `seconds` in all; returns the seconds that such drafting usually
        takes."""
        known = self.known
        reading, levels = controller.seconds()
        known.costs["read"].add(controller.num_unread, reading)
        for width, taken in levels:
            known.costs["step"].add(width, taken)
        rest = known.costs[self.kind]
        rest.add(0, max(LEAST_TIME, seconds - reading - sum(taken for _, taken in levels)))  # rounding may leave less
        steps = sum(known.costs["step"].estimate((width,))[0] for width, _ in levels)
        reading = known.costs["read"].estimate((min(controller.num_unread, USUAL_READ),))[0]
        return reading + steps + rest.estimate((0,))[0]

    def _calibrate(self, accepted: Accepted) -> None:
        """Learns from every draft whose parent was accepted, and from a guess that was not worth verifying."""
        calibration, drafts = self.known.calibration, accepted.drafts
        going = [b for b, count in enumerate(accepted.num_drafts) if count is not None]
        for b in going:
            tokens = accepted.tokens[b]
            if drafts.guess is not None and drafts.guess_log_probs is not None and tokens:
                calibration.learn(drafts.guess_log_probs[b][0], 0, tokens[0] == drafts.guess[b][0])
        if drafts.log_probs is None:
            return
        for b in going:
            children, log_probs = drafts.children[b], drafts.log_probs[b]
            for depth, node in enumerate(accepted.paths[b]):
                next_node = children[node].get(accepted.tokens[b][depth])  # accepted, also where it ended the text
                if children[node]:
                    calibration.note_going_on(depth, next_node is not None)
                for child in children[node].values():
                    calibration.learn(log_probs[child - 1], depth, child == next_node)

    def end(self) -> None:
        """Keeps what is known for later processes."""
        self.known.keep()

    def explain(self) -> str:
        """Returns two lines for people: auto's estimates, and how many drafts it verified a round."""
        known = self.known
        with known.lock:
            sizes = known.costs["verify"].known
            step = known.costs["step"].estimate((1,))[0]
            seen = zip(known.calibration.going_on, known.calibration.seen, strict=True)
            chances = " ".join(f"{chance:.2f}" for chance, count in seen if count)
            arms = known.exploration.arms.items()
            rates = ", ".join(f"{kind} {arm.rate.value:.1f}" for kind, arm in arms if arm.rounds)
            rate = known.exploration.rate
        if not sizes:
            return "auto knows nothing yet: no round was timed"
        ends = sizes[:1] + sizes[-1:] if len(sizes) > 1 else sizes
        verify = ", ".join(f"{1000 * seconds:.1f} ms for {count}" for count, seconds in ends)
        counts = self.drafts_by_count.most_common(3)
        typical = ", ".join(f"{count} ({times} times)" for count, times in counts) or "none"
        return (
            f"auto knows: target forwards take {verify} tokens; a draft step {1000 * step:.1f} ms, which pays where it"
            f" brings {rate * step:.2f} tokens or more at {rate:.1f} tokens/s\n"
            f"auto knows: tokens/s a sequence: {rates}; drafts a round: {typical};"
            f" rounds that go on, by depth: {chances or 'not known'}"
        )
