"""`eagle31 train`: a drafter for any causal language model, from data to a folder worth pushing."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import kept
from .loading import load_tokenizer
from .parsing import config_field, count, field, path, positive, progress, real, seed, show
from .preparation import add_loading, add_template_option, load_target

SEEN_FOR_COVERAGE, SEEN_FOR_UPGRADE = 16, 16  # rows


@dataclass
class Data:
    """Rows to train and to evaluate on, and what is worth writing down about them."""

    train: Any
    held_out: Any
    facts: dict[str, Any]
    layer_ids: list[int] | None = None  # of the states that come with them


def train(args: argparse.Namespace) -> int:
    from ..training.output import claim

    check_options(args)
    settings = arguments(args)
    with claim(settings.output_dir):
        return run(args, settings)


def run(args: argparse.Namespace, settings: Any) -> int:
    """The whole run, in a folder that no other run writes into meanwhile."""
    from transformers.trainer_utils import IntervalStrategy

    from ..training.output import check_output, discard_replaced, in_all_processes
    from ..training.trainer import Eagle31Trainer

    output = settings.output_dir
    checkpoint = in_all_processes(lambda: check_output(output, args.resume, args.overwrite))
    progress(f"loading {args.target}")
    tokenizer = load_tokenizer(args.target, args.revision)
    states = stored(args)
    target = states or load_target(args)
    data = read_data(args, target, tokenizer)
    if data.held_out is None and args.eval_rows:
        progress("too few rows to hold any out: nothing is evaluated, and the last checkpoint is kept")
        settings.eval_strategy, settings.load_best_model_at_end = IntervalStrategy.NO, False
    drafter, coverage = begin(args, target, tokenizer, data)
    trainer = Eagle31Trainer(
        drafter, settings, data.train, data.held_out, target=None if states else target, processing_class=tokenizer
    )
    trainer.facts = {"data": data.facts, "draft_vocabulary_coverage": coverage}
    progress(f"training on {len(data.train):,} rows, evaluating on {len(data.held_out) if data.held_out else 0:,}")
    speak_plainly(trainer)
    if args.overwrite:
        in_all_processes(lambda: replace(output))
    result = trainer.train(resume_from_checkpoint=checkpoint)
    # Checkpoints keep fp32 to go on from; what is served has the target's dtype.
    trainer.drafter.to(target.get_input_embeddings().weight.dtype)
    trainer.save_model()
    if trainer.is_world_process_zero():
        discard_replaced(output)
        report(args, trainer, result.metrics)
    return 0


def replace(output: str) -> None:
    """Makes room for a run in the folder of an earlier one, whose result stays until there is a new one."""
    from ..training.output import set_aside

    aside = set_aside(output)
    if aside is not None:
        progress(f"what an earlier run wrote is in {aside} until the new drafter is saved")


def check_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that mean nothing beside each other."""
    fresh = [
        name
        for name in ("--draft-vocab-size", "--head")
        if getattr(args, name[2:].replace("-", "_")) not in (None, "target")
    ]
    if args.upgrade and args.drafter is None:
        raise ValueError("--upgrade makes an EAGLE 3 drafter an EAGLE 3.1 one; expected --drafter with it.")
    if args.drafter is not None and fresh:
        raise ValueError(
            f"{fresh[0]} is of a new drafter, and --drafter names one that has its own; expected one of the two."
        )


def arguments(args: argparse.Namespace) -> Any:
    """The command's own options, then --set, as arguments of the trainer."""
    from ..training.arguments import Eagle31TrainingArguments

    every = {"eval_steps": args.eval_every, "save_steps": args.eval_every}
    evaluates = {"eval_strategy": "steps", "load_best_model_at_end": True} if args.eval_rows or args.eval_data else {}
    options = {
        "output_dir": args.output,
        "depth": args.depth,
        "loss": args.loss,
        "max_length": args.max_length,
        "learning_rate": args.learning_rate,
        "per_device_train_batch_size": args.batch_size,
        "num_train_epochs": args.epochs,
        "gradient_accumulation_steps": args.accumulate,
        "max_steps": args.steps or -1,
        "bf16": args.bf16,
        "use_cpu": args.device == "cpu",
        "save_total_limit": 2,
        "seed": args.seed,
        "report_to": args.report_to,
        "disable_tqdm": args.json,
        "dataloader_pin_memory": args.device != "cpu",
    }
    try:
        return Eagle31TrainingArguments(**options | every | evaluates | dict(args.set))
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"--set: {error}; expected a field of Eagle31TrainingArguments, and a value of its type."
        ) from None


def stored(args: argparse.Namespace) -> Any:
    """What the data has kept of the target, where it holds the target's states: then the target itself is not loaded."""
    from ..training.store import MANIFEST, read_manifest
    from ..training.target import StoredTarget

    if not (Path(args.data) / MANIFEST).is_file() or read_manifest(args.data).layer_ids is None:
        return None
    if args.upgrade or args.regenerate:
        raise ValueError(
            f"{args.data} holds the target's states, and the target is not run; expected neither --upgrade nor"
            " --regenerate."
        )
    return StoredTarget(args.data, args.target)


def read_data(args: argparse.Namespace, target: Any, tokenizer: Any) -> Data:
    """Rows of a store, or made of records now; regenerated ones go into a store beside the drafter, so that none is
    generated twice."""
    from ..training.packing import Part
    from ..training.store import HiddenStateStore

    rows, facts = rows_of_source(args, args.data, target, tokenizer, "data")
    layer_ids = rows.manifest.layer_ids if isinstance(rows, HiddenStateStore) else None
    if args.eval_data:
        held_out, _ = rows_of_source(args, args.eval_data, target, tokenizer, "eval-data")
        return Data(rows, held_out, facts, layer_ids)
    split = len(rows) - min(args.eval_rows, len(rows) // 10)
    return Data(Part(rows, 0, split), Part(rows, split, len(rows)) if split < len(rows) else None, facts, layer_ids)


def rows_of_source(
    args: argparse.Namespace, source: str, target: Any, tokenizer: Any, name: str
) -> tuple[Any, dict[str, Any]]:
    """The rows of one source, and the facts about them: of a store as they are, else made of its records now.
    Regenerated ones go into the subfolder `name` of the output. Raises ValueError for a store of another tokenizer."""
    from ..training.identity import tokenizer_fingerprint
    from ..training.prepare import rows_in_memory
    from ..training.store import MANIFEST, HiddenStateStore

    if (Path(source) / MANIFEST).is_file():
        store = HiddenStateStore(source)
        store.check(tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    elif args.regenerate:
        store = regenerated(args, source, target, tokenizer, Path(args.output, name))
    else:
        rows, skipped = rows_in_memory(
            target,
            tokenizer,
            source,
            max_length=args.max_length,
            split=args.split,
            seed=args.seed,
            template_options=dict(args.template_option),
            progress=progress,
        )
        return rows, facts_of(source, rows, skipped)
    return store, facts_of(source, store, store.skipped)


def regenerated(args: argparse.Namespace, source: str, target: Any, tokenizer: Any, folder: Path) -> Any:
    """The target's own answers, each process making its share."""
    from accelerate import PartialState

    from ..training.prepare import prepare_data
    from ..training.store import HiddenStateStore

    state = PartialState(cpu=args.device == "cpu")
    part = (state.process_index, state.num_processes)
    prepare_data(
        target,
        tokenizer,
        source,
        str(folder),
        max_length=args.max_length,
        regenerate=True,
        split=args.split,
        seed=args.seed,
        part=part,
        progress=progress,
        template_options=dict(args.template_option),
    )
    state.wait_for_everyone()
    return HiddenStateStore(folder)


def facts_of(source: str, rows: Any, skipped: dict[str, int]) -> dict[str, Any]:
    """Counts of rows, tokens and skipped records, as training.json keeps them; says them to the user, too."""
    facts = {"source": source, "rows": len(rows), "tokens": sum(rows.lengths), "skipped": dict(skipped)}
    left_out = "".join(f", {count:,} skipped ({reason})" for reason, count in sorted(skipped.items()))
    progress(f"{source}: {facts['rows']:,} rows of {facts['tokens']:,} tokens{left_out}")
    return facts


def begin(args: argparse.Namespace, target: Any, tokenizer: Any, data: Data) -> tuple[Any, dict[str, float] | None]:
    """The drafter to train, and what its draft vocabulary covers."""
    from ..modeling import Eagle31DrafterModel
    from ..training.fresh import new_drafter
    from ..tying import execution_device
    from ..upgrade import upgrade_to_eagle31

    if args.drafter is None:
        ids, coverage = draft_vocabulary(args, target, tokenizer, data)
        fields = {"aux_hidden_state_layer_ids": data.layer_ids} if data.layer_ids else {}
        return new_drafter(target, ids, args.head, args.seed, **fields | dict(args.field)), coverage
    drafter: Any = (
        Eagle31DrafterModel.from_pretrained(args.drafter, **dict(args.field)).float().to(execution_device(target))
    )
    if args.upgrade and not drafter.config.is_eagle31:
        progress("making the EAGLE 3 drafter an EAGLE 3.1 one, by calibration")
        texts = [data.train[i]["input_ids"][None] for i in range(min(SEEN_FOR_UPGRADE, len(data.train)))]
        drafter = upgrade_to_eagle31(drafter, target, texts)
        progress(drafter.upgrade_report.summary().replace("\n", "; "))
    return drafter, None


def draft_vocabulary(
    args: argparse.Namespace, target: Any, tokenizer: Any, data: Data
) -> tuple[Any, dict[str, float] | None]:
    """The target ids a new drafter is to propose, and the shares they cover of the answers' tokens and of the target's
    probability; None for both where it proposes all."""
    from ..training.fresh import choose_vocabulary, count_answers, layer_ids_for, mass_covered
    from ..training.regenerate import stop_ids
    from ..training.target import StoredTarget, TargetReader
    from ..tying import shape_of

    size = shape_of(target.get_input_embeddings())[0]
    if args.draft_vocab_size is None or args.draft_vocab_size == size:
        return None, None
    ids, tokens = choose_vocabulary(count_answers(data.train, size), args.draft_vocab_size, stop_ids(target, tokenizer))
    seen = data.held_out or data.train
    reader = (
        target
        if isinstance(target, StoredTarget)
        else TargetReader(target, layer_ids_for(target.config.get_text_config(decoder=True)))
    )
    mass = mass_covered((seen[i] for i in range(min(SEEN_FOR_COVERAGE, len(seen)))), ids, reader)
    progress(
        f"a draft vocabulary of {len(ids):,} covers {tokens:.2%} of the answers' tokens, {mass:.2%} of the target's"
        " probability"
    )
    return ids, {"tokens": tokens, "probability": mass}


def speak_plainly(trainer: Any) -> None:
    """A line where transformers' own callbacks print some sixty figures; those are in trainer_state.json and at
    --report-to."""
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    class Lines(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if state.is_world_process_zero and state.global_step >= state.max_steps:
                progress(f"the run was finished after step {state.global_step:,}: there is nothing left to train")

        def on_log(self, args, state, control, logs=None, **kwargs):
            if state.is_world_process_zero:
                line = line_of(logs or {})
                if line:
                    progress(f"step {state.global_step:,} of {state.max_steps:,}: {line}")

    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Lines)


def line_of(logs: dict[str, float]) -> str:
    """What was logged, in the figures one looks at: of training, or of an evaluation."""
    prefix = "eval_" if "eval_loss" in logs else ""
    if f"{prefix}loss" not in logs:
        return ""
    parts = [f"{'held out, ' if prefix else ''}loss {logs[f'{prefix}loss']:.3f}"]
    for figure in ("accuracy", "acceptance"):
        values = [logs[name] for k in range(1, len(logs)) if (name := f"{prefix}{figure}_{k}") in logs]
        parts += [f"{figure} " + " ".join(f"{value:.2f}" for value in values)] if values else []
    if "eval_accepted_length" in logs:
        parts.append(f"accepted length {logs['eval_accepted_length']:.2f}")
    if "eval_served_accepted_length" in logs:
        parts.append(f"in generate() {logs['eval_served_accepted_length']:.2f}")
    return "; ".join(parts)


def report(args: argparse.Namespace, trainer: Any, metrics: dict[str, Any]) -> None:
    """What came of it: one object, or a few lines."""
    evaluated = [entry for entry in trainer.state.log_history if "eval_accepted_length" in entry]
    best: dict[str, Any] = max(evaluated, key=lambda entry: entry["eval_accepted_length"], default={})
    if args.json:
        show(args, {"output": args.output, "steps": trainer.state.global_step, **metrics, "best": best}, "")
        return
    print(
        f"drafter  {args.output}, after {trainer.state.global_step:,} steps in {metrics['train_runtime'] / 60:.1f}"
        " minutes"
    )
    if best:
        served = (
            f"; {best['eval_served_accepted_length']:.2f} in generate()"
            if "eval_served_accepted_length" in best
            else ""
        )
        print(f"accepted {best['eval_accepted_length']:.2f} tokens a target forward on the answers held out{served}")
    print(f"try it   eagle31 generate --target {args.target} --drafter {args.output} PROMPT")


def add_train(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(kept=kept.checkpoint)
    parser.add_argument(
        "--target", type=path, required=True, help="folder or Hub repository of the model to train a drafter for"
    )
    parser.add_argument(
        "--data",
        type=path,
        required=True,
        help="chats or texts: a file, a folder, a dataset of the Hub, or what prepare-data wrote",
    )
    parser.add_argument("--output", type=path, required=True, help="folder of the drafter and its checkpoints")
    parser.add_argument("--split", default="train", help="of a dataset (default: train)")
    parser.add_argument(
        "--regenerate", action="store_true", help="replace answers by the target's own first; more is accepted so"
    )
    add_template_option(parser)
    parser.add_argument("--eval-data", type=path, help="rows to evaluate on (default: some of the data)")
    parser.add_argument(
        "--eval-rows", type=count, default=32, help="rows of the data held out for it, at most a tenth (default: 32)"
    )
    parser.add_argument(
        "--eval-every", type=positive, default=200, metavar="STEPS", help="evaluate and save so often (default: 200)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help=(
            "go on from the last complete checkpoint in OUTPUT; a finished run stays as it is, unless more steps or"
            " epochs are asked for"
        ),
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help=(
            "train anew where OUTPUT is not empty: the drafter and checkpoints there are removed once the new drafter"
            " is saved"
        ),
    )
    _add_drafter(parser)
    _add_optimisation(parser)
    add_loading(parser)


def _add_drafter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafter", type=path, help="begin with this one, of any EAGLE 3 or 3.1 format (default: a new one)"
    )
    parser.add_argument("--upgrade", action="store_true", help="make an EAGLE 3 drafter an EAGLE 3.1 one first")
    parser.add_argument(
        "--head",
        choices=("target", "scratch"),
        default="target",
        help="how a new drafter's head begins (default: target)",
    )
    parser.add_argument(
        "--draft-vocab-size", type=positive, help="tokens a new drafter can propose, the most frequent (default: all)"
    )
    parser.add_argument(
        "--field",
        type=config_field,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of Eagle31Config that wins",
    )


def _add_optimisation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=positive, default=4, help="steps unrolled (default: 4)")
    parser.add_argument(
        "--loss", default="kl", help="kl, reverse_kl, jsd, tv, lk_alpha, lk_lambda, ce, or a mixture as kl=0.9,tv=0.1"
    )
    parser.add_argument("--max-length", type=positive, default=2048, help="tokens of a packed row (default: 2048)")
    parser.add_argument("--epochs", type=real(0, above=True), default=2.0)
    parser.add_argument("--steps", type=positive, help="instead of epochs")
    parser.add_argument("--batch-size", type=positive, default=1, help="packed rows of each process (default: 1)")
    parser.add_argument("--accumulate", type=positive, default=8, help="batches a step (default: 8)")
    parser.add_argument("--learning-rate", type=real(0), default=1e-4)
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--report-to", default="none", help="trackio, wandb, tensorboard")
    parser.add_argument(
        "--set",
        type=field,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of Eagle31TrainingArguments that wins",
    )
