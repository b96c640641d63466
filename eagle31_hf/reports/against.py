"""A report beside an earlier one: what changed, and what is noise."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.knobs import AUTO
from .document import SCHEMA, Column, Section, Table
from .figures import Figure, kept

EXPECTED = "the report.json of `eagle31 bench acceptance`"


def read_earlier(path: Path) -> dict[str, Any]:
    """Returns an earlier acceptance report. Raises ValueError for any other file."""
    try:
        report = json.loads(path.read_bytes())
        found = report.get("schema"), report.get("kind")
    except (ValueError, RecursionError, AttributeError):
        raise ValueError(f"{path}: is no JSON object; expected {EXPECTED}.") from None
    if found != (SCHEMA, "acceptance"):
        raise ValueError(
            f"{path}: has schema {found[0]!r} and kind {found[1]!r}; expected {SCHEMA!r} and 'acceptance', {EXPECTED}."
        )
    try:
        against(report, report["figures"], report["facts"], path.name)  # it is compared with itself
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path}: is damaged ({type(error).__name__}: {error}); write it anew.") from None
    return report


def against(earlier: Mapping[str, Any], figures: Mapping[str, Any], facts: Mapping[str, Any], name: str) -> Section:
    """Compares accepted drafts by drafter, condition and way of drafting, those that both reports have; where each has
    one drafter, these are compared whatever their names. Takes them as plain values, those of JSON."""
    is_same = earlier["facts"].get("prompts") == facts["prompts"]
    then = earlier["figures"]
    if len(then) == len(figures) == 1:
        then = {next(iter(figures)): next(iter(then.values()))}
    columns = [Column(title) for title in ("drafter", "condition", "drafts", "then", "now", "times", "")]
    lines = list[list[str]]()
    for place, *pair in _pairs(then, figures):
        shown = [Figure(**one["accepted_drafts"]).shown for one in pair]
        # as rows, of a depth only
        before, now = ([{"accepted": [count], "rounds": rounds} for count, rounds in one["by_prompt"]] for one in pair)
        ratio = kept(now, before, is_same and len(now) == len(before))
        lines.append([*place, *shown, ratio.shown, verdict(ratio)])
    same, other = "Both are of the same prompts, which are compared one by one.", "Prompts differ: intervals are wider."
    text = f"Accepted drafts a round, then and now. {same if is_same else other}"
    note = "" if lines else "No drafter, condition and way of drafting is in both reports."
    return Section(f"Beside {name}", text, [Table("accepted drafts", columns, lines, note)])


def _pairs(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[list[str], Any, Any]]:
    """Yields drafter, condition and way of drafting of what is in both, and the figures of each."""
    for label in (label for label in now if label in then):
        for condition in (condition for condition in now[label] if condition in then[label]):
            # what auto drafts follows from measured time: it is never twice the same
            for way in (way for way in now[label][condition] if way in then[label][condition] and way != AUTO):
                yield [label, condition, way], then[label][condition][way], now[label][condition][way]


def verdict(ratio: Figure) -> str:
    """Says whether a ratio is more than noise."""
    if ratio.value is None:
        return "nothing to compare"
    if ratio.low is None or ratio.high is None:
        return "too few prompts"
    if ratio.low == ratio.high == 1:
        return "same"
    return "better" if ratio.low > 1 else "worse" if ratio.high < 1 else "noise"
