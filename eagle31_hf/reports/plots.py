"""Charts of a report as pictures, by matplotlib: SVG for the page, PNG for elsewhere.

Colours are Okabe and Ito's, which the colour-blind tell apart; lines differ in marks, parts of a whole in hatching, so
that both can be read in grey, too.
"""

import io
import math
import re
from typing import Any

import numpy as np

from ..printable import printable
from .document import Chart, HeatMap

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
MARKERS = "osD^vPX"
HATCHES = ("", "//", "..", "xx", "--", "++", "oo")
SIZE = (6.4, 3.6)  # inches
NUM_TICKS = 12  # labels of an axis of a heat map
NAMES = re.compile(r"""(\bid="|href="\#|url\(\#)([\w.-]+)""")  # of an SVG's parts, where they are given and used
NO_DATE: dict[str, Any] = {"Date": None}  # the same figures, the same bytes


def check_installed() -> None:
    """Raises ImportError, with what to do, where what writes reports is missing."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"writing a report needs {error.name}: pip install eagle31_hf[plots]") from None


def svg(file: bytes, prefix: str) -> str:
    """Returns an SVG file as an `<svg>` element for a page, which has every name in it once: they begin with `prefix`.

    Its words are text, in the colour of the text around it; lines have the page's colours --line-0, --line-1 and so on.
    """
    text = file.decode()
    text = text[text.index("<svg") :].replace("#000000", "currentColor")
    for i, colour in enumerate(COLOURS):
        text = text.replace(colour.lower(), f"var(--line-{i}, {colour})")
    return NAMES.sub(lambda found: f"{found[1]}{prefix}{found[2]}", text)


def files_of(chart: Chart | HeatMap, forms: tuple[str, ...] = ("svg", "png")) -> dict[str, bytes]:
    """Returns the chart as files by their forms. It is drawn and laid out once for all of them."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings: Any = {
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": chart.title,
        "font.size": 10,
        "hatch.linewidth": 0.4,
    }
    files: dict[str, bytes] = {}
    with rc_context(settings):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(facecolor="none")
        _draw_heat(figure, axes, chart) if isinstance(chart, HeatMap) else _draw_lines(axes, chart)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        for form in forms:
            out, is_svg = io.BytesIO(), form == "svg"
            facecolor, metadata = ("none", NO_DATE) if is_svg else ("white", None)
            figure.savefig(out, format=form, dpi=150, facecolor=facecolor, metadata=metadata)
            figure.set_layout_engine("none")
            files[form] = out.getvalue()
    return files


def _draw_lines(axes: Any, chart: Chart) -> None:
    if chart.is_stacked:
        labels = [_label(series.label) for series in chart.series]
        parts = np.array([series.y for series in chart.series], dtype=float)
        drawn = axes.stackplot(chart.x, *parts, labels=labels, colors=COLOURS, alpha=0.8)
        for area, hatch in zip(drawn, HATCHES, strict=False):
            area.set_hatch(hatch)
        axes.set_ylim(0, 1)
    else:
        for i, series in enumerate(chart.series):
            look: Any = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4}
            axes.plot(chart.x, np.array(series.y, dtype=float), label=_label(series.label), **look)
            if series.low is not None and series.high is not None:
                low, high = np.array([series.low, series.high], dtype=float)
                axes.fill_between(chart.x, low, high, color=look["color"], alpha=0.2, linewidth=0)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.grid(alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)  # depths, positions
    axes.margins(x=0 if chart.is_stacked else 0.02)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": 2}
    axes.legend(fontsize=8, framealpha=0, **(below if chart.is_stacked else {}))


def _draw_heat(figure: Any, axes: Any, chart: HeatMap) -> None:
    values = np.array(chart.values, dtype=float)
    image = axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, interpolation="nearest")
    for labels, place in ((chart.columns, axes.set_xticks), (chart.rows, axes.set_yticks)):
        step = math.ceil(len(labels) / NUM_TICKS)
        place(range(0, len(labels), step), labels[::step])
    axes.tick_params(axis="x", rotation=60)
    figure.colorbar(image, label="share of the attention")


def _label(text: str) -> str:
    """Returns a label as it is shown: of one that begins with an underscore matplotlib makes none, and with a control
    character an SVG is no XML."""
    return printable(f"\u200b{text}" if text.startswith("_") else text)
