"""Training data as it is found: records out of files, folders and datasets, and what each kind of record holds. T tokens."""

import hashlib
import json
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Record = Mapping[str, Any]
SAVED_DATASET = ("state.json", "dataset_dict.json")  # what `Dataset.save_to_disk` and `DatasetDict.save_to_disk` leave


class JsonLines(Sequence):
    """The objects of a file with one on each line, parsed as they are asked for; only where lines begin is held in memory."""

    def __init__(self, path: Path):
        self.path, self._starts = path, array("Q")
        start = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._starts.append(start)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index):
        """Raises ValueError, which names file and line, for what is no JSON object."""
        start = self._starts[index]
        with self.path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        try:
            return _checked(json.loads(line))
        except ValueError as error:
            with self.path.open("rb") as file:
                number = 1 + sum(end <= start for end in accumulate(map(len, file)))
            raise ValueError(f"{self.path}, line {number}: {error}; expected one JSON object a line.") from None


class Joined(Sequence):
    """Several sources, one after the other."""

    def __init__(self, parts: list[Sequence]):
        self._parts, self._ends = parts, [*accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index):
        index = range(len(self))[index]
        part = bisect_right(self._ends, index)
        return self._parts[part][index - self._ends[part] + len(self._parts[part])]


def _checked(record: Any) -> Record:
    if not isinstance(record, dict):
        raise ValueError(f"holds a {type(record).__name__}")
    return record


def _json(path: Path) -> Sequence[Record]:
    with path.open("rb") as file:
        if not file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return JsonLines(path)
    try:
        return [_checked(record) for record in json.loads(path.read_bytes())]
    except ValueError as error:
        raise ValueError(f"{path}: {error}; expected a list of JSON objects, or one a line.") from None


def _text(path: Path) -> Sequence[Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is no UTF-8; expected .jsonl, .json, .parquet or text.") from None
    return [{"text": text}] if text.strip() else []


def _parquet(path: Path) -> Sequence[Record]:
    return _datasets(str(path)).load_dataset("parquet", data_files=str(path), split="train")


FILES: dict[str, Callable[[Path], Sequence[Record]]] = {".jsonl": JsonLines, ".json": _json, ".parquet": _parquet}  # others are text


def read_records(source: str, split: str = "train") -> Sequence[Record]:
    """Records of a file, of all files in a folder in the order of their paths, or of a dataset: saved in a folder, or of the Hub.

    `.jsonl` is read lazily; a file that is not `.jsonl`, `.json` or `.parquet` is one record {"text"}. Datasets of the Hub go by
    "owner/name" or "owner/name:config"; `split` is theirs and that of saved ones. Raises FileNotFoundError for a path that is not there,
    ValueError for what cannot be read or is empty, ImportError where the `datasets` library is needed and missing.
    """
    if _is_local(source):
        parts = [FILES.get(path.suffix.lower(), _text)(path) for path in _files(source)]
        records: Sequence[Record] = parts[0] if len(parts) == 1 else Joined(parts)
    else:
        records = _dataset(source, split)
    if not len(records):
        raise ValueError(f"{source}: holds no records; expected at least one.")
    return records


def identity(source: str, split: str = "train") -> str:
    """Hash of the data, the same wherever it lies: of the contents of files, or of a dataset's name, split and fingerprint."""
    if not _is_local(source):
        name = None if Path(source).exists() else source
        return hashlib.sha256(json.dumps([name, split, _dataset(source, split)._fingerprint]).encode()).hexdigest()
    digest = hashlib.sha256()
    for path in _files(source):
        name = path.relative_to(source).as_posix() if path != Path(source) else path.suffix
        digest.update(json.dumps(name).encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _is_local(source: str) -> bool:
    path = Path(source)
    if path.exists():
        return not any((path / name).is_file() for name in SAVED_DATASET)
    if path.suffix in {*FILES, ".txt"} or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?", source):
        raise FileNotFoundError(f"{source} not found; expected a file, a folder, or a dataset of the Hub as in owner/name.")
    return False


def _files(source: str) -> list[Path]:
    root = Path(source)
    if root.is_file():
        return [root]
    paths = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    found = sorted(path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts))
    if not found:
        raise ValueError(f"{source}: is a folder without files; expected .jsonl, .json, .parquet or text files in it.")
    return found


def _dataset(source: str, split: str) -> Any:
    if Path(source).exists():
        saved = _datasets(source).load_from_disk(source)
        if isinstance(saved, dict) and split not in saved:
            raise ValueError(f"{source}: has no split {split!r}; expected one of {', '.join(saved)}.")
        return saved[split] if isinstance(saved, dict) else saved
    name, _, config = source.partition(":")
    return _datasets(source).load_dataset(name, config or None, split=split)


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ImportError(f"{source}: is no file of text or JSON; to read it as a dataset, pip install eagle31_hf[train]") from None
    return datasets


@dataclass
class Chat:
    """Messages as chat templates take them, and the tools offered in it."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass
class Tokens:
    """Ids (T,) long; `answers` (T,) bool: which of them are the target's to say."""

    input_ids: Tensor
    answers: Tensor


ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")} | {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "claude": "assistant",
    "model": "assistant", "chatbot": "assistant", "observation": "tool",
}  # fmt: skip
ANSWER_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {  # a column -> which tokens are answers
    "answers": Tensor.bool, "loss_mask": Tensor.bool, "assistant_masks": Tensor.bool, "labels": lambda labels: labels != -100,
}  # fmt: skip


def tokens_of(record: Record) -> Tokens:
    """What has been tokenized already, its answers under any of ANSWER_COLUMNS. Raises ValueError where something is missing or short."""
    column = next((name for name in ANSWER_COLUMNS if record.get(name) is not None), None)
    if column is None or record.get("input_ids") is None:
        raise ValueError(f"a row has {', '.join(record) or 'nothing'}; expected input_ids and one of {', '.join(ANSWER_COLUMNS)}.")
    ids, marks = torch.as_tensor(record["input_ids"]).long(), torch.as_tensor(record[column])
    if ids.dim() != 1 or ids.shape != marks.shape:
        raise ValueError(f"input_ids are {tuple(ids.shape)} and {column} {tuple(marks.shape)}; expected one mark for each id.")
    return Tokens(ids, ANSWER_COLUMNS[column](marks))


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raises ValueError for ids (T,) the target does not have, which a GPU would only call an assertion of its own."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"token ids go from {int(ids.min())} to {int(ids.max())}; expected 0 to {vocab_size - 1}, the target's. They are of another "
            "tokenizer: use the one that belongs to the target."
        )


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or not ("role" in turn or {"from", "value"} <= turn.keys()):
        raise ValueError(f"a message is {str(turn)[:80]!r}; expected an object with role and content, or from and value.")
    # Columns of a dataset hold None where a message has no such field; templates take it for there being one.
    if turn.get("role") is not None:
        return {name: value for name, value in turn.items() if value is not None}
    if turn["from"].lower() not in ROLES:
        raise ValueError(f"a message is from {turn['from']!r}; expected one of {', '.join(ROLES)}.")
    return {"role": ROLES[turn["from"].lower()], "content": turn["value"]}


def _chat(record: Record, turns: Sequence[Any]) -> Chat:
    tools = record.get("tools")
    return Chat([_message(turn) for turn in turns], (json.loads(tools) if isinstance(tools, str) else tools) or None)


def _answered(record: Record, asked: Any, answer: Any) -> Chat:
    """One question and its answer: each is text, or messages."""
    sides = (("user", asked), ("assistant", answer))
    return _chat(record, [turn for role, side in sides for turn in ([{"role": role, "content": side}] if isinstance(side, str) else side)])


def _instruction(record: Record) -> Chat:
    asked = "\n\n".join(part for part in (record["instruction"], record.get("input")) if part)
    return _answered(record, asked, record["output"])


KINDS: dict[tuple[str, ...], Callable[[Record], Chat | str | Tokens]] = {  # the columns that tell a kind of record, the first that fits
    ("input_ids",): tokens_of,
    ("messages",): lambda record: _chat(record, record["messages"]),
    ("conversations",): lambda record: _chat(record, record["conversations"]),
    ("prompt", "completion"): lambda record: _answered(record, record["prompt"], record["completion"]),
    ("prompt", "response"): lambda record: _answered(record, record["prompt"], record["response"]),
    ("instruction", "output"): _instruction,
    ("text",): lambda record: record["text"],
}


def parse_record(record: Record) -> Chat | str | Tokens:
    """What a record holds: a chat, plain text or tokens. Raises ValueError for a record of no kind in KINDS."""
    found = {name for name, value in record.items() if value is not None}
    for columns, read in KINDS.items():
        if found.issuperset(columns):
            return read(record)
    kinds = "; ".join(" and ".join(columns) for columns in KINDS)
    raise ValueError(f"a record has {', '.join(sorted(found)) or 'nothing'}; expected one of: {kinds}.")
