"""A drafter's weights as a safetensors file: finite, or not written at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..storage.tensor_file import Entry, write_tensor_file
from .files import FLOATS, WEIGHTS, WEIGHTS_INDEX

# numpy's unsigned integer of a float's size, and the bits of the float's exponent in it
EXPONENTS = {
    "F64": (np.uint64, 0x7FF << 52), "F32": (np.uint32, 0xFF << 23), "BF16": (np.uint16, 0xFF << 7),
    "F16": (np.uint16, 0x1F << 10),
}  # fmt: skip


def write_weights(path: Path, entries: Mapping[str, Entry], source: str) -> None:
    """Writes the weights of the drafter `source` to a new file.

    Raises FileExistsError where `path` is there already, ValueError naming the first tensor with a NaN or an infinity.
    """

    def check(name: str, entry: Entry, chunk: memoryview) -> None:
        if entry.dtype in FLOATS and not is_finite(entry.dtype, chunk):
            raise ValueError(
                f"{source}: {name} holds NaN or infinite values; expected finite weights. Download it again."
            )

    write_tensor_file(path, entries, check=check)


def is_finite(dtype: str, chunk: memoryview) -> bool:
    """Returns True where none of these floats is NaN or infinite.

    Such floats have all bits of their exponent set: without their sign and read as integers they are the largest ones.
    Integers are compared because a CPU is slow at arithmetic with bf16.
    """
    unsigned, exponent = EXPONENTS[dtype]
    without_sign: Any = unsigned(np.iinfo(unsigned).max >> 1)
    return bool((np.frombuffer(chunk, dtype=unsigned) & without_sign).max() < exponent)


def remove_stale_weights(folder: Path) -> None:
    """Removes what an earlier save left that a loader would read with, or instead of, the weights just saved.

    transformers removes an earlier save's shards, but neither the index of those nor, where it writes shards itself,
    the one file.
    """
    number = "[0-9]" * 5
    has_shards = any(folder.glob(f"model-{number}-of-{number}.safetensors"))
    (folder / (WEIGHTS if has_shards else WEIGHTS_INDEX)).unlink(missing_ok=True)
