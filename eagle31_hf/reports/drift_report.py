"""The drift report as a document: tables and charts of what was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..diagnostics.attention_mass import KINDS
from ..diagnostics.drift import NUM_RECENT, Drift, drift_of
from .document import Chart, Column, HeatMap, Report, Section, Series, Table
from .drift import PLAIN, Measured
from .figures import Row, acceptance_by_depth, accepted_drafts, accepted_length, kept, mean_by_depth, series_of
from .findings import findings_of
from .study import LENGTHENED

TITLE = "Attention drift"
MASSES = {
    "sink": "the sink",
    "prompt": "the other keys of the prompt",
    "own": "the key at which the chain begins",
    "self": "keys that the chain made",
}


def drift_report(drafters: Sequence[Measured], depth: int, facts: Mapping[str, Any]) -> Report:
    """Makes the report of what was measured of one or several drafters, chains of `depth`."""
    drifts = {one.label: drift_of(one.plain) for one in drafters}
    sections = [
        _acceptance(drafters, depth),
        _states(drafters, drifts),
        _attention(drifts),
        _interventions(drafters),
        _contexts(drafters),
    ]
    return Report(
        kind="drift",
        title=TITLE,
        findings=[finding for one in drafters for finding in findings_of(one, depth)],
        sections=[section for section in sections if section.tables],
        facts=dict(facts),
        figures={one.label: _figures(one, drifts[one.label], depth) for one in drafters},
    )


def _figures(measured: Measured, drift: Drift, depth: int) -> dict[str, Any]:
    """Returns what the report says of a drafter as plain values."""
    contexts = {f"{length} tokens": rows for length, rows in measured.contexts.items()}
    remedies = {f"{max(measured.contexts)} tokens, {name}": rows for name, rows in measured.remedies.items()}
    return {
        "drift": vars(drift) | {"growth": drift.growth, "masses_of": list(KINDS)},
        "acceptance": {
            condition: {
                "prompts": len(rows),
                "accepted_length": accepted_length(rows).as_dict(),
                "accepted_drafts": accepted_drafts(rows).as_dict(),
                "by_depth": [figure.as_dict() for figure in acceptance_by_depth(rows, depth)],
            }
            for condition, rows in {**measured.rows, **contexts, **remedies}.items()
        },
    }


def _depths(count: int) -> list[float]:
    return [float(k) for k in range(1, count + 1)]


def _by_depth(title: str, series: Sequence[Series], number: str = ".2f", note: str = "") -> Table:
    """Makes a table with a line for each depth and a column for each drafter."""
    rows = [[k + 1, *(one.y[k] for one in series)] for k in range(len(series[0].y))]
    return Table(title, [Column("depth"), *(Column(one.label, number) for one in series)], rows, note)


def _acceptance(drafters: Sequence[Measured], depth: int) -> Section:
    columns = [
        Column("drafter"),
        Column("accepted length"),
        Column("accepted drafts"),
        Column("rounds"),
        Column("tokens"),
    ]
    rows = [
        [
            one.label,
            accepted_length(one.plain).shown,
            accepted_drafts(one.plain).shown,
            sum(row["rounds"] for row in one.plain),
            sum(row["tokens"] for row in one.plain),
        ]
        for one in drafters
    ]
    series = [series_of(one.label, acceptance_by_depth(one.plain, depth)) for one in drafters]
    return Section(
        "Acceptance",
        (
            "Accepted length is the tokens that a forward of the target gives, the bonus token included; accepted"
            " drafts are those without it. In brackets and as bands: 95% intervals by bootstrap over prompts. By depth:"
            " the share of drafted tokens that are accepted."
        ),
        [Table("by drafter", columns, rows), _by_depth("by depth", series)],
        [Chart("Acceptance by depth", "depth", "share of drafted tokens", _depths(depth), series)],
    )


def _states(drafters: Sequence[Measured], drifts: Mapping[str, Drift]) -> Section:
    longest = max(len(drift.inputs) for drift in drifts.values()) - 1
    columns = [Column("drafter"), *(Column(f"state {i + 1}", ".2f") for i in range(longest)), Column("fused", ".2f")]
    columns += [Column("depth 1", ".2f"), Column("last depth", ".2f"), Column("growth", ".2f")]
    inputs = [
        [
            label,
            *(drift.inputs[i] if i < len(drift.inputs) - 1 else None for i in range(longest)),
            drift.inputs[-1],
            drift.states[0],
            drift.states[-1],
            drift.growth,
        ]
        for label, drift in drifts.items()
    ]
    named = {
        "states": ("Size of the state fed forward", "root mean square"),
        "cosines": ("Cosine between that state and the fused one", "cosine"),
        "agreement": ("Agreement with the target", "share of drafted tokens"),
        "entropies": ("Entropy of the attention", "nats"),
    }
    series = {name: [series_of(one.label, mean_by_depth(one.plain, name)) for one in drafters] for name in named}
    depths = _depths(len(series["states"][0].y))
    return Section(
        "States",
        (
            "Root mean squares of the captured states, of the fused state they become, and of the state that a step"
            " feeds to the next, means over chains of full depth. Agreement is the share of drafted tokens that the"
            " target would choose, too, after the same drafted tokens, accepted or not."
        ),
        [
            Table("sizes where a chain begins, and of its states", columns, inputs),
            *(_by_depth(title, series[name]) for name, (title, _) in named.items()),
        ],
        [Chart(title, "depth", unit, depths, series[name]) for name, (title, unit) in named.items()],
    )


def _attention(drifts: Mapping[str, Drift]) -> Section:
    tables = list[Table]()
    charts = list[Chart]()
    for label, drift in drifts.items():
        by_kind = list(zip(*drift.masses, strict=True))
        series = [Series(MASSES[kind], list(values)) for kind, values in zip(KINDS, by_kind, strict=True)]
        note = f"The sink is the text's key {drift.sink}, counted from 0."
        rows = [[k, *masses] for k, masses in enumerate(drift.masses, 1)]
        columns = [Column("depth"), *(Column(kind, ".3f") for kind in KINDS)]
        tables.append(Table(f"{label}: attention by depth", columns, rows, note))
        depths = _depths(len(rows))
        charts.append(
            Chart(f"{label}: attention by depth", "depth", "share", depths, series, is_stacked=True, note=note)
        )
    kinds = "; ".join(f"{kind}: {what}" for kind, what in MASSES.items())
    return Section(
        "Attention",
        f"Where layer 0 looks, averaged over heads and chains of full depth. {kinds[0].upper()}{kinds[1:]}.",
        tables,
        charts,
        [_heat_map(label, drift) for label, drift in drifts.items()],
    )


def _heat_map(label: str, drift: Drift) -> HeatMap:
    depth = len(drift.states)
    columns = ["sink", "earlier", *(f"-{NUM_RECENT - i}" for i in range(NUM_RECENT)), "own"]
    columns += [f"d{k}" for k in range(1, depth + 1)]
    unseen = len(columns) - depth
    values: list[list[float | None]] = [
        [value if key < unseen + k else None for key, value in enumerate(row)] for k, row in enumerate(drift.attention)
    ]
    return HeatMap(
        f"{label}: attention key by key",
        "key",
        "depth",
        columns,
        [str(k) for k in range(1, depth + 1)],
        values,
        f"-{NUM_RECENT} to -1: the keys before the chain; earlier: the rest of the prompt; d1, d2: the chain's own.",
    )


def _interventions(drafters: Sequence[Measured]) -> Section:
    conditions = [name for name in drafters[0].rows if name != PLAIN]
    columns = [Column("what is done")]
    columns += [Column(f"{one.label}: {what}") for one in drafters for what in ("accepted length", "drafts kept")]
    rows = [[name, *(cell for one in drafters for cell in _beside(one.rows[name], one.plain))] for name in conditions]
    return Section(
        "Interventions",
        (
            "What the drafter depends on. Noise is Gaussian, as large as the given multiple of the root mean square of"
            " what it is added to, in what layer 0 reads at every depth and in the prompt. Drafts kept: accepted drafts"
            " as a multiple of those without."
        ),
        [Table("accepted with interventions", columns, rows)] if conditions else [],
    )


def _beside(rows: Sequence[Row], before: Sequence[Row]) -> list[str]:
    return [accepted_length(rows).shown, kept(rows, before).shown]


def _contexts(drafters: Sequence[Measured]) -> Section:
    columns = [
        Column("drafter"), Column("tokens of context"), Column("remedy"), Column("prompts"),
        Column("accepted length"), Column("drafts kept"),
    ]  # fmt: skip
    rows = list[list[Any]]()
    for one in drafters:
        for length, found in one.contexts.items():
            rows.append([one.label, length, "", len(found), *_beside(found, one.short[length])])
        for name, found in one.remedies.items():
            length = max(one.contexts)
            rows.append([one.label, length, name, len(found), *_beside(found, one.short[length])])
    return Section(
        "Context",
        f"{LENGTHENED} Drafts kept: accepted drafts as a multiple of those on the same prompts as they are.",
        [Table("accepted by length of the context", columns, rows)] if rows else [],
    )
