"""Cache layers that keep a window of keys and, of the tokens before it, compressed ones (DeepSeek-V4).

They cannot give tokens back: a compressed key stands for several. But they never write in place, and all that they
hold comes in by their own methods. So a layer notes how it stood before a forward and what the forward gave it. To take
tokens back is to begin from there again, and to give it the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from transformers import Cache

# By which a forward hands a layer its keys, what is to be compressed, and what came of it.
KEYS = "update"
UNCOMPRESSED = "store_compression_weights"
OVERLAP = "update_overlap_state"
METHODS = (KEYS, UNCOMPRESSED, OVERLAP, "update_compressor_states")


def compresses(layer: Any) -> bool:
    """Returns whether a layer of a cache keeps compressed keys."""
    return hasattr(layer, UNCOMPRESSED)


def has_compressed(cache: Cache) -> bool:
    """Returns whether some layer of a cache keeps compressed keys."""
    return any(map(compresses, cache.layers))


class Noted:
    """A layer that notes, from its first `crop` on, what the last forward gave it: of a prompt nothing is taken back.
    Its methods can be copied with it, as a streamer may copy a cache."""

    def __init__(self, layer: Any):
        self.layer = layer
        self.before: dict[str, Any] | None = None  # the layer's attributes before that forward
        self.calls: list[tuple[str, tuple]] = []  # methods and their arguments
        for method in METHODS:
            if hasattr(layer, method):
                setattr(layer, method, partial(self._call, method))
        layer.crop = self.crop

    def end(self) -> None:
        """Leaves the layer as its class made it."""
        for name in (*METHODS, "crop"):
            vars(self.layer).pop(name, None)

    def _call(self, method: str, *args: Any) -> Any:
        if self.before is not None:
            if method == KEYS and self.calls:  # another forward begins, so all of the one before it is kept
                self.crop(0)
            self.calls.append((method, args))
        return getattr(type(self.layer), method)(self.layer, *args)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last -`tokens_to_remove` tokens of the last forward."""
        calls, self.calls = self.calls, []
        if self.before is not None and tokens_to_remove:
            vars(self.layer).update(self.before)
            num_given = next((args[0].shape[2] for method, args in calls if method == KEYS), 0)
            self._give(calls, num_given + tokens_to_remove)
        self.before = attributes(self.layer)

    def _give(self, calls: list[tuple[str, tuple]], num_tokens: int) -> None:
        """Gives the layer the first tokens of what the calls of a forward gave it."""
        num_windows: dict[str, int] = {}  # of what is compressed under a name: those that the tokens fill
        for method, args in calls if num_tokens > 0 else ():
            if method == KEYS:
                given = tuple(states[:, :, :num_tokens] for states in args[:2])
            elif method == UNCOMPRESSED:
                given = args[0], *(states[:, :num_tokens] for states in args[1:])
            elif method == OVERLAP and not num_windows[args[0]]:
                continue
            else:
                count = num_windows[args[0]]
                given = tuple(value[:, :count] if isinstance(value, Tensor) else value for value in args)
            found = getattr(type(self.layer), method)(self.layer, *given)
            if method == UNCOMPRESSED:
                num_windows[args[0]] = found[0].shape[1] // self.layer.compress_rate


def attributes(layer: Any) -> dict[str, Any]:
    """Returns a layer's attributes, to go back to."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}


@contextmanager
def noting(cache: Cache) -> Iterator[None]:
    """A context in which `crop` takes tokens of the last forward back from layers with compressed keys, too."""
    noted = [Noted(layer) for layer in cache.layers if compresses(layer)]
    try:
        yield
    finally:
        for each in noted:
            each.end()
