"""The drift report as a document: tables and charts of what was measured, what it means, and what to do about it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..diagnostics.attention_mass import KINDS
from ..diagnostics.drift import NUM_RECENT, Drift, drift_of
from .document import GOOD, NOTE, WARNING, Chart, Column, Finding, HeatMap, Report, Section, Series, Table
from .drift_study import FALLEN, PLAIN, Measured, context_name
from .figures import (
    EXPLAINED,
    Figure,
    Row,
    acceptance_by_depth,
    accepted_drafts,
    accepted_length,
    kept,
    mean_by_depth,
    series_of,
)
from .prompts import LENGTHENED

GROWTH = 1.25  # of the state over all depths, from which on it is said to grow
LEAST_ACCEPTED = 0.1  # share of rounds that accept a depth, below which it is not worth drafting
LEAST_GAIN = 0.05  # of a remedy, to be named
UPGRADE = "Make it EAGLE 3.1 (`eagle31 upgrade`), or train one (`eagle31 train`)."
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
        title="Attention drift",
        findings=[finding for one in drafters for finding in findings_of(one, depth)],
        sections=[section for section in sections if section.tables],
        facts=dict(facts),
        figures={one.label: _figures(one, drifts[one.label], depth) for one in drafters},
    )


def _figures(measured: Measured, drift: Drift, depth: int) -> dict[str, Any]:
    """Returns what the report says of a drafter, for programs."""
    contexts = {context_name(one.length, one.remedy): one.rows for one in measured.contexts}
    return {
        "drift": vars(drift) | {"growth": drift.growth, "masses_of": list(KINDS)},
        "acceptance": {
            condition: {
                "prompts": len(rows),
                "accepted_length": accepted_length(rows),
                "accepted_drafts": accepted_drafts(rows),
                "by_depth": acceptance_by_depth(rows, depth),
            }
            for condition, rows in {**measured.rows, **contexts}.items()
        },
    }


def _acceptance(drafters: Sequence[Measured], depth: int) -> Section:
    names = ("drafter", "accepted length", "accepted drafts", "rounds", "tokens")
    rows = list[list[Any]]()
    for one in drafters:
        sums = [sum(row[name] for row in one.plain) for name in ("rounds", "tokens")]
        rows.append([one.label, accepted_length(one.plain).shown, accepted_drafts(one.plain).shown, *sums])
    series = [series_of(one.label, acceptance_by_depth(one.plain, depth)) for one in drafters]
    chart = Chart("Acceptance by depth", "depth", "share of drafted tokens", [*range(1, depth + 1)], series)
    return Section(
        "Acceptance",
        f"{EXPLAINED} By depth: the share of drafted tokens that are accepted.",
        [Table("by drafter", [*map(Column, names)], rows), chart.table("by depth")],
        [chart],
    )


def _states(drafters: Sequence[Measured], drifts: Mapping[str, Drift]) -> Section:
    longest = max(len(drift.inputs) for drift in drifts.values()) - 1
    names = [*(f"state {i + 1}" for i in range(longest)), "fused", "depth 1", "last depth", "growth"]
    columns = [Column("drafter"), *(Column(name, ".2f") for name in names)]
    rows = list[list[Any]]()
    for label, drift in drifts.items():
        *captured, fused = drift.inputs
        unread = [None] * (longest - len(captured))
        rows.append([label, *captured, *unread, fused, drift.states[0], drift.states[-1], drift.growth])
    named = {
        "states": ("Size of the state fed forward", "root mean square"),
        "cosines": ("Cosine between that state and the fused one", "cosine"),
        "agreement": ("Agreement with the target", "share of drafted tokens"),
        "entropies": ("Entropy of the attention", "nats"),
    }
    charts = list[Chart]()
    for name, (title, unit) in named.items():
        series = [series_of(one.label, mean_by_depth(one.plain, name)) for one in drafters]
        charts.append(Chart(title, "depth", unit, [*range(1, len(series[0].y) + 1)], series))
    return Section(
        "States",
        (
            "Root mean squares of the captured states, of the fused state they become, and of the state that a step"
            " feeds to the next, means over chains of full depth. Agreement is the share of drafted tokens that the"
            " target would choose, too, after the same drafted tokens, accepted or not."
        ),
        [
            Table("sizes where a chain begins, and of its states", columns, rows),
            *(chart.table(chart.title) for chart in charts),
        ],
        charts,
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
        depths = [*range(1, len(rows) + 1)]
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
    names = ("drafter", "tokens of context", "remedy", "prompts", "accepted length", "drafts kept")
    rows = [
        [one.label, at.length, at.remedy, len(at.rows), *_beside(at.rows, at.short)]
        for one in drafters
        for at in one.contexts
    ]
    return Section(
        "Context",
        f"{LENGTHENED} Drafts kept: accepted drafts as a multiple of those on the same prompts as they are.",
        [Table("accepted by length of the context", [*map(Column, names)], rows)] if rows else [],
    )


def findings_of(measured: Measured, depth: int) -> list[Finding]:
    """Returns what is to be said of a drafter, the worst first."""
    label, drift = measured.label, drift_of(measured.plain)
    found = list[Finding]()
    length, steps = accepted_length(measured.plain).shown, f"{drift.growth:.2f}x over {len(drift.states)} steps"
    if drift.growth < GROWTH:
        found.append(Finding(GOOD, f"{label}: accepted length {length}; the state does not grow ({steps})."))
    else:
        said = f"{label}: accepted length {length}; the state grows {steps}."
        found.append(Finding(WARNING, said, "" if measured.config.norm_output else UPGRADE))
    # from which depth on does it attend to its own tokens more than to the prompt?
    prompt, made = KINDS.index("prompt"), KINDS.index("self")
    left = next((k for k, masses in enumerate(drift.masses, 1) if masses[made] > masses[prompt]), None)
    if left is not None:
        most = f"{drift.masses[-1][made]:.0%} of layer 0's attention at depth {len(drift.masses)}"
        said = f"{label}: from depth {left} on it attends to its own tokens ({most}) more than to the prompt."
        found.append(Finding(NOTE, said))
    # which depths are hardly ever accepted?
    rates = [figure.value or 0.0 for figure in acceptance_by_depth(measured.plain, depth)]
    useful = next((k for k, rate in enumerate(rates) if rate < LEAST_ACCEPTED), depth)
    if useful < depth:
        said = f"{label}: fewer than one round in {1 / LEAST_ACCEPTED:.0f} accepts depth {useful + 1} or more."
        remedy = f"Draft at most {useful} deep (`num_assistant_tokens={useful}`)." if useful else "It does not fit."
        found.append(Finding(NOTE if useful else WARNING, said, remedy))
    found += _of_context(measured)
    order = (WARNING, NOTE, GOOD)
    return sorted(found, key=lambda finding: order.index(finding.level))


def _of_context(measured: Measured) -> Iterator[Finding]:
    """Says what longer contexts cost, and which remedy gained most there."""
    if not measured.contexts:
        return
    longest = measured.longest
    left = kept(longest.rows, longest.short)
    if left.value is None:
        return
    where = f"{measured.label}: in contexts of {longest.length} tokens"
    said = f"{where} {percent(left)} of the drafts of short ones are accepted."
    if left.value >= FALLEN:
        yield Finding(GOOD, said)
    elif left.high is None or left.high >= 1:
        yield Finding(NOTE, said, f"More prompts would say whether that is chance. {_best_remedy(measured)}")
    else:
        yield Finding(WARNING, said, _best_remedy(measured))


def percent(figure: Figure) -> str:
    """Returns a share in per cent, its interval in brackets."""
    interval = "" if figure.low is None or figure.high is None else f" [{figure.low:.0%}, {figure.high:.0%}]"
    return f"{figure.value:.0%}{interval}"


def _best_remedy(measured: Measured) -> str:
    remedies = [one for one in measured.contexts if one.remedy]
    gains = {one.remedy: kept(one.rows, measured.longest.rows).value for one in remedies}
    known = {remedy: gain for remedy, gain in gains.items() if gain is not None}
    if not known:
        return "Train it on longer texts."
    best, value = max(known.items(), key=lambda pair: pair[1])
    if value < 1 + LEAST_GAIN:
        return "Train it on longer texts; neither windows nor slower rope helped here."
    return f"Train it on longer texts, or set a {best}: {value - 1:+.0%} here."
