"""A drafter's weights as a safetensors file: finite, or not written at all."""

import stat
from collections.abc import Mapping
from pathlib import Path

import torch

from ..storage.tensor_file import DTYPES, Entry, write_tensor_file
from .files import FLOATS, WEIGHTS, WEIGHTS_INDEX
from .knobs import KNOBS_FILE


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
            raise ValueError(
                f"{source}: {name} holds NaN or infinite values; expected finite weights. Download it again."
            )

    write_tensor_file(path, entries, check=check)


def open_to_others(folder: Path) -> None:
    """Gives the weights in a folder the mode of its knobs, as the umask has it for new files: safetensors (0.8) writes
    files that their owner alone may read."""
    mode = stat.S_IMODE((folder / KNOBS_FILE).stat().st_mode)
    for path in (*folder.glob("model*.safetensors"), *folder.glob("adapter_model*.safetensors")):
        if stat.S_IMODE(path.stat().st_mode) != mode:  # some file systems have one mode, and refuse to set any
            path.chmod(mode)


def remove_stale_weights(folder: Path) -> None:
    """Removes what an earlier save left that a loader would read with, or instead of, the weights just saved.

    transformers removes an earlier save's shards, but neither the index of those nor, where it writes shards itself,
    the one file.
    """
    number = "[0-9]" * 5
    has_shards = any(folder.glob(f"model-{number}-of-{number}.safetensors"))
    (folder / (WEIGHTS if has_shards else WEIGHTS_INDEX)).unlink(missing_ok=True)
