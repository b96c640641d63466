"""The rows of speculators in `examples/search_recipe.py`: the same target, texts, steps and batches, by its own
drafter, unroll, loss and optimizers.

    python tests/peers/search_speculators.py --speculators-python PYTHON_WITH_SPECULATORS --work WORK --target demo \
        [--folder WORK/second] [--rates 1e-3 6e-3 2e-2] [--optimizer muon] [--seeds 3]

By default what it does by default (0.9.0, `speculators/train/config/schema.py`): Muon for matrices and AdamW for the
rest, decays of 0.1 and 0.01, a warm-up of a hundredth of the steps and a linear schedule, the states joined before they
are normed; at its own rate, 0.001, and at others. `--optimizer adamw`: AdamW alone, with the first weights, norms,
warm-up and cosine of the search.

For installing it see `speculators_fixtures.py`. Rows are added to WORK/runs.jsonl, where `search_recipe.py table`
finds them; what is there is not done again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle31_hf import Eagle31DrafterModel

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "examples"))
import search_material as material_module  # noqa: E402 -- an example is no package
import search_recipe as search  # noqa: E402
import search_training  # noqa: E402

# what `speculators.train.optimizers` reads; at other rates than its own the plan's are set before each step
MUON = {
    "optimizer": "muon",
    "lr": 1e-3,
    "weight_decay": 0.01,
    "muon_lr": 1e-3,
    "muon_momentum": 0.95,
    "muon_weight_decay": 0.1,
    "muon_ns_steps": 5,
    "muon_adjust_lr_fn": "match_rms_adamw",
}
FIELDS = {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True}  # of a drafter that it makes
RATES = {"muon": [1e-3, 6e-3, 2e-2], "adamw": [1e-3, 4e-3, 1e-2]}


def recipe_of(optimizer: str, rate: float, steps: int) -> search_training.Recipe:
    """Returns what the search calls speculators' rate, schedule and drafter."""
    if optimizer == "adamw":
        return search_training.Recipe(rate=rate)
    return search_training.Recipe(rate=rate, schedule="linear", warm_up=steps // 100, fields=FIELDS)


def idea_of(optimizer: str, rate: float) -> str:
    """Returns the name of a row."""
    if optimizer == "adamw":
        return f"speculators, AdamW {rate:g}"
    return "speculators as it comes" if rate == MUON["lr"] else f"speculators, Muon {rate:g}"


def prepare(
    workspace: Path,
    material: material_module.Material,
    recipe: search_training.Recipe,
    optimizer: str,
    seed: int,
    steps: int,
) -> None:
    """Writes the target's parts, the texts with states, the drafter to begin with and the plan."""
    layer_ids, target = material.default_layers(), material.target
    texts = material.training_texts("greedy", layer_ids)
    norm = target.model.norm.weight.detach()
    save_file(
        {
            "input_ids": texts.ids.contiguous(),
            "states": texts.states.float().contiguous(),
            # speculators norms the target's state itself; of this one it makes the last state again
            "before_norm": (texts.last_states / norm).contiguous(),
        },
        workspace / "data.safetensors",
    )
    head, table = target.get_output_embeddings().weight, target.get_input_embeddings().weight
    parts = {"embedding": table, "head": head, "norm": norm}
    save_file({name: part.detach().clone() for name, part in parts.items()}, workspace / "target.safetensors")
    search_training.begun(material, recipe, seed).save_pretrained(workspace / "initial")
    draw = torch.Generator().manual_seed(seed)
    size, order = material_module.BATCH, torch.empty(0, dtype=torch.long)
    while len(order) < steps * size:
        order = torch.cat([order, torch.randperm(len(texts.ids), generator=draw)])
    plan = {
        "batches": order[: steps * size].view(steps, size).tolist(),
        "learning_rates": [recipe.rate * search_training.rate_factor(recipe, step, steps) for step in range(steps)],
        "optimizer": {"betas": [0.9, recipe.beta2], "weight_decay": recipe.weight_decay},
        "clip": recipe.clip,
        "depth": recipe.depth,
        "decay": recipe.depth_decay,
        "prompt": material_module.PROMPT,
    }
    if optimizer == "muon":
        plan["optimizers"] = MUON
    (workspace / "plan.json").write_text(json.dumps(plan))


def train(workspace: Path, python: str, steps: int) -> float:
    """Trains in speculators' process, writes the drafter to `workspace`/trained, and returns the processor's seconds
    of a step."""
    commands = [{"command": "train", "count": steps}, {"command": "write", "folder": str(workspace / "trained")}]
    done = subprocess.run(
        [python, HERE / "speculators_training.py", "--workspace", workspace, "--batching", "sequences"],
        input="\n".join(map(json.dumps, commands)) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return sum(json.loads(done.stdout.splitlines()[0])["processor"]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators-python", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", choices=material_module.SHAPES, required=True)
    parser.add_argument("--folder", type=Path, help="of the target; by default the demo's")
    parser.add_argument("--optimizer", choices=RATES, default="muon")
    parser.add_argument("--rates", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=search.STEPS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    material = material_module.Material(args.target, search.folder_of(args), args.work)
    for seed in range(args.seeds):
        for rate in args.rates or RATES[args.optimizer]:
            recipe = recipe_of(args.optimizer, rate, args.steps)
            key = search.key_of(material, idea_of(args.optimizer, rate), recipe, seed, args.steps)
            if any(key.items() <= row.items() for row in search.rows_of(args.work)):
                continue
            with tempfile.TemporaryDirectory() as folder:
                workspace = Path(folder)
                prepare(workspace, material, recipe, args.optimizer, seed, args.steps)
                seconds = train(workspace, args.speculators_python, args.steps)
                drafter = Eagle31DrafterModel.from_pretrained(workspace / "trained", dtype=torch.float32)
                drafter.load_target_embeddings(material.target)
                row = key | {"seconds": round(seconds, 4)} | search_training.measured(material, drafter.eval())
            with (args.work / "runs.jsonl").open("a") as file:
                file.write(f"\n{json.dumps(row)}\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
