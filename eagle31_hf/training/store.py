"""A store of training examples, with or without the target's states: a folder with a `manifest.json`, which says what
it was made from, and numbered safetensors shards.

T tokens of an example, n aux hidden states, ht target width. An example is {"input_ids" (T,), "answers" (T,) bool}, and
with states also {"states" (T, n*ht), "last_states" (T, ht)}: the aux hidden states, and those that enter the target's
head. A shard holds the examples one after another.
"""

import json
import os
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatch
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..json_file import read_json
from ..storage.folders import check_new_folder, write_json
from ..storage.sealed import open_sealed, sweep, write_sealed
from ..storage.tensor_file import Entry
from .ends import parts_of
from .kinds import Tokens

Columns = dict[str, Tensor]  # of an example
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # a column's dtype, and the shape of its entry for one token
MANIFEST, TARGET_PARTS = "manifest.json", "target.safetensors"
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
STORED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": FP8}
STATES = ("states", "last_states", "scales")  # columns that may hold NaN or infinite values
ROWS_AT_ONCE = 16  # tokens that are scaled together, which a core's cache holds in fp32
NOT_FINITE = "states are not finite"


@dataclass
class Manifest:
    """A record of what a store's examples were made from, so that others are not mixed with them, and how they lie in
    its shards.

    `revision` is the target's `weights_fingerprint`, without values where it neither answered nor gave states; `commit`
    that of its repository; `source` says what the examples were made of, and how. Without `layer_ids` and `dtype` the
    store has tokens only.
    """

    target: str
    revision: str
    tokenizer: str
    source: dict[str, Any]
    target_hidden_size: int
    num_records: int
    records_per_shard: int
    commit: str | None = None
    layer_ids: list[int] | None = None
    dtype: str | None = None

    def __post_init__(self):
        if (self.layer_ids is None) != (self.dtype is None):
            raise ValueError(
                f"layer_ids is {self.layer_ids} and dtype {self.dtype}; expected both, or None for both: tokens only."
            )
        if self.dtype is not None and self.dtype not in STORED_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; expected one of {', '.join(STORED_DTYPES)}.")

    @property
    def num_shards(self) -> int:
        return -(-self.num_records // self.records_per_shard)

    def layout(self) -> Layout:
        """Returns the dtype and the shape of an entry of every column that has one for each token."""
        layout: Layout = {"input_ids": (torch.int32, ()), "answers": (torch.uint8, ())}
        if self.layer_ids is None:
            return layout
        num_states, dtype = len(self.layer_ids), STORED_DTYPES[self.dtype]
        layout["states"] = (dtype, (num_states * self.target_hidden_size,))
        layout["last_states"] = (torch.bfloat16 if dtype == FP8 else dtype, (self.target_hidden_size,))
        return layout | ({"scales": (torch.float32, (num_states,))} if dtype == FP8 else {})


def _flat(manifest: Manifest) -> dict[str, Any]:
    """Returns what two stores of the same examples have in common. Where the target was found does not count:
    `revision` says which it was."""
    values = {name: value for name, value in vars(manifest).items() if name not in ("source", "target", "commit")}
    return values | {f"source.{name}": value for name, value in manifest.source.items()}


def read_manifest(folder: str | Path) -> Manifest:
    """Reads the manifest of the store in a folder. Raises ValueError where there is none, or one of another version."""
    path = Path(folder, MANIFEST)
    if not path.is_file():
        raise ValueError(f"{folder}: holds no {MANIFEST}; expected a folder that prepare-data has made.")
    values, names = read_json(path), {field.name for field in fields(Manifest)}
    if values.keys() != names:
        others = ", ".join(sorted(values.keys() ^ names))
        raise ValueError(
            f"{path}: has other fields than this version writes ({others}). Prepare the data again, into another"
            " folder."
        )
    return Manifest(**values)


def check_store_folder(folder: str | Path) -> None:
    """Raises ValueError for a folder that holds something else than a store, which several processes may be making."""
    folder = Path(folder)
    others = [path for path in folder.glob("*") if not fnmatch(path.name, f"{MANIFEST}.*.partial")]
    # looked for last: a store has its manifest before anything else
    if folder.is_file() or (others and not (folder / MANIFEST).is_file()):
        check_new_folder(folder, f"A store that goes on has a {MANIFEST}. Name another.")


def open_store(folder: str | Path, manifest: Manifest, earlier: Mapping[str, Any] | None = None) -> None:
    """Makes the folder with its manifest, or compares with the one there; several processes may do so at once.

    `earlier`: of fields that an earlier version wrote otherwise, the values in its manifest. Raises ValueError naming
    the first field in which they differ, and for a folder that holds something else.
    """
    folder = Path(folder)
    check_store_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    staged = folder / f"{MANIFEST}.{uuid.uuid4().hex}.partial"
    try:
        write_json(staged, asdict(manifest))
        _publish(staged, folder / MANIFEST)
    except FileExistsError:
        found, expected = _flat(read_manifest(folder)), _flat(manifest)
        found |= {name: expected.get(name) for name, value in (earlier or {}).items() if found.get(name) == value}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise ValueError(
                    f"{folder / MANIFEST}: {name} is {found.get(name)!r}, expected {expected.get(name)!r}: the data"
                    " there was made from something else. Name another folder, or go back to what it was made from."
                ) from None
    finally:
        staged.unlink(missing_ok=True)
    sweep(folder, "shard-*.safetensors")  # each writer does so for its own, unless it is killed before


def _publish(staged: Path, path: Path) -> None:
    """Has a file go by another name. Raises FileExistsError where there is one of that name."""
    try:
        os.link(staged, path)  # unlike a rename, it fails for all but the first
    except FileExistsError:
        raise
    except OSError:  # FAT, network and cloud folders have no links: of two at the same moment the last wins there
        if path.exists():
            raise FileExistsError(path) from None
        os.replace(staged, path)


def shard_path(folder: str | Path, index: int) -> Path:
    return Path(folder, f"shard-{index:05d}.safetensors")


def missing_shards(folder: str | Path, part: tuple[int, int] = (0, 1)) -> list[int]:
    """Returns the shards that are not there, of those whose number is part[0] modulo part[1]."""
    numbers = range(part[0], read_manifest(folder).num_shards, part[1])
    return [index for index in numbers if not shard_path(folder, index).is_file()]


def write_shard(
    folder: str | Path, index: int, examples: Iterable[Columns], skipped: Mapping[str, int]
) -> tuple[int, int]:
    """Writes a shard, whole or not at all; returns the numbers of its examples and tokens.

    `skipped` counts by reason the records that gave no example; examples with NaN or infinite states join them. Raises
    OSError naming the shard when it cannot be written.
    """
    layout = read_manifest(folder).layout()
    skips = Counter(skipped)
    encoded = list[Columns]()
    for example in examples:
        stored = _encode(example, layout)
        if all(_is_finite(stored[name]) for name in STATES if name in stored and layout[name][0] != FP8):
            encoded.append(stored)
        else:
            skips[NOT_FINITE] += 1
    offsets = torch.tensor([0] + [len(columns["input_ids"]) for columns in encoded]).cumsum(0)
    tensors = {"offsets": Entry.of_tensor(offsets)}
    for name, (dtype, shape) in layout.items():
        tensors[name] = Entry.of_pieces(dtype, (int(offsets[-1]), *shape), [columns[name] for columns in encoded])
    facts = {"rows": str(len(encoded)), "tokens": str(int(offsets[-1])), "skipped": json.dumps(skips, sort_keys=True)}
    write_sealed(shard_path(folder, index), tensors, facts)
    return len(encoded), int(offsets[-1])


def _is_finite(values: Tensor) -> bool:
    """Returns whether all values are finite, in one pass: NaN and infinity show in the extremes."""
    return values.numel() == 0 or all(bool(extreme.isfinite()) for extreme in values.aminmax())


def _encode(example: Columns, layout: Layout) -> Columns:
    """Returns the columns as they are stored. fp8 has one scale per token and aux hidden state, which differ in size by
    orders of magnitude."""
    columns = dict(example)
    if "scales" in layout:
        pieces = [_scaled(piece, layout["scales"][1][0]) for piece in columns["states"].split(ROWS_AT_ONCE)]
        states, scales = zip(*pieces, strict=True)
        columns |= {"states": torch.cat(states), "scales": torch.cat(scales)}
    stored = {name: columns[name].to(dtype) for name, (dtype, _) in layout.items()}
    for name, (_, shape) in layout.items():
        found, expected = tuple(stored[name].shape), (len(columns["input_ids"]), *shape)
        if found != expected:
            raise ValueError(f"{name} of a row has shape {found}; expected {expected}.")
    return stored


def _scaled(states: Tensor, num_states: int) -> tuple[Tensor, Tensor]:
    """Returns states (N, n*ht) in fp8 and their scales (N, n)."""
    each = states.float().unflatten(-1, (num_states, -1))
    scales = (each.abs().amax(-1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (each / scales[..., None]).flatten(-2).to(FP8), scales


class HiddenStateStore(Dataset):
    """The examples of a store, read one by one; every process opens the files for itself. fp8 states are returned as
    bfloat16.

    `allow_partial`: leaves out shards that are missing. `verify`: checks a shard when it is first opened. Raises
    ValueError when shards are missing, or when one has changed since it was written.
    """

    def __init__(self, folder: str | Path, allow_partial: bool = False, verify: bool = True):
        self.folder = Path(folder)
        self.manifest = read_manifest(folder)
        self.verify = verify
        total, missing = self.manifest.num_shards, missing_shards(folder)
        if missing and not allow_partial:
            raise ValueError(
                f"{folder}: holds {total - len(missing)} of {total} shards; expected all. Run the same prepare-data"
                " command again."
            )
        self._paths = [shard_path(folder, index) for index in sorted({*range(total)} - {*missing})]
        self._offsets = list[list[int]]()
        self.skipped = Counter[str]()
        self._files = dict[int, Any]()
        for path in self._paths:
            with open_sealed(path, verify=False) as file:
                self._offsets.append(file.get_tensor("offsets").tolist())
                self.skipped.update(json.loads(file.metadata()["skipped"]))
        self._starts = list(accumulate((len(offsets) - 1 for offsets in self._offsets), initial=0))[:-1]
        self.lengths = [end - start for offsets in self._offsets for start, end in pairwise(offsets)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def __getitem__(self, i: int) -> Columns:
        return self._columns(i, self.manifest.layout())

    def tokens(self, i: int) -> Tokens:
        """Returns the tokens of an example, without its states."""
        columns = self._columns(i, ("input_ids", "answers"))
        return Tokens(columns["input_ids"], columns["answers"])

    def _columns(self, i: int, names: Iterable[str]) -> Columns:
        i = range(len(self))[i]
        shard = bisect_right(self._starts, i) - 1
        start, end = self._offsets[shard][i - self._starts[shard] :][:2]
        if shard not in self._files:
            with open_sealed(self._paths[shard], self.verify) as file:
                self._files[shard] = file
        # A slice is a view of the whole mapped tensor, which is what would be sent between processes.
        columns = {name: self._files[shard].get_slice(name)[start:end].clone() for name in names}
        columns |= {"input_ids": columns["input_ids"].long(), "answers": columns["answers"].bool()}
        if "scales" in columns:
            pairs = zip(columns["states"].split(ROWS_AT_ONCE), columns.pop("scales").split(ROWS_AT_ONCE), strict=True)
            columns["states"] = torch.cat([_unscaled(states, scales) for states, scales in pairs])
        return columns

    def check(self, tokenizer_fingerprint: str) -> None:
        """Raises ValueError where the examples were made with another tokenizer."""
        if self.manifest.tokenizer != tokenizer_fingerprint:
            raise ValueError(
                f"{self.folder}: tokenizer is {self.manifest.tokenizer!r}, expected {tokenizer_fingerprint!r}. Prepare"
                " the data with what you train with."
            )


def _unscaled(states: Tensor, scales: Tensor) -> Tensor:
    """Returns states (N, n*ht) in bfloat16, of fp8 ones and their scales (N, n).

    The bits of an fp8 number, moved to those of fp16, are 1/256 of it: their exponents are biased by 7 and 15. torch's
    own conversion takes four times as long on a CPU.
    """
    bits = states.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values = bits.view(torch.float16).float().unflatten(-1, (scales.shape[-1], -1))
    return (values * (256 * scales)[..., None]).flatten(-2).bfloat16()


def save_target_parts(folder: str | Path, target: Any, scoring: dict[str, Any]) -> None:
    """Writes what stands in for the target, or for a model of its ends, where only its states are: `parts_of` it, and
    its configs."""
    tensors = {name: Entry.of_tensor(weight) for name, weight in parts_of(target).items()}
    write_sealed(Path(folder, TARGET_PARTS), tensors, {"scoring": json.dumps(scoring, sort_keys=True)})
    target.config.save_pretrained(folder)
    target.generation_config.save_pretrained(folder)


def load_target_parts(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads `parts_of` a target, a tied head too, and the `scoring` they were saved with.

    Raises OSError where there are none, ValueError when they are damaged.
    """
    with open_sealed(Path(folder, TARGET_PARTS), verify=True) as file:
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {"head": parts["embedding"]} | parts, json.loads(file.metadata()["scoring"])
