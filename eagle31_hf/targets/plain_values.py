"""The plain values that objects hold: what a forward or a logits processor goes by beside its tensors."""

from enum import Enum
from types import BuiltinFunctionType, FunctionType

import torch
from torch import nn

OF_MODULES = set(vars(nn.Module())) - {"training"}  # what every module has, hooks among it
PLAIN = (int, float, str, bool, type(None), Enum, FunctionType, BuiltinFunctionType)


def values_of_module(module: nn.Module) -> tuple:
    """The class of a module, and its attributes as `plain_values` has them."""
    return type(module), id(module), *plain_values(module, OF_MODULES)


def plain_values(one: object, but: set) -> list[tuple[str, str]]:
    """The attributes that are plain values or lists of such, and of dicts the entries that are, less those named
    `but`."""
    found = list[tuple[str, str]]()
    for name, value in vars(one).copy().items():  # at once: another thread may set some meanwhile
        if name in but:
            continue
        if issubclass(type(value), dict):
            found += [(f"{name}.{key}", str(entry)) for key, entry in value.copy().items() if _is_plain(entry)]
        elif _is_plain(value):
            found.append((name, str(value)))
    return found


def _is_plain(value: object) -> bool:
    kind = type(value)  # not isinstance, which looks into configs
    if issubclass(kind, PLAIN):
        return True
    if issubclass(kind, dict):
        return all(map(_is_plain, value.values()))  # type: ignore[attr-defined]
    if issubclass(kind, list | tuple | set):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return isinstance(value, torch.Tensor) and value.numel() == 1
