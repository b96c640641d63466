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
    attributes = vars(one).copy()  # at once: another thread may set some meanwhile
    flat = [(name, value) for name, value in attributes.items() if name not in but and not isinstance(value, dict)]
    for name, value in attributes.items():
        if name not in but and isinstance(value, dict):
            flat += [(f"{name}.{key}", entry) for key, entry in value.copy().items()]
    return [(name, str(value)) for name, value in flat if _is_plain(value)]


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)
