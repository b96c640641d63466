"""Train the demo's EAGLE 3.1 and EAGLE 3 drafters by the default optimizer, loss and depth of `Eagle31Trainer`: same
target, examples, order, steps, settings and seed.

    python examples/train_demo_drafters.py --work work --output eagle31_hf/demo

About half an hour each on a CPU core, and a quarter of an hour before for the examples: pieces of training text, each
gone on with by the target, greedily. Once these are there, two commands with `--only eagle31` and `--only eagle3` share
the work. A run that was stopped goes on; its minutes are then those of the last part. Writes OUTPUT/eagle31 and
OUTPUT/eagle3 (bfloat16), each with a `training.json` of what the pair's card reports.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from train import own_words, train

from eagle31_hf import Eagle31Trainer, demo
from eagle31_hf.hub import CARD
from eagle31_hf.training.saving import last_checkpoint

FLAGS = {"eagle31": {"fc_norm": True, "norm_output": True}, "eagle3": {"fc_norm": False, "norm_output": False}}
BATCH, EVAL_DEPTH = 8, 7
BY_DEPTH = {"loss_by_depth": "distance", "accuracy_by_depth": "accuracy", "acceptance_by_depth": "acceptance"}


def facts_of(trainer: Eagle31Trainer, lengths: list[int], num_held_out: int) -> dict[str, Any]:
    """Returns what the card reports of a run on examples of so many tokens, the last of them held out: how long it was,
    and its figures on those held out."""
    found = trainer.evaluate()
    minutes = sum(entry.get("train_runtime", 0.0) for entry in trainer.state.log_history) / 60
    facts = {
        "python": sys.version.split()[0],
        "rows": len(lengths) - num_held_out,
        "row_length": trainer.args.max_length,
        "steps": trainer.state.global_step,
        "tokens_trained": round(trainer.state.epoch * sum(lengths[:-num_held_out])),
        "depth": trainer.args.depth,
        "minutes": round(minutes, 1),
        "accepted_length": round(found["eval_accepted_length"], 3),
    }
    depths = range(1, EVAL_DEPTH + 1)
    return facts | {name: [round(found[f"eval_{key}_{k}"], 4) for k in depths] for name, key in BY_DEPTH.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="keeps the examples and the runs' checkpoints")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", choices=FLAGS, help="train this drafter, and leave the other as it is")
    parser.add_argument("--texts", type=int, default=3072, help="pieces of text, each one or more examples")
    parser.add_argument("--held-out", type=int, default=64, help="examples that are not trained on, but evaluated")
    parser.add_argument("--epochs", type=float, default=3.5)
    parser.add_argument("--length", type=int, default=256, help="tokens of an example at most, half of them the prompt")
    args = parser.parse_args()
    target, tokenizer = demo.load_target()
    examples = own_words(target, tokenizer, args.work / "data", args.texts, length=args.length)
    for name in [args.only] if args.only else FLAGS:
        folder = args.work / name
        options = {
            "num_held_out": args.held_out,
            "checkpoint": last_checkpoint(folder),
            "max_length": args.length,
            "num_train_epochs": args.epochs,
            "per_device_train_batch_size": BATCH,
            "eval_depth": EVAL_DEPTH,
            "eval_prompts": 8,
            "eval_max_new_tokens": args.length // 2,
            "bf16": True,
            "use_cpu": True,
        }
        trainer = train(target, tokenizer, examples, folder, FLAGS[name] | {"target_model": "demo target"}, **options)
        record = facts_of(trainer, examples.lengths, args.held_out)
        trainer.drafter.bfloat16().save_pretrained(args.output / name)
        (args.output / name / CARD).unlink()  # the pair has one of its own
        (args.output / name / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        print(name, json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
