"""A pretend accelerator: tensors that claim to live on another device, and tell when the host would wait for it.

On a GPU the host waits wherever a value is read, a tensor is copied to or from the device, or the size of a result
depends on values. All data here lie on the CPU; the device exists in name only. Needs torch 2.9.

`WAITS`: by reason and line of the library; `LAUNCHES`: operations that a GPU would be given, views excluded.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_consecutive"}
VIEWS = {
    "view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "alias",
    "detach", "split", "split_with_sizes", "as_strided", "unbind", "empty", "empty_like", "new_empty", "empty_strided",
    "_local_scalar_dense", "lift_fresh",
}  # fmt: skip
# A GPU runs each of these as one kernel; a CPU takes them apart.
FUSED = {torch.nn.functional.rms_norm, torch.nn.functional.scaled_dot_product_attention}
WAITS: Counter[tuple[str, str]] = Counter()
LAUNCHES: Counter[str] = Counter()
_setup_privateuseone_for_python_backend(NAME)


class Held(Tensor):
    """A tensor of the pretend device; `x` holds its data."""

    @staticmethod
    def __new__(cls, x: Tensor) -> "Held":
        held = torch.Tensor._make_wrapper_subclass(
            cls, x.size(), strides=x.stride(), storage_offset=x.storage_offset(), dtype=x.dtype, device=f"{NAME}:0"
        )
        held.x = x
        return held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


def _note_wait(reason: str) -> None:
    frame = sys._getframe(1)
    while frame is not None and "/eagle31_hf/" not in frame.f_code.co_filename:
        frame = frame.f_back
    where = "outside"
    if frame is not None:
        where = f"{frame.f_code.co_filename.rsplit('/eagle31_hf/')[-1]}:{frame.f_lineno}"
    WAITS[reason, where] += 1


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the data, and notes what a GPU would make of it."""
    name = func._schema.name.split("::")[1]
    leaves = [*_leaves(args), *_leaves(list(kwargs.values()))]
    held = [leaf for leaf in leaves if isinstance(leaf, Held)]
    device = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if not held and device != NAME:
        return func(*args, **kwargs)
    on_host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Held) and leaf.dim()]
    _note_waits(name, args, device, bool(held), on_host)
    if name not in VIEWS:
        LAUNCHES[name] += 1
    kwargs = kwargs | {"device": "cpu"} if device else kwargs
    given = _data(args)
    out = func(*given, **{key: _data(value) for key, value in kwargs.items()})
    if device == "cpu" or name == "_local_scalar_dense":
        return out
    if name.endswith("_") and not name.endswith("__") and isinstance(out, Tensor):
        return next(leaf for leaf in held if leaf.x is given[0])
    return _held(out)


def _leaves(values: Any) -> list[Any]:
    """The arguments of an operation, lists of tensors taken apart."""
    leaves = []
    for value in values:
        leaves += value if isinstance(value, list | tuple) else [value]
    return leaves


def _data(value: Any) -> Any:
    """The same value with the data of held tensors in their place."""
    if isinstance(value, Held):
        return value.x
    return type(value)(_data(one) for one in value) if isinstance(value, list | tuple) else value


def _held(value: Any) -> Any:
    """The same value with its tensors held by the device."""
    if isinstance(value, Tensor):
        return Held(value)
    return type(value)(_held(one) for one in value) if isinstance(value, list | tuple) else value


def _note_waits(name: str, args: tuple, device: str | None, has_held: bool, on_host: list[Tensor]) -> None:
    indices = [one for one in args[1] if one is not None] if name in ("index", "index_put", "index_put_") else []
    fills = "put" in name and args[2].numel() == 1  # which is a masked fill
    if name == "_local_scalar_dense":
        _note_wait("a value is read")
    elif name in SIZED_BY_VALUES:
        _note_wait(f"the size of {name}")
    elif name == "_to_copy" and device == "cpu":
        _note_wait("copied to the host")
    elif (name == "_to_copy" and not has_held) or (name == "copy_" and on_host):
        _note_wait("copied to the device")
    elif indices:
        if not fills and any(one.dtype == torch.bool for one in indices):
            _note_wait("an index of booleans")
        if any(not isinstance(one, Held) for one in indices):
            _note_wait("an index on the host")
    elif on_host:
        raise RuntimeError(f"{name} of tensors on two devices.")


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist and isinstance(args[0], Held):
            _note_wait("a list is read")
            return args[0].x.tolist()
        if func is torch.Tensor.new_tensor and isinstance(args[0], Held):
            _note_wait("copied to the device")
            return Held(args[0].x.new_tensor(*args[1:], **kwargs))
        if func is torch.tensor and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == NAME:
            _note_wait("copied to the device")
            return Held(torch.tensor(*args, **kwargs | {"device": "cpu"}))
        if func not in FUSED:
            return func(*args, **kwargs)
        before = LAUNCHES.copy()
        out = func(*args, **kwargs)
        if before != LAUNCHES:
            LAUNCHES.clear()
            LAUNCHES.update(before)
            LAUNCHES[func.__name__] += 1
        return out


@contextmanager
def accelerator() -> Iterator[None]:
    """A context in which the pretend device exists; random numbers of its generators come from the CPU's."""
    make = torch.Generator

    class Generator:
        def __new__(cls, device: Any = "cpu") -> torch.Generator:
            return make("cpu")

    torch.Generator = Generator  # type: ignore[misc]
    try:
        with _Functions(), _Dispatch(), nullcontext():
            yield
    finally:
        torch.Generator = make  # type: ignore[misc]


def moved(model: nn.Module) -> nn.Module:
    """The model with its weights on the pretend device."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, Held):
                    tensors[name] = Held(tensor.data)
                    tensors[name]._is_param = isinstance(tensor, nn.Parameter)  # as torch marks other subclasses
    return model
