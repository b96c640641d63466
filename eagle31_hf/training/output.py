"""The folder of a training run: what may be in it when a run begins, and what becomes of an earlier run's files."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.trainer import TRAINER_STATE_NAME

from ..checkpoints.sharing import try_lock
from ..configuration import Eagle31Config
from ..json_file import read_json
from ..storage.folders import check_new_folder
from .saving import RECORD, STAGED_RECORD, checkpoints, last_checkpoint, read_record, why_incomplete
from .store import MANIFEST

REPLACED = "eagle31-replaced"  # the subfolder for what earlier runs wrote
# Patterns of files that a run writes besides checkpoints, or that a loader would take for a part of these. Everything
# else is left alone, prepared training data and folders such as checkpoint-best included.
WRITTEN = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "config.json",
    "generation_config.json",
    "README.md",
    RECORD,
    STAGED_RECORD,
    "training_args.bin",
    TRAINER_STATE_NAME,
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
)
Found = TypeVar("Found")


@contextmanager
def claim(folder: str | Path) -> Iterator[None]:
    """Keeps the runs of other processes out of a run's folder until the block ends or the process dies.

    The folder is made if need be, and removed again if it is still empty at the end. The main process holds a lock on
    the folder itself, so that no file of it is left behind. Where a folder cannot be locked, as on Windows and some
    network file systems, nobody is kept out. Raises ValueError, in all processes of a distributed run, where another
    run holds the folder, or where it cannot be written to.
    """
    with ExitStack() as at_end:
        once(lambda: _claim(Path(folder), at_end))
        yield


def _claim(folder: Path, at_end: ExitStack) -> None:
    """Makes the folder and locks it, and leaves to `at_end` to undo both."""
    is_new = not folder.is_dir()
    if is_new:
        if os.path.lexists(folder):
            return  # `check_output` says what it is
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ValueError(
                f"{folder}: cannot be made ({error.strerror}); expected a folder that you may write to."
            ) from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder}: this user may not write to it; expected a folder that you may write to.")
    _lock(folder, at_end)
    if is_new:
        at_end.callback(_remove_empty, folder)  # while it is still locked


def _lock(folder: Path, at_end: ExitStack) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # this user may not read it, or this system opens no folders
        return
    at_end.callback(os.close, descriptor)
    with suppress(OSError):  # there are no locks
        if not try_lock(descriptor):
            raise ValueError(
                f"{folder}: another run is writing into it; name another folder, or wait until that run has ended."
            )


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # the run has begun
        folder.rmdir()


def check_output(folder: str | Path, resume: bool = False, overwrite: bool = False) -> str | None:
    """Returns the checkpoint from which a run in `folder` resumes, None where it starts anew; writes nothing.

    Raises ValueError for a folder that is not empty without `resume` or `overwrite`, for one without anything to
    resume, and for one to overwrite that holds what no run wrote: the target itself maybe, or a drafter that was
    downloaded or converted.
    """
    folder = Path(folder)
    if resume and overwrite:
        raise ValueError(f"{folder}: cannot be both resumed and overwritten; expected one of --resume and --overwrite.")
    has_data, has_checkpoints = holds_data(folder), bool(checkpoints(folder))
    if resume:
        checkpoint = last_checkpoint(folder)
        # only data: the run was stopped before its first checkpoint
        if checkpoint is None and (has_checkpoints or not has_data):
            raise ValueError(
                f"{folder}: holds no complete checkpoint to resume from; begin anew, without --resume or with"
                " --overwrite."
            )
        return checkpoint
    goes_on = "go on with the run in it by --resume, " if has_data or has_checkpoints else ""
    if not overwrite or folder.is_file():
        check_new_folder(folder.resolve(), f"Name another, {goes_on}or replace what is there by --overwrite.")
    _check_replaceable(folder)
    return None


def holds_data(folder: str | Path) -> bool:
    """Returns True where training data has been prepared in the folder, or regenerated by a run."""
    return any(path for depth in ("*", "*/*") for path in Path(folder).glob(f"{depth}/{MANIFEST}"))


def _check_replaceable(folder: Path) -> None:
    """Raises ValueError, naming the file, where something that would be set aside as an earlier run's is not known to
    be one's."""
    theirs = _of_unknown_origin(folder)
    if theirs is not None:
        raise ValueError(
            f"{theirs}: was not written by a run, and --overwrite would remove it; expected an earlier run's folder,"
            f" with the {RECORD} of one. Name another, or move it away."
        )


def _of_unknown_origin(folder: Path) -> Path | None:
    """Returns the first of the files and checkpoints to be set aside that no run is known to have written; None where a
    run wrote them all.

    A run's own are those beside its record, and in folders without one, as another trainer leaves them, checkpoints of
    drafters of which one at least is whole. The Trainer writes its state there before the record.
    """
    found = [path for path in checkpoints(folder) if {file.name for file in path.iterdir()} - {STAGED_RECORD}]
    configs = (each / name for each in (folder, *found) for name in ("config.json", "adapter_config.json"))
    foreign = next(filter(_is_foreign, configs), None)
    if foreign is not None:
        return foreign
    files = [path for path in _written(folder) if not path.is_dir() and path.name != STAGED_RECORD]
    has_state_alone = all(path.name == TRAINER_STATE_NAME for path in files)
    if read_record(folder) or (has_state_alone and any(_is_drafter_of_a_run(path) for path in found)):
        return None
    return next(iter(files + found), None)


def _is_foreign(config: Path) -> bool:
    """Returns True for the config of another model. One that cannot be read may be a killed run's; what lies beside it
    has to tell."""
    try:
        return read_json(config, constants=True).get("model_type") != Eagle31Config.model_type
    except (OSError, ValueError):
        return False


def _is_drafter_of_a_run(checkpoint: Path) -> bool:
    is_whole = why_incomplete(checkpoint) is None
    return bool(read_record(checkpoint)) or (
        is_whole and (checkpoint / "config.json").is_file() and not _is_foreign(checkpoint / "config.json")
    )


def once(make: Callable[[], Found], each_machine: bool = False) -> Found:
    """Calls `make` in the main process, or in the first one of each machine; the others wait, and return what it
    returned there. Were all to look, one might already write where another looks. Where it raises, so do all processes,
    ValueError where it was another's error."""
    state = PartialState()
    made: Found | None = None
    failure: Exception | None = None
    if state.is_local_main_process if each_machine else state.is_main_process:
        try:
            made = make()
        except Exception as error:  # any: the other processes wait for the outcome
            failure = error
    outcomes = gather_object([(made, failure and str(failure))])
    if failure is not None:
        raise failure
    said = next((text for _, text in outcomes if text is not None), None)
    if said is not None:
        raise ValueError(said)
    return outcomes[state.process_index - state.local_process_index if each_machine else 0][0]


def set_aside(folder: str | Path) -> Path | None:
    """Moves what an earlier run wrote to a new subfolder of `folder`, and returns that; None where there was nothing.

    Raises ValueError, before it moves anything, where that is not known to be a run's.
    """
    folder = Path(folder)
    _check_replaceable(folder)
    found = _written(folder)
    if not found:
        return None
    numbers = [int(path.name) for path in _replaced(folder)]
    aside = folder / REPLACED / str(max(numbers, default=0) + 1)
    aside.mkdir(parents=True)
    for path in found:
        path.rename(aside / path.name)
    return aside


def _written(folder: Path) -> list[Path]:
    """Returns the files of the patterns in WRITTEN, and the checkpoints."""
    files = [path for pattern in WRITTEN for path in sorted(folder.glob(pattern)) if not path.is_dir()]
    return files + checkpoints(folder)


def _replaced(folder: Path) -> list[Path]:
    """Returns the numbered subfolders into which `set_aside` has moved files."""
    return [path for path in (folder / REPLACED).glob("*") if re.fullmatch("[0-9]+", path.name)]


def discard_replaced(folder: str | Path) -> None:
    """Removes what has been set aside, once what replaces it is written."""
    for path in _replaced(Path(folder)):
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # nothing was set aside, or somebody put something of their own there
        Path(folder, REPLACED).rmdir()
