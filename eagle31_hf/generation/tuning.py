"""How far to draft: a fixed plan, or one chosen every round from what has been measured
(`num_assistant_tokens="auto"`).

Auto maximises tokens a second. A step of t seconds pays when it is expected to add more tokens than are generated in t
seconds at the present rate (Dinkelbach's method for maximising a ratio: the rate is that of recent rounds, so it
converges to the best there is). Expected tokens come from the drafter's own probabilities, calibrated by depth on what
the target accepted; expected seconds from what forwards of that size usually took.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from ..modeling import Eagle31DrafterModel
from .drafting import Fixed, Policy, Proposal
from .verify import Verdict

# WIDTHS: how many nodes of a level may get children
MAX_DEPTH = 16
TOP_K = 4
WIDTHS = (1, 2, 3, 4, 6, 8)
# of drafts that may be verified: few, so that the time of each is soon known
COUNTS = (*range(9), 10, 12, 16, 24, 32, 48, 60)
FIRST = (4, 8, 16, 32, 8, 16)  # numbers of drafts verified in the first rounds, before anything is measured
PLAIN_EVERY = 64  # every so many rounds one without drafting measures what drafting is compared with
# plain rounds after drafting was slower than plain decoding: at first, and at most; doubled each time
PAUSES = (8, 512)
EXTREME = 3e-4  # probabilities are clamped to this distance from 0 and 1
PROBE = 6  # rounds drafted after a pause, before drafting may pause again
FORESIGHT = 1.15  # a level is worth this many times its own tokens, as it also shows whether the next one pays


@dataclass(frozen=True)
class Plan:
    """One round: `depth` 0 is plain decoding, `policy` None a chain of exactly `depth`; no tree is larger than
    `max_nodes`."""

    depth: int
    policy: Policy | None = None
    max_nodes: int = 10**9


PLAIN = Plan(0)


class FixedPilot:
    """The same plan every round: chains, or with `top_k` above 1 trees."""

    def __init__(self, depth: int, top_k: int, total_tokens: int):
        self.depth = depth
        self.top_k = top_k
        self.total_tokens = total_tokens
        self.choices: Counter[str] = Counter()

    def plan(self, max_depth: int, num_rows: int, num_unread: int) -> Plan:
        """No draft may be deeper than `max_depth`."""
        depth = min(self.depth, max_depth)
        return (
            Plan(depth, None if self.top_k == 1 else Fixed(depth, self.top_k, self.total_tokens))
            if depth > 0
            else PLAIN
        )

    def learn(self, *args) -> None:
        """Nothing to learn: the plan is fixed."""

    def explain(self) -> str:
        return ""


class Costs:
    """Seconds a forward takes by its size, the tokens it runs: the mean of the last nine without the slowest quarter
    (other load on the machine only ever makes it slower), interpolated linearly between sizes."""

    def __init__(self):
        self.seconds: dict[int, deque[float]] = {}
        self.usual: dict[int, float] = {}
        self.known: list[tuple[int, float]] = []  # by size; a larger forward is never taken to be the faster one

    def add(self, rows: int, seconds: float) -> None:
        lately = self.seconds.setdefault(rows, deque(maxlen=9))
        lately.append(seconds)
        kept = sorted(lately)[: max(1, 3 * len(lately) // 4)]
        self.usual[rows] = sum(kept) / len(kept)
        # weight, mean and number of sizes of each pool: isotonic regression by pool adjacent violators
        pooled: list[list[float]] = []
        for size in sorted(self.usual):
            pooled.append([len(self.seconds[size]), self.usual[size], 1])
            while len(pooled) > 1 and pooled[-2][1] > pooled[-1][1]:
                weight, mean, sizes = pooled.pop()
                before = pooled[-1]
                pooled[-1] = [
                    before[0] + weight,
                    (before[0] * before[1] + weight * mean) / (before[0] + weight),
                    before[2] + sizes,
                ]
        levels = [mean for _, mean, sizes in pooled for _ in range(int(sizes))]
        self.known = list(zip(sorted(self.usual), levels, strict=True))

    def estimate(self, sizes: tuple[int, ...]) -> list[float]:
        """Seconds for sizes in ascending order; see the function `estimate`."""
        return estimate(self.known, sizes)


def estimate(points: Sequence[tuple[int, float]], sizes: tuple[int, ...]) -> list[float]:
    """Seconds for `sizes` from known `points` of (size, seconds), both ascending: linear between points; beyond the
    last one each token costs the average slope or, where there is one point, a twentieth of its seconds."""
    if not points:
        return [0.0] * len(sizes)
    first, last = points[0], points[-1]
    slope = (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else first[1] / 20
    estimates, i = [], 0
    for size in sizes:
        while i < len(points) and points[i][0] < size:
            i += 1
        if i == len(points):
            estimates.append(last[1] + slope * (size - last[0]))
        elif points[i][0] == size or i == 0:
            estimates.append(points[i][1])
        else:
            (low, below), (high, above) = points[i - 1], points[i]
            estimates.append(below + (above - below) * (size - low) / (high - low))
    return estimates


class Calibration:
    """Probability that the target accepts a draft whose parent it accepted: a logistic function of the drafter's
    log-odds. An offset for every depth accounts for the drafter getting worse from step to step.

    Source: vLLM's adaptive verification.
    """

    def __init__(self):
        self.slope, self.intercept = 1.0, 0.0
        self.offsets, self.seen = [0.0] * MAX_DEPTH, [0] * MAX_DEPTH
        self.going_on = [0.7] * MAX_DEPTH  # share of accepted nodes with an accepted child, by depth

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

    def copy(self) -> "Calibration":
        """A copy that what is learnt later does not change."""
        copied = Calibration()
        copied.slope, copied.intercept = self.slope, self.intercept
        copied.offsets = [*self.offsets]
        copied.seen = [*self.seen]
        copied.going_on = [*self.going_on]
        return copied


class Rate:
    """Tokens a second, in which recent rounds count more."""

    def __init__(self, memory: float = 0.97):
        self.memory = memory
        self.tokens = 0.0
        self.seconds = 0.0
        self.rounds = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens, self.seconds = self.memory * self.tokens + tokens, self.memory * self.seconds + seconds
        self.rounds += 1

    def fade(self) -> None:
        """Reduces the weight of all rounds so far to a tenth."""
        self.tokens, self.seconds = 0.1 * self.tokens, 0.1 * self.seconds

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Tuner:
    """What is known of a drafter and a target working together on batches of one size; outlives calls.

    Shared by threads: only `AutoPilot` reads and writes it, and holds its lock. A round under way uses what its
    `AutoPolicy` copied when the round began, and hands over what it observed when it is over.
    """

    calibration: Calibration = field(default_factory=Calibration)
    verify: Costs = field(default_factory=Costs)  # of the target's forward
    read: Costs = field(default_factory=Costs)  # of the drafter's forward over the tokens it has not read yet
    step: Costs = field(default_factory=Costs)  # of the drafter's forward over a level of drafts
    rest: Costs = field(default_factory=Costs)  # of drafting, what is neither reading nor a step
    drafting: Rate = field(default_factory=Rate)
    plain: Rate = field(default_factory=Rate)
    pause: int = PAUSES[0]
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rate(self) -> float:
        """Tokens a second of the faster of drafting and plain decoding: what a second has to bring."""
        return max(self.drafting.value, self.plain.value)

    @property
    def drafting_loses(self) -> bool:
        return self.drafting.rounds >= len(FIRST) and self.plain.rounds > 0 and self.drafting.value < self.plain.value

    def usual_seconds(self, policy: "AutoPolicy", seconds: float) -> float:
        """Adds the times of a round's drafting, `seconds` in all; returns the seconds that such drafting usually takes."""
        self.read.add(policy.num_unread, policy.read_seconds)
        for width, taken in policy.step_seconds:
            self.step.add(width, taken)
        self.rest.add(0, seconds - policy.read_seconds - sum(taken for _, taken in policy.step_seconds))
        steps = sum(self.step.estimate((width,))[0] for width, _ in policy.step_seconds)
        return self.read.estimate((policy.num_unread,))[0] + steps + self.rest.estimate((0,))[0]


_tuners: WeakKeyDictionary[Eagle31DrafterModel, WeakKeyDictionary[PreTrainedModel, dict[tuple, Tuner]]] = (
    WeakKeyDictionary()
)
_tuners_lock = threading.Lock()


def tuner_of(drafter: Eagle31DrafterModel, target: PreTrainedModel, *kind: object) -> Tuner:
    """The `Tuner` of this pair for one kind of call: number of rows, trees or not, sampled or not."""
    with _tuners_lock:
        return _tuners.setdefault(drafter, WeakKeyDictionary()).setdefault(target, {}).setdefault(kind, Tuner())


class AutoPolicy:
    """Decides in one round of drafting which steps pay, by what the tuner knew when the round began. `top_k`: children
    a node may have.

    `read_seconds`, and `step_seconds` with (nodes, seconds) of every step, are for the tuner to learn from when the
    round is over.
    """

    def __init__(self, tuner: Tuner, top_k: int, num_rows: int, num_unread: int):
        self.top_k = top_k
        self.num_rows = num_rows
        self.num_unread = num_unread
        self.first = dict(enumerate(FIRST)).get(tuner.drafting.rounds)  # None once the first rounds are over
        self.calibration, self.rate = tuner.calibration.copy(), tuner.rate
        self.verify, self.step = tuner.verify.known, tuner.step.known  # lists that are replaced, never changed
        self.widths: list[int] = []
        self.read_seconds, self.step_seconds = 0.0, list[tuple[int, float]]()
        low, high = estimate(self.verify, (2, 10))
        self._draft_tokens = self.rate * max(high - low, 0.0) / 8 / num_rows  # tokens lost by verifying one more draft
        self._clock = time.perf_counter()

    @property
    def max_width(self) -> int:
        return WIDTHS[-1] if self.top_k > 1 else 1

    def scores(self, log_probs: Tensor, level: int) -> Tensor:
        return self.calibration(log_probs, level)

    def width(self, scores: Tensor, level: int) -> int:
        best = scores.exp().tolist()
        now = time.perf_counter()
        if level == 0:
            self.read_seconds = now - self._clock
        else:
            self.step_seconds.append((self.widths[-1], now - self._clock))
        self._clock = now
        width = self._best_width(best, level)
        self.widths.append(width)
        return width

    def _best_width(self, best: list[list[float]], level: int) -> int:
        if self.first is not None:
            wide = self.first // 4 if self.top_k > 1 else 1
            return min(wide, len(best[0])) if (level + 1) * wide < self.first else 0
        hope = FORESIGHT * self.calibration.going_on[min(level + 1, MAX_DEPTH - 1)]
        widths = [width for width in WIDTHS if width <= len(best[0])]
        values = []
        gained = 0.0
        done = 0
        for width, seconds in zip(widths, estimate(self.step, tuple(widths)), strict=True):
            gained += sum(max(0.0, chance * hope - self._draft_tokens) for row in best for chance in row[done:width])
            done = width
            values.append(gained - self.rate * seconds)
        return widths[values.index(max(values))] if max(values) > 0 else 0

    def count(self, scores: Tensor) -> int:
        if self.first is not None:
            return self.first
        sums = scores.topk(min(COUNTS[-1], scores.shape[1])).values.exp().sum(0).cumsum(0).tolist()
        counts = [count for count in COUNTS if count <= len(sums)]
        seconds = estimate(self.verify, tuple(count + 1 for count in counts))
        values = [
            (sums[count - 1] if count else 0.0) - self.rate * cost for count, cost in zip(counts, seconds, strict=True)
        ]
        return counts[values.index(max(values))]


class AutoPilot:
    """Chooses the plan of every round of one call; no tree is larger than `max_nodes`."""

    def __init__(self, tuner: Tuner, top_k: int = TOP_K, max_nodes: int = COUNTS[-1] + 1):
        self.tuner = tuner
        self.top_k = top_k
        self.max_nodes = max_nodes
        self.choices: Counter[str] = Counter()
        # rounds left of a pause; rounds so far; rounds left to draft after a pause
        self.left = self.rounds = self.probing = 0
        self.policy: AutoPolicy | None = None
        self.drafts_by_count: Counter[int] = Counter()

    def plan(self, max_depth: int, num_rows: int, num_unread: int) -> Plan:
        self.rounds += 1
        self.policy = None
        with self.tuner.lock:
            if max_depth < 1 or self._is_plain():
                return PLAIN
            self.policy = AutoPolicy(self.tuner, self.top_k, num_rows, num_unread)
        return Plan(min(MAX_DEPTH, max_depth), self.policy, self.max_nodes)

    def _is_plain(self) -> bool:
        if self.left > 0:
            self.left -= 1
            return True
        if self.tuner.plain.rounds == 0 or self.rounds % PLAIN_EVERY == 0:
            return True
        if self.probing > 0:
            self.probing -= 1
            return False
        if self.tuner.drafting_loses:
            self.left, self.tuner.pause = self.tuner.pause - 1, min(2 * self.tuner.pause, PAUSES[1])
            self.probing = PROBE
            self.tuner.drafting.fade()
            return True
        self.tuner.pause = PAUSES[0]
        return False

    def learn(self, proposal: Proposal, verdict: Verdict, seconds: dict[str, float], num_tokens: int) -> None:
        """A round is over: what was accepted, and the seconds its phases took."""
        tuner = self.tuner
        with tuner.lock:
            tuner.verify.add(proposal.num_rows, seconds["verify"] + seconds["accept"])
            # What such a round usually takes, not what this one took: machines are shared, and one hiccup outweighs
            # many rounds.
            usual = tuner.verify.estimate((proposal.num_rows,))[0]
            if self.policy is None:
                tuner.plain.add(num_tokens, usual)
                self.choices["plain"] += 1
                return
            usual += tuner.usual_seconds(self.policy, seconds["draft"])
            if self.policy.first is not None:  # a first round, drafted to measure and not to be fast
                tuner.drafting.fade()
            tuner.drafting.add(num_tokens, usual)
            drafted = "of chains" if proposal.ids.shape[1] else "with drafts not worth verifying"
            self.choices[drafted if proposal.tree is None else "of trees"] += 1
            self.drafts_by_count[proposal.ids.shape[1]] += 1
            self._calibrate(proposal, verdict)

    def _calibrate(self, proposal: Proposal, verdict: Verdict) -> None:
        assert proposal.log_probs is not None
        calibration, log_probs = self.tuner.calibration, proposal.log_probs.tolist()
        # a draft not worth verifying can still be compared with the target's token
        for b, guess in enumerate(proposal.guesses or []):
            if verdict.tokens[b]:
                calibration.learn(guess[1], 0, verdict.tokens[b][0] == guess[0])
        for b, (children, path) in enumerate(zip(proposal.children(), verdict.paths, strict=True)):
            for depth, node in enumerate(path):
                if children[node]:
                    calibration.going_on[depth] += 0.05 * ((depth + 1 < len(path)) - calibration.going_on[depth])
                for child in children[node].values():
                    accepted = depth + 1 < len(path) and path[depth + 1] == child
                    calibration.learn(log_probs[b][child], depth, accepted)

    def explain(self) -> str:
        """Figures behind the choices, for people."""
        with self.tuner.lock:
            return self._explain(self.tuner, self.tuner.calibration)

    def _explain(self, tuner: Tuner, calibration: Calibration) -> str:
        rows = tuner.verify.known
        verify = ", ".join(
            f"{1000 * seconds:.1f} ms for {count}"
            for count, seconds in (rows[:1] + rows[-1:] if len(rows) > 1 else rows)
        )
        step = tuner.step.estimate((1,))[0]
        typical = (
            ", ".join(f"{count} ({times} times)" for count, times in self.drafts_by_count.most_common(3)) or "none"
        )
        chances = " ".join(
            f"{chance:.2f}" for chance, seen in zip(calibration.going_on, calibration.seen, strict=True) if seen
        )
        return (
            f"auto knows: target forwards take {verify} tokens; a draft step {1000 * step:.1f} ms, which pays where it"
            f" brings {tuner.rate * step:.2f} tokens or more at {tuner.rate:.1f} tokens/s\nauto knows: drafting gives"
            f" {tuner.drafting.value:.1f} tokens/s, plain decoding {tuner.plain.value:.1f}; drafts a round: {typical};"
            f" rounds that go on, by depth: {chances or 'not known'}"
        )
