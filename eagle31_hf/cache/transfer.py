"""Copies between the host and a device. On a GPU each one makes the host wait, so a round packs what it has to say into
one of each.

B sequences of the batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Mirrored:
    """One integer a sequence: on the host, and on the device once it is asked for. Immutable.

    `host`: the integers; `copy` (B, 1), int64: the same on a device, where they are known to be there already.
    """

    def __init__(self, host: Sequence[int], copy: Tensor | None = None):
        self.host = list(host)
        self._copy = copy

    @property
    def is_uniform(self) -> bool:
        """Returns whether all sequences have the same integer, so that no copy on a device is needed."""
        return min(self.host) == max(self.host)

    def on(self, device: torch.device) -> Tensor:
        """The integers (B, 1) on the device; no wait where they are uniform or there already."""
        if self._copy is None or self._copy.device != device:
            if self.is_uniform:
                self._copy = torch.full((len(self.host), 1), self.host[0], device=device)
            else:
                self._copy = to_device(device, self.host)[0][:, None]
        return self._copy

    def __add__(self, other: "Mirrored | int") -> "Mirrored":
        if isinstance(other, int):
            return Mirrored([value + other for value in self.host], None if self._copy is None else self._copy + other)
        total = Mirrored([a + b for a, b in zip(self.host, other.host, strict=True)])
        known = other._copy if self._copy is None else self._copy
        if known is not None and not total.is_uniform:  # it will be asked for, and a sum needs no copy
            total._copy = self.on(known.device) + other.on(known.device)
        return total

    def __sub__(self, other: int) -> "Mirrored":
        return self + -other


def to_device(device: torch.device, *values: Sequence) -> list[Tensor]:
    """Rectangular nested lists of integers -> int64 tensors of their shapes on the device, by one copy."""
    host = [torch.tensor(value, dtype=torch.long, device="cpu") for value in values]
    if device.type == "cpu":
        return host
    packed = torch.cat([part.flatten() for part in host])
    if device.type == "cuda":  # from pinned memory the host need not wait
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([part.numel() for part in host])
    return [part.view(like.shape) for part, like in zip(parts, host, strict=True)]


def to_host(*tensors: Tensor) -> list[Any]:
    """Tensors of one device -> nested lists, by one copy. Integers are exact up to 2**24, as every token id is."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    has_floats = any(tensor.is_floating_point() for tensor in tensors)
    packed = torch.cat([tensor.flatten().to(torch.float32 if has_floats else torch.long) for tensor in tensors])
    host = packed.cpu().split([tensor.numel() for tensor in tensors])
    return [part.view(like.shape).to(like.dtype).tolist() for part, like in zip(host, tensors, strict=True)]
