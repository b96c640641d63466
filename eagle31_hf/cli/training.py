"""`eagle31 train`: trains a drafter for any causal language model, from data to a folder for the Hub."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import IntervalStrategy

from ..checkpoints.headers import read_headers
from ..training.arguments import GOING_ON, MATRIX_RATE, Eagle31TrainingArguments, usual_rate
from ..training.fresh import new_drafter
from ..training.output import check_output, claim, discard_replaced, once, set_aside
from ..training.recipe import (
    ExampleReader,
    asked_data,
    draft_vocabulary,
    is_store,
    line_of,
    loaded_drafter,
    log_in_lines,
)
from ..training.records import check_apart
from ..training.saving import check_data, check_step
from ..training.store import read_manifest
from ..training.target import StoredTarget
from ..training.trainer import Eagle31Trainer
from ..upgrade import upgrade_to_eagle31
from .loading import load_tokenizer
from .parsing import Parser, config_field, count, field, number, positive, progress, rate_or_none, seed, show
from .preparation import add_data, add_loading, data_options, is_regenerated
from .target import target_for

LEFT_BEHIND = (
    "If {output} holds a complete checkpoint or rows, the same command with --resume (in place of --overwrite) goes on"
    " with them; else begin anew. A drafter that was to be replaced is kept, by then in {output}/eagle31-replaced."
)
SAME = ("depth", "loss", "max_length", "learning_rate", "bf16", "seed", "report_to")  # as the trainer's arguments
USUAL = Eagle31TrainingArguments  # whose defaults are the command's, too
ANSWER_BATCH_SIZE = 32
SELF_PROMPTS = 10_000  # chats where there is no data: some 4 million tokens


def train(args: argparse.Namespace) -> int:
    """Trains a drafter in a folder that no other run writes into meanwhile."""
    if args.data is None and args.self_prompts is None:
        args.self_prompts = SELF_PROMPTS
    check_options(args)
    options = data_options(
        args,
        batch_size=args.answer_batch_size or ANSWER_BATCH_SIZE,
        states=args.engine is not None,
        layer_ids=asked_layers(args) if args.engine else None,
    )
    for source in (args.data, args.eval_data):
        if not is_store(source):  # of a store its own files alone are read
            check_apart(source, args.output)
    settings = arguments(args)
    if settings.shard_target and settings.world_size == 1:
        found = "shard_target has each process keep a part of the target, and this is the only process"
        raise ValueError(f"{found}; expected several, by accelerate launch, or no shard_target.")
    with claim(settings.output_dir):
        return run(args, settings, options)


def run(args: argparse.Namespace, settings: Any, options: Any) -> int:
    """Goes through a run from its data to the saved drafter."""
    output = settings.output_dir
    checkpoint = once(lambda: check_output(output, args.resume, args.overwrite))
    tokenizer = load_tokenizer(args.target, args.revision)
    stored = stored_target(args)
    if checkpoint is not None:
        check_step(checkpoint, settings)
        once(lambda: check_data(checkpoint, asked_data(args.data, args.eval_data, options)))
    # what answers, or is calibrated on, runs in each process by itself
    in_parts = settings.shard_target and not (options.regenerate or args.upgrade)
    target, states_by = (stored, None) if stored else target_for(args, options, checkpoint is None, in_parts)
    if states_by is not None and args.upgrade:
        raise ValueError("--upgrade runs the target here, and an engine runs it; expected one of the two.")
    data = read_data(args, target, tokenizer, settings, replace(options, states=False, layer_ids=None), states_by)
    ends = states_by.ends if states_by else target
    drafter, coverage = starting_drafter(args, ends, tokenizer, data)
    trainer = Eagle31Trainer(
        drafter,
        settings,
        data.train,
        data.held_out,
        target=None if stored or states_by else target,
        processing_class=tokenizer,
    )
    trainer.facts = {"data": data.facts, "draft_vocabulary_coverage": coverage}
    progress(f"training on {len(data.train):,} rows, evaluating on {len(data.held_out) if data.held_out else 0:,}")
    log_in_lines(trainer, progress)
    if args.overwrite:
        once(lambda: move_aside(output))
    result = trainer.train(resume_from_checkpoint=checkpoint)
    # Checkpoints keep fp32 to go on from; the drafter that is served has the target's dtype.
    trainer.drafter.to(target.get_input_embeddings().weight.dtype)
    trainer.save_model()
    if trainer.is_world_process_zero():
        discard_replaced(output)
        report(args, trainer, result.metrics)
    return 0


def asked_layers(args: argparse.Namespace) -> list[int] | None:
    """Returns the layers whose states the drafter reads, where a drafter or an option says it."""
    fields = dict(args.field)
    if args.drafter is not None:
        return read_headers(args.drafter, fields).config.aux_hidden_state_layer_ids
    return fields.get("aux_hidden_state_layer_ids")


def move_aside(output: str) -> None:
    """Moves an earlier run's files aside, and says where they are until there is a new drafter."""
    aside = set_aside(output)
    if aside is not None:
        progress(f"what an earlier run wrote is in {aside} until the new drafter is saved")


def check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that mean nothing beside each other."""
    if args.upgrade and args.drafter is None:
        raise ValueError("--upgrade makes an EAGLE 3 drafter an EAGLE 3.1 one; expected --drafter with it.")
    if torch.device(args.device).index:
        raise ValueError(
            f"--device: got {args.device}; training runs on the first GPU that it sees. Expected cuda, and the number"
            " of another in the variable CUDA_VISIBLE_DEVICES."
        )
    if "output_dir" in dict(args.set):
        raise ValueError("--set output_dir: the folder of a run is --output; expected it there.")
    if args.answer_batch_size is not None and not is_regenerated(args):
        raise ValueError("--answer-batch-size is of regenerated answers; expected --regenerate too.")
    if args.drafter is not None and (args.draft_vocab_size is not None or args.head != "target"):
        found = "--draft-vocab-size and --head are of a new drafter, and --drafter names one that has its own"
        raise ValueError(f"{found}; expected one of the two.")


def arguments(args: argparse.Namespace) -> Any:
    """Returns the command's own options, and then --set, as arguments of the trainer."""
    every = {"eval_steps": args.eval_every, "save_steps": args.eval_every}
    evaluates = {"eval_strategy": "steps", "load_best_model_at_end": True} if args.eval_rows or args.eval_data else {}
    options = {name: getattr(args, name) for name in SAME} | {
        "output_dir": args.output,
        "per_device_train_batch_size": args.batch_size,
        "num_train_epochs": args.epochs,
        "gradient_accumulation_steps": args.accumulate,
        "max_steps": args.steps or -1,
        "use_cpu": args.device == "cpu",
        "save_total_limit": 2,
        "disable_tqdm": args.json,
        "dataloader_pin_memory": args.device != "cpu",
    }
    if "matrix_learning_rate" in args:
        options["matrix_learning_rate"] = args.matrix_learning_rate
    options |= every | evaluates | dict(args.set)
    if args.drafter is not None:  # it has been trained: a share of the usual rates, where they are not given
        options.setdefault("matrix_learning_rate", GOING_ON * MATRIX_RATE)
        if options["learning_rate"] is None:
            options["learning_rate"] = GOING_ON * usual_rate(options["matrix_learning_rate"])
    try:
        return Eagle31TrainingArguments(**options)
    except (TypeError, AttributeError) as error:
        found = f"--set: {error}"
        raise ValueError(f"{found}; expected a field of Eagle31TrainingArguments, and a value of its type.") from None


def stored_target(args: argparse.Namespace) -> Any:
    """Returns the parts of the target that the data keeps, or None where the target has to be loaded.

    Raises ValueError for options that need the whole target.
    """
    if not is_store(args.data) or read_manifest(args.data).layer_ids is None:
        return None
    if args.upgrade or args.engine or is_regenerated(args):
        found = f"{args.data} holds the target's states, and the target is not run"
        raise ValueError(f"{found}; expected neither --upgrade nor --regenerate nor --self-prompts nor --engine.")
    return StoredTarget(args.data, args.target)


def read_data(
    args: argparse.Namespace, target: Any, tokenizer: Any, settings: Any, options: Any, states_by: Any
) -> Any:
    """Returns the rows to train and to evaluate on; where there are none to evaluate on, the settings say so too."""
    reader = ExampleReader(target, tokenizer, options, progress, Path(args.output), states_by)
    data = reader.training_data(args.data, args.eval_data, args.eval_rows)
    if data.held_out is None and args.eval_rows:
        progress("too few rows to hold any out: nothing is evaluated, and the last checkpoint is kept")
        settings.eval_strategy = IntervalStrategy.NO
        settings.load_best_model_at_end = False
    return data


def starting_drafter(args: argparse.Namespace, target: Any, tokenizer: Any, data: Any) -> tuple[Any, float | None]:
    """Returns the drafter to train, and the share of the answers' tokens that a new one's draft vocabulary covers."""
    fields = dict(args.field)
    if args.drafter is not None:
        upgrade = upgrade_to_eagle31 if args.upgrade else None
        return loaded_drafter(args.drafter, target, data, progress, fields, upgrade), None
    ids, coverage = draft_vocabulary(target, tokenizer, data, args.draft_vocab_size, progress)
    layers = {"aux_hidden_state_layer_ids": data.layer_ids} if data.layer_ids else {}
    return new_drafter(target, ids, args.head, args.seed, **layers | fields), coverage


def report(args: argparse.Namespace, trainer: Any, metrics: dict[str, Any]) -> None:
    """Shows the outcome as one JSON object, or in a few lines."""
    evaluated = [entry for entry in trainer.state.log_history if "eval_accepted_length" in entry]
    best: dict[str, Any] = max(evaluated, key=lambda entry: entry["eval_accepted_length"], default={})
    result = {"output": args.output, "steps": trainer.state.global_step, **metrics, "best": best}
    minutes = metrics["train_runtime"] / 60
    lines = [f"drafter  {args.output}, after {trainer.state.global_step:,} steps in {minutes:.1f} minutes"]
    if best:
        lines.append(f"best     {line_of(best)}")
    lines.append(f"try it   eagle31 generate --target {args.target} --drafter {args.output} PROMPT")
    show(args, result, "\n".join(lines))


def add_train(parser: Parser) -> None:
    parser.set_defaults(left_behind=LEFT_BEHIND)
    parser.add_path("--target", "folder or Hub repository of the model to train a drafter for", required=True)
    parser.add_path("--output", "folder of the drafter and its checkpoints", required=True)
    what = "chats or texts: a file, a folder, a dataset of the Hub, or what prepare-data wrote"
    parser.add_path("--data", f"{what} (default: none; the target makes up {SELF_PROMPTS:,} chats)")
    add_data(parser)
    parser.add_flag("--regenerate", "replace answers by the target's own first; more is accepted so")
    what = f"prompts that the target answers at once (default: {ANSWER_BATCH_SIZE})"
    parser.add("--answer-batch-size", positive, what, metavar="SIZE")
    parser.add_path("--eval-data", "rows to evaluate on (default: some of the data)")
    parser.add_option("--eval-rows", count, 32, "rows of the data held out for it, at most a tenth")
    parser.add_option("--eval-every", positive, 500, "evaluate and save so often", metavar="STEPS")
    unless = "a finished run stays as it is, unless more steps or epochs are asked for"
    parser.add_flag("--resume", f"go on from the last complete checkpoint in OUTPUT; {unless}")
    removed = "the drafter and checkpoints there are removed once the new drafter is saved"
    parser.add_flag("--overwrite", f"train anew where OUTPUT is not empty: {removed}")
    parser.add_path("--drafter", "begin with this one, of any EAGLE 3 or 3.1 format (default: a new one)")
    parser.add_flag("--upgrade", "make an EAGLE 3 drafter an EAGLE 3.1 one first")
    parser.add_option("--head", ("target", "scratch"), "target", "how a new drafter's head begins")
    parser.add("--draft-vocab-size", positive, "tokens a new drafter can propose, the most frequent (default: all)")
    parser.add_several("--field", config_field, "a field of Eagle31Config that wins")
    parser.add_option("--depth", positive, USUAL.depth, "steps unrolled")
    what = "kl, reverse_kl, jsd, tv, lk_alpha, lk_lambda, ce, or a mixture of them"
    parser.add_option("--loss", str, USUAL.loss, what)
    parser.add_option("--max-length", positive, USUAL.max_length, "tokens of a packed row")
    parser.add_option("--epochs", number(0, above=True), USUAL.num_train_epochs)
    parser.add("--steps", positive, "instead of epochs")
    parser.add_option("--batch-size", positive, USUAL.per_device_train_batch_size, "packed rows of each process")
    what = "batches of each process that a step learns from"
    parser.add_option("--accumulate", positive, USUAL.gradient_accumulation_steps, what)
    rate = {"metavar": "RATE", "default": argparse.SUPPRESS}  # None is a value
    what = "of Muon, which trains the matrices of fc and layers; none: AdamW trains them too"
    parser.add("--matrix-learning-rate", rate_or_none, f"{what} (default: 0.02; with --drafter a tenth of it)", **rate)
    what = "of everything that Muon does not train (default: 0.004, without Muon 0.0001; with --drafter a tenth of it)"
    parser.add("--learning-rate", number(0), what)
    parser.add_flag("--bf16", "mixed precision")
    parser.add_option("--seed", seed, 0)
    parser.add_option("--report-to", str, "none", "trackio, wandb, tensorboard")
    parser.add_several("--set", field, "an argument of Eagle31TrainingArguments that wins")
    add_loading(parser)
