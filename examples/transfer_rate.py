"""Does one rate of Muon suit drafters of every width? Trains short runs at three widths, five rates and both of torch's
adjustments, and prints their losses: the adjustment whose lowest loss stays in its column is the one that transfers.

    python examples/transfer_rate.py --work work

About 50 minutes on a CPU core; what is done is kept in WORK, and a rerun goes on. Targets are Llamas of 8 layers, 64,
128 and 256 wide, trained on the demo's texts for 300 steps each; drafters, with an MLP three times as wide, learn from
the texts themselves for 100 steps.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from pretraining import token_ids, train
from search_material import BATCH, Material, texts_of
from search_training import Recipe, trained
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eagle31_hf import demo

WIDTHS = (64, 128, 256)
RATES = (1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1)  # of "original"
# where the two give a square matrix the same update: the middle one
ALIKE_AT = 128
ADJUSTMENTS = {"original": 1.0, "match_rms_adamw": 1 / (0.2 * math.sqrt(ALIKE_AT))}


def new_target(width: int, vocab_size: int) -> LlamaForCausalLM:
    """Makes an untrained target."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=8,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def target_of(width: int, work: Path, steps: int, num_files: int | None) -> Path:
    """Returns the folder of the target so wide, which is trained for so many steps where it is not there yet."""
    folder = work / f"width-{width}-steps{steps}"
    if not (folder / "config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(demo.FOLDER / "target")
        model = new_target(width, len(tokenizer))
        texts = texts_of("demo", held_out=False)[:num_files]
        train(model, token_ids(tokenizer, texts), steps, work / f"{folder.name}.state")
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def loss_of(key: str, material: Material, recipe: Recipe, steps: int, work: Path) -> float:
    """Returns the last loss of a run, from WORK/losses.json where it was done before."""
    file = work / "losses.json"
    losses = json.loads(file.read_text()) if file.exists() else {}
    if key not in losses:
        losses[key] = round(trained(material, recipe, seed=0, steps=steps)[1]["loss"], 3)
        file.write_text(json.dumps(losses, indent=1))
    return losses[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="keeps the targets, their states and the losses")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of the targets")
    parser.add_argument("--target-steps", type=int, default=300, help="of a target's training")
    parser.add_argument("--steps", type=int, default=100, help="of a drafter's training")
    parser.add_argument("--files", type=int, help="take the texts from the first so many files (default: from all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    targets = {width: target_of(width, args.work, args.target_steps, args.files) for width in args.widths}
    materials = {
        width: Material("demo", folder, args.work, args.steps * BATCH, num_files=args.files)
        for width, folder in targets.items()
    }
    print(f"| adjustment | width | {' | '.join(f'{rate:g}' for rate in RATES)} |\n|---|---|" + "---|" * len(RATES))
    for adjust, factor in ADJUSTMENTS.items():
        for width, material in materials.items():
            common = {"texts": "files", "rate": 4e-3, "warm_up": 5, "fields": {"intermediate_size": 3 * width}}
            recipes = {rate: Recipe(adjust=adjust, matrix_rate=rate * factor, **common) for rate in RATES}
            name = f"{adjust} {width} {args.steps} steps"
            losses = [
                loss_of(f"{name} {rate:g}", material, recipe, args.steps, args.work) for rate, recipe in recipes.items()
            ]
            cells = [f"**{loss:.3f}**" if loss == min(losses) else f"{loss:.3f}" for loss in losses]
            print(f"| {adjust} | {width} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
