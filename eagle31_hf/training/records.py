"""Records of training data, read from files, folders and datasets."""

import hashlib
import json
import os
import re
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from ..storage.sealed import is_sealed, open_sealed
from .skipped import Skipped

Record = Mapping[str, Any]
SAVED_DATASET = ("state.json", "dataset_dict.json")  # left by `Dataset.save_to_disk` and `DatasetDict.save_to_disk`
ABOUT = {"README", "LICENSE", "NOTICE"}  # files of a folder that tell of the others, whatever their suffix
SHARD = "shard-*.safetensors"  # a file of a store
COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip"}


class Records(Sequence):
    """Records by their number; asking for one that cannot be read raises Skipped, which names its place."""

    @abstractmethod
    def where(self, number: int) -> str:
        """Returns the place of a record, as its file and line."""


class Lines(Records):
    """The objects of a file with one on each line, parsed as they are asked for; blank lines count for nothing. In
    memory is only where the lines begin, so that a file may be larger than memory."""

    def __init__(self, path: Path):
        self.path = path
        self._starts = array("Q")  # byte offsets
        self._numbers = array("Q")  # of the lines, counted from 1
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._starts.append(start)
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, number: int) -> str:
        return f"{self.path}, line {self._numbers[number]}"

    def __getitem__(self, index):
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        place, expected = self.where(index), "expected one JSON object a line."
        try:
            value = json.loads(line)
        except UnicodeDecodeError as error:
            raise Skipped("no UTF-8", f"{error}; expected UTF-8.", place) from None
        except RecursionError:
            raise Skipped("nested too deep", f"is nested too deep; {expected}", place) from None
        except ValueError as error:
            raise Skipped("no JSON", f"{error}; {expected}", place) from None
        return _checked(value, place)


class Items(Records):
    """Records that can be had by their number: of a file held in memory, or of a dataset of the `datasets` library.
    `unit`: what one is called there."""

    def __init__(self, name: str | Path, items: Sequence[Any], unit: str = "record"):
        self.name, self.unit = name, unit
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def where(self, number: int) -> str:
        return f"{self.name}, {self.unit} {range(len(self))[number] + 1}"

    def __getitem__(self, index):
        return _checked(self._items[range(len(self))[index]], self.where(index))


class Shard(Items):
    """The tokens of the rows of a store's shard."""

    def __init__(self, path: Path):
        if not is_sealed(path):
            raise ValueError(
                f"{path}: was not written by prepare-data, and may be a model's weights; expected .jsonl, .json,"
                " .parquet or text files, or a store. Name files, or a folder without it."
            )
        with open_sealed(path, verify=True) as file:
            super().__init__(path, [*pairwise(file.get_tensor("offsets").tolist())], "row")
            self._tokens = {name: file.get_tensor(name) for name in ("input_ids", "answers")}

    def __getitem__(self, index):
        start, end = self._items[index]
        return {name: column[start:end] for name, column in self._tokens.items()}


class Joined(Records):
    """Records of several sources, one after the other; at most the first `most` of them."""

    def __init__(self, parts: list[Records], most: int | None = None):
        self._parts, self._ends = parts, [*accumulate(map(len, parts))]
        self._num = self._ends[-1] if most is None else min(most, self._ends[-1])

    def __len__(self) -> int:
        return self._num

    def _find(self, number: int) -> tuple[Records, int]:
        number = range(len(self))[number]
        part = bisect_right(self._ends, number)
        return self._parts[part], number - self._ends[part] + len(self._parts[part])

    def where(self, number: int) -> str:
        part, number = self._find(number)
        return part.where(number)

    def __getitem__(self, index):
        part, number = self._find(index)
        return part[number]


def _checked(record: Any, place: str) -> Record:
    if not isinstance(record, dict):
        raise Skipped("no JSON object", f"holds a {type(record).__name__}; expected one JSON object a line.", place)
    return record


def _json(path: Path) -> Records:
    with path.open("rb") as file:
        if not file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return Lines(path)
    try:
        return Items(path, json.loads(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; expected a list of JSON objects, or one a line.") from None


def _text(path: Path) -> Records:
    if path.suffix.lower() in COMPRESSED:
        raise ValueError(f"{path}: is compressed; expected .jsonl, .json, .parquet or text. Decompress it first.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is no UTF-8; expected .jsonl, .json, .parquet or text.") from None
    return Items(path, [{"text": text}] if text.strip() else [])


def _parquet(path: Path) -> Records:
    return Items(path, _datasets(str(path)).load_dataset("parquet", data_files=str(path), split="train"), "row")


# others are text
FILES: dict[str, Callable[[Path], Records]] = {
    ".jsonl": Lines,
    ".json": _json,
    ".parquet": _parquet,
    ".safetensors": Shard,
}


def read_records(source: str, split: str = "train", max_samples: int | None = None) -> Records:
    """Reads the records of a file, of all files in a folder in the order of their paths, or of a dataset, saved in a
    folder or of the Hub. Of a store that prepare-data wrote, also of several in one folder, the tokens are read.

    `.jsonl` is read lazily; a file that is no `.jsonl`, `.json`, `.parquet` or shard is one record {"text"}. Datasets
    of the Hub go by "owner/name" or "owner/name:config"; `split` is theirs and that of saved ones. `max_samples`: only
    so many records, the first ones; a dataset of the Hub is streamed then, not downloaded whole. Raises
    FileNotFoundError for a path that is not there, ValueError for a file that cannot be read or has nothing in it,
    ImportError where the `datasets` library is needed and missing.
    """
    if _is_local(source):
        parts: list[Records] = [FILES.get(path.suffix.lower(), _text)(path) for path in _files(source)]
    else:
        parts = [Items(source, _dataset(source, split, max_samples), "row")]
    records = Joined(parts, max_samples)
    if not len(records):
        raise ValueError(f"{source}: holds no records; expected at least one.")
    return records


def identity(source: str, split: str = "train", max_samples: int | None = None) -> str:
    """Returns a hash of the data, the same wherever it lies: of the contents of files, or of a dataset's name, split
    and fingerprint or, where it is streamed, its first `max_samples` records."""
    if not _is_local(source):
        name = None if Path(source).exists() else source
        found = _dataset(source, split, max_samples)
        fingerprint = [*map(repr, found)] if isinstance(found, list) else found._fingerprint
        return hashlib.sha256(json.dumps([name, split, fingerprint]).encode()).hexdigest()
    digest = hashlib.sha256()
    for path in _files(source):
        name = path.relative_to(source).as_posix() if path != Path(source) else path.suffix
        digest.update(json.dumps(name).encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def check_apart(source: str | None, output: str) -> None:
    """Raises ValueError for an output folder within a folder of files that is read as data: what is written there would
    be data of the next run, and of one that is resumed."""
    is_folder = source is not None and Path(source).is_dir() and _is_local(source)
    if is_folder and Path(output).resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(
            f"the output {output} lies within the data, {source}, of which all files are read; expected a folder that"
            " lies elsewhere."
        )


def _is_local(source: str) -> bool:
    path = Path(source)
    if path.exists():
        return not any((path / name).is_file() for name in SAVED_DATASET)
    if path.suffix in {*FILES, ".txt"} or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?", source):
        raise FileNotFoundError(
            f"{source} not found; expected a file, a folder, or a dataset of the Hub as in owner/name."
        )
    return False


def _files(source: str) -> list[Path]:
    root = Path(source)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ValueError(f"{source}: is a pipe or a device; expected a file or a folder, which can be read twice.")
    paths = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    found = sorted(path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts))
    stores = {path.parent for path in found if path.match(SHARD)}  # beside whose shards lie files about them
    found = [path for path in found if path.match(SHARD) or path.parent not in stores]
    found = [path for path in found if path.stem.upper() not in ABOUT]
    if not found:
        raise ValueError(f"{source}: is a folder without files; expected .jsonl, .json, .parquet or text files in it.")
    return found


def _dataset(source: str, split: str, max_samples: int | None) -> Any:
    if Path(source).exists():
        saved = _datasets(source).load_from_disk(source)
        if isinstance(saved, dict) and split not in saved:
            raise ValueError(f"{source}: has no split {split!r}; expected one of {', '.join(saved)}.")
        return saved[split] if isinstance(saved, dict) else saved
    return _of_hub(source, split) if max_samples is None else _streamed(source, split, max_samples)


def _of_hub(source: str, split: str, **options: Any) -> Any:
    name, _, config = source.partition(":")
    return _datasets(source).load_dataset(name, config or None, split=split, **options)


@lru_cache(maxsize=4)  # `read_records` and `identity` both ask for them
def _streamed(source: str, split: str, max_samples: int) -> list[Any]:
    """Returns the first rows of a dataset of the Hub."""
    return [*_of_hub(source, split, streaming=True).take(max_samples)]


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"{source}: is no file of text or JSON; to read it as a dataset, pip install eagle31_hf[train]"
        ) from None
    return datasets
