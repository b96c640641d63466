"""Goes on with a drafter that has been trained, at shares of the rates that a new one is trained with: the demo's, on
answers of its own target.

    python examples/going_on.py --work work --shares 1 0.3 0.1 0.03

Prints the accepted length of the drafter as it is (share 0), and after so many steps at each share, on the sets of
prompts of `search_recipe.py`.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from search_material import NUM_PROMPTS, Material
from search_recipe import LIBRARY
from search_table import SETS
from search_training import measured, trained_by_the_library

from eagle31_hf import Eagle31DrafterModel, demo

SEED = 42


def begun(material: Material) -> Eagle31DrafterModel:
    drafter = Eagle31DrafterModel.from_pretrained(demo.FOLDER / "eagle31", dtype=torch.float32)
    drafter.load_target_embeddings(material.target)
    return drafter


def gone_on(material: Material, share: float, steps: int) -> Eagle31DrafterModel:
    """Returns the drafter after so many steps at a share of the rates; as it is where there are none."""
    drafter = begun(material)
    if not share:
        return drafter.eval()
    recipe = replace(LIBRARY, matrix_rate=share * LIBRARY.matrix_rate, rate=share * LIBRARY.rate)
    return trained_by_the_library(material, drafter.train(), recipe, SEED, steps)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the answers")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.3, 0.1, 0.03])
    parser.add_argument("--steps", type=int, default=80, help="(default: 80)")
    parser.add_argument("--texts", type=int, default=640, help="that are answered, to train on (default: 640)")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help=f"of a set (default: {NUM_PROMPTS})")
    parser.add_argument("--files", type=int, help="take the texts from the first so many files (default: from all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    material = Material("demo", demo.FOLDER / "target", args.work, args.texts, args.prompts, args.files)
    print(f"share of the rates{''.join(format(name, '>12') for name in SETS)}")
    for share in (0.0, *args.shares):
        found = measured(material, gone_on(material, share, args.steps))
        print(f"{share:18g}{''.join(format(found[name], '12.3f') for name in SETS)}", flush=True)


if __name__ == "__main__":
    main()
