"""One layer's keys and values, written in place.

A *slot* is a token's index in its sequence's text, left padding included. B sequences, H heads, R new tokens, D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, cache_utils
from transformers.cache_utils import DynamicLayer

from .transfer import Commit, Mirrored

# Stands where a layer holds nothing, as one that takes its keys from another; older versions of transformers have none.
DUMMY: Any = getattr(cache_utils, "DummyLayer", ())
# transformers takes a layer with states for one without keys, unless it is of this class; older versions have none.
BOTH: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", object)
BLOCK = 64  # a buffer that grows has a multiple of as many slots: attention of few rows on a CPU reads them by blocks
HEADROOM = 256  # slots a buffer is allocated for beyond what is needed, at least; a quarter of it, where that is more


class CacheFullError(RuntimeError):
    """Raised where a static cache gets more tokens than it has slots."""


@dataclass
class Placement:
    """The slots that the tokens of the next forward go to, shared by a cache's layers. By default after the end, the
    same slots in every row.

    `slots` (W, R): for rows that differ, the slot of every token of the W rows in `written`, the others are not
    written. `high`: the greatest first slot of a row. `low`: the least slot a token stands at (a tree's nodes are
    written further on than they stand). `is_final`: nothing of it will be taken back, so windowed layers need not
    keep more than their window. `has_accepted`: some of the tokens that the call has written are accepted.
    """

    slots: Tensor | None = None
    written: Tensor | None = None
    low: int | None = None
    high: int | None = None
    is_final: bool = False
    has_accepted: bool = False

    def place(self, starts: Mirrored, num_tokens: int, device: torch.device, commit: Commit | None = None) -> None:
        """Places as many tokens a sequence, from slot `starts[b]` on; with a commit, only the sequences that go on
        after it are written."""
        going = range(len(starts.host)) if commit is None else commit.going
        first = [starts.host[b] for b in going]
        self.clear()
        self.low, self.high = min(first), max(first)
        if self.low < self.high or len(first) < len(starts.host):
            begin = starts.on(device)
            every = commit is None or len(first) == len(starts.host)
            self.written = torch.arange(len(first), device=device) if every else commit.going_index
            self.slots = (begin if every else begin[self.written]) + torch.arange(num_tokens, device=device)

    def clear(self) -> None:
        """The next forward appends again."""
        self.slots = self.written = None
        self.low = self.high = None


class SlotLayer(DynamicLayer):
    """One layer's keys and values (B, H, capacity, D), of which slots up to `end` are in use.

    `window`: how many tokens a token attends to, itself included; slots that have left every row's window may be given
    up, the buffer then begins at slot `first`. `fixed`: the buffer never moves or grows, and forwards always see all of
    it (CUDA graphs); its slots past the end are for the mask to hide.
    """

    def __init__(self, placement: Placement, limit: int | None = None, window: int | None = None, fixed: bool = False):
        DynamicLayer.__init__(self)  # alone, whatever else a subclass is
        self.placement = placement
        self.limit = limit
        self.fixed = fixed
        self.window = self.sliding_window = window
        self.is_sliding = window is not None
        self.is_compileable = fixed  # transformers then masks unused slots, also for a single token
        self.buffers: list[Tensor] = []  # keys, values
        self.first = 0
        self.end = 0
        self.settled = 0  # as far as tokens have been accepted
        # The tokens and the buffers that it was found with. Slots of theirs are never written to: a stock layer that
        # still has the buffers is as it was.
        self.found = 0
        self.taken_over: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def hold(self, keys: Tensor, values: Tensor, end: int) -> "SlotLayer":
        """Takes over tensors that hold the slots before `end`; a fixed layer keeps writing to these very tensors."""
        self.lazy_initialization(keys, values)
        self.buffers = [keys, values]
        self.end = self.settled = end
        self.found = end
        self.first = 0 if self.fixed else end - keys.shape[-2]
        self.keys, self.values = keys, values
        self.taken_over = list(self.buffers)
        return self

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes R new tokens (B, H, R, D) of every row; returns what they may attend to, themselves included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.placement
        num_new = key_states.shape[-2]
        high = self.end if place.high is None else place.high
        seen_from = 0 if self.window is None else self.seen_from(high if place.low is None else place.low)
        if place.is_final and self._passes_by(num_new):
            return self._pass_by((key_states, value_states))
        end = high + num_new
        if not self.buffers or end - self.first > self.buffers[0].shape[-2]:
            self._make_room(seen_from, end, (key_states, value_states))
        keys, values = self.buffers
        if place.slots is None or place.written is None:
            keys[..., high - self.first : end - self.first, :] = key_states
            values[..., high - self.first : end - self.first, :] = value_states
        else:  # rows differ: each has slots of its own
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                rows = place.written.to(states.device)
                buffer[rows[:, None], :, place.slots.to(states.device) - self.first] = states[rows].transpose(1, 2)
        self.end = end
        if self.fixed:
            return keys, values
        self.keys = keys[..., seen_from - self.first : end - self.first, :]
        self.values = values[..., seen_from - self.first : end - self.first, :]
        return self.keys, self.values

    def _passes_by(self, num_new: int) -> bool:
        """Returns whether a prompt fills the whole window, so that nothing before it need be kept."""
        return self.placement.slots is None and self.window is not None and not self.fixed and num_new >= self.window

    def _pass_by(self, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A prompt longer than the window: all of it is seen once, its last window - 1 tokens are kept."""
        seen_from, num_new = self.seen_from(self.end), new[0].shape[-2]
        held = self.held(self.end - seen_from) or [x[..., :0, :] for x in new]
        full = [torch.cat(pair, dim=-2) for pair in zip(held, new, strict=True)]
        self.end += num_new
        self.first = self.seen_from(self.end)
        self.buffers = [states[..., states.shape[-2] - (self.end - self.first) :, :].clone() for states in full]
        self.keys, self.values = self.buffers
        return full[0], full[1]

    def _make_room(self, seen_from: int, end: int, like: tuple[Tensor, Tensor]) -> None:
        """Makes larger buffers, for slots up to `end`; what comes before `seen_from` is given up on the way."""
        capacity = self.buffers[0].shape[-2] if self.buffers else 0
        if self.fixed and (self.buffers or end > (self.limit or 0)):
            raise CacheFullError(
                f"a static cache of {capacity or self.limit} tokens got token {end}; expected a text that fits: make"
                " the cache larger (max_cache_len), or ask for fewer tokens (max_new_tokens)."
            )
        used, needed = min(self.end, end) - seen_from, end - seen_from
        if needed > capacity or any(buffer is self.buffers[0] for buffer in self.taken_over):
            # Zeros, not whatever memory held: a masked slot still meets the weight 0, and 0 times NaN is NaN.
            fresh = [x.new_zeros((*x.shape[:-2], self._capacity(needed), x.shape[-1])) for x in like]
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
        if self.window is not None:
            return ample
        if self.limit is not None:
            ample = max(needed, min(ample, self.limit))
        return -(-ample // BLOCK) * BLOCK

    def seen_from(self, slot: int) -> int:
        """The first slot a token at `slot` attends to."""
        return 0 if self.window is None or self.fixed else max(0, slot - self.window + 1)

    def move(self, source: Tensor, goal: Tensor | int) -> None:
        """Copies places `source` (B, M) of the buffers to places `goal` (B, M), or, for one sequence, to those from
        `goal` on."""
        for buffer in self.buffers:
            if isinstance(goal, int):
                buffer[:, :, goal : goal + source.shape[1]] = buffer.index_select(2, source[0])
            else:
                rows = torch.arange(len(source), device=source.device)[:, None]
                buffer[rows, :, goal] = buffer[rows, :, source]

    def wipe(self, ends: list[int]) -> None:
        """Zeros from slot `ends[b]` of every row b on."""
        for buffer in self.buffers:
            for b, end in enumerate(ends):
                buffer[b, :, max(end - self.first, 0) :] = 0

    def settle(self, end: int) -> None:
        """Keeps the slots before `end`, up to which the longest row is accepted, and drops all others."""
        shows_it = end == self.end and self.window is None  # as `update` left it, in most plain rounds
        self.end = self.settled = end
        if self.buffers and not self.fixed and not shows_it:
            self.keys, self.values = self.held(end - max(self.seen_from(end), self.first))

    def take_back(self, accepted_too: bool) -> None:
        """Takes back every token that was not accepted, or also those that were: all but what it was found with."""
        self.settle(self.found if accepted_too else self.settled)
        if self.fixed and self.buffers:
            self.wipe([self.end] * len(self.buffers[0]))

    def crop(self, tokens_to_remove: int) -> None:
        self.settle(self.end - abs(tokens_to_remove))

    def get_seq_length(self) -> int:
        return self.end

    def get_max_length(self) -> int:
        """The answer of a stock layer of its kind: how many slots a static one has (BLOOM makes its mask as long),
        -1 for one that grows."""
        return self.get_mask_sizes(0)[0] if self.fixed else super().get_max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.fixed:
            return (self.buffers[0].shape[-2] if self.buffers else self.limit or query_length), 0
        offset = self.seen_from(self.end)
        return self.end - offset + query_length, offset

    def held(self, count: int) -> list[Tensor]:
        """Keys and values of the last `count` tokens."""
        return [buffer[..., self.end - count - self.first : self.end - self.first, :] for buffer in self.buffers]


class StatesBeside(BOTH):
    """The states of a layer whose keys are in slots: they stay with the stock layer that it stands in for, whose
    attributes it shows."""

    stock: Any

    def __getattr__(self, name: str) -> Any:  # asked for what it has not itself: the states and what is said of them
        if name == "stock":
            raise AttributeError(name)
        return getattr(self.stock, name)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.stock.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.stock.update_recurrent_state(*args, **kwargs)


class HybridSlotLayer(SlotLayer, StatesBeside):
    """A slot layer with states beside its keys."""

    def __init__(self, stock: Any, placement: Placement, limit: int, window: int | None = None):
        self.stock = stock
        SlotLayer.__init__(self, placement, limit, window)

    def crop(self, tokens_to_remove: int) -> None:
        """Raises RuntimeError where tokens are to be removed, as from a copy that was made within a call: states cannot
        be taken back."""
        if tokens_to_remove:
            raise RuntimeError(
                "got tokens to remove from a copy of a cache that was made within a drafted call; expected none: its"
                " recurrent states are those after all of its tokens. Copy it before or after the call."
            )


def slot_layers(cache: Cache) -> list[SlotLayer]:
    """Returns the layers of a cache that are slot layers: all of a cache in use but those that hold nothing."""
    return [layer for layer in cache.layers if isinstance(layer, SlotLayer)]
