"""A report as text, and its files: report.json, report.md, charts, and report.html, one page that needs no network."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..json_file import finite
from ..markdown import inert, paragraph
from ..markdown import table as piped
from ..storage.folders import replace_json, replacing
from . import plots
from .document import GOOD, NOTE, WARNING, Chart, Finding, HeatMap, Report, Table

MARKS = {GOOD: "ok", NOTE: "note", WARNING: "warning"}
PICTURES = "pictures"
LONGEST = 120  # bytes of a picture's name
CODE = re.compile("`([^`]*)`")
TEMPLATE = Path(__file__).with_name("template.html")


def said(finding: Finding) -> str:
    """Returns a finding in a line."""
    return f"{MARKS[finding.level]}: {finding.text}" + (f" {finding.remedy}" if finding.remedy else "")


def terminal(report: Report) -> str:
    """Returns the findings, then every table with aligned columns, and its note."""
    lines = [report.title, "", *(f"- {said(finding)}" for finding in report.findings)]
    for section in report.sections:
        for table in section.tables:
            lines += ["", f"{section.title}: {table.title}", *aligned(table)]
            lines += [table.note] if table.note else []
    return "\n".join(lines)


def aligned(table: Table) -> list[str]:
    """Returns the lines of a table whose columns stand below each other."""
    rows = [[column.name for column in table.columns], *table.cells()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = list[str]()
    for first, *others in rows:  # names stand left, figures right
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def markdown(report: Report) -> str:
    """Returns the report as a part of a model card, its words as they are, whatever names they hold."""
    lines = [f"## {inert(report.title)}", "", *(f"- {inert(said(finding))}" for finding in report.findings)]
    for section in report.sections:
        lines += ["", f"### {inert(section.title)}", "", paragraph(section.text)]
        for table in section.tables:
            head = [column.name for column in table.columns]
            lines += ["", f"**{inert(table.title)}**", "", piped(head, table.cells())]
            lines += ["", paragraph(table.note)] if table.note else []
        for generation in section.generations:
            counts = ", ".join(f"{len(found['accepted'])}/{len(found['drafts'])}" for found in generation.rounds)
            lines += ["", f"**{inert(generation.title)}**: accepted of drafted, round by round: {counts}"]
    facts = (f"{name}: {value}" for name, value in report.facts.items())
    return "\n".join([*lines, "", inert(f"Measured by eagle31_hf. {'; '.join(facts)}.")]) + "\n"


def write_report(folder: Path, report: Report, names: str) -> list[Path]:
    """Writes a report into a folder, in place of one that is there; none of its files is ever half written. Returns
    their paths. Raises ImportError without matplotlib."""
    pictures = folder / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    charts: list[tuple[str, Chart | HeatMap]] = [
        (section.title, chart) for section in report.sections for chart in (*section.charts, *section.heat_maps)
    ]
    drawn = {id(chart): plots.files_of(chart) for _, chart in charts}
    replace_json(folder / "report.json", finite(report.as_dict()))
    html = page(report, names, lambda chart: drawn[id(chart)]["svg"])
    files = {folder / "report.md": markdown(report).encode(), folder / "report.html": html.encode()}
    for i, (title, chart) in enumerate(charts):
        name = re.sub(r"\W+", "-", f"{i:02} {title} {chart.title}".lower()).strip("-")
        stem = name.encode()[:LONGEST].decode(errors="ignore")
        files |= {pictures / f"{stem}.{form}": file for form, file in drawn[id(chart)].items()}
    for path, data in files.items():
        with replacing(path) as staged:
            staged.write_bytes(data)
    return [folder / "report.json", *files]


def page(report: Report, names: str, svg_of: Callable[[Chart | HeatMap], bytes]) -> str:
    """Returns the page; `names`: whose report it is; `svg_of`: a chart's SVG file."""
    import jinja2  # which torch brings, but not every vendor's build of it
    from markupsafe import Markup, escape

    def words(text: str) -> Any:
        """Returns text whose parts in backticks are marked as code."""
        return Markup(CODE.sub(r"<code>\1</code>", str(escape(text))))

    def picture(chart: Chart | HeatMap, prefix: str) -> Any:
        """Returns the chart as an element that screen readers announce by its title; its figures are in the tables."""
        name = escape(f"{chart.title}: {chart.y_label} by {chart.x_label}")
        drawn = plots.svg(svg_of(chart), prefix)
        return Markup(drawn.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1))

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    quoted = partial(json.dumps, ensure_ascii=False)
    shown = template.render(report=report, names=names, marks=MARKS, picture=picture, words=words, quoted=quoted)
    return f"{shown}\n"
