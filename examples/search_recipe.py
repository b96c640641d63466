"""Search for what makes a drafter learn faster and hold longer: one switch at a time, several seeds, equal steps.

    python examples/train_second_target.py --output work/second
    python examples/search_recipe.py run --work work --target demo --ideas "adamw 4e-3" muon --seeds 3
    python examples/search_recipe.py run --work work --target second --folder work/second
    python examples/search_recipe.py table --work work

Every run trains a new drafter, 2,048 tokens a step, on its target's own greedy answers, head frozen, and measures
the accepted length at K = 7, greedy, on prompts as trained, perturbed, and as long as four training texts. What is
done is kept in WORK, and a rerun goes on.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from search_material import ANSWER, LENGTH, LONG_PROMPT, SETS, SHAPES, Material
from search_training import EAGLE3, Recipe, measured, trained

from eagle31_hf import demo
from eagle31_hf.storage.fingerprints import digest

STEPS = 420
ADAMW = Recipe()
DEFAULTS = vars(ADAMW)
MUON = Recipe(matrix_rate=4e-2, rate=4e-3)
TOGETHER = replace(MUON, jump=LONG_PROMPT + ANSWER, all_tokens=True, head=True, autocast=True)
IDEAS = {
    # optimizer: rates, torch's adjustment of Muon's rate, decay, averages
    "adamw 1e-3": ADAMW,
    "adamw 4e-3": replace(ADAMW, rate=4e-3),
    "adamw 1e-2": replace(ADAMW, rate=1e-2),
    "muon": MUON,
    "muon 1e-2": replace(MUON, matrix_rate=1e-2),
    "muon 2e-2": replace(MUON, matrix_rate=2e-2),
    "muon 8e-2": replace(MUON, matrix_rate=8e-2),
    "muon, rms 1.5e-2": replace(MUON, adjust="match_rms_adamw", matrix_rate=1.5e-2),
    "vectors 1e-3": replace(MUON, rate=1e-3),
    "vectors 1e-2": replace(MUON, rate=1e-2),
    "momentum 0.9": replace(MUON, momentum=0.9),
    "momentum 0.98": replace(MUON, momentum=0.98),
    "decay 0": replace(MUON, weight_decay=0.0),
    "decay 0.1": replace(MUON, weight_decay=0.1),
    "no clipping": replace(MUON, clip=1e9),
    "linear": replace(MUON, schedule="linear"),
    "wsd": replace(MUON, schedule="wsd"),
    "warm-up 10": replace(MUON, warm_up=10),
    "ema 0.98": replace(MUON, ema=0.98),
    "ema 0.98, constant": replace(MUON, ema=0.98, schedule="constant"),
    "head trained": replace(MUON, head=True),
    # beginning
    "start fitted": replace(MUON, start="fitted"),
    "start same position": replace(MUON, start="same position"),
    "start last norm": replace(MUON, start="last norm"),
    # what is read
    "four states": replace(MUON, layers="four"),
    "late layers": replace(MUON, layers="late"),
    # what is minimised
    "depth 2": replace(MUON, depth=2),
    "depth 5": replace(MUON, depth=5),
    "depth 7": replace(MUON, depth=7),
    "depth 5, 0.8": replace(MUON, depth=5, depth_decay=0.8),
    "reach": replace(MUON, reach=True),
    "depth 5, reach": replace(MUON, depth=5, reach=True),
    "lk_lambda": replace(MUON, loss="lk_lambda"),
    "kl, then lk_lambda": replace(MUON, loss_after="lk_lambda"),
    "kl, then lk_alpha": replace(MUON, loss_after="lk_alpha"),
    "kl, then tv": replace(MUON, loss_after="tv"),
    "kl and ce": replace(MUON, loss="kl=0.5,ce=0.5"),
    "ce": replace(MUON, loss="ce"),
    "hint 1": replace(MUON, hint=1.0),
    "hint 0.1": replace(MUON, hint=0.1),
    # data, length, speed
    "all tokens": replace(MUON, all_tokens=True),
    "files too": replace(MUON, texts="greedy+files"),
    "sampled too": replace(MUON, texts="greedy+sampled"),
    "jump": replace(MUON, jump=LONG_PROMPT + ANSWER),
    "jump, 16 times as far": replace(MUON, jump=16 * LENGTH),
    "jump, all tokens": replace(MUON, jump=LONG_PROMPT + ANSWER, all_tokens=True),
    "window 128": replace(MUON, fields={"layer_types": ["sliding_attention"], "sliding_window": 128}),
    "autocast": replace(MUON, autocast=True),
    "parallel": replace(MUON, depth=7, parallel=True),
    "eagle3": replace(MUON, fields=EAGLE3),
    # what has held, together
    "together": TOGETHER,
    "together, answers only": replace(TOGETHER, all_tokens=False),
    "together, no jump": replace(TOGETHER, jump=0),
    "together, muon 2e-2": replace(TOGETHER, matrix_rate=2e-2),
    "together, depth 5": replace(TOGETHER, depth=5),
    "together, eagle3": replace(TOGETHER, fields=EAGLE3),
}


def rows_of(work: Path) -> list[dict[str, Any]]:
    """Returns what is done."""
    file = work / "runs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def key_of(material: Material, idea: str, recipe: Recipe, seed: int, steps: int) -> dict[str, Any]:
    """Returns what a run is known by: a recipe or a target that has changed since is another."""
    return {
        "target": material.name,
        "idea": idea,
        "seed": seed,
        "steps": steps,
        "weights": material.weights,
        "recipe": digest(repr(sorted((k, v) for k, v in vars(recipe).items() if v != DEFAULTS[k])))[:8],
    }


def run(args: argparse.Namespace) -> None:
    """Does the runs that are not done yet."""
    args.work.mkdir(parents=True, exist_ok=True)
    material = Material(args.target, folder_of(args), args.work)
    for seed in range(args.seeds):
        for idea in args.ideas:
            key = key_of(material, idea, IDEAS[idea], seed, args.steps)
            if any(key.items() <= row.items() for row in rows_of(args.work)):
                continue
            drafter, figures = trained(material, IDEAS[idea], seed, args.steps)
            row = key | {name: round(value, 4) for name, value in figures.items()} | measured(material, drafter)
            with (args.work / "runs.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def folder_of(args: argparse.Namespace) -> Path:
    """Returns the folder of the target. Raises ValueError where there is none to take."""
    if args.target != "demo" and args.folder is None:
        raise ValueError(f"--target {args.target} comes with no weights; expected --folder with what its script wrote.")
    return args.folder or demo.FOLDER / "target"


def cell(values: list[float]) -> str:
    """Returns a mean, and its standard error where there are several values."""
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{error}"


def kind_of(row: dict[str, Any]) -> tuple[str, str, int]:
    """Returns what the runs of a line of the table have in common."""
    return row["target"], row["idea"], row["steps"]


def table(args: argparse.Namespace) -> None:
    """Prints what is done, with the newest weights of each target and the newest recipe of each idea."""
    rows = rows_of(args.work)
    weights, recipes = {row["target"]: row["weights"] for row in rows}, {kind_of(row): row["recipe"] for row in rows}
    rows = [row for row in rows if (row["weights"], row["recipe"]) == (weights[row["target"]], recipes[kind_of(row)])]
    print(
        "| target | idea | steps | seeds | "
        + " | ".join(SETS)
        + " | depth 7 / depth 1 | s/step |\n|"
        + "---|" * (6 + len(SETS))
    )
    for target, idea, steps in dict.fromkeys(map(kind_of, rows)):
        found = [row for row in rows if kind_of(row) == (target, idea, steps)]
        cells = [cell([row[name] for row in found]) for name in SETS]
        held = cell([row["accuracy"][-1] / max(1e-4, row["accuracy"][0]) for row in found])
        seconds = statistics.mean(row["seconds"] for row in found)
        print(f"| {target} | {idea} | {steps} | {len(found)} | {' | '.join(cells)} | {held} | {seconds:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="train and measure")
    running.add_argument("--target", choices=SHAPES, required=True)
    running.add_argument("--folder", type=Path, help="of the target; by default the demo's")
    running.add_argument("--ideas", nargs="+", choices=IDEAS, default=list(IDEAS), metavar="IDEA")
    running.add_argument("--seeds", type=int, default=1)
    running.add_argument("--steps", type=int, default=STEPS)
    running.set_defaults(do=run)
    showing = commands.add_parser("table", help="print what is done")
    showing.set_defaults(do=table)
    for command in (running, showing):
        command.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.do(args)


if __name__ == "__main__":
    main()
