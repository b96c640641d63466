"""A report's files: report.json, report.md, report.html and its charts."""

import os
import re
import secrets
from pathlib import Path

from ..storage.folders import replace_json
from . import plots
from .document import Chart, HeatMap, Report
from .page import page
from .text import markdown

PICTURES = "pictures"


def write_report(folder: Path, report: Report, names: str) -> list[Path]:
    """Writes a report into a folder, in place of one that is there; none of its files is ever half written. Returns
    their paths. Raises ImportError without matplotlib."""
    pictures = folder / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    written = [folder / "report.json"]
    replace_json(written[0], report.as_dict())
    for name, text in (("report.md", markdown(report)), ("report.html", page(report, names))):
        written.append(_replace(folder / name, text.encode()))
    for section in report.sections:
        drawn: list[Chart | HeatMap] = [*section.charts, *section.heat_maps]
        for chart in drawn:
            stem = re.sub(r"\W+", "-", f"{section.title} {chart.title}".lower()).strip("-")
            written += [_replace(pictures / f"{stem}.{form}", plots.file_of(chart, form)) for form in ("png", "svg")]
    return written


def _replace(path: Path, data: bytes) -> Path:
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        staged.write_bytes(data)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    return path
