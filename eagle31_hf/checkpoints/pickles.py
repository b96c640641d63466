"""PyTorch's `.bin` and `.pt` files: no code of theirs runs, and only plain tensors are read.

A file is first checked to be a sound archive of plain tensors, then mapped by torch's tensor-only unpickler.
"""

import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

# A drafter has some forty tensors, which a pickle of a few kilobytes describes; the objects built from a pickle may be
# a hundred times its size.
MAX_PICKLE_BYTES, MAX_DIRECTORY_BYTES = 2**18, 2**20
# Globals that a pickle of plain tensors names. torch's unpickler allows more: tensors of any size without data, sets,
# attributes.
PLAIN = re.compile(
    r"torch\._utils\._rebuild_(tensor|tensor_v2|parameter)|torch\.[A-Z]\w+Storage|collections\.OrderedDict"
)
# Globals that torch's unpickler allows because they run no code, but that plain tensors do not need.
VALUES = re.compile(
    r"torch\.(Size|device|Tensor|(float|u?int|q?u?int|bfloat|complex|bool|per_)\w*)|torch\.serialization\._get_layout"
    r"|torch\.storage\.\w+Storage"
    r"|torch\.(nested|_dynamo)\..+|(__builtin__|builtins|collections)\.(set|bytearray|complex|Counter)"
)
# Globals by which tensors are rebuilt that are not plain, and what each is called.
OTHER_TENSORS = {
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without memory, of the device meta",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_tensor_v3": (
        "a tensor of a dtype drafters do not have (quantized ones are not read: use the original)"
    ),
    "torch._utils._rebuild_parameter_with_state": "a parameter with attributes",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of another class",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of another device",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of another device",
    "torch._tensor._rebuild_from_type_v2": "a tensor of another class, or one with attributes",
}


def unpickle(path: Path) -> dict[Any, Any]:
    """Returns the dictionary in a file of PyTorch 1.6 (2020) or later, its tensors memory-mapped.

    Raises ValueError for a file that is damaged, holds more than plain tensors, or asks to run code; the message begins
    with the path.
    """
    try:
        _check_archive(path)
        _check_description(path)
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: asks to run code when loaded, and was not ({_reason(error)}). Expected tensors only; do not load"
            " this file elsewhere."
        ) from None
    except NotPlainError as error:
        raise ValueError(f"{path}: holds {error}; expected plain dense tensors. Save those.") from None
    except Exception as error:  # what reads a damaged archive or pickle may fail on it in any way
        raise ValueError(
            f"{path}: is not a sound PyTorch file ({type(error).__name__}: {_reason(error)}). Download it again."
        ) from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds a {type(values).__name__}; expected a dictionary of names and tensors.")
    return values


class NotPlainError(Exception):
    """A pickle of tensors that are not dense, not in memory, or not of torch's own class."""


def stored_sizes(path: Path) -> set[int]:
    """Returns the sizes in bytes of an archive's records.

    A storage of any other size is cut off, or reaches into the next record.
    """
    with zipfile.ZipFile(path) as archive:
        return {entry.file_size for entry in archive.infolist()}


def _reason(error: Exception) -> str:
    """Returns torch's message about the file, without its advice to load it as code."""
    text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    return re.split(r"\n| In PyTorch 2\.6|\. Please ", text.strip())[0][:200]


def _check_archive(path: Path) -> None:
    """Raises ValueError for an archive that could fill memory before torch looks at it.

    It may have a directory of millions of entries, compressed entries, or a huge pickle.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(
            "not a zip archive, as PyTorch has written since 1.6; load it in a process you trust and save it again"
        )
    with open(path, "rb") as file:  # zipfile has no other way to tell the size before it reads the directory
        size = zipfile._EndRecData(file)[5]  # type: ignore[attr-defined]
    if size > MAX_DIRECTORY_BYTES:
        raise ValueError(f"its directory has {size} bytes, too many for a drafter's tensors")
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename[:80]} is compressed, as PyTorch never writes it")
            if entry.filename.lower().endswith("data.pkl") and entry.file_size > MAX_PICKLE_BYTES:
                raise ValueError(f"data.pkl has {entry.file_size} bytes, too many for names and shapes")


def _check_description(path: Path) -> None:
    """Raises an error where data.pkl, the pickle of names and shapes, names more globals than plain tensors need.

    UnpicklingError: it asks for code; NotPlainError: for tensors that are not plain.
    """
    reader = torch._C.PyTorchFileReader(str(path))  # finds the record that `torch.load` will find
    # GLOBAL is the one operation by which torch's unpickler looks up a name; it refuses the others itself.
    asked = [
        str(argument).replace(" ", ".")
        for operation, argument, _ in pickletools.genops(reader.get_record("data.pkl"))
        if operation.name == "GLOBAL"
    ]
    others = [name for name in asked if not PLAIN.fullmatch(name)]
    code = next((name for name in others if name not in OTHER_TENSORS and not VALUES.fullmatch(name)), None)
    if code is not None:
        raise pickle.UnpicklingError(code)
    kind = next((OTHER_TENSORS[name] for name in others if name in OTHER_TENSORS), "more than tensors")
    if others:
        raise NotPlainError(f"{kind} ({', '.join(dict.fromkeys(others[:3]))})")
