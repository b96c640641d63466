"""Checkpoints of a run: which can be resumed, what is written beside the weights, and when a run has diverged: its
weights are no longer finite, or its gradients with no scale of fp16."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SchedulerType, sort_checkpoints
from transformers.utils import logging

from .. import vocab
from ..configuration import FIELDS, Eagle31Config
from ..hub import CARD, render_card
from ..json_file import read_json
from ..modeling import Eagle31DrafterModel
from ..storage.fingerprints import digest
from ..storage.folders import write_json

logger = logging.get_logger(__name__)
RECORD = "training.json"
# facts of the data that a run keeps when it is resumed: what another value means, and the options it follows from
KEPT = {
    "records_digest": ("other data", "--data, --split, --max-samples, --regenerate, --self-prompts and --seed"),
    "held_out_digest": ("other rows held out", "--eval-rows, --eval-data, --seed and --max-length"),
}
FREE_FIELDS = {"target_model", "weights_from"}  # of a drafter's config, which say nothing of what it computes
STAGED_RECORD = f"{RECORD}.partial"  # a record that is being written, left behind by a kill
# names of checkpoints of a run; a user's checkpoint-best or checkpoint-100.bak is none
CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-([0-9]+)")
CHECK_EVERY = 10  # steps; weights are also looked at where they are saved or evaluated
# Where fp16 losses are scaled, a step that overflows is skipped, and halves the scale, which begins at 2**16.
LEAST_SCALE = 2.0**-16
ARCHIVES = (".pt", ".pth", ".bin")  # of torch.save
LEAST_ROOM = 2**20  # bytes: a disk with less room is full


def write_record(folder: Path, drafter: Eagle31DrafterModel, settings: dict[str, Any], facts: dict[str, Any]) -> None:
    """Writes `training.json`: the draft vocabulary, hashed, what the loss is made of (`settings`), and `facts` about
    the data and the optimizers.

    It also marks a folder as a run's own, which another run may replace; so it is whole or not there, and comes before
    the weights.
    """
    record = {"draft_vocabulary": vocabulary_digest(drafter.d2t), "settings": settings, **facts}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STAGED_RECORD, record)
    os.replace(folder / STAGED_RECORD, folder / RECORD)


def read_record(folder: str | Path) -> dict[str, Any]:
    """Returns a run's `training.json`; {} where there is none, or it cannot be read."""
    try:
        record = read_json(Path(folder, RECORD), constants=True)
    except (OSError, ValueError):
        return {}
    return record if "draft_vocabulary" in record and isinstance(record.get("settings"), dict) else {}


def changed_since(checkpoint: str | Path, settings: dict[str, Any]) -> str:
    """Returns which of the `settings` are not those that a checkpoint was trained by, as in `depth 4 (was 3)`; nothing
    where it does not say."""
    before = read_record(checkpoint).get("settings", {})
    now = json.loads(json.dumps(settings))  # tuples are lists there
    return ", ".join(
        f"{name} {value} (was {before[name]})" for name, value in now.items() if before.get(name, value) != value
    )


def vocabulary_digest(d2t: Tensor | None) -> str | None:
    """Returns a hash of the target ids that a drafter can propose; None for a full vocabulary. `d2t` (Vd,): offsets."""
    return None if d2t is None else digest(repr(vocab.target_ids(d2t.cpu()).tolist()))


def check_drafter(drafter: Eagle31DrafterModel, checkpoint: str) -> None:
    """Raises ValueError where a checkpoint is of a drafter with other fields, whose weights would be run by another
    network, or with another draft vocabulary, whose head's weights would be taken for those of other tokens."""
    was, is_now = Eagle31Config.from_pretrained(checkpoint).to_dict(), drafter.config.to_dict()
    for name in sorted(FIELDS - FREE_FIELDS):
        if was.get(name) != is_now.get(name):
            raise ValueError(
                f"{checkpoint}: its drafter has {name} {was.get(name)}, and {is_now.get(name)} is asked for now;"
                " expected the same. Resume with the fields and the drafter of then."
            )
    mine = vocabulary_digest(drafter.d2t)
    theirs = read_record(checkpoint).get("draft_vocabulary", mine)
    if theirs != mine:
        raise ValueError(
            f"{checkpoint}: its draft vocabulary ({theirs}) is not the drafter's ({mine}); expected the same. Build the"
            " drafter with the vocabulary of the checkpoint to resume."
        )


def check_data(checkpoint: str | Path, data: Any) -> None:
    """Raises ValueError where the run of a checkpoint began with other `data`, facts as `training.json` keeps them: it
    may have trained on what is held out now. A fact that is missing, here or there, is not compared."""
    before = read_record(checkpoint).get("data")
    if not (isinstance(before, dict) and isinstance(data, dict)):  # a caller's own facts
        return
    for name, (what, options) in KEPT.items():
        if name in before and data.get(name, before[name]) != before[name]:
            raise ValueError(
                f"{checkpoint}: its run began with {what} ({before.get('rows')} rows of {before.get('source')}, {name}"
                f" {before[name][:8]}) than is asked for now ({name} {data[name][:8]}); expected the same. Resume with"
                f" the {options} of then, and unchanged data, or choose a new --output."
            )


def step_of(args: Any) -> dict[str, int | None]:
    """Returns what a step of the optimizer learns from, by `Eagle31TrainingArguments`: `rows`, over all processes; they
    are packed with up to `max_length` tokens, or texts (None)."""
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return {"rows": rows, "max_length": args.max_length if args.packing else None}


def said_of(step: Mapping[str, Any]) -> str:
    """Returns a step as messages name it, as in `8 x 2048 tokens`."""
    return f"{step['rows']} x {step['max_length']} tokens" if step["max_length"] else f"{step['rows']} x a text"


def check_step(checkpoint: str | Path, args: Any) -> None:
    """Raises ValueError where the steps of a checkpoint's run learnt from more or from less than those of `args` do:
    steps count which rows are learnt, and where the schedule stands. Warns of a run that does not say."""
    was, is_now = read_record(checkpoint).get("step"), step_of(args)
    if not isinstance(was, dict) or was.keys() != is_now.keys():
        found = "its run does not say how much a step learns from (before it was recorded, eagle31 train took 8 rows)"
        logger.warning_once("%s: %s; it goes on by steps of %s.", checkpoint, found, said_of(is_now))
    elif was != is_now:
        raise ValueError(
            f"{checkpoint}: a step of its run learns from {said_of(was)}, and {said_of(is_now)} is asked for now;"
            " expected the same. Resume with the --max-length of then, and as many rows: --batch-size times"
            " --accumulate times the number of processes."
        )


def check_finite(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError where a weight that is about to be written to `folder` is NaN or infinite."""
    for name, weight in weights.items():
        if num_not_finite([weight]):
            raise RuntimeError(
                f"{folder}: {name} holds NaN or infinity as {weight.dtype}; expected finite weights, and wrote none."
                " The checkpoints of the run are finite; where it is the dtype that is too narrow, save in bfloat16 or"
                " float32."
            )


def checkpoints(folder: str | Path) -> list[Path]:
    """Returns the checkpoints in a folder, whole or not, by their step: the subfolders `checkpoint-<digits>`."""
    found = [path for path in Path(folder).glob("*") if CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def remove_oldest(folder: str | Path, limit: int | None, best: str | None) -> None:
    """Removes the oldest checkpoints beyond `limit`, but neither the newest nor the best; none without a limit."""
    found = [path for path in sort_checkpoints(str(folder), use_mtime=True) if CHECKPOINT.fullmatch(Path(path).name)]
    kept = {*found[-1:], str(Path(best)) if best else None}
    excess = len(found) - max(limit, len(kept.intersection(found))) if limit else 0
    for path in [path for path in found if path not in kept][: max(0, excess)]:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def without_limit(args: TrainingArguments) -> Iterator[int | None]:
    """A context in which the Trainer removes no checkpoint, as it would take folders such as checkpoint-best for old
    ones; yields the limit."""
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        yield limit
    finally:
        args.save_total_limit = limit


@contextmanager
def naming_unwritten(folder: Path) -> Iterator[None]:
    """A context in which libraries write into a folder. Where they cannot, torch's error says neither which file that
    was nor why, and those of libraries in Rust do not say which: raises OSError with the reason, and the file, if it is
    the one archive that is not whole, or the folder.
    """
    try:
        yield
    except Exception as error:
        said, place = str(error), folder
        is_of_torch = "inline_container" in said  # the file of torch's that writes archives
        # tokenizers raises no other class
        is_of_rust = type(error) in (SafetensorError, Exception) and "(os error " in said
        if not is_of_torch and not is_of_rust:
            raise
        is_full = f"(os error {errno.ENOSPC})" in said or shutil.disk_usage(folder).free < LEAST_ROOM
        number = errno.ENOSPC if is_full else errno.EIO
        torn = [path for path in folder.iterdir() if path.suffix in ARCHIVES and not is_zipfile(path)]
        if is_of_torch and len(torn) == 1:
            place = torn[0]
        raise OSError(number, os.strerror(number), str(place)) from error


def why_incomplete(checkpoint: Path) -> str | None:
    """Returns what keeps a checkpoint from being resumed, None for a whole one: the Trainer's state, which is written
    last, can be read, and so can the weights."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
        with safe_open(checkpoint / "model.safetensors", framework="pt"):  # which knows how long the file has to be
            return None
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        return str(error)


def last_checkpoint(folder: str | Path) -> str | None:
    """Returns the newest checkpoint in a folder that was written to its end, None where there is none."""
    for path in reversed(checkpoints(folder)):
        reason = why_incomplete(path)
        if reason is None:
            return str(path)
        logger.warning("%s is left out: it was not written to its end (%s)", path, reason)
    return None


class TrainingDivergedError(RuntimeError):
    """Raised to stop a training whose weights or gradients are not finite; no such weights were saved."""


def check_divergence(trainer: Trainer) -> None:
    """Raises TrainingDivergedError, in all processes at once, where a trained weight is NaN or infinite, or where the
    scale of fp16 losses has become that small that gradients cannot be finite. Waits for the device."""
    scaler, args = trainer.accelerator.scaler, trainer.args
    num_broken = num_not_finite(weight for weight in trainer.model.parameters() if weight.requires_grad)
    num_broken += scaler is not None and scaler.get_scale() < LEAST_SCALE
    if not int(trainer.accelerator.reduce(num_broken.to(args.device), "sum")):
        return
    kept = last_checkpoint(args.output_dir)
    broken = "weights are" if scaler is None else "weights or gradients are"
    found = f"the last checkpoint with finite weights is {kept}" if kept else "no checkpoint was written before"
    again = "train its drafter on in a new run (eagle31 train --drafter)" if kept else "begin anew"
    raise TrainingDivergedError(
        f"{broken} not finite after step {trainer.state.global_step}. Training has diverged and was stopped; {found}."
        f" To go on, {again} with lower rates, with max_grad_norm=1, or with bf16 instead of fp16."
    )


@torch.no_grad()
def num_not_finite(weights: Iterable[Tensor]) -> Tensor:
    """Returns the number of tensors with NaN or infinity (in this process's part, where sharded), a scalar on their
    device, without copying them."""
    num_broken = torch.zeros((), dtype=torch.long)
    for weight in weights:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if local.is_floating_point() and local.numel():
            is_finite = torch.stack(torch.aminmax(local)).isfinite().all()
            num_broken = num_broken.to(local.device) + ~is_finite
    return num_broken


def note_training(trainer: Any) -> None:
    """Adds to the facts of the drafter's card how far a `CheckpointingTrainer` has trained it, and how; of the
    best checkpoint's weights, how far those were."""
    args, state = trainer.args, trainer.state
    step = state.global_step if trainer.saved_step is None else trainer.saved_step
    facts, reach = trainer.drafter.card_facts.training, trainer.position_reach
    batch = trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size
    facts |= {
        "Steps": f"{step:,} of {batch} sequences of up to {args.max_length:,} tokens"
        f"{f', positions spread up to {reach:,}' if reach else ''}",
        "Loss": f"{args.loss}, {args.depth} deep, normalised by {args.normalisation},"
        f" {'of all tokens, prompts too' if args.train_prompts else f'loss mask: {args.loss_mask}'}",
        "Optimizer": f"{trainer.trained_by()}, {SchedulerType(args.lr_scheduler_type).value}",
    }
    logged = (entry for entry in reversed(state.log_history) if entry["step"] <= step)
    evaluated = next((entry for entry in logged if "eval_accepted_length" in entry), None)
    if evaluated is not None:
        facts["Accepted length"] = (
            f"{evaluated['eval_accepted_length']:.2f} a target forward, walking the answers held out,"
            f" {args.eval_settings().depth} deep"
        )


def write_card(folder: Path, drafter: Eagle31DrafterModel, name: str | None) -> None:
    """Writes the drafter's card into a folder. `name`: its repository's, by default the folder's."""
    config: Any = drafter.config
    card = render_card(config, drafter.card_facts, name or folder.resolve().name)
    (folder / CARD).write_text(card, encoding="utf-8")
