"""Counts what a computation costs on tensors without values: its operations, as a GPU would be given them, with their
arithmetic, the bytes they read and write, and the memory that is held meanwhile.

Floating point tensors have a shape alone; integers and booleans, on which sizes depend, have values: 0 where they come
of floats, as in a comparison. A float that is read is 1. A view is no operation.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from eagle31_hf.training.flop import flop_of

# no work: they reserve memory, or say how a tensor is to be read
NOTHING = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "_reshape_alias",
    "lift_fresh", "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
READS_ROWS = {"index", "embedding", "gather", "index_select"}  # of its first argument as much as it returns
WRITES_ROWS = {"index_put", "index_put_", "index_add_", "scatter", "scatter_", "scatter_add_"}  # as much as it is given
WAITS = {"nonzero", "unique_consecutive", "_unique2", "masked_select", "_local_scalar_dense"}
FLOATS = {None, torch.float32, torch.float64, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Cost:
    """The cost of one operation; `waits`: the host waits for its result."""

    part: str
    name: str
    flop: int
    nbytes: int
    waits: bool


@dataclass
class Ledger:
    """The costs of what ran, in order. `part`: what runs now; `held`: bytes of tensors that live, `peak`: the most of
    each part."""

    rows: list[Cost] = field(default_factory=list)
    part: str = ""
    held: int = 0
    peak: Counter[str] = field(default_factory=Counter)
    _owners: Counter[int] = field(default_factory=Counter)

    def begin(self, part: str) -> None:
        self.part = part
        self.peak[part] = max(self.peak[part], self.held)

    def hold(self, tensor: Tensor, data: Tensor) -> None:
        storage = data.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not self._owners[key]:
            self.held += size
            self.peak[self.part] = max(self.peak[self.part], self.held)
        self._owners[key] += 1
        weakref.finalize(tensor, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._owners[key] -= 1
        if not self._owners[key]:
            del self._owners[key]
            self.held -= size

    def add(self, name: str, flop: int, nbytes: int) -> None:
        self.rows.append(Cost(self.part, name, flop, nbytes, name in WAITS))


LEDGERS: list[Ledger] = []  # those of the contexts that last


class Counted(Tensor):
    """A tensor whose operations are counted; `x` holds its values, or on meta its shape."""

    @staticmethod
    def __new__(cls, x: Tensor) -> "Counted":
        made = Tensor._make_wrapper_subclass(
            cls, x.size(), strides=x.stride(), storage_offset=x.storage_offset(), dtype=x.dtype, device="cpu"
        )
        made.x = x
        for ledger in LEDGERS:
            ledger.hold(made, x)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def counting() -> Iterator[Ledger]:
    """A context that counts what is computed with tensors that are made in it, a model's weights among them."""
    LEDGERS.append(Ledger())
    try:
        with _Functions(), _Dispatch(), mock.patch.object(functional, "rms_norm", _rms_norm):
            yield LEDGERS[-1]
    finally:
        LEDGERS.pop()


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on values, or on shapes, and adds what it costs."""
    name = func._schema.name.split("::")[1]
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if name == "_local_scalar_dense":
        _add(name, 0, 0)
        return 1.0 if args[0].is_floating_point() else args[0].x.item()
    has_floats = any(leaf.is_floating_point() for leaf in given)
    on_meta = has_floats or (not given and kwargs.get("dtype") in FLOATS and name != "arange")
    args_data, kwargs_data = tree_map(_data, (args, kwargs))
    if on_meta:
        if name.removesuffix("_") in ("index", "index_put"):
            args_data = (args_data[0], _numbers(args_data[1]), *args_data[2:])
        args_data, kwargs_data = tree_map(_shape, (args_data, kwargs_data))
    if any(argument.name == "device" for argument in func._schema.arguments) and (not given or "device" in kwargs):
        kwargs_data |= {"device": "meta" if on_meta else "cpu"}
    out = func(*args_data, **kwargs_data)
    is_in_place = name.endswith("_") and not name.endswith("__") and given and isinstance(out, Tensor)
    result = given[0] if is_in_place else tree_map(_counted, out)
    if name not in NOTHING and not _is_view(func):
        _add(name, flop_of(func, args, kwargs, result), _bytes(name, given, result))
    return result


def _add(name: str, flop: int, nbytes: int) -> None:
    for ledger in LEDGERS:
        ledger.add(name, flop, nbytes)


def _is_view(func: Any) -> bool:
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _bytes(name: str, given: list[Tensor], result: Any) -> int:
    """Returns the bytes that an operation reads and writes."""
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if name in READS_ROWS:
        return 2 * sum(map(_size, made))
    if name in WRITES_ROWS:
        return 2 * _size(given[-1])
    return sum(map(_size, given)) + sum(map(_size, made))


def _size(tensor: Tensor) -> int:
    """The bytes of a tensor; what is expanded is read once."""
    stored = tensor.x.untyped_storage().nbytes() if isinstance(tensor, Counted) else tensor.nbytes
    return min(tensor.nbytes, stored)


def _data(value: Any) -> Any:
    return value.x if isinstance(value, Counted) else value


def _shape(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _numbers(indices: Any) -> list[Tensor | None]:
    """Indices, with booleans as the numbers of what is true: a shape alone says nothing of how many there are."""
    found = list[Tensor | None]()
    for index in indices:
        is_bool = index is not None and index.dtype == torch.bool
        found += index.nonzero(as_tuple=True) if is_bool else [index]
    return found


def _counted(value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, Counted):
        return value
    if value.is_floating_point():
        return Counted(_shape(value))
    return Counted(torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value)


class _FusedNorm(torch.autograd.Function):
    """An RMSNorm counted as a GPU runs it, one operation each way; of shapes torch would make one of many parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = torch.empty_like(x)
        _add("rms_norm", 0, 2 * _size(x) + _size(weight))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        _add("rms_norm_backward", 0, 3 * _size(x) + 2 * _size(weight))
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    return _FusedNorm.apply(x, weight)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist and isinstance(args[0], Counted):
            _add("_local_scalar_dense", 0, 0)
            return args[0].x.tolist()
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})
