"""The rows of speculators in `examples/search_recipe.py`: the same target, texts, steps, batches and first weights,
by its own drafter, unroll and loss, AdamW and the cosine of its bench at several rates.

    python tests/peers/search_speculators.py --speculators-python PYTHON_WITH_SPECULATORS --work WORK --target demo \
        [--folder WORK/second] [--rates 1e-3 4e-3 1e-2] [--seeds 3]

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


def prepare(
    workspace: Path, material: material_module.Material, recipe: search_training.Recipe, seed: int, steps: int
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
    search_training.begun(material, search.ADAMW, seed).save_pretrained(workspace / "initial")
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
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 4e-3, 1e-2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=search.STEPS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    material = material_module.Material(args.target, search.folder_of(args), args.work)
    for seed in range(args.seeds):
        for rate in args.rates:
            recipe = search_training.Recipe(rate=rate)
            key = search.key_of(material, f"speculators {rate:g}", recipe, seed, args.steps)
            if any(key.items() <= row.items() for row in search.rows_of(args.work)):
                continue
            with tempfile.TemporaryDirectory() as folder:
                workspace = Path(folder)
                prepare(workspace, material, recipe, seed, args.steps)
                seconds = train(workspace, args.speculators_python, args.steps)
                drafter = Eagle31DrafterModel.from_pretrained(workspace / "trained", dtype=torch.float32)
                drafter.load_target_embeddings(material.target)
                row = key | {"seconds": round(seconds, 4)} | search_training.measured(material, drafter.eval())
            with (args.work / "runs.jsonl").open("a") as file:
                file.write(f"\n{json.dumps(row)}\n")
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
