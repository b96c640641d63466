"""The only file that knows cache layouts.

A *slot* is a token's index in its row's text, left padding included. Within `slots(cache)` the layers of a cache are
`SlotLayer`s: a token's keys are written where they stay, rejected ones are forgotten by moving the end back, and rows
of a batch may differ in length. Caches whose layers are of other kinds keep them, and can only append and crop, all
rows alike.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, QuantizedCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .sequences import Commit
from .transfer import Mirrored

HEADROOM = 256  # slots a buffer is allocated for beyond what is needed, at least; a quarter of it, where that is more

# Caches whose rows cannot be taken back: `crop` is missing, or trims only a part of them.
UNSUPPORTED = {
    QuantizedCache: (
        "a quantized cache cannot drop rejected tokens (they are rounded together with accepted ones); pass a"
        " DynamicCache or no cache"
    )
}


@dataclass
class Placement:
    """Where the tokens of the next forward go, shared by a cache's layers. By default after the end, the same slots in
    every row.

    `slots` (W, R): for rows that differ, the slot of every token of the W rows in `written`, the others are not
    written. `high`: the greatest first slot of a row. `low`: the least slot a token stands at (a tree's nodes are
    written further on than they stand). `is_final`: nothing of it will be taken back, so windowed layers need not keep
    more than their window.
    """

    slots: Tensor | None = None
    written: Tensor | None = None
    low: int | None = None
    high: int | None = None
    is_final: bool = False

    def place(self, starts: Mirrored, num_tokens: int, device: torch.device, commit: Commit | None = None) -> None:
        """As many tokens a sequence, from slot `starts[b]` on; with a commit, only the sequences that go on after it
        are written."""
        going = range(len(starts.host)) if commit is None else commit.going
        first = [starts.host[b] for b in going]
        self.low = min(first)
        self.high = max(first)
        self.slots = None
        self.written = None
        if self.low < self.high or len(first) < len(starts.host):
            begin = starts.on(device)
            every = commit is None or len(first) == len(starts.host)
            self.written = torch.arange(len(first), device=device) if every else commit.going_index
            self.slots = (begin if every else begin[self.written]) + torch.arange(num_tokens, device=device)

    def clear(self) -> None:
        """The next forward appends again."""
        self.slots = None
        self.written = None
        self.low = None
        self.high = None


class SlotLayer(DynamicLayer):
    """One layer's keys and values (B, H, capacity, D), of which slots up to `end` are in use.

    `window`: how many tokens a token attends to, itself included; slots that have left every row's window may be given
    up, the buffer then begins at slot `first`. `fixed`: the buffer never moves or grows, and forwards always see all of
    it (CUDA graphs); its slots past the end are for the mask to hide.
    """

    def __init__(self, placement: Placement, limit: int | None = None, window: int | None = None, fixed: bool = False):
        super().__init__()
        self.placement = placement
        self.limit = limit
        self.fixed = fixed
        self.window = self.sliding_window = window
        self.is_sliding = window is not None
        self.is_compileable = fixed  # transformers then masks unused slots, also for a single token
        self.buffers: list[Tensor] = []  # keys, values
        self.first = self.end = self.settled = 0  # settled: as far as tokens have been accepted
        # buffers and `first` it began with; with a window they are never written to
        self.taken_over: tuple[list[Tensor], int] = [], 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def hold(self, keys: Tensor, values: Tensor, end: int) -> "SlotLayer":
        """Takes over tensors that hold the slots before `end`; a fixed layer keeps writing to these very tensors."""
        self.lazy_initialization(keys, values)
        self.buffers = [keys, values]
        self.end = end
        self.settled = end
        self.first = 0 if self.fixed else end - keys.shape[-2]
        self.taken_over = list(self.buffers), self.first
        return self

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes R new tokens (B, H, R, D) of every row; returns what they may attend to, themselves included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place, num_new = self.placement, key_states.shape[-2]
        high = self.end if place.high is None else place.high
        low = high if place.low is None else place.low
        seen_from, new = self.seen_from(low), (key_states, value_states)
        if (
            place.is_final
            and place.slots is None
            and self.window is not None
            and not self.fixed
            and num_new >= self.window
        ):
            return self._pass_by(new)
        self._make_room(seen_from, high + num_new, new)
        for buffer, states in zip(self.buffers, new, strict=True):
            if place.slots is None:
                buffer[..., high - self.first : high - self.first + num_new, :] = states
            else:
                written = place.written.to(states.device)
                buffer[written[:, None], :, place.slots.to(states.device) - self.first] = states[written].transpose(
                    1, 2
                )
        self.end = high + num_new
        if self.fixed:
            return self.buffers[0], self.buffers[1]
        self.keys, self.values = (
            buffer[..., seen_from - self.first : self.end - self.first, :] for buffer in self.buffers
        )
        return self.keys, self.values

    def _pass_by(self, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A prompt longer than the window: all of it is seen once, its last window - 1 tokens are kept."""
        seen_from, num_new = self.seen_from(self.end), new[0].shape[-2]
        held = [buffer[..., seen_from - self.first : self.end - self.first, :] for buffer in self.buffers] or [
            x[..., :0, :] for x in new
        ]
        full = [torch.cat(pair, dim=-2) for pair in zip(held, new, strict=True)]
        self.end += num_new
        self.first = self.seen_from(self.end)
        self.buffers = [states[..., states.shape[-2] - (self.end - self.first) :, :].clone() for states in full]
        self.keys, self.values = self.buffers
        return full[0], full[1]

    def _make_room(self, seen_from: int, end: int, like: tuple[Tensor, Tensor]) -> None:
        """A buffer for slots up to `end`; what comes before `seen_from` is given up when it has to move anyway."""
        capacity = self.buffers[0].shape[-2] if self.buffers else 0
        if end - self.first <= capacity:
            return
        if self.fixed and (self.buffers or end > (self.limit or 0)):
            raise RuntimeError(f"a static cache of {capacity or self.limit} tokens got token {end}.")
        used, needed = min(self.end, end) - seen_from, end - seen_from
        if needed > capacity or any(buffer is self.buffers[0] for buffer in self.taken_over[0]):
            # Zeros, not whatever memory held: a masked slot still meets the weight 0, and 0 times NaN is NaN.
            fresh = [
                states.new_zeros((*states.shape[:-2], self._capacity(needed), states.shape[-1])) for states in like
            ]
        else:
            fresh = self.buffers
        for i, buffer in enumerate(self.buffers):
            held = buffer[..., seen_from - self.first : seen_from - self.first + used, :]
            fresh[i][..., :used, :] = held.clone() if fresh[i] is buffer else held
            self.buffers[i] = fresh[i]  # one old buffer at a time is still there
        self.buffers, self.first = fresh, seen_from

    def _capacity(self, needed: int) -> int:
        if self.fixed:
            return self.limit or needed
        ample = needed + max(needed // 4, HEADROOM)
        return ample if self.limit is None or self.window is not None else max(needed, min(ample, self.limit))

    def seen_from(self, slot: int) -> int:
        """The first slot a token at `slot` attends to."""
        return 0 if self.window is None or self.fixed else max(0, slot - self.window + 1)

    def move(self, rows: Tensor, source: Tensor, goal: Tensor) -> None:
        """Copies places `source` (W, M) of the buffers to places `goal` (W, M), in the W `rows` (W, 1)."""
        for buffer in self.buffers:
            buffer[rows, :, goal] = buffer[rows, :, source]

    def wipe(self, ends: list[int]) -> None:
        """Zeros from slot `ends[b]` of every row b on."""
        for buffer in self.buffers:
            for b, end in enumerate(ends):
                buffer[b, :, max(end - self.first, 0) :] = 0

    def settle(self, end: int) -> None:
        """The longest row ends before slot `end`."""
        self.end = self.settled = end
        if self.buffers and not self.fixed:
            seen_from = max(self.seen_from(end), self.first)
            self.keys, self.values = (
                buffer[..., seen_from - self.first : end - self.first, :] for buffer in self.buffers
            )

    def take_back(self) -> None:
        """Takes back every token that was not accepted. Of a prompt that failed midway a windowed layer may have given
        up what the tokens before it attend to, which the buffers it began with still hold."""
        if self.first > self.seen_from(self.settled):
            self.buffers, self.first = self.taken_over
        self.settle(self.settled)

    def crop(self, tokens_to_remove: int) -> None:
        self.settle(self.end - abs(tokens_to_remove))

    def get_seq_length(self) -> int:
        return self.end

    def get_max_length(self) -> int:
        """As of a stock layer of its kind: how many slots a static one has (BLOOM makes its mask as long), -1 for one
        that grows."""
        return self.get_mask_sizes(0)[0] if self.fixed else super().get_max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.fixed:
            return (self.buffers[0].shape[-2] if self.buffers else self.limit or query_length), 0
        offset = self.seen_from(self.end)
        return self.end - offset + query_length, offset

    def held(self, count: int) -> list[Tensor]:
        """Keys and values of the last `count` tokens."""
        return [buffer[..., self.end - count - self.first : self.end - self.first, :] for buffer in self.buffers]


# How a stock layer becomes a `SlotLayer` and gets its tokens back. Only these very classes: what derives from them
# keeps more than keys.


def _from_dynamic(layer: DynamicLayer, placement: Placement, limit: int) -> SlotLayer:
    ours = SlotLayer(placement, limit)
    return ours.hold(layer.keys, layer.values, layer.get_seq_length()) if layer.get_seq_length() else ours


def _to_dynamic(ours: SlotLayer, layer: DynamicLayer) -> None:
    layer.dtype = ours.dtype
    layer.device = ours.device
    layer.is_initialized = True
    layer.keys, layer.values = ours.held(ours.end)


def _from_sliding(layer: DynamicSlidingWindowLayer, placement: Placement, limit: int) -> SlotLayer:
    ours = SlotLayer(placement, limit, window=layer.sliding_window)
    return ours.hold(layer.keys, layer.values, layer.get_seq_length()) if layer.get_seq_length() else ours


def _to_sliding(ours: SlotLayer, layer: DynamicSlidingWindowLayer) -> None:
    if not layer.is_initialized:
        layer.lazy_initialization(*ours.buffers)
    layer.keys, layer.values = ours.held(min(ours.end, layer.sliding_window - 1))
    layer.cumulative_length = ours.end


def _from_static(layer: StaticLayer, placement: Placement, limit: int) -> SlotLayer:
    ours = SlotLayer(placement, layer.max_cache_len, fixed=True)
    return ours.hold(layer.keys, layer.values, int(layer.get_seq_length())) if layer.is_initialized else ours


def _to_static(ours: SlotLayer, layer: StaticLayer) -> None:
    if not layer.is_initialized:
        layer.batch_size, layer.num_heads, _, layer.k_head_dim = ours.buffers[0].shape
        layer.v_head_dim = ours.buffers[1].shape[-1]
        layer.dtype = ours.dtype
        layer.device = ours.device
        layer.is_initialized = True
        layer.keys, layer.values = ours.buffers
        layer.cumulative_length = layer.cumulative_length.to(ours.device)
    # attention will meet them again, and rejected tokens' values may be NaN
    ours.wipe([ours.end] * len(ours.buffers[0]))
    layer.cumulative_length.fill_(ours.end)


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
    return ours


def _to_static_sliding(ours: SlotLayer, layer: StaticSlidingWindowLayer) -> None:
    if not layer.is_initialized:
        layer.lazy_initialization(*ours.buffers)
    held = min(ours.end, layer.max_cache_len)
    for states, ended in zip((layer.keys, layer.values), ours.held(held), strict=True):
        states[..., :held, :] = ended
    layer.cumulative_length.fill_(held)
    layer.cumulative_length_int = ours.end


ADOPTED: dict[type, tuple[Callable[..., SlotLayer], Callable[..., None]]] = {
    DynamicLayer: (_from_dynamic, _to_dynamic),
    DynamicSlidingWindowLayer: (_from_sliding, _to_sliding),
    StaticLayer: (_from_static, _to_static),
    StaticSlidingWindowLayer: (_from_static_sliding, _to_static_sliding),
}


def is_adoptable(cache: Cache) -> bool:
    """Whether `slots` can keep this cache's tokens."""
    kinds = {type(layer) for layer in cache.layers} | ({cache.layer_class_to_replicate} - {None})
    return kinds <= set(ADOPTED) and not cache.offloading


@contextmanager
def slots(cache: Cache, limit: int) -> Iterator[Placement | None]:
    """Within it the layers of an adoptable cache are `SlotLayer`s; after it they are as they were, with the tokens
    written meanwhile.

    `limit`: slots that will ever be in use. None where the cache cannot be adopted: windowed layers then keep what
    `crop` may have to bring back.
    """
    if not is_adoptable(cache):
        with recording_past(cache):
            yield None
        return
    placement = Placement()
    found = cache.layers
    replicated = cache.layer_class_to_replicate
    cache.layers = [ADOPTED[type(layer)][0](layer, placement, limit) for layer in found]
    if replicated is not None:
        cache.layer_class_to_replicate = lambda: SlotLayer(placement, limit)  # type: ignore[assignment]
    try:
        yield placement
    except BaseException:
        for layer in cache.layers:
            layer.take_back()
        raise
    finally:
        ours = cache.layers
        cache.layers = found
        cache.layer_class_to_replicate = replicated
        found += [DynamicLayer() for _ in range(len(ours) - len(found))]
        for layer, stock in zip(ours, found, strict=True):
            if layer.buffers:
                ADOPTED[type(stock)][1](layer, stock)


def slot_cache(config: PreTrainedConfig) -> tuple[Cache, Placement]:
    """An empty cache of `SlotLayer`s, as many as the config has layers."""
    placement = Placement()
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
    return Cache(layers=[SlotLayer(placement, window=window) for window in windows]), placement


def keep_paths(cache: Cache, starts: Mirrored, commit: Commit) -> None:
    """Of the nodes written from slot `starts[b]` on keeps, in every sequence b of the batch, those of its path,
    ascending, and drops the others.

    Keys carry their position in themselves, so an accepted path only moves together; a node never moves onto one still
    to be moved, and the nodes that pad a shorter path stay where they are.
    """
    if commit.path is not None:
        begin = starts.on(commit.path.device) * (commit.counts.on(commit.path.device) > 0)  # ended ones stay, anywhere
        sequences = torch.arange(len(commit.path), device=begin.device)[:, None]
        goal = begin + torch.arange(commit.path.shape[1], device=begin.device)
        by_place: dict[tuple, list[Tensor]] = {}  # layers have few first slots and devices
        for layer in cache.layers:
            if layer.buffers:
                place = layer.first, layer.device
                if place not in by_place:
                    slots = (sequences, begin + commit.path - layer.first, goal - layer.first)
                    by_place[place] = [index.to(layer.device) for index in slots]
                layer.move(*by_place[place])
    settle(cache, max(start + len(path) for start, path in zip(starts.host, commit.paths, strict=True)))


def settle(cache: Cache, end: int) -> None:
    """All tokens before slot `end` are accepted, and no others are kept."""
    for layer in cache.layers:
        layer.settle(end)


def wipe(cache: Cache, ends: list[int]) -> None:
    """Zeros wherever rows were rejected, from slot `ends[b]` of every row b on: a masked slot still meets the weight 0,
    and 0 times NaN is NaN."""
    for layer in cache.layers:
        layer.wipe(ends)


def key_span(cache: Cache, starts: list[int], num_new: int, window: int | None) -> tuple[int, int]:
    """The first slot and the end of the keys that `num_new` tokens from slots `starts` on will meet in layers with this
    window."""
    fixed = [
        layer for layer in cache.layers if getattr(layer, "fixed", False) and layer.is_sliding == (window is not None)
    ]
    if fixed:
        return 0, fixed[0].get_mask_sizes(num_new)[0]
    # a cache made without a config has none, whatever the model's
    has_windows = any(layer.is_sliding for layer in cache.layers)
    return max(0, min(starts) - window + 1) if window is not None and has_windows else 0, max(starts) + num_new


def crop(cache: Cache, tokens_to_remove: int) -> None:
    """Removes the last tokens. To be called after every forward even with 0: windowed stock layers shrink back to their
    size here."""
    cache.crop(-tokens_to_remove)


def capacity(cache: Cache) -> int | None:
    """Slots of a static cache; None where there is no end."""
    limits = [layer.limit for layer in cache.layers if isinstance(layer, SlotLayer) and layer.fixed and layer.limit]
    return min(limits) if limits else None


def windows(cache: Cache) -> list[int | None]:
    """By layer, how many tokens it attends to; None where it attends to all."""
    return [layer.sliding_window if layer.is_sliding else None for layer in attention_layers(cache)]


def attention_layers(cache: Cache) -> list[Any]:
    """Its layers but those of convolutions and recurrences, which give no attentions."""
    return [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]


def static_spans(cache: Cache, num_after: int, num_new: int) -> list[slice | None]:
    """By layer, the slots a stock static layer would show to `num_new` tokens, after which `num_after` more are in the
    cache; None for layers that are not static."""
    return [
        _static_span(layer, layer.end - num_after, num_new) if getattr(layer, "fixed", False) else None
        for layer in attention_layers(cache)
    ]


def _static_span(layer: Any, end: int, num_new: int) -> slice:
    if layer.window is None:
        return slice(None)
    return slice(layer.window) if end <= layer.window else slice(max(0, end - num_new - layer.window + 1), end)


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
