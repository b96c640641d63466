"""Copies between the host and a device. On a GPU each one makes the host wait, so a round packs what it has to say into
one of each: see `Commit`.

B sequences of the batch, W of which go on.
"""

from collections.abc import Sequence
from functools import cached_property
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


class Commit:
    """The outcome of one forward for a cache: which of its nodes are kept, and the tokens chosen there, which are added
    to every sequence, on the host and, by one copy, on the device.

    `paths[b]` are the nodes of the forward at which the tokens of sequence b were chosen; `counts`: how many they
    are; `ids` (B, M): the tokens, padded with 0, which every embedding has, since the drafter reads them; `path` (B,
    P): the paths, padded with nodes that stay where they are, or None where all of them are the first nodes;
    `going`: which sequences go on, on the host.
    """

    def __init__(self, device: torch.device, tokens: list[list[int]], paths: list[list[int]], finished: Sequence[bool]):
        self.paths = paths
        self.going = [b for b, has_finished in enumerate(finished) if not has_finished]
        counts = [len(new) for new in tokens]
        longest = max(counts)
        columns: list[Sequence] = [[new + [0] * (longest - len(new)) for new in tokens]]
        has_moves = any(path != list(range(len(path))) for path in paths)
        if has_moves:
            deepest = max(len(path) for path in paths)
            columns.append([[*path, *range(len(path), deepest)] for path in paths])
        is_batch = len(tokens) > 1
        if is_batch:  # of one sequence nobody asks which, and its count needs no copy
            columns += [counts, self.going]
        self.ids, *sent = to_device(device, *columns)
        self.path = sent[0] if has_moves else None
        self.counts = Mirrored(counts, sent[-2][:, None] if is_batch else None)
        self._going = sent[-1] if is_batch else None

    @cached_property
    def going_index(self) -> Tensor:
        """The sequences that go on (W,), on the device."""
        return torch.arange(len(self.going), device=self.ids.device) if self._going is None else self._going

    @cached_property
    def is_going(self) -> Tensor:
        """1 for each sequence that goes on, else 0 (B, 1), on the device."""
        return torch.zeros_like(self.counts.on(self.ids.device)).index_fill_(0, self.going_index, 1)
