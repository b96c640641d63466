"""Checkpoints: which can be resumed, and what is written beside the weights."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from .. import vocab
from ..modeling import Eagle31DrafterModel
from .identity import digest
from .objective import Settings

logger = logging.getLogger(__name__)
RECORD = "training.json"


def write_record(folder: Path, drafter: Eagle31DrafterModel, settings: Settings, facts: dict[str, Any]) -> None:
    """`training.json`: which tokens the head stands for, hashed, how the drafter was trained, and `facts` about the data."""
    record = {"draft_vocabulary": vocabulary_digest(drafter.d2t), "settings": settings.__dict__, **facts}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def vocabulary_digest(d2t: Tensor | None) -> str | None:
    return None if d2t is None else digest(repr(vocab.target_ids(d2t.cpu()).tolist()))


def check_vocabulary(drafter: Eagle31DrafterModel, checkpoint: str) -> None:
    """Raises ValueError where a checkpoint's head stands for other tokens than the drafter's: trained weights would be taken for others."""
    weights = Path(checkpoint, "model.safetensors")
    if not weights.exists():
        return
    with safe_open(weights, framework="pt") as file:
        theirs = file.get_tensor("d2t") if "d2t" in file.keys() else None  # noqa: SIM118 -- no mapping
    mine = None if drafter.d2t is None else vocab.target_ids(drafter.d2t.cpu())
    same = theirs is None if mine is None else theirs is not None and torch.equal(vocab.target_ids(theirs), mine)
    if not same:
        raise ValueError(
            f"{checkpoint}: its draft vocabulary ({vocabulary_digest(theirs)}) is not the drafter's ({vocabulary_digest(drafter.d2t)}); "
            "expected the same. Build the drafter with the vocabulary of the checkpoint to resume."
        )


def check_finite(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError where a weight that is about to be written to `folder` is NaN or infinite."""
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.numel() and not torch.stack(torch.aminmax(weight)).isfinite().all():
            raise RuntimeError(
                f"{folder}: {name} holds NaN or infinity as {weight.dtype}; expected finite weights, and wrote none. The checkpoints "
                "of the run are finite; where it is the dtype that is too narrow, save in bfloat16 or float32."
            )


def ended_state(folder: Path) -> TrainerState | None:
    """The state of a run that came to its end in the folder; None where none did, or it cannot be read."""
    try:
        return TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError):
        return None


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest checkpoint that was written to its end: the Trainer's state, which is written last, can be read, as can the weights."""

    def is_complete(path: Path) -> bool:
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text())
            with safe_open(path / "model.safetensors", framework="pt"):  # which knows how long the file has to be
                pass
        except (OSError, ValueError, SafetensorError) as error:
            logger.warning("%s is left out: it was not written to its end (%s)", path, error)
            return False
        return True

    found = sorted(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    return next((str(path) for path in found if is_complete(path)), None)
