"""The drafting knobs of one call, and where their values come from."""

from dataclasses import dataclass
from numbers import Real
from typing import Any

from transformers import GenerationConfig

from ...checkpoints.knobs import AUTO, AUTO_KNOBS, KNOBS, LEAST, check_knob
from ...modeling import Eagle31DrafterModel

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
