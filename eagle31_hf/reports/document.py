"""A report as data: what JSON, the terminal, Markdown and the page all show.

`Report.as_dict()` is its JSON; docs/reports.md describes it.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "eagle31-report/1"
# levels of a finding
GOOD = "good"
NOTE = "note"
WARNING = "warning"
NOTHING = "-"  # shown where there is no figure


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and the format of its numbers as Python writes it (".2f")."""

    name: str
    format: str = ""

    def shown(self, value: Any) -> str:
        """Returns a cell as people read it."""
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return NOTHING
        return format(value, self.format) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class Table:
    """Rows of plain values, a value for each column."""

    title: str
    columns: list[Column]
    rows: list[list[Any]]
    note: str = ""

    def cells(self) -> list[list[str]]:
        """Returns the rows as people read them."""
        return [[column.shown(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows]


@dataclass(frozen=True)
class Series:
    """A line of a chart: a value for each x, and the ends of the interval around it, where it has one."""

    label: str
    y: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None


@dataclass(frozen=True)
class Chart:
    """Lines over x, whole numbers, or, `is_stacked`, parts of a whole on top of each other."""

    title: str
    x_label: str
    y_label: str
    x: list[int]
    series: list[Series]
    is_stacked: bool = False
    note: str = ""

    def table(self, title: str) -> Table:
        """Returns the lines as a table, a row for each x."""
        columns = [Column(self.x_label), *(Column(one.label, ".2f") for one in self.series)]
        return Table(title, columns, [[x, *(one.y[i] for one in self.series)] for i, x in enumerate(self.x)])


@dataclass(frozen=True)
class HeatMap:
    """Values (rows, columns) from 0 to 1 as shades, with a label for every row and column."""

    title: str
    x_label: str
    y_label: str
    columns: list[str]
    rows: list[str]
    values: list[list[float | None]]
    note: str = ""


@dataclass(frozen=True)
class Generation:
    """A text, token by token: the end of its prompt, and the `rounds` that gave it, as `shown_round` returns them."""

    title: str
    prompt: str
    rounds: list[dict[str, Any]]


@dataclass(frozen=True)
class Finding:
    """A sentence about a drafter, how bad it is (GOOD, NOTE, WARNING), and what to do about it."""

    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a report: a paragraph, then its tables and pictures."""

    title: str
    text: str
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    heat_maps: list[HeatMap] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """A report. `facts`: what was measured, with what, on what; `figures`: what the tables were made of, by drafter and
    condition, for programs."""

    kind: str
    title: str
    findings: list[Finding]
    sections: list[Section]
    facts: dict[str, Any]
    figures: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {"schema": SCHEMA, **asdict(self)}
