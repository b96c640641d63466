"""Draws docs/speedup.svg, README's picture of the speed-up, from the figures of the demo (docs/figures/demo.json).

pip install eagle31_hf[plots]
python docs/speedup.py [picture.svg]
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

DOCS = Path(__file__).parent
COLOURS = {"EAGLE 3.1": "#1b6ca8", "EAGLE 3": "#a9c6dd"}
BAR = 0.38  # its height, where rows are 1 apart
STYLE = {
    "svg.fonttype": "none",  # letters stay letters: the file is small, and its words can be compared
    "svg.hashsalt": "eagle31_hf",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(figures: dict, path: Path) -> None:
    """Writes the picture: for every way to draft a bar a drafter, as long as its speed beside the target's alone."""
    ways = list(dict.fromkeys(row["drafting"] for row in figures["rows"]))
    with pyplot.rc_context(STYLE):
        picture, axes = pyplot.subplots(figsize=(6.4, 2.9), layout="constrained")
        for i, (drafter, colour) in enumerate(COLOURS.items()):
            speeds = {row["drafting"]: row["speedup"] for row in figures["rows"] if row["drafter"] == drafter}
            places = [at + (i - 0.5) * BAR for at in range(len(ways))]
            bars = axes.barh(places, [speeds[way] for way in ways], BAR, color=colour, label=drafter)
            axes.bar_label(bars, fmt="%.2fx", padding=3)
        axes.axvline(1, color="#444444", linewidth=1)
        alone = f"the target alone, {figures['target_tokens_per_second']:.0f} tokens/s"
        axes.annotate(alone, (1, 1.02), xycoords=("data", "axes fraction"), ha="right")
        axes.set_yticks(range(len(ways)), ways)
        axes.invert_yaxis()
        axes.set_xlim(0, 2.5)
        axes.set_xlabel("tokens a second, beside the target alone (demo pair, greedy, 2 CPU cores)")
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
        picture.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(picture)


if __name__ == "__main__":
    destination = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "speedup.svg"
    draw(json.loads((DOCS / "figures" / "demo.json").read_text(encoding="utf-8")), destination)
