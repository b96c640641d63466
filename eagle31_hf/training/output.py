"""The folder of a training run: what may be in it when a run begins, and what becomes of an earlier run's files."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from ..checkpoints.write import check_new_folder
from .saving import last_checkpoint
from .store import MANIFEST

REPLACED = "eagle31-replaced"  # the subfolder for what earlier runs wrote
# What a run writes, and what a loader would take for a part of that. Everything else is left alone, prepared training data included.
WRITTEN = (
    "checkpoint-*", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin",
    "pytorch_model.bin.index.json", "config.json", "generation_config.json", "README.md", "training.json", "training_args.bin",
    "trainer_state.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "vocab.*", "merges.txt",
)  # fmt: skip
Found = TypeVar("Found")


def check_output(folder: str | Path, resume: bool = False, overwrite: bool = False) -> str | None:
    """Returns the checkpoint from which a run in `folder` resumes, None where it starts anew; writes nothing.

    Raises ValueError for a folder that is not empty without `resume` or `overwrite`, for one without anything to resume, and for one to
    overwrite that holds what no run wrote: another model, the target itself maybe.
    """
    folder = Path(folder)
    if resume and overwrite:
        raise ValueError(f"{folder}: cannot be both resumed and overwritten; expected one of --resume and --overwrite.")
    has_rows = any(path for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{MANIFEST}"))
    has_checkpoints = any(folder.glob("checkpoint-*"))
    if resume:
        checkpoint = last_checkpoint(folder)
        if checkpoint is None and (has_checkpoints or not has_rows):  # only rows: the run was stopped before its first checkpoint
            raise ValueError(f"{folder}: holds no complete checkpoint to resume from; begin anew, without --resume or with --overwrite.")
        return checkpoint
    goes_on = "go on with the run in it by --resume, " if has_rows or has_checkpoints else ""
    if not overwrite or folder.is_file():
        check_new_folder(folder.resolve(), f"Name another, {goes_on}or replace what is there by --overwrite.")
    theirs = _of_no_run(folder)
    if theirs is not None:
        raise ValueError(
            f"{theirs}: was not written by a run, and --overwrite would remove it; expected an earlier run's folder. Name another."
        )
    return None


def _of_no_run(folder: Path) -> Path | None:
    """The first file that would be taken for an earlier run's and is another model's, or stands where no run has been."""
    folders = [folder, *sorted(folder.glob("checkpoint-*"))]
    configs = [path for each in folders for path in (each / "config.json", each / "adapter_config.json") if path.is_file()]
    for path in configs:
        with suppress(ValueError, OSError):  # a kill left half of it
            config = json.loads(path.read_bytes())
            if not isinstance(config, dict) or config.get("model_type") != "eagle31":
                return path
    if configs or len(folders) > 1 or (folder / REPLACED).is_dir():
        return None
    return next((path for path in _written(folder) if path.is_file()), None)


def in_all_processes(find: Callable[[], Found]) -> Found:
    """Calls `find` in the main process only, and returns its result, or raises its error as ValueError, in all: were all to look, one might
    already write where another looks."""
    outcome: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            outcome[0] = find()
        except (ValueError, OSError) as error:
            outcome[1] = str(error)
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]


def set_aside(folder: str | Path) -> Path | None:
    """Moves what an earlier run wrote to a new subfolder of `folder`, and returns that; None where there was nothing."""
    folder = Path(folder)
    found = _written(folder)
    if not found:
        return None
    numbers = [int(path.name) for path in (folder / REPLACED).glob("[0-9]*")]
    aside = folder / REPLACED / str(max(numbers, default=0) + 1)
    aside.mkdir(parents=True)
    for path in found:
        path.rename(aside / path.name)
    return aside


def _written(folder: Path) -> list[Path]:
    return sorted({path for pattern in WRITTEN for path in folder.glob(pattern)})


def discard_replaced(folder: str | Path) -> None:
    """Removes what has been set aside, once what replaces it is written."""
    shutil.rmtree(Path(folder, REPLACED), ignore_errors=True)
