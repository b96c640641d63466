"""The acceptance report as a document: tables, charts and findings; and a report beside an earlier one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench import Shape
from ..checkpoints.knobs import AUTO
from .acceptance_study import (
    CONCURRENCY,
    CONTEXT,
    PERTURBED,
    SERVED,
    TARGET_ALONE,
    TEMPERATURE,
    TURN,
    Condition,
    Settings,
    Who,
    named,
)
from .document import GOOD, NOTE, SCHEMA, WARNING, Chart, Column, Finding, Generation, Report, Section, Table
from .figures import (
    EXPLAINED,
    Figure,
    Row,
    acceptance_by_depth,
    accepted_drafts,
    accepted_length,
    kept,
    series_of,
    speedup,
    tokens_per_second,
)
from .prompts import LENGTHENED

EXPECTED = "the report.json of `eagle31 bench acceptance`"
ROBUST = 0.9  # share of accepted drafts that a perturbation must leave
TOKENS = (
    "The first prompt's text. Accepted drafts are underlined; the token that the target adds to each round, the bonus"
    " token, is in a box. Point at a round, or go to it by the tab key, to see all that was drafted in it."
)


def acceptance_report(
    found: Mapping[str, Condition],
    generations: Sequence[Generation],
    settings: Settings,
    labels: Sequence[str],
    facts: Mapping[str, Any],
) -> Report:
    """Makes the report of what was measured, by condition, of drafters by their `labels`."""
    sections = [
        _speed(found[SERVED], settings, labels),
        _positions(found[SERVED], settings.reference, labels),
        *_conditions(found, settings.reference.name, labels),
        Section("Token by token", TOKENS, generations=list(generations)),
    ]
    return Report(
        kind="acceptance",
        title="Acceptance and speed",
        findings=[finding for label in labels for finding in findings_of(found, settings, label)],
        sections=[section for section in sections if section.tables or section.generations],
        facts=dict(facts),
        figures={label: _figures(found, label) for label in labels},
    )


def _figures(found: Mapping[str, Condition], label: str) -> dict[str, Any]:
    """Returns what was measured of a drafter by condition and way of drafting."""
    return {
        name: {way: _figures_of(rows, condition.alone) for (who, way), rows in condition.rows.items() if who == label}
        for name, condition in found.items()
    }


def _figures_of(rows: Sequence[Row], alone: Sequence[Row] | None) -> dict[str, Any]:
    """`by_prompt`: accepted drafts and rounds, by which two reports of the same prompts can be compared."""
    return {
        "accepted_length": accepted_length(rows),
        "accepted_drafts": accepted_drafts(rows),
        "tokens_per_second": tokens_per_second(rows),
        "prompts": len(rows),
        "speedup": speedup(rows, alone) if alone else None,
        "same_text": same_texts(rows, alone) if alone else None,
        "by_prompt": [[sum(row["accepted"]), row["rounds"]] for row in rows],
    }


def same_texts(rows: Sequence[Row], alone: Sequence[Row]) -> int:
    """Returns how many texts are those of the target alone."""
    return sum(row["text"] == other["text"] for row, other in zip(rows, alone, strict=True))


def _speed(served: Condition, settings: Settings, labels: Sequence[str]) -> Section:
    by_who, alone = served.rows, served.alone or []
    names = ("drafter", "drafts", "tokens/s", "speed-up", "accepted length", "accepted drafts", "same text")
    lines = list[list[Any]]()
    for (who, way), found in by_who.items():
        is_alone, is_drafted = (who, way) == TARGET_ALONE, who in labels
        counted = (accepted_length(found).shown, accepted_drafts(found).shown) if is_drafted else ("", "")
        gain = "1" if is_alone else speedup(found, alone).shown
        same = "" if is_alone else f"{same_texts(found, alone)} of {len(found)}"
        lines.append([who, way, tokens_per_second(found).shown, gain, *(("1", "0") if is_alone else counted), same])
    chains = [way for way in settings.ways if way.top_k == 1 and not way.is_auto]
    chains.sort(key=lambda way: way.depth)
    depths = [way.depth for way in chains]
    faster = [series_of(label, [speedup(by_who[label, way.name], alone) for way in chains]) for label in labels]
    longer = [series_of(label, [accepted_length(by_who[label, way.name]) for way in chains]) for label in labels]
    charts = [
        Chart("Speed-up by depth of chains", "tokens drafted a round", "speed-up", depths, faster),
        Chart("Accepted length by depth of chains", "tokens drafted a round", "tokens", depths, longer),
    ]
    return Section(
        "Speed",
        f"{EXPLAINED} Speed-up is over the target alone, prompt by prompt in the same run.",
        [Table("by way of drafting", [*map(Column, names)], lines)],
        charts if len(depths) > 1 else [],
    )


def _positions(served: Condition, way: Shape, labels: Sequence[str]) -> Section:
    series = [series_of(label, acceptance_by_depth(served.rows[label, way.name], way.depth)) for label in labels]
    positions = [*range(1, way.depth + 1)]
    chart = Chart("Acceptance by position", "position", "share", positions, series)
    text = f"Of the tokens drafted at a position, the share that is accepted, of {named(way.name)}."
    return Section(chart.title, text, [chart.table("by position")], [chart])


PARTS = {
    TURN: (
        "Second turn",
        "Chats in which the user asks again. The first answer is the target's own; it is part of the prompt.",
    ),
    PERTURBED: ("Perturbed prompts", "The same prompts as they should not be."),
    CONTEXT: ("Context", LENGTHENED),
    TEMPERATURE: ("Temperature", "Sampled, with a seed for each prompt."),
    CONCURRENCY: (
        "Concurrency",
        "Prompts in one batch, each of which advances at its own pace; those that fill no batch are left out.",
    ),
}


def _conditions(found: Mapping[str, Condition], way: str, labels: Sequence[str]) -> Iterator[Section]:
    for kind, (title, text) in PARTS.items():
        of_kind = [condition for condition in found.values() if condition.kind == kind]
        is_timed = any(condition.alone for condition in of_kind)
        names = ("condition", "drafter", "prompts", "accepted length", "speed-up" if is_timed else "drafts kept")
        lines = list[list[Any]]()
        for condition in of_kind:
            count = sum(map(len, condition.batches.values()))
            for label in labels:
                rows, alone = condition.rows[label, way], condition.alone
                last = speedup(rows, alone) if alone else _kept(found, condition.name, (label, way))
                lines.append([condition.name, label, count, accepted_length(rows).shown, last.shown])
        tables = [Table("by condition", [*map(Column, names)], lines)] if lines else []
        yield Section(title, f"{text} Drafted as {named(way)}.", tables)


def _kept(found: Mapping[str, Condition], name: str, who: Who) -> Figure:
    """Returns accepted drafts as a multiple of those on the same prompts as they are served."""
    served = found[SERVED].rows[who]
    return kept(found[name].rows[who], [served[number] for number in found[name].batches])


def findings_of(found: Mapping[str, Condition], settings: Settings, label: str) -> list[Finding]:
    """Returns what a drafter gains, where its text differs, and what it does not bear."""
    served = found[SERVED]
    alone = served.alone or []
    by_way = {way: rows for (who, way), rows in served.rows.items() if who == label}
    findings = [_gain(label, {way: speedup(rows, alone) for way, rows in by_way.items()})]
    others = {way: len(rows) - same_texts(rows, alone) for way, rows in by_way.items()}
    if any(others.values()):
        worst = max(others, key=lambda way: others[way])
        said = f"{label}: up to {others[worst]} of {len(alone)} texts are not the target's own, with {named(worst)}."
        why = "In half precision close ties may fall either way; in fp32 (`--dtype float32`) they must not."
        findings.append(Finding(NOTE, said, why))
    for name in [name for name, condition in found.items() if condition.kind == PERTURBED]:
        left = _kept(found, name, (label, settings.reference.name))
        if left.high is not None and left.high < ROBUST:
            said = f"{label}: {name}: {left.shown} of the drafts are still accepted."
            remedy = "Render prompts as it was trained, or train with `--template-augmentation`."
            findings.append(Finding(WARNING, said, remedy))
    return findings


def _gain(label: str, gains: Mapping[str, Figure]) -> Finding:
    """Says which way of drafting is fastest, and whether it gains anything."""
    best = max(gains, key=lambda way: gains[way].value or 0.0)
    gain = gains[best]
    said = f"{label}: fastest is {named(best)}, {gain.shown} times as fast as the target alone."
    if (gain.low if gain.low is not None else gain.value or 0.0) > 1:
        return Finding(GOOD, said)
    if (gain.high if gain.high is not None else gain.value or 0.0) > 1:
        return Finding(NOTE, said, "More prompts would say whether that is chance.")
    return Finding(WARNING, said, "It gains nothing here: draft with a better drafter, or not at all.")


def read_earlier(path: Path) -> dict[str, Any]:
    """Returns an earlier acceptance report. Raises ValueError for any other file."""
    try:
        report = json.loads(path.read_bytes())
        found = report.get("schema"), report.get("kind")
    except (ValueError, RecursionError, AttributeError):
        raise ValueError(f"{path}: is no JSON object; expected {EXPECTED}.") from None
    if found != (SCHEMA, "acceptance"):
        said = f"{path}: has schema {found[0]!r} and kind {found[1]!r}"
        raise ValueError(f"{said}; expected {SCHEMA!r} and 'acceptance', {EXPECTED}.")
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
