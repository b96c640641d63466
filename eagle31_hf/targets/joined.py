"""Linear layers that read the same input, as those of queries, keys and values do, run as one product, by a copy of
their weights that lies in one buffer.

The layers stay what they are. The copy is written again before every call, which takes as long as reading the weights
once: it holds what they hold.

K width of the input, N of a layer's output.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.utils import logging

from ..kernels.quantized_linear import quantized_linear
from ..quantized import FEW_ROWS, QuantizedLinear

logger = logging.get_logger(__name__)

# By kind of layer: the names of its tensors, which have a row for every output, and what multiplies by them.
KINDS: dict[type, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    nn.Linear: (("weight", "bias"), linear),
    QuantizedLinear: (("weight", "scale", "bias"), quantized_linear),
}


@dataclass
class Joined:
    """A copy of the tensors of several layers, joined into those of one. `wholes`: a weight and what else such a layer
    has, None for a bias that none of them has; `sources`: the layers' own tensors, by which a stale copy is known."""

    wholes: list[Tensor | None]
    sources: list[tuple[Any, ...]]

    @property
    def place(self) -> tuple[int, ...]:
        """The addresses that graphs read."""
        return tuple(whole.data_ptr() for whole in self.wholes if whole is not None)

    @property
    def num_bytes(self) -> int:
        return sum(whole.nbytes for whole in self.wholes if whole is not None)


_joined: WeakKeyDictionary[nn.Module, Joined] = WeakKeyDictionary()  # by the first layer of a group


def products(layers: Sequence[Any], x: Tensor) -> Sequence[Tensor]:
    """Multiplies x (..., K) by the weight of each layer -> (..., N) of each: as one product where the layers were
    joined and, if their weights are of 8 bits, x is of few rows."""
    kind, joined = type(layers[0]), _joined.get(layers[0])
    can_join = kind is nn.Linear or x.shape[:-1].numel() <= FEW_ROWS
    if joined is None or not can_join or not _is_of(joined, _tensors(layers)):
        return [layer(x) for layer in layers]
    return KINDS[kind][1](x, *joined.wholes).split([layer.out_features for layer in layers], dim=-1)


@torch.no_grad()
def join(groups: Iterable[Sequence[nn.Module]], most_bytes: float) -> list[Joined]:
    """Joins the layers of each group, where they can be joined, and copies their weights as they are now. Returns what
    was joined, which is to be kept as long as graphs read it. New copies take at most `most_bytes`."""
    found = list[Joined]()
    for layers in groups:
        tensors, known = _tensors(layers), _joined.get(layers[0])
        if known is None or not _is_of(known, tensors):
            known = _made(tensors, most_bytes)
            if known is None:
                _joined.pop(layers[0], None)
                continue
            most_bytes -= known.num_bytes
        for whole, parts in zip(known.wholes, tensors, strict=True):
            if whole is not None:
                torch.cat([part.detach() for part in parts], out=whole)
        _joined[layers[0]] = known
        found.append(known)
    return found


def separate(groups: Iterable[Sequence[nn.Module]]) -> None:
    """Forgets the copies of groups; what still holds them keeps them."""
    for layers in groups:
        _joined.pop(layers[0], None)


def _made(tensors: list[tuple[Any, ...]], most_bytes: float) -> Joined | None:
    """Makes room for the copy of a group; None where it cannot be joined, or there is not enough."""
    if not tensors or not all(map(_are_alike, tensors)):
        return None
    if sum(part.nbytes for parts in tensors for part in parts if part is not None) > most_bytes:
        return None
    try:
        with torch.inference_mode(False):  # another call may write to it in another mode
            return Joined([_room(parts) for parts in tensors], tensors)
    except torch.OutOfMemoryError:
        logger.info("There is no memory for more joined weights: their layers run one by one.")
        return None


def _room(parts: Sequence[Any]) -> Tensor | None:
    first = parts[0]
    return None if first is None else first.detach().new_empty(sum(map(len, parts)), *first.shape[1:])


def _tensors(layers: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The tensors of layers, by name: a weight of each, say, then a bias of each, or None. Empty where the layers are
    not all of one of the KINDS, or run another forward."""
    kind = type(layers[0])
    if kind not in KINDS or any(type(layer) is not kind or "forward" in vars(layer) for layer in layers):
        return []
    return [tuple(getattr(layer, name) for layer in layers) for name in KINDS[kind][0]]


def _are_alike(parts: Sequence[Any]) -> bool:
    """Returns whether tensors of several layers can be parts of one; True, too, where no layer has this tensor."""
    if any(part is None for part in parts):
        return all(part is None for part in parts)
    if any(hasattr(part, "__tensor_flatten__") for part in parts):  # as torchao's, whose data are other tensors
        return False
    return len({(type(part), part.dtype, part.device, part.shape[1:]) for part in parts}) == 1


def _is_of(joined: Joined, tensors: list[tuple[Any, ...]]) -> bool:
    """Returns whether a copy is one of these very tensors, and they have not been moved or cast since."""
    return len(joined.sources) == len(tensors) and all(
        all(a is b for a, b in zip(mine, theirs, strict=True))
        and (whole is None or all((part.dtype, part.device) == (whole.dtype, whole.device) for part in theirs))
        for whole, mine, theirs in zip(joined.wholes, joined.sources, tensors, strict=True)
    )
