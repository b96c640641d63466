"""A report as text: for the terminal, and as Markdown for a model card."""

from ..markdown import inert, paragraph
from ..markdown import table as piped
from .document import GOOD, NOTE, WARNING, Finding, Report, Table

MARKS = {GOOD: "ok", NOTE: "note", WARNING: "warning"}


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
