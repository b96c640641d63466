"""The library's one writer of safetensors files: streamed in chunks, and in the order that safetensors has."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Safetensors' names, in the order in which safetensors itself writes tensors of these dtypes.
DTYPES = {
    "I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
CHUNK_BYTES = 2**20  # stays in a core's cache between reading, checking and writing


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its dtype (safetensors' name), its shape, and its bytes in chunks of at most CHUNK_BYTES."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[memoryview]]

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> "Entry":
        return cls(NAME_OF_DTYPE[tensor.dtype], tuple(tensor.shape), lambda: tensor_chunks(tensor))

    @classmethod
    def of_pieces(cls, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[Tensor]) -> "Entry":
        """Describes a tensor whose parts along the first axis are `pieces`, which are not copied into one."""
        parts = list(pieces)
        return cls(NAME_OF_DTYPE[dtype], shape, lambda: (chunk for part in parts for chunk in tensor_chunks(part)))

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


def tensor_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the bytes of a tensor on any device in chunks of at most CHUNK_BYTES."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    for piece in flat.split(CHUNK_BYTES) if flat.numel() else ():
        yield memoryview(piece.numpy())


def in_order(entries: Mapping[str, Entry]) -> list[str]:
    """Returns the names as they follow each other in a file, so that one set of tensors has one file."""
    return sorted(entries, key=lambda name: ([*DTYPES].index(entries[name].dtype), name))


def header_of(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Returns the header of a file of these tensors: JSON, padded so that the data is aligned to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name in in_order(entries):
        start, end = end, end + entries[name].nbytes
        header[name] = {"dtype": entries[name].dtype, "shape": list(entries[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def write_tensor_file(
    path: Path,
    entries: Mapping[str, Entry],
    metadata: Mapping[str, str] | None = None,
    check: Callable[[str, Entry, memoryview], None] | None = None,
) -> None:
    """Writes a safetensors file, byte for byte as safetensors' `save_file` would, and syncs it to disk.

    `path` must be new: what another process links to or reads is never written into. `check` is called with name, entry
    and bytes of every chunk before that is written, and may raise. Raises FileExistsError where `path` is there
    already, OSError where it cannot be written.
    """
    header = header_of(entries, metadata or {})
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in in_order(entries):
            for chunk in entries[name].chunks():
                if check is not None:
                    check(name, entries[name], chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
