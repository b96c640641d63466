"""Search for what makes a drafter learn faster and hold longer: one switch at a time, several seeds, equal steps.

    python examples/train_second_target.py --output work/second
    python examples/search_recipe.py run --work work --target demo --ideas "AdamW 0.004" "the recipe" --seeds 3
    python examples/search_recipe.py run --work work --target second --folder work/second
    python examples/search_recipe.py table --work work

Every run trains a new drafter, 2,048 tokens a step unless its idea says otherwise, on its target's own greedy answers,
and measures the accepted length at K = 7, greedy, on held-out prompts as long as those of training, perturbed, and four
texts long. What is done is kept in WORK, and a rerun goes on.
"""

import argparse
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from search_material import ANSWER, LENGTH, LONG_PROMPT, SHAPES, Material
from search_table import SPECULATORS, beside_speculators, shown
from search_table import table as search_table
from search_training import EAGLE3, Recipe, measured, trained

from eagle31_hf import demo
from eagle31_hf.storage.fingerprints import digest

STEPS = 420
ADAMW = Recipe()
DEFAULTS = vars(ADAMW)
MUON = Recipe(matrix_rate=4e-2, rate=4e-3)
# what gained, together
LIBRARY = Recipe(matrix_rate=2e-2, rate=4e-3, weight_decay=0.0, library=True)  # its defaults
RECIPE = replace(MUON, jump=LONG_PROMPT + ANSWER, all_tokens=True, head=True, autocast=True)
IDEAS = {
    "eagle31 train": LIBRARY,
    # how the library's rate of Muon and its decay depend on the number of steps
    **{
        f"eagle31 train, Muon {rate:g}, decay {decay:g}": replace(LIBRARY, matrix_rate=rate, weight_decay=decay)
        for rate in (5e-3, 1e-2, 2e-2, 4e-2)
        for decay in (0.0, 0.1)
        if (rate, decay) != (2e-2, 0.0)
    },
    # how much a step learns from; --steps says how many make the same tokens
    **{f"eagle31 train, {n * LENGTH:,} tokens a step": replace(LIBRARY, batch=n) for n in (2, 4, 16, 32, 64)},
    "eagle31 train, 8,192 tokens a step, Muon 0.04": replace(LIBRARY, batch=32, matrix_rate=4e-2),
    # optimizer: rates, torch's adjustment of Muon's rate, decay, averages
    "AdamW 0.001": ADAMW,
    "AdamW 0.004": replace(ADAMW, rate=4e-3),
    "AdamW 0.01": replace(ADAMW, rate=1e-2),
    "Muon 0.01": replace(MUON, matrix_rate=1e-2),
    "Muon 0.02": replace(MUON, matrix_rate=2e-2),
    "Muon 0.04": MUON,
    "Muon 0.08": replace(MUON, matrix_rate=8e-2),
    "Muon 0.015, match_rms_adamw": replace(MUON, adjust="match_rms_adamw", matrix_rate=1.5e-2),
    "vectors at 0.001": replace(MUON, rate=1e-3),
    "vectors at 0.01": replace(MUON, rate=1e-2),
    "momentum 0.9": replace(MUON, momentum=0.9),
    "momentum 0.98": replace(MUON, momentum=0.98),
    "weight decay 0": replace(MUON, weight_decay=0.0),
    "weight decay 0.1": replace(MUON, weight_decay=0.1),
    "gradients not clipped": replace(MUON, clip=1e9),
    "linear schedule": replace(MUON, schedule="linear"),
    "WSD schedule": replace(MUON, schedule="wsd"),
    "warm-up of 10 steps": replace(MUON, warm_up=10),
    "averaged weights, 0.98": replace(MUON, ema=0.98),
    "averaged weights, 0.98, constant rates": replace(MUON, ema=0.98, schedule="constant"),
    "head trained": replace(MUON, head=True),
    # beginning
    "fc by least squares": replace(MUON, start="fitted"),
    "fc by least squares, same position": replace(MUON, start="same position"),
    "last norm as the target's": replace(MUON, start="last norm"),
    # what is read
    "four states": replace(MUON, layers="four"),
    "late layers": replace(MUON, layers="late"),
    # what is minimised
    "depth 2": replace(MUON, depth=2),
    "depth 5": replace(MUON, depth=5),
    "depth 7": replace(MUON, depth=7),
    "depth 4, weights 0.8 ** k": replace(MUON, depth=4, depth_decay=0.8),
    "depths weighed by their chance": replace(MUON, reach=True),
    "depth 5, weighed by their chance": replace(MUON, depth=5, reach=True),
    "lk_lambda": replace(MUON, loss="lk_lambda"),
    "KL, then lk_lambda": replace(MUON, loss_after="lk_lambda"),
    "KL, then lk_alpha": replace(MUON, loss_after="lk_alpha"),
    "KL, then TV": replace(MUON, loss_after="tv"),
    "half KL, half hard tokens": replace(MUON, loss="kl=0.5,ce=0.5"),
    "hard tokens": replace(MUON, loss="ce"),
    # data, length, speed
    "prompts, too": replace(MUON, all_tokens=True),
    "half of it files": replace(MUON, texts="greedy+files"),
    "half of it sampled": replace(MUON, texts="greedy+sampled"),
    "positions spread": replace(MUON, jump=LONG_PROMPT + ANSWER),
    "positions spread 16 times as far as a text": replace(MUON, jump=16 * LENGTH),
    "four texts in sight of each other": replace(MUON, joined=4),
    "window of 128": replace(MUON, fields={"layer_types": ["sliding_attention"], "sliding_window": 128}),
    "autocast": replace(MUON, autocast=True),
    "parallel drafts": replace(MUON, depth=7, parallel=True),
    "EAGLE 3": replace(MUON, fields=EAGLE3),
    # what gained, together
    "the recipe": RECIPE,
    "the recipe, Muon 0.02": replace(RECIPE, matrix_rate=2e-2),
    "the recipe, answers only": replace(RECIPE, all_tokens=False),
    "the recipe, positions not spread": replace(RECIPE, jump=0),
    "the recipe, four texts in sight of each other": replace(RECIPE, joined=4),
    "the recipe, head frozen": replace(RECIPE, head=False),
    "the recipe, half KL, half hard tokens": replace(RECIPE, loss="kl=0.5,ce=0.5"),
    "the recipe, a tenth of it hard tokens": replace(RECIPE, loss="kl=0.9,ce=0.1"),
    "the recipe, hard tokens": replace(RECIPE, loss="ce"),
    "the recipe, fp32": replace(RECIPE, autocast=False),
    "the recipe, depth 4, weights 0.8 ** k": replace(RECIPE, depth=4, depth_decay=0.8),
    "the recipe, EAGLE 3": replace(RECIPE, fields=EAGLE3),
}


def rows_of(work: Path) -> list[dict[str, Any]]:
    """Returns what is done. A line that a kill cut off is none: its run is done again."""
    file, rows = work / "runs.jsonl", []
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


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
                file.write(f"\n{json.dumps(row)}\n")  # not at the end of a line that was cut off
            print(json.dumps(row), flush=True)


def folder_of(args: argparse.Namespace) -> Path:
    """Returns the folder of the target. Raises SystemExit, with an error that says why, where there is none to take."""
    folder = args.folder or (demo.FOLDER / "target" if args.target == "demo" else None)
    if folder is None or not (folder / "config.json").is_file():
        found = "comes with no weights" if folder is None else f"is not in {folder}"
        raise SystemExit(f"--target {args.target} {found}; expected --folder with what its script wrote.")
    return folder


def table(args: argparse.Namespace) -> None:
    """Prints what is done as tables; with --output also writes its rows to a file, where docs/tables.py reads them."""
    if not rows_of(args.work):
        raise SystemExit(f"{args.work}: holds no runs; expected the --work of `search_recipe.py run`.")
    order = {idea: number for number, idea in enumerate(IDEAS)}
    of_others = -1  # those of other trainers come first
    rows = sorted(
        shown(rows_of(args.work)),
        key=lambda row: (order.get(row["idea"], of_others), row["steps"], row["target"], row["seed"]),
    )
    print(search_table(rows))
    if any(row["idea"].startswith(SPECULATORS) for row in rows):
        print(f"\n{beside_speculators(rows)}")
    if args.output:
        args.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="train and measure")
    running.add_argument("--target", choices=SHAPES, required=True)
    running.add_argument("--folder", type=Path, help="of the target; by default the demo's")
    running.add_argument("--ideas", nargs="+", choices=IDEAS, default=list(IDEAS), metavar="IDEA")
    running.add_argument("--seeds", type=int, default=1, help="so many, from 0")
    running.add_argument("--steps", type=int, default=STEPS)
    running.set_defaults(do=run)
    showing = commands.add_parser("table", help="print what is done, and the recipe beside speculators")
    showing.add_argument("--output", type=Path, help="write the rows to this file, too")
    showing.set_defaults(do=table)
    for command in (running, showing):
        command.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.do(args)


if __name__ == "__main__":
    main()
