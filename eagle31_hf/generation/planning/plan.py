"""A round's plan: how far to draft, and how wide. A chain is a tree with one child a node."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...acceptance import CHAINS, PLAIN, TREES

UNLIMITED = 2**31  # nodes


@dataclass(frozen=True)
class Selection:
    """The candidates that are verified: the best `count`, which lie in `depth` levels (None: not known); `is_chain`: in
    every sequence one in each level."""

    count: int
    depth: int | None = None
    is_chain: bool = False


@dataclass(frozen=True)
class Plan:
    """One round of drafting. `depth`: levels at most, 0 for plain decoding; `top_k`: children of a node, 1 for a chain;
    `max_width`: nodes a level may start from; `max_nodes`: of the tree, the root included; `controller`: a
    `LevelController`, which decides level by level, where the depth is not fixed; `drafts`: the chain of each sequence,
    `depth` long, where it is known without the drafter."""

    depth: int
    top_k: int = 1
    max_width: int = 1
    max_nodes: int = UNLIMITED
    controller: Any = None
    drafts: list[list[int]] | None = None

    @property
    def is_scored(self) -> bool:
        """Returns whether the probabilities of candidates are needed: to compare them, or for the controller."""
        return self.top_k > 1 or self.controller is not None

    @property
    def kind(self) -> str:
        """Returns the kind of a round by this plan."""
        return PLAIN if self.depth == 0 else CHAINS if self.top_k == 1 else TREES

    @property
    def name(self) -> str:
        """Returns what to call it, for people."""
        names = {CHAINS: f"chains {self.depth} deep", TREES: f"trees of {self.max_nodes}, {self.depth} deep"}
        return names.get(self.kind, "plain")


NO_DRAFTS = Plan(0)


class Planner:
    """Chooses the plan of every round of one call; by itself it learns nothing and has nothing to say. `choices` counts
    what it chose, by name, for people."""

    def __init__(self):
        self.choices: Counter[str] = Counter()

    def begin(self, tokens: list[list[int]]) -> None:
        """The prompts' forward gave each sequence these tokens."""

    def plan(self, max_depth: int, max_nodes: int, going: list[int], num_unread: int) -> Plan:
        """The plan of a round in which no draft may be deeper than `max_depth`, no tree larger than `max_nodes`.

        `going`: the sequences of the batch that have not ended; the drafter reads `num_unread` tokens of each first."""
        raise NotImplementedError

    def observe(self, num_nodes: int, accepted: Any, seconds: Mapping[str, float]) -> None:
        """A round is over: `num_nodes` of each sequence were verified, `accepted` is what the sampler returned, and
        `seconds` are those of its phases, `"draft"`, `"verify"`, `"accept"`."""

    def lookup_depth(self, gains: list[float]) -> int:
        """Returns how many tokens of each chain from the text to verify; 0 where a round planned here promises more.
        `gains[i]`: drafts of a sequence that are expected to be accepted where i + 1 are verified."""
        return 0

    def observe_lookup(self, num_nodes: int, seconds: Mapping[str, float]) -> None:
        """A round of such chains is over: `num_nodes` of each sequence, the root included, were verified."""

    def end(self) -> None:
        """The call is over."""

    def explain(self) -> str:
        """Figures behind the choices, for people; "" where there are none."""
        return ""
