"""Stock caches of transformers made into caches of slot layers, and back. The only file that knows cache layouts.

Within `slots(cache)` the layers of a cache are `SlotLayer`s: a token's keys are written where they stay, rejected ones
are forgotten by moving the end back, and sequences of a batch may differ in length. Recurrent states stay where they
are. Caches whose layers are of other kinds keep them, and can only append and crop, all sequences alike.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..errors import DraftingRefusedError
from .compressed import compresses, recording
from .layer import DUMMY, CacheFullError, HybridSlotLayer, Placement, SlotLayer, slot_layers
from .states import HAS_METHODS, attributes_of, crop_keys, holds_states, is_recurrent
from .transfer import Commit, Mirrored

# How a stock layer becomes a `SlotLayer` and gets its tokens back. Only these very classes: what derives from them
# keeps more than keys.


def _from_dynamic(layer: DynamicLayer, placement: Placement, limit: int) -> SlotLayer:
    window = getattr(layer, "sliding_window", None)
    has_states = holds_states(layer)  # beside its keys
    ours = HybridSlotLayer(layer, placement, limit, window) if has_states else SlotLayer(placement, limit, window)
    return ours.hold(layer.keys, layer.values, layer.get_seq_length()) if layer.get_seq_length() else ours


def _to_dynamic(ours: SlotLayer, layer: DynamicLayer) -> None:
    layer.keys, layer.values = ours.held(ours.end)


def _to_sliding(ours: SlotLayer, layer: DynamicSlidingWindowLayer) -> None:
    layer.keys, layer.values = ours.held(min(ours.end, layer.sliding_window - 1))
    layer.cumulative_length = ours.end


def _from_static(layer: StaticLayer, placement: Placement, limit: int) -> SlotLayer:
    ours = SlotLayer(placement, layer.max_cache_len, fixed=True)
    return ours.hold(layer.keys, layer.values, int(layer.get_seq_length())) if layer.is_initialized else ours


def _to_static(ours: SlotLayer, layer: StaticLayer) -> None:
    for own, states in zip((layer.keys, layer.values), ours.held(ours.end), strict=True):
        own[..., : ours.end, :] = states  # onto itself where the layer's own tensors were taken over
        own[..., ours.end :, :] = 0  # attention will meet them again, and rejected tokens' values may be NaN
    layer.cumulative_length.fill_(ours.end)
    ours.buffers = []  # one layer at a time is held twice


def _from_static_sliding(layer: StaticSlidingWindowLayer, placement: Placement, limit: int) -> SlotLayer:
    # A ring cannot be rolled back: the window is cut out of a buffer of the whole text by the mask.
    window, end = layer.max_cache_len, layer.get_seq_length()
    ours = SlotLayer(placement, limit, window=window, fixed=True)
    if end:
        held = min(end, window)
        ours.buffers = [x.new_zeros((*x.shape[:-2], limit, x.shape[-1])) for x in (layer.keys, layer.values)]
        for buffer, states in zip(ours.buffers, (layer.keys, layer.values), strict=True):
            buffer[..., end - held : end, :] = states[..., :held, :]
        ours.lazy_initialization(layer.keys, layer.values)
        ours.settle(end)
        ours.found = end
    return ours


def _to_static_sliding(ours: SlotLayer, layer: StaticSlidingWindowLayer) -> None:
    held = min(ours.end, layer.max_cache_len)
    for states, ended in zip((layer.keys, layer.values), ours.held(held), strict=True):
        states[..., :held, :] = ended
    layer.cumulative_length.fill_(held)
    layer.cumulative_length_int = ours.end


ADOPTED: dict[type, tuple[Callable[..., SlotLayer], Callable[..., None]]] = {
    DynamicLayer: (_from_dynamic, _to_dynamic),
    DynamicSlidingWindowLayer: (_from_dynamic, _to_sliding),
    StaticLayer: (_from_static, _to_static),
    StaticSlidingWindowLayer: (_from_static_sliding, _to_static_sliding),
}


KEYLESS = {DUMMY}  # layers without keys, which stay as they are: those that hold nothing, and states alone
if HAS_METHODS:
    ADOPTED[cache_utils.LinearAttentionAndFullAttentionLayer] = _from_dynamic, _to_dynamic
    ADOPTED[cache_utils.LinearAttentionAndSlidingWindowAttentionLayer] = _from_dynamic, _to_sliding
    KEYLESS |= {cache_utils.LinearAttentionLayer}


def is_adoptable(cache: Cache) -> bool:
    """Returns whether `slots` can keep this cache's tokens."""
    kinds = {type(layer) for layer in cache.layers} | ({cache.layer_class_to_replicate} - {None})
    return kinds - KEYLESS <= set(ADOPTED) and not cache.offloading


@contextmanager
def slots(cache: Cache, limit: int) -> Iterator[Placement | None]:
    """A context in which the layers of an adoptable cache are `SlotLayer`s; after it they are as they were, with the
    tokens written meanwhile: after an error only with those that were accepted, after a refusal, or where the cache was
    too short, with none.

    `limit`: slots that will ever be in use. None where the cache cannot be adopted: windowed layers then keep what
    `crop` may have to bring back.
    """
    if not is_adoptable(cache):
        with recording(cache), appending(cache):
            yield None
        return
    placement = Placement()
    found = cache.layers
    states = [(layer, attributes_of(layer)) for layer in found if holds_states(layer)]
    replicated = cache.layer_class_to_replicate
    cache.layers = [
        layer if type(layer) in KEYLESS else ADOPTED[type(layer)][0](layer, placement, limit) for layer in found
    ]
    if replicated is not None:
        cache.layer_class_to_replicate = lambda: SlotLayer(placement, limit)  # type: ignore[assignment]
    try:
        yield placement
    except BaseException as error:
        is_refused = isinstance(error, DraftingRefusedError | CacheFullError)
        if is_refused or not placement.has_accepted:
            for layer, state in states:
                _put_back(layer, state)
        for layer in slot_layers(cache):
            layer.take_back(accepted_too=is_refused)
        raise
    finally:
        ours = cache.layers
        has_changed = any(layer.end != layer.found for layer in slot_layers(cache))
        cache.layers = found
        cache.layer_class_to_replicate = replicated
        if has_changed:
            _hand_back(ours, found)


def _hand_back(ours: list[Any], found: list[Any]) -> None:
    """Has the stock layers `found` hold what slot layers hold; where there were too few, more are added."""
    found += [DynamicLayer() for _ in range(len(ours) - len(found))]
    for layer, stock in zip(ours, found, strict=True):
        if layer is not stock and layer.buffers:
            if not stock.is_initialized:
                stock.lazy_initialization(*layer.buffers)
            ADOPTED[type(stock)][1](layer, stock)


def slot_cache(config: PreTrainedConfig) -> tuple[Cache, Placement]:
    """An empty cache of `SlotLayer`s, as many as the config has layers."""
    placement = Placement()
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    return Cache(layers=[SlotLayer(placement, window=window) for window in windows]), placement


def keep_paths(cache: Cache, starts: Mirrored, commit: Commit) -> None:
    """Keeps the nodes of every sequence's path, ascending, of those written from slot `starts[b]` on; drops the others.

    Keys carry their position in themselves, so an accepted path only moves together; a node never moves onto one still
    to be moved, and the nodes that pad a shorter path stay where they are.
    """
    if commit.path is not None:
        by_place: dict[tuple, tuple] = {}  # layers have few first slots and devices
        for layer in slot_layers(cache):
            if layer.buffers:
                place = layer.first, layer.device
                if place not in by_place:
                    by_place[place] = _places(starts, commit, *place)
                layer.move(*by_place[place])
    settle(cache, max(start + len(path) for start, path in zip(starts.host, commit.paths, strict=True)))


def _places(starts: Mirrored, commit: Commit, first: int, device: torch.device) -> tuple[Tensor, Tensor | int]:
    """Returns the places of a buffer that a commit's paths move from, and those they move to; it begins at slot
    `first`."""
    assert commit.path is not None
    if len(commit.paths) == 1:
        begin = starts.host[0] - first
        return (commit.path + begin).to(device), begin
    begins = starts.on(commit.path.device) * (commit.counts.on(commit.path.device) > 0)  # ended ones stay, anywhere
    goal = begins + torch.arange(commit.path.shape[1], device=begins.device) - first
    source = begins + commit.path - first
    return source.clamp_(min=0).to(device), goal.clamp_(min=0).to(device)


def settle(cache: Cache, end: int) -> None:
    """Keeps the tokens before slot `end`, which are accepted, and drops all others."""
    for layer in slot_layers(cache):
        layer.settle(end)


def wipe(cache: Cache, ends: list[int]) -> None:
    """Writes zeros over rejected tokens, from slot `ends[b]` of every sequence b on: a masked slot still meets the
    weight 0, and 0 times NaN is NaN."""
    for layer in slot_layers(cache):
        layer.wipe(ends)


def key_span(cache: Cache, starts: list[int], num_new: int, window: int | None) -> tuple[int, int]:
    """The first slot and the end of the keys that `num_new` tokens from slots `starts` on will meet in layers with this
    window."""
    fixed = [layer for layer in slot_layers(cache) if layer.fixed and layer.is_sliding == (window is not None)]
    if fixed:
        return 0, fixed[0].get_mask_sizes(num_new)[0]
    # a cache made without a config has none, whatever the model's
    has_windows = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
    return max(0, min(starts) - window + 1) if window is not None and has_windows else 0, max(starts) + num_new


def crop(cache: Cache, tokens_to_remove: int) -> None:
    """Removes the last tokens' keys; the others are accepted. To be called after every forward even with 0: windowed
    stock layers shrink back to their size here."""
    for layer in cache.layers:
        crop_keys(layer, tokens_to_remove)
    if cache in _appended:
        _appended[cache].accept()


def can_crop(cache: Cache) -> bool:
    """Returns whether any number of tokens can be removed from a stock cache: no layer has given up what came before a
    window, and none holds states."""
    if not is_adoptable(cache) or is_recurrent(cache):
        return False
    layers = attention_layers(cache)
    return not any(layer.is_sliding and layer.get_seq_length() >= layer.sliding_window for layer in layers)


def length(cache: Cache) -> int | None:
    """Returns how many tokens a cache holds; None where no layer has keys: states do not tell."""
    return int(cache.get_seq_length()) if has_keys(cache) else None


def capacity(cache: Cache) -> int | None:
    """Slots of a static cache; None where there is no end."""
    limits = [layer.limit for layer in slot_layers(cache) if layer.fixed and layer.limit]
    return min(limits) if limits else None


def attention_layers(cache: Cache) -> list[Any]:
    """Returns the layers of a cache that hold keys and values; those of convolutions and recurrences give no
    attentions."""
    return [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]


def has_keys(cache: Cache) -> bool:
    """Returns whether some layer of a cache keeps keys, or will where it has none yet: without any, masks and positions
    mean nothing."""
    return bool(attention_layers(cache)) or not cache.layers


def accepted_keys(cache: Cache) -> tuple[Tensor, int] | None:
    """Returns the keys (B, H, T, D) of the accepted tokens in a cache, and the slot after them: of the last layer that
    keeps all tokens or, where each has a window, of the last one. None where no layer holds keys as they are."""
    layers = [layer for layer in attention_layers(cache) if layer.is_initialized]
    layers = [layer for layer in layers if not layer.is_sliding] or layers
    if not layers:
        return None
    layer = layers[-1]
    if isinstance(layer, SlotLayer):
        return layer.buffers[0][..., : layer.settled - layer.first, :], layer.settled
    length = layer.get_seq_length()
    held = layer.keys.shape[-2] if isinstance(layer.keys, Tensor) and layer.keys.dim() == 4 else -1
    if held != length:  # quantized, say
        return None
    appended = _appended.get(cache)
    end = (appended and appended.length) or length
    return layer.keys[..., :end, :], end


def shown_attentions(layer: Any, attentions: Tensor) -> Tensor:
    """Returns the attentions (B, H, T, keys) that a stock layer would show of the last T tokens: to a window at most;
    of a static layer to all slots, used or not; of a layer with compressed keys all."""
    if compresses(layer):
        return attentions
    window = layer.sliding_window if layer.is_sliding else None
    is_static = getattr(layer, "fixed", False)
    end = layer.end if is_static else attentions.shape[3]
    if is_static and (window is None or end <= window):
        return attentions[..., :window]
    return attentions[..., 0 if window is None else max(0, end - attentions.shape[2] - window + 1) : end]


class Appended:
    """The states that layers of a cache which cannot be adopted go back to after an error: until tokens are accepted
    what they were found with, then the accepted tokens."""

    def __init__(self, cache: Cache):
        self.layers = cache.layers
        self.states = [attributes_of(layer) for layer in self.layers]
        self.length = 0  # tokens that were accepted

    def accept(self) -> None:
        """Everything in the layers is accepted. Recurrent states never hold anything else; convolutions of older
        transformers cannot say later how much of it there was."""
        attention = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin)]
        self.length = attention[0].get_seq_length() if attention else 0
        self.states = [
            {} if layer in attention or holds_states(layer) else attributes_of(layer) for layer in self.layers
        ]
        for layer in filter(compresses, self.layers):
            layer.accept()

    def take_back(self) -> None:
        """Takes back what was not accepted."""
        del self.layers[len(self.states) :]
        for layer, state in zip(self.layers, self.states, strict=True):
            if state:
                _put_back(layer, state)
            elif isinstance(layer, CacheLayerMixin):
                with suppress(ValueError):  # of one that compresses, where the caller ran the target over its cache
                    crop_keys(layer, layer.get_seq_length() - self.length)


_appended: WeakKeyDictionary[Cache, Appended] = WeakKeyDictionary()  # of caches in use


def _put_back(layer: Any, state: dict[str, Any]) -> None:
    """Gives a stock layer the attributes that it had."""
    vars(layer).clear()
    vars(layer).update(state)


@contextmanager
def appending(cache: Cache) -> Iterator[None]:
    """A context in which tokens are appended to a cache's own layers; after an error they hold the accepted ones. In it
    windowed layers keep what `crop` may have to bring back, those with states beside the window from the first `crop`
    on."""
    recording = [(layer, layer.record_past) for layer in cache.layers if hasattr(layer, "record_past")]
    try:
        for layer, _ in recording:
            if not holds_states(layer):
                layer.activate_past_recording()
        _appended[cache] = Appended(cache)
        yield
    except BaseException:
        if cache in _appended:
            _appended[cache].take_back()
        raise
    finally:
        _appended.pop(cache, None)
        for layer, record_past in recording:
            layer.record_past = record_past
