"""A round's plan: how far to draft, and how wide, as the drafting knobs of a call say. A chain is a tree with one child
a node."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from transformers import GenerationConfig

from ...acceptance import CHAINS, PLAIN, TREES
from ...checkpoints.knobs import AUTO, AUTO_KNOBS, KNOBS, LEAST, check_knob
from ...modeling import Eagle31DrafterModel

UNLIMITED = 2**31  # nodes
TREE_NODES = 60  # of a tree whose size is not given, as in EAGLE-2
MEMORY = 16  # rounds, each of a sequence, over which a fixed way's accepted drafts are averaged
# What transformers fills in where nobody set a knob; such a value says nothing about the caller's wish.
STOCK_DEFAULTS = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}
OWN_DEFAULTS = AUTO_KNOBS | {"prompt_lookup_num_tokens": AUTO, "assistant_confidence_threshold": 0.0}
USUAL_LOOKUP = 32  # the most tokens of a chain from the text, where nobody said how many


@dataclass(frozen=True)
class DraftingSettings:
    """The way to draft. `depth` None: auto. `lookup`: the most tokens of a chain from the text. `top_k`,
    `total_tokens`, `lookup` None: the usual value for the depth."""

    depth: int | None
    threshold: float
    top_k: int | None
    total_tokens: int | None
    lookup: int | None = None

    @property
    def is_auto(self) -> bool:
        return self.depth is None

    @property
    def longest_lookup(self) -> int:
        """Returns the most tokens of a chain from the text. With a fixed depth there are none unless a number is given:
        who says how much to draft gets that."""
        if self.lookup is not None:
            return self.lookup
        return USUAL_LOOKUP if self.is_auto else 0

    @property
    def may_draw_trees(self) -> bool:
        return self.is_auto if self.top_k is None else self.top_k > 1


def resolve_settings(
    drafter: Eagle31DrafterModel, generation_config: GenerationConfig, given: dict[str, Any]
) -> DraftingSettings:
    """Returns for every knob the value `generate(...)` was given, else its generation config's, else the drafter's.

    Raises ValueError for a value that cannot work.
    """
    values: dict[str, Any] = {}
    for name in KNOBS:
        configured = getattr(generation_config, name, None)
        if isinstance(configured, Real) and configured == STOCK_DEFAULTS.get(name):  # an array would compare as one
            configured = None
        origins = {
            "": given.get(name),
            ", in the generation config": configured,
            ", in the drafter's generation_config": getattr(drafter.generation_config, name, None),
            "the defaults": OWN_DEFAULTS[name],
        }
        origin, values[name] = next((origin, value) for origin, value in origins.items() if value is not None)
        check_knob(name, values[name], origin=origin)
    numbers = {name: None if values[name] == AUTO else int(values[name]) for name in LEAST}
    return DraftingSettings(
        depth=numbers["num_assistant_tokens"],
        threshold=float(values["assistant_confidence_threshold"]),
        top_k=numbers["draft_tree_top_k"],
        total_tokens=numbers["draft_tree_total_tokens"],
        lookup=numbers["prompt_lookup_num_tokens"],
    )


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


class FixedPlanner(Planner):
    """Plans every round alike, as the caller asked: `depth` levels; with `top_k` above 1 a tree of `max_nodes` nodes,
    the root included."""

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
