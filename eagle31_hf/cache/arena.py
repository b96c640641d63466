"""Keys, values and states that stay at one address from call to call, with lengths that the device holds: what a
captured round, which replays the same operations on the same memory, needs.

B sequences, H heads, C slots, D width.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..kernels.layer_parts import append
from .layer import DUMMY, Placement, SlotLayer, StatesBeside, slot_layers
from .states import KINDS, StateArena, holds_states

# Slots beyond the longest text: an ended sequence may be longer by what a round commits, at most 62 tokens, and as many
# nodes are written after it.
SPARE = 128
LEAST_SLOTS = {"cuda": 4096}  # a longer text has everything captured anew; 0.5 GB of keys and values for a model of 8B


class Arena:
    """The buffers (R, H, C, D) of every layer of one cache, made when a layer first writes and kept. `capacity`: C;
    `num_rows`: R, by default as many as are first written; `windows`: of the layers that will write, by index;
    `states`: those of recurrent layers.

    Layers of one window lie in one stack of keys and one of values, (L, R, H, C, D), for operations on all of them; one
    whose keys or values are of another shape or dtype has stacks of its own.
    """

    def __init__(self, capacity: int, num_rows: int | None = None):
        self.capacity, self.num_rows = capacity, num_rows
        self.states = StateArena(num_rows)
        self.windows: dict[int, int | None] = {}
        self.stacks = list[Tensor]()
        self.buffers: dict[int, list[Tensor]] = {}  # by layer: keys, values, in the stacks
        self.reserved: dict[int, list[Tensor]] = {}  # those of layers that have not written yet

    def of_layer(self, index: int, like: tuple[Tensor, Tensor]) -> list[Tensor]:
        """The buffers of a layer whose new keys and values (B, H, T, D) are `like` these."""
        if index not in self.buffers:
            shapes = [(self.num_rows or len(x), *x.shape[1:-2], self.capacity, x.shape[-1]) for x in like]
            wanted = [(shape, x.dtype, x.device) for shape, x in zip(shapes, like, strict=True)]
            if index not in self.reserved:
                same = [i for i, window in self.windows.items() if window == self.windows[index]]
                self._reserve([i for i in same if i not in self.buffers], wanted)
            elif [(x.shape, x.dtype, x.device) for x in self.reserved[index]] != wanted:
                self._reserve([index], wanted)
            self.buffers[index] = self.reserved.pop(index)
        return self.buffers[index]

    def _reserve(self, layers: list[int], wanted: list[tuple[Any, ...]]) -> None:
        """Makes the stacks of some layers, each of a shape, a dtype and a device."""
        with torch.inference_mode(False):  # another call may write to them in another mode
            stacks = [torch.zeros((len(layers), *shape), dtype=dtype, device=device) for shape, dtype, device in wanted]
            self.stacks += stacks
            self.reserved |= {index: [stack[place] for stack in stacks] for place, index in enumerate(layers)}

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.stacks, *self.states.states.values()))

    def clear(self) -> None:
        """Drops all buffers, which no graph may read any more."""
        self.stacks.clear()
        self.buffers.clear()
        self.reserved.clear()
        self.states = StateArena(self.num_rows)


class ArenaPlacement(Placement):
    """A placement whose tokens may go to slots that the device holds: sequence b writes from `on_device[b]` on, a
    tensor (R, 1), and attention is shown the whole buffer. None: as any placement says, in the first `num_rows` rows
    (None: in all)."""

    on_device: Tensor | None = None
    num_rows: int | None = None
    outlives_call: bool = True  # the caller keeps the cache, which then gets copies
    _found: tuple[Tensor, Tensor] | None = None  # the starts and the slots that were found last

    def slots_from_device(self, num_tokens: int) -> Tensor:
        """The slots (R, num_tokens) that the tokens of a forward go to, found once for all its layers."""
        starts = self.on_device
        assert starts is not None
        if self._found is None or self._found[0] is not starts or self._found[1].shape[1] != num_tokens:
            self._found = starts, starts + torch.arange(num_tokens, device=starts.device)
        return self._found[1]


class ArenaLayer(SlotLayer):
    """A slot layer in an arena. Nothing is given up or moved: windows are left to the mask."""

    placement: ArenaPlacement

    def __init__(self, placement: ArenaPlacement, arena: Arena, index: int, window: int | None):
        super().__init__(placement, arena.capacity, window)
        self.arena = arena
        self.index = index

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.placement.on_device is None:
            return super().update(key_states, value_states, *args, **kwargs)
        buffers = self.ready(key_states, value_states)
        append([key_states, value_states], buffers, self.placement.slots_from_device(key_states.shape[2]))
        return buffers[0], buffers[1]

    def ready(self, key_states: Tensor, value_states: Tensor) -> list[Tensor]:
        """The arena's buffers of keys and values, made where there are none yet, for states (R, H, T, D) like these."""
        if not self.buffers:
            self.lazy_initialization(key_states, value_states)
            self._make_room(0, 0, (key_states, value_states))
        return self.arena.of_layer(self.index, (key_states, value_states))

    def take_over(self, layer: SlotLayer) -> None:
        """Copies the tokens that a layer was found with."""
        if layer.buffers:
            self.ready(*layer.buffers)
            for ours, theirs in zip(self.buffers, layer.buffers, strict=True):
                ours[..., layer.first : layer.end, :] = theirs[..., : layer.end - layer.first, :]
        self.settle(layer.end)
        self.found = layer.end

    def _passes_by(self, num_new: int) -> bool:
        return False

    def _make_room(self, seen_from: int, end: int, like: tuple[Tensor, Tensor]) -> None:
        if end > self.arena.capacity:
            raise RuntimeError(f"a cache of {self.arena.capacity} slots got token {end}.")
        self.buffers = [buffer[: self.placement.num_rows] for buffer in self.arena.of_layer(self.index, like)]


class HybridArenaLayer(ArenaLayer, StatesBeside):
    """A layer in an arena with states beside its keys."""

    def __init__(self, stock: Any, placement: ArenaPlacement, arena: Arena, index: int, window: int | None):
        self.stock = stock
        ArenaLayer.__init__(self, placement, arena, index, window)


def move_into(cache: Cache, arena: Arena, num_rows: int | None = None) -> ArenaPlacement:
    """Makes the layers of a cache of `num_rows` sequences layers in an arena, which gets copies of the keys and values
    they hold (states follow after the prompt, see `StateArena`); returns their placement."""
    placement = ArenaPlacement()
    placement.num_rows = num_rows
    arena.windows = {i: layer.window for i, layer in enumerate(cache.layers) if isinstance(layer, SlotLayer)}
    layers = list[Any]()
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, SlotLayer):  # it holds nothing, or states alone
            layers.append(layer)
            continue
        place = placement, arena, index, layer.window
        stock = getattr(layer, "stock", None)  # of a layer with states beside its keys
        layers.append(ArenaLayer(*place) if stock is None else HybridArenaLayer(stock, *place))
        layers[-1].take_over(layer)
    cache.layers = layers
    return placement


def leave_arena(cache: Cache) -> None:
    """Has the layers of a cache hold their tokens and states in memory of their own: another call is about to use the
    arena."""
    for layer in cache.layers:
        if isinstance(layer, ArenaLayer):
            kept = layer.buffers if layer.placement.outlives_call else []  # else nobody asks for them any more
            layer.buffers = [buffer[..., : layer.end, :].clone() for buffer in kept]
        for states in [getattr(layer, kind) for kind in KINDS] if holds_states(layer) else []:
            states.update({number: state.clone() for number, state in states.items() if state is not None})


def why_not_in_arena(cache: Cache, max_length: int) -> str | None:
    """Returns why the layers of a cache within `adopt.slots`, for texts of `max_length` tokens, cannot lie in an arena;
    None where they can."""
    if type(cache).update is not Cache.update:  # which our operations pass by
        return f"the target's {type(cache).__name__} updates its keys in a way of its own"
    if not cache.layers:
        return f"the target's {type(cache).__name__} was made without a config, and has no layers yet"
    layers = slot_layers(cache)
    if any(not isinstance(layer, (SlotLayer, DUMMY)) and not holds_states(layer) for layer in cache.layers):
        return f"the target's {type(cache).__name__} has layers that are not attention's"
    if not layers:
        return f"the target's {type(cache).__name__} keeps no keys"
    limits = [layer.limit for layer in layers if layer.fixed and layer.limit is not None]
    if limits and min(limits) < max_length - 1:  # the last token of a text is never read
        return "the static cache is shorter than the longest text"  # which may end before
    return None


def slots_of(length: int, device: torch.device, is_tight: bool = False) -> int:
    """The slots of an arena for texts up to `length`: a power of two, LEAST_SLOTS unless `is_tight`, so that few arenas
    serve many calls, and what a round may write past the end of a text."""
    least = 128 if is_tight else LEAST_SLOTS.get(device.type, 128)
    return max(least, 1 << (length - 1).bit_length()) + SPARE
