"""Recurrent states and those of convolutions, which hold what all tokens so far have left in them.

Nothing can be taken back from such a state. A forward over tokens that may be rejected reads and writes a `Scratch` in
its place; the cache's own states change once it is known which tokens are accepted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, cache_utils
from transformers.cache_utils import CacheLayerMixin

STATE_LAYER = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
# By which modules reach the states of a cache; before transformers 5.21 they read attributes of its layers.
METHODS = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")
HAS_METHODS = all(hasattr(Cache, method) for method in METHODS)

KINDS = CONVOLUTION, RECURRENCE = "conv_states", "recurrent_states"  # attributes of a layer: states by number
Key = tuple[str, int, int]  # the kind, the layer and the number of a state


def holds_states(layer: Any) -> bool:
    """Returns whether a layer of a cache holds states, be it beside keys."""
    return HAS_METHODS and isinstance(layer, STATE_LAYER)


def is_recurrent(cache: Cache) -> bool:
    """Returns whether some layer of a cache holds states."""
    return any(holds_states(layer) for layer in cache.layers)


def is_of_transformers(cache: Cache) -> bool:
    """Returns whether the classes of a cache and its layers are transformers' own, which write states as a `Scratch`
    does."""
    return all(type(one).__module__ == cache_utils.__name__ for one in (cache, *cache.layers))


def crop_keys(layer: Any, tokens_to_remove: int) -> None:
    """Removes the last tokens of a layer's keys and values, where it has any; its states are left alone."""
    if not holds_states(layer):
        layer.crop(-tokens_to_remove)
        return
    kinds = (kind for kind in type(layer).__mro__ if issubclass(kind, CacheLayerMixin))
    of_keys = next((kind for kind in kinds if not issubclass(kind, STATE_LAYER)), None)
    if of_keys is not None:
        # A window is recorded from the end of the prompt on: one flag serves it and the convolution beside it, which
        # would keep the whole prompt.
        layer.record_past = True
        of_keys.crop(layer, -tokens_to_remove)  # type: ignore[attr-defined]


def attributes_of(layer: Any) -> dict[str, Any]:
    """Returns the attributes of a stock layer, to go back to; its dicts are copied. Of its tensors only states are: a
    forward writes to them, while other layers that can be cropped make new ones."""
    has_states = holds_states(layer)
    return {
        name: {key: one.clone() if has_states and isinstance(one, Tensor) else one for key, one in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in vars(layer).items()
    }


class StateArena:
    """The states of R rows at addresses that stay from call to call, as captured rounds need them; a `Scratch` reads
    them as it reads a cache's. The first rows are a cache's sequences, the others are idle."""

    def __init__(self, num_rows: int | None):
        self.num_rows = num_rows
        self.states: dict[Key, Tensor] = {}

    def take_over(self, cache: Cache) -> None:
        """Copies a cache's states; the cache then holds views of these."""
        for index, layer in enumerate(cache.layers):
            for kind in KINDS if holds_states(layer) else ():
                held: dict[int, Tensor | None] = getattr(layer, kind)
                for number, state in held.items():
                    if state is not None:
                        held[number] = self._copied_in((kind, index, number), state)

    def _copied_in(self, key: Key, state: Tensor) -> Tensor:
        if key not in self.states:
            with torch.inference_mode(False):  # another call may write to it in another mode
                shape = self.num_rows or len(state), *state.shape[1:]
                self.states[key] = torch.zeros(shape, dtype=state.dtype, device=state.device)
        self.states[key].zero_()  # what an earlier call left in idle rows may not be finite
        return self.states[key][: len(state)].copy_(state)

    def advance(self, scratch: "Scratch", is_row: Tensor) -> None:
        """Copies what a scratch holds into the rows for which `is_row` (R, 1) is true."""
        for key, state in scratch.states.items():
            held = self.states[key]
            held.copy_(torch.where(is_row.view(-1, *[1] * (state.dim() - 1)), state, held))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((CONVOLUTION, layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((RECURRENCE, layer_idx, state_idx))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context that leaves the states as it found them."""
        found = {key: state.clone() for key, state in self.states.items()}
        try:
            yield
        finally:
            for key, before in found.items():
                self.states[key].copy_(before)


def forget_states(cache: Cache) -> None:
    """Has a cache hold the states that it has before the first token."""
    for layer in cache.layers:
        if holds_states(layer):
            STATE_LAYER.reset(layer)


class Scratch:
    """A stand-in for a cache, or a `StateArena`, handed to the modules that read its states. It gives them copies of
    the states, of all sequences or those of `rows`, and keeps what they write to itself, until `write_back` puts it
    into the cache."""

    def __init__(self, cache: Any, rows: Tensor | None = None):
        self.cache = cache
        self.rows = rows
        self.states: dict[Key, Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._held((CONVOLUTION, layer_idx, state_idx), self.cache.get_conv_state)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._held((RECURRENCE, layer_idx, state_idx), self.cache.get_recurrent_state)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Returns the state and the new tokens' columns after it; holds as many of the last ones as a state has."""
        held = self.get_conv_state(layer_idx, state_idx)
        assert held is not None  # of the prompt
        full = torch.cat((held, conv_states), dim=-1)
        self.states[CONVOLUTION, layer_idx, state_idx] = full[..., -held.shape[-1] :]
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.states[RECURRENCE, layer_idx, state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def forget(self) -> None:
        """Drops what was read and written: where nothing of it will be kept, nor read again."""
        self.states.clear()

    def write_back(self) -> None:
        """Has the cache hold these states, in its own tensors."""
        for (kind, layer, number), state in self.states.items():
            held = getattr(self.cache.layers[layer], kind)[number]
            if self.rows is None:
                held.copy_(state)
            else:
                held.index_copy_(0, self.rows.to(held.device), state.to(held))

    def _held(self, key: Key, read: Any) -> Tensor | None:
        """Returns the state that was written last or, where none was, a copy of the cache's: forwards of one token
        write to what they read."""
        if key not in self.states:
            state = read(*key[1:])
            if state is None:
                return None
            self.states[key] = state.clone() if self.rows is None else state[self.rows.to(state.device)]
        return self.states[key]
