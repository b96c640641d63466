"""The drafting knobs a native checkpoint keeps in its generation_config.json."""

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from .files import read_json

KNOBS_FILE = "generation_config.json"
MAX_TOKENS = 4096  # the most that may be drafted in one round: caches are sized by it
AUTO = "auto"
COUNTS = ("num_assistant_tokens", "draft_tree_top_k", "draft_tree_total_tokens")


def read_knobs(folder: Path) -> dict[str, Any]:
    """Returns what generation_config.json sets, by the names of `GenerationConfig`; nothing where there is no such file.

    Only numbers, words and lists of numbers are read: a drafter needs no more. Raises ValueError for a file that is damaged, for knobs
    out of range, and for what `GenerationConfig` refuses.
    """
    path = folder / KNOBS_FILE
    if not path.is_file():
        return {}
    known = {*vars(GenerationConfig()), *COUNTS}
    values = {name: value for name, value in read_json(path).items() if name in known and not name.startswith("_") and _is_plain(value)}
    for name in COUNTS:
        value = values.get(name)
        if value not in (None, AUTO) and (type(value) is not int or not 1 <= value <= MAX_TOKENS):
            raise ValueError(f"{path}: {name} is {str(value)[:80]!r}; expected 'auto' or an integer from 1 to {MAX_TOKENS}.")
    threshold = values.get("assistant_confidence_threshold")
    if threshold is not None and (type(threshold) not in (int, float) or not 0 <= threshold < 1):
        raise ValueError(f"{path}: assistant_confidence_threshold is {str(threshold)[:80]!r}; expected 0 to less than 1.")
    try:
        GenerationConfig.from_dict(dict(values))
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path}: {str(error)[:500]}") from None
    return values


def _is_plain(value: Any) -> bool:
    is_list = isinstance(value, list) and all(type(item) is int for item in value)
    return value is None or is_list or isinstance(value, bool | int | float | str)
