"""A report's files: report.json, report.md, report.html and its charts."""

import re
from pathlib import Path

from ..json_file import finite
from ..storage.folders import replace_json, replacing
from . import plots
from .document import Chart, HeatMap, Report
from .page import page
from .text import markdown

PICTURES = "pictures"
LONGEST = 120  # bytes of a picture's name


def write_report(folder: Path, report: Report, names: str) -> list[Path]:
    """Writes a report into a folder, in place of one that is there; none of its files is ever half written. Returns
    their paths. Raises ImportError without matplotlib."""
    pictures = folder / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    charts: list[tuple[str, Chart | HeatMap]] = [
        (section.title, chart) for section in report.sections for chart in (*section.charts, *section.heat_maps)
    ]
    drawn = {id(chart): plots.files_of(chart) for _, chart in charts}
    written = [folder / "report.json"]
    replace_json(written[0], finite(report.as_dict()))
    html = page(report, names, lambda chart: drawn[id(chart)]["svg"])
    for name, text in (("report.md", markdown(report)), ("report.html", html)):
        written.append(_replace(folder / name, text.encode()))
    for i, (title, chart) in enumerate(charts):
        name = re.sub(r"\W+", "-", f"{i:02} {title} {chart.title}".lower()).strip("-")
        stem = name.encode()[:LONGEST].decode(errors="ignore")
        written += [_replace(pictures / f"{stem}.{form}", file) for form, file in drawn[id(chart)].items()]
    return written


def _replace(path: Path, data: bytes) -> Path:
    with replacing(path) as staged:
        staged.write_bytes(data)
    return path
