"""A planner that plans every round alike: a chain or a tree of the size that the caller asked for."""

from collections.abc import Mapping
from typing import Any

from .plan import NO_DRAFTS, Plan, Planner
from .settings import DraftingSettings

MEMORY = 16  # rounds, each of a sequence
TREE_NODES = 60  # of a tree whose size is not given, as in EAGLE-2


class FixedPlanner(Planner):
    """Plans `depth` levels every round; with `top_k` above 1 a tree of `max_nodes` nodes, the root included."""

    def __init__(self, depth: int, top_k: int = 1, max_nodes: int = TREE_NODES):
        super().__init__()
        self.depth = depth
        self.top_k = top_k
        self.max_nodes = max_nodes
        self.mean_accepted = depth / 2  # drafts of a sequence and round; a guess before the first

    @classmethod
    def of(cls, settings: DraftingSettings, draws_trees: bool) -> "FixedPlanner":
        """The planner for settings with a fixed depth."""
        assert settings.depth is not None
        top_k = (settings.top_k or 1) if draws_trees else 1
        return cls(settings.depth, top_k, settings.total_tokens or TREE_NODES)

    def plan(self, max_depth: int, max_nodes: int, going: list[int], num_unread: int) -> Plan:
        """The plan of a round in which no draft may be deeper than `max_depth`, no tree larger than `max_nodes`."""
        depth = min(self.depth, max_depth)
        if depth < 1:
            return NO_DRAFTS
        if self.top_k == 1:
            return Plan(depth)
        return Plan(depth, self.top_k, self.top_k, min(self.max_nodes, max_nodes))

    def observe(self, num_nodes: int, accepted: Any, seconds: Mapping[str, float]) -> None:
        """Notes how many drafts the sequences accepted."""
        for count in accepted.num_drafts:
            if count is not None:
                self.mean_accepted += (count - self.mean_accepted) / MEMORY

    def lookup_depth(self, gains: list[float]) -> int:
        """Returns the depth of all the text's drafts, where more of them are expected to be accepted than of the
        drafter's lately; else 0."""
        return len(gains) if gains[-1] > self.mean_accepted else 0
