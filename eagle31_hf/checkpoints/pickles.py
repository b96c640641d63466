"""PyTorch's `.bin` and `.pt` files: no code of theirs runs, and only plain tensors are read.

A file is first checked to be a sound archive of plain tensors, then mapped by torch's tensor-only unpickler.
"""

import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

# A drafter has some forty tensors, which a pickle of a few kilobytes describes; the objects built from a pickle may be
# a hundred times its size.
MAX_PICKLE_BYTES, MAX_DIRECTORY_BYTES = 2**18, 2**20
# Globals that a pickle of plain tensors names. torch's unpickler allows more: tensors of any size without data, sparse
# and quantized ones, sets, attributes.
PLAIN = re.compile(
    r"torch\._utils\._rebuild_(tensor|tensor_v2|parameter)|torch\.[A-Z]\w+Storage|collections\.OrderedDict"
)


def unpickle(path: Path) -> dict[Any, Any]:
    """Returns the dictionary in a file of PyTorch 1.6 (2020) or later, its tensors memory-mapped.

    Raises ValueError for a file that is damaged, or asks for more than plain tensors, to run code for instance; the
    message begins with the path.
    """
    try:
        _check_archive(path)
        reader = torch._C.PyTorchFileReader(str(path))  # finds the record that `torch.load` will find
        operations = pickletools.genops(reader.get_record("data.pkl"))
        # GLOBAL is the one operation by which torch's unpickler looks up a name; it refuses the others itself
        names = {str(argument).replace(" ", ".") for kind, argument, _ in operations if kind.name == "GLOBAL"}
        others = sorted(name for name in names if not PLAIN.fullmatch(name))
        values = {} if others else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # what reads a damaged archive or pickle may fail on it in any way
        text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
        reason = re.split(r"\n| In PyTorch 2\.6|\. Please ", text.strip())[0][:200]  # no advice to load it as code
        found = f"{path}: is not a sound PyTorch file ({type(error).__name__}: {reason})"
        raise ValueError(f"{found}. Download it again.") from None
    if others:
        raise ValueError(
            f"{path}: asks for {', '.join(others[:3])[:200]} when loaded, and was not: plain dense tensors need nothing"
            " of that. Expected those only: save them, or, where the file is not yours, do not load it elsewhere."
        )
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds a {type(values).__name__}; expected a dictionary of names and tensors.")
    return values


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
