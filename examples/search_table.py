"""The table of accepted lengths that `search_recipe.py` has measured, and of speculators' rows, which
`tests/peers/search_speculators.py` adds: a line for each recipe, the targets side by side."""

import statistics
from collections.abc import Sequence
from typing import Any

SETS = ("as trained", "perturbed", "long")  # of prompts
Row = dict[str, Any]


def shown(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the newest weights of each target, and of the newest recipe of each idea on it."""
    weights = {row["target"]: row["weights"] for row in rows}
    recipes = {(row["target"], row["idea"]): row["recipe"] for row in rows}
    return [
        row
        for row in rows
        if (row["weights"], row["recipe"]) == (weights[row["target"]], recipes[row["target"], row["idea"]])
    ]


def cell(values: Sequence[float], digits: int = 2) -> str:
    """Returns a mean, with its standard error where there are several values."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def kept_accuracy(row: Row) -> float:
    """Returns the accuracy at the last depth over that at the first."""
    return row["accuracy"][-1] / max(1e-4, row["accuracy"][0])


def cells_of(rows: Sequence[Row]) -> list[str]:
    """Returns the cells of one recipe on one target: accepted lengths, the accuracy kept at depth 7, a step's seconds
    of a core."""
    if not rows:
        return [""] * (len(SETS) + 2)
    seconds = statistics.mean(row["seconds"] for row in rows)
    return [*(cell([row[name] for row in rows]) for name in SETS), cell([*map(kept_accuracy, rows)]), f"{seconds:.2f}"]


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a table in Markdown, recipes in the order in which they come."""
    targets, kinds = sorted({row["target"] for row in rows}), list(dict.fromkeys(map(kind_of, rows)))
    head = ["trained with", "steps"] + [
        f"{target}: {name}" for target in targets for name in (*SETS, "acc. 7 / acc. 1", "s/step")
    ]
    lines = [head, ["---"] * len(head)]
    for kind in kinds:
        of_kind = [row for row in rows if kind_of(row) == kind]
        cells = [cells_of([row for row in of_kind if row["target"] == target]) for target in targets]
        lines.append([kind[0], f"{kind[1]:,}", *(cell for each in cells for cell in each)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kind_of(row: Row) -> tuple[str, int]:
    """Returns what the runs of a line have in common."""
    return row["idea"], row["steps"]
