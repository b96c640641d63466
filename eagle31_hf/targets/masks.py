"""Masks in the form a target takes them. B sequences, N new tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ..cache import adopt as cache
from ..cache.masks import SlotMask, windows_by_kind
from ..cache.states import is_recurrent

ALL_LAYERS = "all layers"
MASKLESS = ("linear_attention", "conv")  # types of layers that take no mask once there is a state


def slot_masks(
    target: PreTrainedModel, past_key_values: Cache, mask: SlotMask, going: list[int] | None = None
) -> Tensor | dict[str, Tensor] | None:
    """Additive masks (B, 1, N, keys) in the form the target takes: by layer type where its config has them, else one;
    None where no layer has keys.

    `mask`: of N new tokens as queries; `going`: the sequences that have not ended, by default all.
    """
    if not cache.has_keys(past_key_values):
        return None
    has_states = is_recurrent(past_key_values)
    windows = windows_of(target, has_states)
    starts = mask.starts.host
    starts = starts if not going else [starts[b] for b in going]

    def additive(window: int | None) -> Tensor:
        seen_from, end = cache.key_span(past_key_values, starts, mask.visible.shape[1], window)
        return mask.additive(end, target.dtype, seen_from, window)

    return _by_kind(windows, additive, has_states)


def span_masks(
    target: PreTrainedModel, starts: Tensor, begin: Tensor, places: Tensor, bits: Tensor, has_states: bool = False
) -> Tensor | dict[str, Tensor | None]:
    """Masks of spans (B, 1, N, 3), see `kernels.tree_attention`, in the form the target takes them. The new tokens at
    places (B, N), in slots from `starts` (B, 1) on, see the slots from `begin` (B, 1) up to these, as far as their
    window goes, and the new tokens of their bits (B, N), all of which have to be in the window. `has_states`: whether
    some layers keep recurrent states, which take no mask."""
    windows = windows_of(target, has_states)
    return _by_kind(windows, partial(spans_of, starts, begin, places, bits), has_states)


def _by_kind(windows: dict[str, int | None], made: Callable[[int | None], Tensor], has_states: bool) -> Any:
    """Masks in the form a target takes them, each of them `made` once for its window."""
    by_window = {window: made(window) for window in {*windows.values()}}
    masks: dict[str, Any] = {kind: by_window[window] for kind, window in windows.items()}
    if has_states:
        masks |= dict.fromkeys(MASKLESS)
    return masks.get(ALL_LAYERS, masks)


def windows_of(target: PreTrainedModel, has_states: bool = False) -> dict[str, int | None]:
    """The sliding windows of a target, in tokens, by type of layers; by ALL_LAYERS where its config has no types. Where
    it keeps recurrent states, by all types that its code may ask for, whatever its config says."""
    config = target.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    if has_states:
        kinds = {"full_attention": None, "sliding_attention": window}
        return kinds | {"hybrid": None, "hybrid_sliding": window}  # ZAYA's names, whose layers have states beside keys
    kinds = getattr(config, "layer_types", None)
    return {ALL_LAYERS: window} if kinds is None else windows_by_kind(kinds, window)


def spans_of(starts: Tensor, begin: Tensor, places: Tensor, bits: Tensor, window: int | None) -> Tensor:
    """One mask of spans; `bits` (B or 1, N)."""
    if window is not None:
        begin = torch.maximum(places - (window - 1), begin)
    return torch.stack(torch.broadcast_tensors(starts, begin, bits.expand_as(places)), dim=-1)[:, None]
