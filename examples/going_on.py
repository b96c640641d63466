"""Goes on with a drafter that has been trained, at shares of the rates that a new one is trained with: the demo's, on
answers of its own target.

    python examples/going_on.py --work work --shares 1 0.3 0.1 0.03

Prints the accepted length of the drafter as it is (share 0), and after so many steps at each share, on the sets of
prompts of `search_recipe.py`.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from search_material import BATCH, Material
from search_table import SETS
from search_training import measured

from eagle31_hf import Eagle31DrafterModel, Eagle31Trainer, Eagle31TrainingArguments, demo
from eagle31_hf.training.arguments import MATRIX_RATE, RATE


def begun(material: Material) -> Eagle31DrafterModel:
    drafter = Eagle31DrafterModel.from_pretrained(demo.FOLDER / "eagle31", dtype=torch.float32)
    drafter.load_target_embeddings(material.target)
    return drafter


def gone_on(material: Material, share: float, steps: int) -> Eagle31DrafterModel:
    """Returns the drafter after so many steps of one row of `BATCH` texts, by the library's Trainer."""
    drafter = begun(material).train()
    texts = material.training_texts("greedy", drafter.config.aux_hidden_state_layer_ids)
    answers = torch.arange(texts.ids.shape[1]) >= texts.prompt
    with tempfile.TemporaryDirectory() as folder:
        args = Eagle31TrainingArguments(
            folder,
            max_steps=steps,
            max_length=BATCH * texts.ids.shape[1],
            matrix_learning_rate=share * MATRIX_RATE,
            learning_rate=share * RATE,
            bf16=True,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        examples = [{"input_ids": ids, "answers": answers} for ids in texts.ids]
        Eagle31Trainer(drafter, args, examples, target=material.target).train()
    return drafter.float().eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the answers")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.3, 0.1, 0.03])
    parser.add_argument("--steps", type=int, default=80, help="(default: 80)")
    parser.add_argument("--texts", type=int, default=640, help="that are answered, to train on (default: 640)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    material = Material("demo", demo.FOLDER / "target", args.work, args.texts)
    print(f"share of the rates{''.join(format(name, '>12') for name in SETS)}")
    for share in (0.0, *args.shares):
        drafter = gone_on(material, share, args.steps) if share else begun(material).eval()
        found = measured(material, drafter)
        print(f"{share:18g}{''.join(format(found[name], '12.3f') for name in SETS)}", flush=True)


if __name__ == "__main__":
    main()
