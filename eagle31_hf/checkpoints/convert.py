"""Conversion of any checkpoint to the native format: into a new folder, or in place.

In place one rename decides: before it the folder is the old checkpoint, from it on the new one.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..configuration import HUB_OPTIONS, Eagle31Config
from ..json_file import read_json
from ..storage.folders import new_folder, write_json
from ..storage.tensor_file import DTYPES, Entry, write_tensor_file
from .files import FLOATS, STAGED, WEIGHT_NAMES, WEIGHTS, WEIGHTS_INDEX, check_file_name
from .knobs import KNOBS_FILE
from .producers import NATIVE
from .read import Checkpoint, read_checkpoint
from .sharing import Stamps, folder_lock, stamps, unchanged
from .sources import check_name

ORIGINAL = "original"  # the folder of the files that a conversion in place has replaced
RECORD = "conversion.json"
BESIDE_WEIGHTS = ("config.json", RECORD)  # the files in it besides the weights


def convert_checkpoint(
    source: str | os.PathLike,
    destination: str | os.PathLike | None = None,
    *,
    discard_original: bool = False,
    aux_layer_convention: str | None = None,
    **options: Any,
) -> Checkpoint:
    """Converts an EAGLE 3 or 3.1 checkpoint of any format to the native one, tensor by tensor, each in its own dtype.

    Without a `destination` a local folder is converted in place: the originals are moved to its `original/`, or removed
    with `discard_original`. If the process dies, at whatever moment, `from_pretrained` on the folder loads either the
    old or the new checkpoint, and a second call finishes the work; on a finished folder it does nothing. Of several
    calls at once one converts, and the others wait until it is done. With a `destination`, `source` may be a Hub
    repository. `options` are `revision`, `token` and the like, and fields of `Eagle31Config` that win over the
    checkpoint's.

    Returns the native checkpoint, as `read_checkpoint` sees it, with the reasons and notes of the conversion. Raises
    OSError where something is not there, cannot be written to or locked, or changes meanwhile; ValueError, before
    anything is written, where the checkpoint cannot be converted, and for options of a Hub repository that a folder
    converted in place does not have.
    """
    hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
    if destination is None:
        check_name(str(source))
        if not os.path.isdir(source):
            raise ValueError(f"{source}: is no local folder, so it cannot be converted in place; name a destination.")
        for name in ("revision", "subfolder"):
            if hub.get(name):
                raise ValueError(
                    f"{source}: {name} is {hub[name]!r}, and a folder converted in place has none; expected a Hub"
                    f" repository and a destination with {name}, or the folder alone."
                )
        return _convert_in_place(Path(source), options, aux_layer_convention, discard_original)
    if discard_original:
        raise ValueError("discard_original removes what a conversion in place keeps; expected no destination with it.")
    before = stamps(source, hub.get("subfolder"))
    checkpoint = read_checkpoint(str(source), options, aux_layer_convention, **hub)
    with new_folder(Path(destination)) as folder, unchanged(before, source, hub.get("subfolder")):
        write_weights(folder / WEIGHTS, entries(checkpoint), checkpoint.source)
        if checkpoint.knobs:
            write_json(folder / KNOBS_FILE, checkpoint.knobs)
        write_json(folder / RECORD, record(checkpoint))
        write_native_config(checkpoint.config, folder / "config.json")
    return _with_history(read_checkpoint(str(destination)), checkpoint)


def write_weights(path: Path, entries: Mapping[str, Entry], source: str) -> None:
    """Writes the weights of the drafter `source` to a new file.

    Raises FileExistsError where `path` is there already, ValueError naming the first tensor with a NaN or an infinity.
    """

    def check(name: str, entry: Entry, chunk: memoryview) -> None:
        if entry.dtype not in FLOATS:
            return
        # of a NaN both are NaN; isfinite of every number takes ten times as long
        ends = torch.aminmax(torch.frombuffer(chunk, dtype=DTYPES[entry.dtype]))
        if not torch.stack(ends).isfinite().all():
            found = f"{source}: {name} holds NaN or infinite values"
            raise ValueError(f"{found}; expected finite weights. Download it again.")

    write_tensor_file(path, entries, check=check)


def open_to_others(folder: Path) -> None:
    """Gives the weights in a folder the mode of its knobs, as the umask has it for new files: safetensors (0.8) writes
    files that their owner alone may read."""
    mode = stat.S_IMODE((folder / KNOBS_FILE).stat().st_mode)
    for path in (*folder.glob("model*.safetensors"), *folder.glob("adapter_model*.safetensors")):
        with suppress(PermissionError):  # some file systems have one mode, and refuse to set any
            path.chmod(mode)


def remove_stale_weights(folder: Path) -> None:
    """Removes what an earlier save left that a loader would read with, or instead of, the weights just saved.

    transformers removes an earlier save's shards, but neither the index of those nor, where it writes shards itself,
    the one file.
    """
    number = "[0-9]" * 5
    has_shards = any(folder.glob(f"model-{number}-of-{number}.safetensors"))
    (folder / (WEIGHTS if has_shards else WEIGHTS_INDEX)).unlink(missing_ok=True)


def entries(checkpoint: Checkpoint) -> dict[str, Entry]:
    """Returns every tensor of a checkpoint by its native name, ready to be written."""
    stored = {name: tensor.entry() for name, tensor in checkpoint.tensors.items()}
    return stored | {name: Entry.of_tensor(tensor) for name, tensor in checkpoint.made.items()}


def record(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the content of conversion.json: the checkpoint that was converted, and how it was understood."""
    return {
        "source": checkpoint.files.source,
        "format": checkpoint.format,
        "reasons": checkpoint.reasons,
        "notes": checkpoint.notes,
        "renamed": {stored.name: name for name, stored in sorted(checkpoint.tensors.items()) if name != stored.name},
        "dropped": checkpoint.dropped,
        "made": sorted(checkpoint.made.keys() - {stored.name for stored in checkpoint.files.tensors.values()}),
    }


def write_native_config(config: Eagle31Config, path: Path) -> None:
    """Writes the config.json of a native checkpoint."""
    config.architectures = ["Eagle31DrafterModel"]
    config.to_json_file(str(path), use_diff=True)


def _with_history(native: Checkpoint, checkpoint: Checkpoint) -> Checkpoint:
    native.reasons[:] = [*checkpoint.reasons, *native.reasons]
    native.notes[:] = checkpoint.notes
    return native


# Conversion in place. The folder after each step, and the files of it that from_pretrained reads (*):
#   stage   config.json*, old weights*; eagle31-converting/model.safetensors, original/config.json
#   commit  config.json* pointing to eagle31-converting/model.safetensors*; old weights, original/config.json
#   tidy    config.json*, model.safetensors*; everything old in original/
# The drafting knobs (generation_config.json) are read from beside the weights, and staged with them.
# The commit is one rename. All of it is done under the folder's lock, and the next conversion removes what a killed
# process has left in eagle31-converting/.


def _convert_in_place(folder: Path, overrides: dict[str, Any], convention: str | None, discard: bool) -> Checkpoint:
    if os.access(folder, os.W_OK | os.X_OK):
        with folder_lock(folder):
            return _convert_alone(folder, overrides, convention, discard)
    checkpoint = read_checkpoint(str(folder), overrides, convention)
    if not _is_done(folder, checkpoint) or (discard and (folder / ORIGINAL).exists()):
        found = f"{folder}: cannot be written to, so it cannot be converted in place"
        raise PermissionError(f"{found}; name a destination.")
    return checkpoint


def _convert_alone(folder: Path, overrides: dict[str, Any], convention: str | None, discard: bool) -> Checkpoint:
    before = stamps(folder)
    checkpoint = read_checkpoint(str(folder), overrides, convention)
    if checkpoint.folder != folder:
        found = f"{folder}: its weights are in {checkpoint.folder}"
        raise ValueError(f"{found}; convert that folder, or name a destination.")
    original, staging = folder / ORIGINAL, (folder / STAGED).parent
    for path in (original, staging):
        # through a link, files in another place would be overwritten
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            found = f"{path}: is a link or a file"
            raise ValueError(f"{found}; expected nothing, or a folder of an earlier conversion. Move it away.")
    if _is_committed(checkpoint):  # by an earlier call, which was stopped before it tidied
        _tidy(folder)
        before = stamps(folder)
        checkpoint = read_checkpoint(str(folder), overrides, convention)
    is_done = _is_done(folder, checkpoint)
    if not is_done:
        _stage(folder, checkpoint, before)
        _commit(folder, checkpoint)
        _tidy(folder)
    shutil.rmtree(staging, ignore_errors=True)
    if discard and (original / RECORD).is_file():
        for name in (*_recorded(original / RECORD), *BESIDE_WEIGHTS):  # the record is the last, as it lists the others
            (original / name).unlink(missing_ok=True)
    if discard and original.is_dir() and not any(original.iterdir()):
        original.rmdir()
    native = read_checkpoint(str(folder))
    return native if is_done else _with_history(native, checkpoint)


def _is_committed(checkpoint: Checkpoint) -> bool:
    return checkpoint.files.config.get("transformers_weights") == STAGED


def _is_done(folder: Path, checkpoint: Checkpoint) -> bool:
    """Returns True where the folder is native already; `checkpoint` is the folder read with the options asked for,
    which may change its config."""
    is_native = checkpoint.folder == folder and checkpoint.is_native and not _is_committed(checkpoint)
    return is_native and checkpoint.config.to_dict() == read_checkpoint(str(folder)).config.to_dict()


def _stage(folder: Path, checkpoint: Checkpoint, before: Stamps) -> None:
    """Writes the new weights, and the knobs, where nobody reads them yet, and copies the old config to original/."""
    original, staged = folder / ORIGINAL, folder / STAGED
    names = {file.name for file in checkpoint.files.weight_files}
    names |= {name for name in WEIGHT_NAMES if (folder / name).is_file()}
    if checkpoint.format != NATIVE and (folder / KNOBS_FILE).is_file():
        names.add(KNOBS_FILE)  # of another library: it would count from now on
    _check_room(folder, names)
    shutil.rmtree(staged.parent, ignore_errors=True)
    work = _new_work(folder)
    try:
        with unchanged(before, folder):
            write_weights(work / WEIGHTS, entries(checkpoint), checkpoint.source)
            if checkpoint.knobs:
                write_json(staged.with_name(KNOBS_FILE), checkpoint.knobs)
            write_json(work / RECORD, record(checkpoint) | {"weight_files": sorted(names)})
            shutil.copyfile(folder / "config.json", work / "config.json")
    except BaseException:
        shutil.rmtree(staged.parent, ignore_errors=True)
        raise
    os.replace(work / WEIGHTS, staged)
    original.mkdir(exist_ok=True)
    for name in (RECORD, "config.json"):
        os.replace(work / name, original / name)


def _check_room(folder: Path, names: set[str]) -> None:
    """Raises ValueError where the files `names` cannot be moved to original/.

    They may be links, or original/ may hold files of an earlier conversion.
    """
    original = folder / ORIGINAL
    kept = sorted(path.name for path in original.iterdir()) if original.is_dir() else []
    # a call that died before its commit left copies of these; the record comes first
    if RECORD in kept or "config.json" not in kept:
        kept = [name for name in kept if name not in BESIDE_WEIGHTS]
    if kept:
        found = f"{original}: holds {kept}, of an earlier conversion maybe"
        raise ValueError(f"{found}; nothing was changed. Move it away, or discard it.")
    links = sorted(name for name in names if (folder / name).is_symlink())
    if links:
        found = f"{folder / links[0]}: is a link"
        raise ValueError(f"{found}; name a destination, so that what it points to stays where it is.")


def _new_work(folder: Path) -> Path:
    """Makes a folder in eagle31-converting/, in which files are finished before they are moved to where they belong."""
    parent = (folder / STAGED).parent
    parent.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(dir=parent))


def _commit(folder: Path, checkpoint: Checkpoint) -> None:
    """Puts the native config in place, which points to the staged weights: from now on the folder is native."""
    config = _new_work(folder) / "config.json"
    checkpoint.config.architectures = ["Eagle31DrafterModel"]
    write_json(config, checkpoint.config.to_diff_dict() | {"transformers_weights": STAGED})
    os.replace(config, folder / "config.json")


def _tidy(folder: Path) -> None:
    """Takes the folder from the commit to its final layout; an earlier call may have done some of the steps."""
    original = folder / ORIGINAL
    staged = folder / STAGED
    work = _new_work(folder)
    for name in _recorded(original / RECORD):
        # once it is in original/, the file of that name here may be a new one
        if (folder / name).is_file() and not (original / name).exists():
            os.replace(folder / name, original / name)
    try:
        os.link(staged, work / WEIGHTS)
    except OSError:  # a file system without hard links
        shutil.copyfile(staged, work / WEIGHTS)
    os.replace(work / WEIGHTS, folder / WEIGHTS)
    stated = read_json(folder / "config.json")
    del stated["transformers_weights"]
    write_native_config(Eagle31Config.from_dict(stated), work / "config.json")
    os.replace(work / "config.json", folder / "config.json")


def _recorded(path: Path) -> list[str]:
    """Returns the files that a record lists: weights, and the generation config of another library.

    Raises ValueError for a name that leads out of the folder: the record may have come with a download.
    """
    names = read_json(path).get("weight_files")
    if not isinstance(names, list):
        found = f"{path}: weight_files is {names!r}"
        raise ValueError(f"{found}; expected the list a conversion in place writes. Move the folder away.")
    for name in names:
        check_file_name(name, path, "weight_files")
    return names
