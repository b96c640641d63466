"""Linear layers that read the same input, as those of queries, keys and values do, run as one product: their weights
are laid side by side in one buffer.

K width of the input, N of a layer's output.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

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


def products(layers: Sequence[Any], x: Tensor) -> Sequence[Tensor]:
    """Multiplies x (..., K) by the weight of each layer -> (..., N) of each: one product, where the weights lie side by
    side and, if they are of 8 bits, x is of few rows."""
    kind = type(layers[0])
    tensors = _tensors(layers)
    is_for_one = kind is nn.Linear or x.shape[:-1].numel() <= FEW_ROWS
    if not tensors or not is_for_one or not all(map(_are_side_by_side, tensors)):
        return [layer(x) for layer in layers]
    return KINDS[kind][1](x, *map(_whole, tensors)).split([layer.out_features for layer in layers], dim=-1)


@torch.no_grad()
def lay_side_by_side(groups: Iterable[Sequence[nn.Module]]) -> None:
    """Lays the weights of the layers of each group side by side, where they can be. They are moved: parameters keep
    their names, values and what is done to them, and take as much memory as before. Ends early where there is no
    memory for a group's weights twice."""
    device = None
    try:
        for layers in groups:
            tensors = _tensors(layers)
            if not all(map(_are_side_by_side, tensors)) and all(map(_can_move, tensors)):
                device = layers[0].weight.device
                for parts in tensors:
                    _move(parts)
    except torch.OutOfMemoryError:
        logger.info("There is no memory to lay more weights side by side: they stay where they are.")
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)  # another stream may still read weights where they were
        torch.cuda.empty_cache()  # which has left gaps that few other tensors fit into


def _tensors(layers: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The tensors of layers, by name: a weight of each, say, then a bias of each, or None. Empty where the layers are
    not all of one of the KINDS, or run another forward."""
    kind = type(layers[0])
    if kind not in KINDS or any(type(layer) is not kind or "forward" in vars(layer) for layer in layers):
        return []
    return [tuple(getattr(layer, name) for layer in layers) for name in KINDS[kind][0]]


def _are_side_by_side(parts: Sequence[Any]) -> bool:
    """Returns whether each tensor begins where the one before it ends; or there is none, which every layer lacks."""
    if any(part is None for part in parts):
        return all(part is None for part in parts)
    first = parts[0]
    ends = [first.data_ptr()]
    for part in parts:
        ends.append(ends[-1] + part.nbytes)
    memory = first.untyped_storage().data_ptr()
    return all(
        part.data_ptr() == begin and part.is_contiguous() and part.untyped_storage().data_ptr() == memory
        for part, begin in zip(parts, ends, strict=False)
    )


def _whole(parts: Sequence[Any]) -> Tensor | None:
    """The tensor (sum of N, ...) whose parts lie side by side. A view."""
    first = parts[0]
    return None if first is None else first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _can_move(parts: Sequence[Any]) -> bool:
    """Returns whether tensors of several layers may be laid side by side: nothing else lies in their memory, and none
    was made in inference mode, where torch lets none be moved. Also where no layer has one."""
    if any(part is None for part in parts):
        return all(part is None for part in parts)
    alike = len({(part.dtype, part.device, part.shape[1:]) for part in parts}) == 1
    return alike and all(
        part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes and not part.is_inference()
        for part in parts
    )


def _move(parts: Sequence[Any]) -> None:
    if parts[0] is not None:
        with torch.inference_mode(False):
            whole = torch.cat([part.detach() for part in parts])
        for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = place
