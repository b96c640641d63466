"""A report as a page: one HTML file that needs no network."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import plots
from .document import Chart, HeatMap, Report
from .text import MARKS

CODE = re.compile("`([^`]*)`")
TEMPLATE = Path(__file__).with_name("template.html")


def page(report: Report, names: str, svg_of: Callable[[Chart | HeatMap], bytes]) -> str:
    """Returns the page; `names`: whose report it is; `svg_of`: a chart's SVG file."""
    import jinja2  # which torch brings, but not every vendor's build of it

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    picture, quoted = partial(_picture, svg_of), partial(json.dumps, ensure_ascii=False)
    shown = template.render(report=report, names=names, marks=MARKS, picture=picture, words=_words, quoted=quoted)
    return f"{shown}\n"


def _words(text: str) -> Any:
    """Returns text whose parts in backticks are marked as code."""
    from markupsafe import Markup, escape

    return Markup(CODE.sub(r"<code>\1</code>", str(escape(text))))


def _picture(svg_of: Callable[[Chart | HeatMap], bytes], chart: Chart | HeatMap, prefix: str) -> Any:
    """Returns the chart as an element that screen readers announce by its title; its figures are in the tables."""
    from markupsafe import Markup, escape

    name = escape(f"{chart.title}: {chart.y_label} by {chart.x_label}")
    drawn = plots.svg(svg_of(chart), prefix).replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
    return Markup(drawn)
