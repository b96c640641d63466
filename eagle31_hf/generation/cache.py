"""The only file that knows cache layouts."""

from contextlib import contextmanager

import torch
from transformers import Cache, QuantizedCache, StaticCache

# Caches whose rows cannot be taken back: `crop` is missing, or trims only a part of them.
UNSUPPORTED = {
    StaticCache: "a static cache cannot drop rejected tokens yet; pass a DynamicCache or no cache",
    QuantizedCache: "a quantized cache cannot drop rejected tokens; pass a DynamicCache or no cache",
}


def crop(cache: Cache, tokens_to_remove: int) -> None:
    """Removes the last tokens. To be called after every forward even with 0: windowed layers shrink back to their size here."""
    cache.crop(-tokens_to_remove)


def keep_path(cache: Cache, rows: list[int], num_rows: int) -> None:
    """Of the last `num_rows` rows keeps these, ascending, and drops the others.

    Keys carry their position in themselves, so an accepted path only moves together; a row never moves onto one still to be moved.
    """
    if rows != list(range(len(rows))):
        for layer in (layer for layer in cache.layers if layer.keys is not None):  # layers that share another's keys hold none
            first = layer.keys.shape[-2] - num_rows
            for tensor in (layer.keys, layer.values):
                moved = tensor[..., torch.tensor(rows, device=tensor.device) + first, :]
                tensor[..., first : first + len(rows), :] = moved
    crop(cache, num_rows - len(rows))


def windows(cache: Cache) -> list[int | None]:
    """By layer, how many tokens it attends to; None where it attends to all."""
    return [layer.sliding_window if layer.is_sliding else None for layer in cache.layers]


@contextmanager
def recording_past(cache: Cache):
    """Within it, windowed layers keep what `crop` may have to bring back; after it they are as they were found."""
    layers = [layer for layer in cache.layers if hasattr(layer, "record_past")]
    found = [layer.record_past for layer in layers]
    cache.activate_past_recording()
    try:
        yield
    finally:
        for layer, record_past in zip(layers, found, strict=True):
            layer.record_past = record_past
