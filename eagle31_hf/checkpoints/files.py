"""A checkpoint's files, found in a folder or on the Hub, and described by their headers before any weight is read.

No code in a file is run: configs and indices are parsed as JSON, pickles by `pickles`.
"""

import os
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import extract_commit_hash

from ..json_file import NOT_TEXT, parse_json, read_json, show
from ..storage.tensor_file import CHUNK_BYTES, NAME_OF_DTYPE, Entry, tensor_chunks
from .knobs import KNOBS_FILE
from .pickles import unpickle
from .sources import HubError, check_name, fetch, find_config

FLOATS = ("F64", "F32", "F16", "BF16")
READ_DTYPES = (*FLOATS, "I64", "I32", "U8", "BOOL")  # a drafter may hold these, by safetensors' names

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_NAMES = (WEIGHTS, WEIGHTS_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")  # first found is read
SIDE_FILES = ("eagle_meta.pt", "eagle3_meta.pt")  # NeMo's draft vocabulary, where its weights leave it out
SUBFOLDERS = ("", "model/consolidated")  # NeMo writes into the latter
# the new weights of a conversion in place, until the old ones are moved away
STAGED = "eagle31-converting/model.safetensors"
# marks an adapter, which transformers adds to any weights beside it where peft is installed
ADAPTER = "adapter_config.json"
# A drafter has some forty tensors, described in a few kilobytes; the objects built from a header may be a hundred times
# its size.
MAX_HEADER_BYTES = 2**20
MAX_CONFIG_VALUES = 100_000
MAX_NAME = 500
MAX_SHARDS = 1000
MAX_FILE_NAME = 255  # bytes, of most file systems


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its dtype (safetensors' name), its shape, and the offset of its first byte.

    In a pickle it has no such offset (None).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int | None = None

    def chunks(self) -> Iterator[memoryview]:
        """Yields its bytes in pieces of at most CHUNK_BYTES; each is valid until the next is asked for."""
        if self.start is None:
            yield from tensor_chunks(self.load())
            return
        left = self.entry().nbytes
        buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.start)
            while left:
                count = file.readinto(buffer[: min(left, len(buffer))])
                if not count:
                    raise OSError(f"{self.file}: {self.name} ends {left} bytes early. Download the file again.")
                yield buffer[:count]
                left -= count

    def entry(self) -> Entry:
        """Describes the tensor to a writer."""
        return Entry(self.dtype, self.shape, self.chunks)

    def load(self) -> Tensor:
        """Reads the tensor. A pickle is opened anew for each, so that only the pages of one are ever in memory."""
        if self.start is None:
            return unpickle(self.file)[self.name].contiguous()
        with safe_open(self.file, "pt") as tensors:
            return tensors.get_tensor(self.name)


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint: its config, its tensors, and the files that hold them.

    `folder` is the one named by `source`, or that of the Hub's cache.
    """

    source: str
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    weight_files: tuple[Path, ...] = ()  # an index among them
    metadata: dict[str, str] = field(default_factory=dict)  # of the safetensors header


def find(source: str, **hub: Any) -> Path:
    """Returns the folder with the config and weights of a folder or Hub repository, downloaded if need be.

    Raises OSError where there is none.
    """
    check_name(source)
    if os.path.isdir(source):
        folder = Path(source, hub.get("subfolder") or "")
        for sub in SUBFOLDERS:
            if any((folder / sub / name).is_file() for name in ("config.json", *WEIGHT_NAMES)):
                return folder / sub
    config = find_config(source, **hub)
    # "main" may move while files are fetched
    options = hub | {"revision": extract_commit_hash(config, None) or hub.get("revision")}
    _fetch_weights(source, Path(config), options)
    for name in (KNOBS_FILE, *SIDE_FILES):
        with suppress(HubError):  # these files are optional
            fetch(source, name, **options)
    return Path(config).parent


def _fetch_weights(source: str, config: Path, hub: dict[str, Any]) -> None:
    """Downloads the first of WEIGHT_NAMES that a repository has, with its shards.

    Raises OSError where a shard is missing, or where the Hub does not tell which weights there are.
    """
    unseen = None
    for name in WEIGHT_NAMES:
        try:
            found = fetch(source, name, **hub)
        except HubError as error:  # it may be there or not; another may be in the cache
            unseen = unseen or error
            continue
        if found is not None:
            shards = sorted(set(read_index(Path(found)).values())) if name.endswith("index.json") else []
            for shard in shards:
                if fetch(source, shard, **hub) is None:
                    said = f"{source}: {name} names {shard}, which the repository does not have"
                    raise OSError(f"{said}. It is incomplete.")
            return
    if unseen is not None and read_json(config).get("weights_from") is None:
        raise unseen


def open_files(source: str, **hub: Any) -> CheckpointFiles:
    """Reads the config and the tensors' headers of a folder or Hub repository; one with only a config has no tensors.

    Raises OSError where something is not there, ValueError (file, what was found, what was expected) where it is not
    sound.
    """
    folder = find(source, **hub)
    if not (folder / "config.json").is_file():
        found = f"{source}: has weights but no config.json"
        raise ValueError(f"{found}; expected the config.json its trainer wrote beside them.")
    if (folder / ADAPTER).exists():
        found = f"{folder / ADAPTER}: marks a LoRA adapter, which is not read"
        raise ValueError(f"{found}; expected a drafter it has been merged into.")
    config = read_json(folder / "config.json", MAX_CONFIG_VALUES)
    name = weights_name(folder, config)
    if name is None:
        return CheckpointFiles(source, folder, config)
    index = read_index(folder / name) if name.endswith("index.json") else None
    shards = sorted(set(index.values())) if index else [name]
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        if not (folder / shard).is_file():
            found = f"{folder / name}: names {shard}, which is not there"
            raise ValueError(f"{found}; expected every shard beside the index.")
        is_safe = shard.endswith(".safetensors")
        stored, noted = _safetensors_header(folder / shard) if is_safe else (_pickle_header(folder / shard), {})
        metadata = noted if shard == shards[0] else metadata
        twice = sorted(tensors.keys() & stored.keys())
        if twice:
            found = f"{folder / shard}: {twice[0]} is also in {tensors[twice[0]].file.name}"
            raise ValueError(f"{found}; expected each tensor once.")
        tensors |= stored
    files = tuple(folder / shard for shard in shards) + (() if index is None else (folder / name,))
    return CheckpointFiles(source, folder, config, tensors, files, metadata)


def weights_name(folder: Path, config: dict[str, Any]) -> str | None:
    """Returns the name of the file to read weights from, None where there is none.

    `transformers_weights` in the config decides, as in transformers; else it is the first of WEIGHT_NAMES.
    """
    named = config.get("transformers_weights")
    if named == STAGED:
        return named
    if named is not None:
        check_file_name(named, folder / "config.json", "transformers_weights")
        if not named.endswith((".safetensors", ".safetensors.index.json")):  # transformers reads no others by this key
            found = f"{folder / 'config.json'}: transformers_weights names {named}"
            raise ValueError(f"{found}; expected a safetensors file, or its index.")
        return named
    return next((name for name in WEIGHT_NAMES if (folder / name).is_file()), None)


def check_file_name(name: Any, where: Path, key: str) -> None:
    """Raises ValueError unless `name`, which the file `where` has under `key`, is a plain name of a file beside it."""
    is_plain = isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")
    if not is_plain or {"\\", "\0"} & set(name) or len(os.fsencode(name)) > MAX_FILE_NAME:
        found = f"{where}: {key} names the file {repr(name)[:80]}"
        expected = f"a plain file name beside it, without folders, of at most {MAX_FILE_NAME} bytes"
        raise ValueError(f"{found}; expected {expected}.")


def read_index(path: Path) -> dict[str, str]:
    """Returns tensor name -> name of the shard, which lies beside the index.

    Raises ValueError for an index that is damaged, or names a file elsewhere.
    """
    value = read_json(path)
    if not isinstance(value.get("metadata"), dict):  # transformers reads it, and fails without
        raise ValueError(f"{path}: metadata is {str(value.get('metadata'))[:80]}; expected an object, {{}} will do.")
    index = value.get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{path}: has no weight_map; expected an object of tensor names and the files that hold them.")
    for name, shard in index.items():
        check_file_name(shard, path, f"weight_map[{show(name)}]")
    if len(set(index.values())) > MAX_SHARDS:
        raise ValueError(f"{path}: names {len(set(index.values()))} files; expected at most {MAX_SHARDS}.")
    return index


def _safetensors_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Returns names, dtypes and shapes of a file's tensors without reading the weights, and its metadata. Raises
    ValueError for a file that is damaged, or has a dtype that no drafter has."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, MAX_HEADER_BYTES))
    try:
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header is to have {length} bytes, more than {MAX_HEADER_BYTES}")
        with safe_open(path, "pt"):  # refuses truncated, oversized, overlapping and gappy files
            pass
    except (SafetensorError, OSError, ValueError) as error:
        said = f"{path}: is not a sound safetensors file ({str(error)[:300]})"
        raise ValueError(f"{said}; expected one. Download it again.") from None
    header = parse_json(text, f"{path}: its header")
    metadata = header.pop("__metadata__", None) or {}
    stored: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        _check_tensor(path, name, entry["dtype"])
        start = 8 + length + entry["data_offsets"][0]
        stored[name] = StoredTensor(name, entry["dtype"], tuple(entry["shape"]), path, start)
    return stored, metadata


def _check_tensor(path: Path, name: str, dtype: str) -> None:
    if len(name) > MAX_NAME or NOT_TEXT.search(name):
        found = f"{path}: a tensor is named {show(name)}..."
        raise ValueError(f"{found}; expected at most {MAX_NAME} printable characters.")
    check_dtype(path, name, dtype, READ_DTYPES)


def check_dtype(path: Path, name: str, dtype: str, known: tuple[str, ...]) -> None:
    """Raises ValueError unless the dtype of the tensor `name` in the file `path` is one of `known`, by safetensors'
    names."""
    if dtype not in known:
        found = f"{path}: {name} is stored as {dtype}"
        raise ValueError(
            f"{found}; expected one of {', '.join(known)}. Quantized drafters are not read: use the original."
        )


def _pickle_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a pickle as `_safetensors_header` does; it has no metadata. Raises ValueError for anything
    but whole, plain tensors."""
    values = unpickle(path)
    with zipfile.ZipFile(path) as archive:
        sizes = {entry.file_size for entry in archive.infolist()}
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            hint = " Save the tensors themselves: the value of that key, say." if isinstance(value, dict) else ""
            found = f"{path}: {repr(name)[:80]} is a {type(value).__name__}"
            raise ValueError(f"{found}; expected names and tensors only.{hint}")
        _check_tensor(path, name, NAME_OF_DTYPE.get(value.dtype, str(value.dtype)))
        if value.is_neg() or value.is_conj():  # torch marks the sign and computes it later; bytes on disk would lack it
            found = f"{path}: {name} is a view with its sign turned"
            raise ValueError(f"{found}; expected the values themselves: save {name}.clone().")
        stored = value.untyped_storage().nbytes()
        # a storage of any other size is cut off, or reaches into the next record
        if stored not in sizes or value.numel() * value.element_size() > stored:
            found = f"{path}: {name} of shape {tuple(value.shape)} is larger than what is stored"
            raise ValueError(f"{found}; expected every element.")
    return {
        name: StoredTensor(name, NAME_OF_DTYPE[value.dtype], tuple(value.shape), path) for name, value in values.items()
    }
