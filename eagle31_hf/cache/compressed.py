"""Cache layers that keep a window of keys and, of all tokens, compressed ones (DeepSeek-V4).

One compressed key stands for several tokens, so single tokens cannot be removed. But a layer changes by its own methods
alone, and writes to no tensor in place. A `Recorder` keeps how the layer stood before a forward and what the forward
gave it. To take tokens back, the layer goes back to that state and is given the accepted tokens again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from transformers import Cache

from .states import attributes_of

# Methods by which a forward writes to a layer: keys; states to be compressed; what the next window needs of the last
# one; compressed keys.
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


class Recorder:
    """Records what the last forward gave a layer, so that `crop` can undo it. Begins with the first `accept`, which
    ends the prompt. It is copied with its layer, as a streamer may copy a cache."""

    def __init__(self, layer: Any):
        self.layer = layer
        self.before: dict[str, Any] | None = None  # the layer's attributes before that forward; None: in the prompt
        self.calls: list[tuple[str, tuple, dict[str, Any]]] = []  # methods and their arguments
        self.is_undone = False  # the layer is on its way back: an error may leave it in between
        for method in METHODS:
            if hasattr(layer, method):
                setattr(layer, method, partial(self._call, method))
        layer.crop, layer.accept = self.crop, self.accept

    def end(self) -> None:
        """Leaves the layer with the methods of its class."""
        for name in (*METHODS, "crop", "accept"):
            vars(self.layer).pop(name, None)

    def accept(self) -> None:
        """Keeps all that the layer holds: what is taken back later is of forwards from now on."""
        self.before, self.calls = attributes_of(self.layer), []

    def crop(self, tokens_to_remove: int) -> None:
        """Takes tokens of the last forward back. `tokens_to_remove` is 0 or, as in transformers, negative. Raises
        ValueError where that forward had not so many, or was the prompt's."""
        if not (tokens_to_remove or self.is_undone):
            return
        length = 0 if self.before is None else self.before["cumulative_length"]
        num_kept = self.layer.cumulative_length + tokens_to_remove - length
        if self.before is None or num_kept < 0:
            raise ValueError(
                f"got {-tokens_to_remove} tokens to take back; expected at most those of the last forward over drafts:"
                " what a layer has compressed before cannot be undone."
            )
        self.is_undone = True
        vars(self.layer).update(self.before)
        self.before = attributes_of(self.layer)  # its dicts are the layer's own now
        self._give(num_kept)
        self.is_undone = False

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the layer. `kwargs`: not of the tokens, from transformers 5.24 on."""
        if self.before is not None:
            if method == KEYS and self.calls:  # another forward begins
                self.accept()
            self.calls.append((method, args, kwargs))
        return getattr(type(self.layer), method)(self.layer, *args, **kwargs)

    def _give(self, num_tokens: int) -> None:
        """Gives the layer the first tokens of what the last forward gave it."""
        num_windows: dict[str, int] = {}  # by name: how many windows these tokens complete
        for method, args, kwargs in self.calls if num_tokens else ():
            if method == KEYS:
                given = tuple(states[:, :, :num_tokens] for states in args[:2])
            elif method == UNCOMPRESSED:
                given = args[0], *(states[:, :num_tokens] for states in args[1:])
            elif method == OVERLAP and not num_windows[args[0]]:
                continue
            else:
                count = num_windows[args[0]]
                given = tuple(value[:, :count] if isinstance(value, Tensor) else value for value in args)
            found = getattr(type(self.layer), method)(self.layer, *given, **kwargs)
            if method == UNCOMPRESSED:
                num_windows[args[0]] = found[0].shape[1] // self.layer.compress_rate


@contextmanager
def recording(cache: Cache) -> Iterator[None]:
    """A context in which tokens of the last forward can be taken back from layers with compressed keys, too."""
    recorders = [Recorder(layer) for layer in cache.layers if compresses(layer)]
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.end()
