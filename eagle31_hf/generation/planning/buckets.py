"""`num_assistant_tokens="auto"` in captured rounds: before every round one of a few plans, each captured once.

The host chooses by what earlier rounds gave and took; within the plan the device keeps the best nodes. A round shows
what every smaller plan would have given, too: what was accepted of its best nodes.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...acceptance import CHAINS, PLAIN, TREES
from ..rejection_sampler import Accepted
from ..tree import HostDrafts
from .costs import CostModel, Rate
from .plan import NO_DRAFTS, DraftingSettings, Plan, Planner

TOP_K = 8
DEPTHS_OF_CHAINS = (3, 6)
TREES_OF = ((4, 16), (6, 32), (8, 60))  # levels, nodes
DEEPEST = 8
MEMORY = 0.95  # how much a round counts beside the next one
UNSEEN = 0.7  # the chance that a draft is accepted, before any was
ROUNDS_OF_A_TRIAL = 2
FIRST_PAUSE = 64  # rounds, until the largest plan is drafted again to see whether what is accepted has changed
LONGEST_PAUSE = 1024
GROWTH = 2


def plans_of(settings: DraftingSettings, draws_trees: bool) -> tuple[Plan, ...]:
    """The plans that auto may choose from, the largest last; `settings.top_k` and `total_tokens` bound the trees."""
    chains = tuple(Plan(depth) for depth in DEPTHS_OF_CHAINS)
    if not draws_trees:
        return (NO_DRAFTS, *chains)
    top_k = min(settings.top_k or TOP_K, TOP_K)
    most = settings.total_tokens or TREES_OF[-1][1]
    sizes = [(depth, nodes) for depth, nodes in TREES_OF if nodes <= most] or [(TREES_OF[0][0], most)]
    return (NO_DRAFTS, *chains, *(Plan(depth, top_k, top_k, nodes) for depth, nodes in sizes))


def holds(plan: Plan, smaller: Plan) -> bool:
    """Returns whether a tree of one plan holds that of another."""
    return smaller.depth <= plan.depth and smaller.max_nodes <= plan.max_nodes


@dataclass
class BucketKnowledge:
    """Measurements of one pair of models in captured rounds: what plans give and what they cost. They outlive calls,
    and are read and written under the lock.

    `in_chain`: by depth, how often the likeliest child of an accepted node is accepted; `in_tree`: the tokens that a
    round of each tree gives; both a round, without seconds. `verify`: seconds by nodes; `draft`: seconds by levels;
    `trials`: plans that are drafted to learn what they cost, first of all."""

    in_chain: list[Rate] = field(default_factory=lambda: [Rate(memory=MEMORY) for _ in range(DEEPEST)])
    in_tree: dict[Plan, Rate] = field(default_factory=dict)
    verify: CostModel = field(default_factory=CostModel)
    draft: dict[str, CostModel] = field(default_factory=lambda: {kind: CostModel() for kind in (PLAIN, CHAINS, TREES)})
    trials: list[Plan] | None = None
    rounds: int = 0
    due: int = FIRST_PAUSE  # the round before which the largest plan is drafted again
    pause: int = FIRST_PAUSE
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tokens(self, plan: Plan) -> float:
        """The tokens that a round of a plan is expected to give, of each sequence."""
        total = 1.0
        chance = 1.0
        likely = UNSEEN
        for rate in self.in_chain[: plan.depth]:
            likely = rate.per_round if rate.rounds else likely
            chance *= likely
            total += chance
        # a tree holds the chain, and smaller trees
        held = [rate.per_round for tree, rate in self.in_tree.items() if holds(plan, tree)] if plan.top_k > 1 else []
        return max(total, *held) if held else total

    def seconds(self, plan: Plan) -> float:
        """The seconds that a round of a plan is expected to take."""
        nodes = 1 + (plan.depth if plan.top_k == 1 else plan.max_nodes - 1)
        of_kind = self.draft[plan.kind].estimate((plan.depth,))[0]
        return self.verify.estimate((nodes,))[0] + of_kind

    def rate(self, plan: Plan) -> float:
        """Tokens a second and sequence; 0 before anything was timed."""
        seconds = self.seconds(plan)
        return self.tokens(plan) / seconds if seconds else 0.0


class BucketPlanner(Planner):
    """Chooses the plan of every round of one call among `plans`, the largest last."""

    def __init__(self, known: BucketKnowledge, plans: Sequence[Plan]):
        super().__init__()
        self.known = known
        self.plans = plans
        self.plan_of_round = NO_DRAFTS

    def plan(self, max_depth: int, max_nodes: int, going: list[int], num_unread: int) -> Plan:
        """The plan of the next round; none is cut to `max_depth` and `max_nodes`, but for 0: no drafts."""
        with self.known.lock:
            self.plan_of_round = self._next() if max_depth > 0 else NO_DRAFTS
        return self.plan_of_round

    def _next(self) -> Plan:
        known = self.known
        largest = self.plans[-1]
        if known.trials is None:
            known.trials = [plan for plan in (largest, self.plans[1], NO_DRAFTS) for _ in range(ROUNDS_OF_A_TRIAL)]
        known.rounds += 1
        while known.trials:
            trial = known.trials.pop(0)
            if trial in self.plans:  # those of an earlier call may have been others
                return trial
        best = max(self.plans, key=known.rate)
        if known.rounds >= known.due and best != largest:
            known.pause = min(GROWTH * known.pause, LONGEST_PAUSE) if best == NO_DRAFTS else FIRST_PAUSE
            known.due = known.rounds + known.pause
            return largest
        return best

    def observe(self, num_nodes: int, accepted: Accepted, seconds: Mapping[str, float]) -> None:
        """Learns from a round that is over."""
        known, plan = self.known, self.plan_of_round
        self.choices[plan.name] += 1
        with known.lock:
            known.verify.add(num_nodes, seconds["verify"])
            known.draft[plan.kind].add(plan.depth, seconds["draft"])
            for b, count in enumerate(accepted.num_drafts):
                if count is not None and not accepted.finished[b] and accepted.drafts.ids[b]:
                    self._learn(plan, accepted.drafts, b, accepted.paths[b])

    def _learn(self, plan: Plan, drafts: HostDrafts, b: int, path: list[int]) -> None:
        """Learns from the drafts of sequence b, of which the nodes of `path` were accepted."""
        children = drafts.children[b]
        for depth, rate in enumerate(self.known.in_chain[: plan.depth] if path else ()):
            if not children[path[depth]]:  # nothing was drafted here
                break
            goes_on = depth + 1 < len(path) and path[depth + 1] == min(children[path[depth]].values())
            rate.add(float(goes_on))
            if not goes_on:
                break
        if plan.top_k == 1:
            return
        assert drafts.parents is not None
        assert drafts.log_probs is not None
        scores = [0.0]  # of each node, the root first: the log-probability of its path
        for parent, log_prob in zip(drafts.parents[b], drafts.log_probs[b], strict=True):
            scores.append(scores[parent] + log_prob)
        order = sorted(range(1, len(scores)), key=lambda node: -scores[node])
        ranks = {node: rank for rank, node in enumerate(order)}
        for smaller in self.plans:
            if smaller.top_k > 1 and holds(plan, smaller):
                kept = [ranks[node] < smaller.max_nodes - 1 for node in path[1 : smaller.depth + 1]]
                self.known.in_tree.setdefault(smaller, Rate(memory=MEMORY)).add(1.0 + [*kept, False].index(False))

    def explain(self) -> str:
        """Figures behind the choices, for people."""
        with self.known.lock:
            told = ", ".join(
                f"{plan.name}: {self.known.tokens(plan):.2f} tokens in {1000 * self.known.seconds(plan):.2f} ms"
                for plan in self.plans
            )
        return f"auto knows, of a round: {told}"
