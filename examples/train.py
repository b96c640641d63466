"""Train an EAGLE 3.1 drafter for the demo target from nothing: seven minutes on two CPU cores.

    python examples/train.py --output my-drafter
    eagle31 train --help     # the same for any target, as one command

Examples are pieces of the standard library's source, each gone on with by the target, greedily; the drafter learns what
the target expects at every token of both.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from corpus import training_files

from eagle31_hf import Eagle31Trainer, Eagle31TrainingArguments, demo
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.output import check_output, claim, discard_replaced, set_aside
from eagle31_hf.training.packing import Part
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import prepare_data
from eagle31_hf.training.recipe import log_in_lines
from eagle31_hf.training.store import HiddenStateStore

LENGTH = 192  # tokens of an example, half of them the prompt
CHARACTERS = 900  # of a piece of text; shorter files are left out
# a wider MLP than the target's, and the three states that are read by default
SHAPE = {"intermediate_size": 512, "aux_hidden_state_layer_ids": [2, 12, 21]}


def own_words(target, tokenizer, folder: Path, count: int, seed: int = 0, length: int = LENGTH) -> HiddenStateStore:
    """Makes examples of `count` pieces of training text, one or more of each: at most `length` tokens, half of them a
    prompt, which the target goes on with greedily. Run again, it goes on where it was stopped."""
    texts, draw = [text for text in training_files() if len(text) > CHARACTERS], random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "texts.jsonl", "w", encoding="utf-8") as file:
        for _ in range(count):
            text = draw.choice(texts)
            start = draw.randrange(len(text) - CHARACTERS + 1)
            file.write(json.dumps({"text": text[start : start + CHARACTERS]}) + "\n")
    options = PreparationOptions(
        max_length=length,
        regenerate=True,
        max_new_tokens=length // 2,
        generation={"do_sample": False},
        batch_size=64,
        records_per_shard=128,
    )
    prepare_data(target, tokenizer, str(folder / "texts.jsonl"), folder / "examples", options, progress=print)
    return HiddenStateStore(folder / "examples")


def train(
    target,
    tokenizer,
    examples,
    output: Path,
    flags: dict | None = None,
    num_held_out: int = 32,
    checkpoint=None,
    **options,
) -> Eagle31Trainer:
    """Trains a new drafter on all but the last examples, on which it is evaluated, from `checkpoint` on, if any.
    `flags` are of its config, `options` of the trainer."""
    drafter = new_drafter(target, **SHAPE | (flags or {}))
    split = len(examples) - num_held_out
    defaults = {
        "depth": 4,
        "per_device_train_batch_size": 8,
        "packing": False,
        "num_train_epochs": 3,
        "max_length": LENGTH,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "eval_depth": 7,
        "per_device_eval_batch_size": 8,
        "eval_prompts": num_held_out,
        "eval_max_new_tokens": LENGTH // 2,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    trainer = Eagle31Trainer(
        drafter,
        Eagle31TrainingArguments(str(output), **defaults | options),
        Part(examples, range(split)),
        Part(examples, range(split, len(examples))),
        target=target,
        processing_class=tokenizer,
    )
    log_in_lines(trainer, print)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1024, help="pieces of text, each one or more examples")
    parser.add_argument("--held-out", type=int, default=32, help="examples that are not trained on, but evaluated")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of an example at most, half of them prompt")
    parser.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint in the folder")
    parser.add_argument("--overwrite", action="store_true", help="replace the drafter that is in the folder")
    args = parser.parse_args()
    with claim(args.output):
        checkpoint = check_output(args.output, args.resume, args.overwrite)
        torch.manual_seed(0)
        target, tokenizer = demo.load_target()
        examples = own_words(target, tokenizer, args.output / "data", args.texts, length=args.length)
        if args.overwrite:
            set_aside(args.output)
        lengths = {"max_length": args.length, "eval_max_new_tokens": args.length // 2}
        options = {"num_held_out": args.held_out, "num_train_epochs": args.epochs, "checkpoint": checkpoint} | lengths
        trainer = train(target, tokenizer, examples, args.output, **options)
        discard_replaced(args.output)
    evaluated = [entry for entry in trainer.state.log_history if "eval_accepted_length" in entry]
    best = max(evaluated, key=lambda entry: entry["eval_accepted_length"])  # which is kept
    served = best["eval_served_accepted_length"]
    print(
        f"{best['eval_accepted_length']:.2f} tokens a target forward on examples held out, {served:.2f} in generate()"
    )


if __name__ == "__main__":
    main()
