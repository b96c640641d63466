"""The drafting knobs of a generation config: their ranges, and those that a native checkpoint keeps."""

from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..json_file import read_json

KNOBS_FILE = "generation_config.json"
AUTO = "auto"
MAX_TOKENS = 4096  # the most that may be drafted in one round: caches are sized by it
# The knobs that count tokens, and the least each may be.
LEAST = {"num_assistant_tokens": 1, "draft_tree_top_k": 1, "draft_tree_total_tokens": 2, "prompt_lookup_num_tokens": 0}
# Every round chooses for itself how far to draft.
SHAPE = ("num_assistant_tokens", "draft_tree_top_k", "draft_tree_total_tokens")
AUTO_KNOBS: dict[str, Any] = dict.fromkeys(SHAPE, AUTO)
KNOBS = (*LEAST, "assistant_confidence_threshold")


def check_knob(name: str, value: Any, begin: str = "", origin: str = "") -> None:
    """Raises ValueError for a value of the wrong type or range, as NaN, or True for a number.

    The message begins with `begin`; `origin` says where the value comes from.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if name not in LEAST:
        holds, expected = is_number and 0.0 <= value < 1.0, "0 (never stop a chain early) to less than 1"
    else:
        is_auto = isinstance(value, str) and value == AUTO
        holds = is_auto or (is_number and isinstance(value, Integral) and LEAST[name] <= value <= MAX_TOKENS)
        hint = " (to decode without drafts, drop assistant_model)" if name == "num_assistant_tokens" else ""
        expected = f"'auto' or an integer from {LEAST[name]} to {MAX_TOKENS}{hint}"
    if not holds:
        raise ValueError(f"{begin}{name} is {repr(value)[:80]}{origin}; expected {expected}.")


def check_knobs(generation_config: Any) -> None:
    """Raises ValueError for a drafter's generation config with a knob that is refused where the drafter is loaded."""
    for name in KNOBS:
        value = getattr(generation_config, name, None)
        if value is not None:
            check_knob(name, value, origin=", in the drafter's generation_config")


def read_knobs(folder: Path) -> dict[str, Any]:
    """Returns the drafting knobs of a folder's generation_config.json, the only values of it that are read.

    Without such a file there are none. Raises ValueError for a damaged file, and for knobs out of range.
    """
    path = folder / KNOBS_FILE
    values = read_json(path) if path.is_file() else {}
    knobs = {name: values[name] for name in KNOBS if values.get(name) is not None}
    for name, value in knobs.items():
        check_knob(name, value, f"{path}: ")
    return knobs
