"""Tables of what `search_recipe.py` has measured: accepted lengths, a line for each recipe, the targets side by side;
and the recipe beside speculators, whose rows `tests/peers/search_speculators.py` adds."""

import statistics
from collections.abc import Sequence
from typing import Any

SETS = ("as trained", "perturbed", "long")  # of prompts
OURS, SPECULATORS = ("eagle31 train", "the recipe"), "speculators"  # what is compared, and how others' ideas begin
AS_IT_COMES = f"{SPECULATORS} as it comes"
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


def times(rows: Sequence[Row], others: Sequence[Row], name: str) -> str:
    """Returns how many times as many drafts are accepted a round (the length less its bonus token), with the standard
    error of this ratio where both have several seeds."""
    ours, theirs = ([row[name] - 1 for row in each] for each in (rows, others))
    ratio = statistics.mean(ours) / statistics.mean(theirs)
    if min(len(ours), len(theirs)) < 2:
        return f"{ratio:.2f}"
    parts = [statistics.variance(values) / len(values) / statistics.mean(values) ** 2 for values in (ours, theirs)]
    return f"{ratio:.2f} ± {ratio * sum(parts) ** 0.5:.2f}"


def best_of_speculators(rows: Sequence[Row]) -> list[Row]:
    """Returns speculators' rows of one target at the rate that accepts most over all sets."""
    ideas = {row["idea"] for row in rows if row["idea"].startswith(SPECULATORS)}
    of_ideas = [[row for row in rows if row["idea"] == idea] for idea in sorted(ideas)]
    return max(of_ideas, key=lambda each: statistics.mean(row[name] for row in each for name in SETS), default=[])


def beside_speculators(rows: Sequence[Row]) -> str:
    """Returns, in Markdown, the accepted drafts of the library and of the recipe over those of speculators by its
    defaults and as it accepts most, after every number of steps that ours were trained for. Rows of a target
    are compared only where it had the same weights."""
    head = ["target", "ours", "theirs", "steps", "minutes", "seeds"]
    lines = [head + [f"{name}: times" for name in SETS]]
    lines.append(["---"] * len(lines[0]))
    for target, weights in dict.fromkeys((row["target"], row["weights"]) for row in rows):
        of_target = [row for row in rows if (row["target"], row["weights"]) == (target, weights)]
        usual = [row for row in of_target if row["idea"] == AS_IT_COMES]
        compared = [each for each in (usual, best_of_speculators(of_target)) if each]
        for idea, steps in sorted({kind_of(row) for row in of_target if row["idea"] in OURS}):
            ours = [row for row in of_target if kind_of(row) == (idea, steps)]
            for theirs in compared:
                both = (ours, theirs)
                minutes = " : ".join(f"{minutes_of(each):.1f}" for each in both)
                about = [target, idea, theirs[0]["idea"], " : ".join(str(each[0]["steps"]) for each in both), minutes]
                lines.append(
                    [*about, " : ".join(str(len(each)) for each in both), *(times(*both, name) for name in SETS)]
                )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def minutes_of(rows: Sequence[Row]) -> float:
    """Returns the minutes of a core that a training took on the mean."""
    return statistics.mean(row["seconds"] * row["steps"] / 60 for row in rows)
