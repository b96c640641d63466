"""Masks in the form a target takes them. B sequences, N new tokens."""

from torch import Tensor
from transformers import Cache, PreTrainedModel

from ..cache import adopt as cache
from ..cache.masks import SlotMask, windows_by_kind


def slot_masks(
    target: PreTrainedModel, past_key_values: Cache, mask: SlotMask, going: list[int] | None = None
) -> Tensor | dict[str, Tensor]:
    """Additive masks (B, 1, N, keys) in the form the target takes: by layer type where its config has them, else one.

    `mask`: of N new tokens as queries; `going`: the sequences that have not ended, by default all.
    """
    config = target.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    starts = mask.starts.host
    starts = starts if not going else [starts[b] for b in going]

    def additive(window: int | None) -> Tensor:
        seen_from, end = cache.key_span(past_key_values, starts, mask.visible.shape[1], window)
        return mask.additive(end, target.dtype, seen_from, window)

    if kinds is None:
        return additive(window)
    return {kind: additive(one) for kind, one in windows_by_kind(kinds, window).items()}
