"""Safetensors files and folders, written as streams: no more than one tensor is in memory, and nothing is half there
afterwards."""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .files import DTYPES, FLOATS, NAME_OF_DTYPE, WEIGHTS, WEIGHTS_INDEX, StoredTensor, tensor_chunks

# The order safetensors itself writes in, so that one set of tensors has one file, whoever wrote it.
ORDER = ("F64", "I64", "F32", "I32", "BF16", "F16", "U8", "BOOL")


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its dtype (safetensors' name), its shape, and its bytes in pieces."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[memoryview]]

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> "Entry":
        return cls(NAME_OF_DTYPE[tensor.dtype], tuple(tensor.shape), lambda: tensor_chunks(tensor))

    @classmethod
    def of_file(cls, stored: StoredTensor) -> "Entry":
        return cls(stored.dtype, stored.shape, stored.chunks)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


def write_safetensors(path: Path, entries: Mapping[str, Entry], source: str) -> None:
    """Writes `path`, byte for byte as safetensors' `save_file` would, and syncs it to disk.

    `path` must be new: what another process links to or reads is never written into. Raises FileExistsError if it is
    not, ValueError naming the first tensor with a NaN or an infinity; `source` is whose it is.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = sorted(entries, key=lambda name: (ORDER.index(entries[name].dtype), name))
    end = 0
    for name in names:
        start, end = end, end + entries[name].nbytes
        header[name] = {"dtype": entries[name].dtype, "shape": list(entries[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb", buffering=0) as file:
        _write(file, len(text).to_bytes(8, "little") + text)
        for name in names:
            check = not_finite(entries[name].dtype)
            for chunk in entries[name].chunks():
                if check is not None and check(chunk):
                    raise ValueError(
                        f"{source}: {name} holds NaN or infinite values; expected finite weights. Download it again."
                    )
                _write(file, chunk)
        os.fsync(file.fileno())


def _write(file: Any, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def not_finite(dtype: str) -> Callable[[memoryview], bool] | None:
    """A test for NaN and infinity, whose exponents are all ones: as integers they are the largest. bf16 arithmetic is
    slow on a CPU."""
    if dtype not in FLOATS:
        return None
    unsigned, exponent = {
        "F64": (np.uint64, 0x7FF << 52),
        "F32": (np.uint32, 0xFF << 23),
        "BF16": (np.uint16, 0xFF << 7),
        "F16": (np.uint16, 0x1F << 10),
    }[dtype]
    without_sign: Any = unsigned(np.iinfo(unsigned).max >> 1)

    def check(chunk: memoryview) -> bool:
        return bool((np.frombuffer(chunk, dtype=unsigned) & without_sign).max() >= exponent)

    return check


def write_json(path: Path, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def remove_stale_weights(folder: Path) -> None:
    """Removes what an earlier save left that a loader would read with, or instead of, the weights just saved.

    transformers removes an earlier save's shards, but neither the index of those nor, where it writes shards itself,
    the one file.
    """
    number = "[0-9]" * 5
    has_shards = any(folder.glob(f"model-{number}-of-{number}.safetensors"))
    (folder / (WEIGHTS if has_shards else WEIGHTS_INDEX)).unlink(missing_ok=True)


NAME_ANOTHER = "Name another, or remove it."


def check_new_folder(destination: Path, remedy: str = NAME_ANOTHER) -> None:
    """Raises ValueError when something is at `destination` already, or in the way to it; `remedy` says what to do about
    it."""
    if destination.is_symlink() or destination.is_file() or (destination.is_dir() and any(destination.iterdir())):
        raise _taken(destination, remedy)
    above = next((parent for parent in destination.parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        raise ValueError(f"{destination}: {above} is a file; expected a folder to write into.")


def _taken(destination: Path, remedy: str = NAME_ANOTHER) -> ValueError:
    return ValueError(f"{destination}: is there already; expected a folder that is new or empty. {remedy}")


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder to write into that becomes `destination` when the block ends well, and nothing at all otherwise.

    Raises ValueError when something is at `destination` already, or another process was there first.
    """
    check_new_folder(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = destination.parent / f".{destination.name}.{secrets.token_hex(4)}"
    staging.mkdir()  # as open to others as the umask lets new folders be; mkdtemp's are private
    try:
        yield staging
        try:
            os.replace(staging, destination)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY):
                raise
            raise _taken(destination) from None
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
