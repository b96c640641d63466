"""The plain values that objects hold: what a forward or a logits processor goes by beside its tensors."""

import torch
from torch import nn

OF_MODULES = set(vars(nn.Module())) - {"training"}  # what every module has, hooks among it
PLAIN = (int, float, str, bool, type(None))


def values_of_module(module: nn.Module) -> tuple:
    """The class of a module, and those of its attributes that are plain values or hold only such."""
    return type(module), id(module), *plain_values(module, OF_MODULES)


def plain_values(one: object, but: set) -> list[tuple[str, str]]:
    """The attributes that are plain values or hold only such, less those named `but`."""
    return [(name, str(value)) for name, value in vars(one).items() if name not in but and _is_plain(value)]


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):  # an empty one is a store of what is to come, of modules or weights
        return bool(value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)
