"""Targets whose layers keep recurrent states, or those of convolutions, beside keys or in place of them.

Rejected tokens cannot be taken back from a state. So the modules that read states, here *mixers*, work on a copy of the
states while drafts are verified; once it is known how many tokens are accepted, the mixers alone run again, over these,
and the result is kept. B sequences, N tokens of a verifying forward.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ..cache.states import METHODS, Scratch, is_recurrent
from ..errors import DraftingRefusedError

Arguments = tuple[tuple, dict[str, Any]]

# What a mixer gives for two tokens at once and one by one is the same up to these shares of its scale. One that bounds
# a gate in one of the ways only shows it where the gate is small for both tokens. It is for a token that comes twice
# and is LOUD times as large: each head has one of the signs with which its gate is small.
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 0.05
LOUD = 30.0
TRIED = (([0, 1], 1.0), ([0, 0], LOUD), ([0, 0], -LOUD))  # which of a forward's tokens, and how many times as large

# Whether a mixer computes something else over several tokens than one by one. Threads that race store the same.
_differs_by_steps: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class Mixers:
    """The mixers of a target, for one call and its cache: `finding` while the prompt runs, then `verifying` and
    `commit` in every round. They do nothing where the cache holds no states."""

    def __init__(self, target: PreTrainedModel, cache: Cache):
        self.target = target
        self.cache = cache
        self.is_needed = is_recurrent(cache)
        self.found: list[nn.Module] = []
        self._running: list[nn.Module] = []  # modules that were given the cache, the innermost last
        self._num_tokens = 0  # N
        self._calls: list[tuple[nn.Module, Arguments]] = []  # of the last forward
        self._scratch: Scratch | None = None  # its states; None: there is nothing to commit
        self._earlier: list[Any] = []  # a mixer's outputs for the tokens before the one that it is run over now

    @contextmanager
    def finding(self) -> Iterator[None]:
        """A context in which mixers are found by what they do: the innermost module that was given the cache when one
        of its states is read or written. Raises DraftingRefusedError where there are none."""
        if not self.is_needed:
            yield
            return
        with ExitStack() as undo:
            for module in self.target.modules():
                undo.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                undo.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            for method in METHODS:
                setattr(self.cache, method, partial(self._note, getattr(self.cache, method)))
                undo.callback(delattr, self.cache, method)
            yield
        within = {inner for module in self.found for inner in module.modules() if inner is not module}
        self.found = [module for module in self.found if module not in within]
        if not self.found:
            raise DraftingRefusedError(
                f"EAGLE drafting: no module of {type(self.target).__name__} reads the recurrent states of"
                f" its {type(self.cache).__name__} by the cache's methods; expected some ({', '.join(METHODS)}):"
                " rejected tokens could not be taken back. Drop assistant_model."
            )

    # Another thread's forward may meet a hook while it is set or removed, and torch then calls it without the keyword
    # arguments.

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is not None and _is_among(self.cache, args, kwargs):
            self._running.append(module)

    def _leave(self, module: nn.Module, args: tuple, *kwargs_and_output: Any) -> None:
        if len(kwargs_and_output) == 2 and _is_among(self.cache, args, kwargs_and_output[0]):
            self._running.pop()

    def _note(self, method: Callable, *args: Any, **kwargs: Any) -> Tensor | None:
        self.found += [module for module in self._running[-1:] if module not in self.found]
        return method(*args, **kwargs)

    @contextmanager
    def verifying(self, num_tokens: int) -> Iterator[None]:
        """A context for one forward over `num_tokens`, which changes no state of the cache."""
        if not self.is_needed:
            yield
            return
        self._num_tokens, self._calls = num_tokens, []
        self._scratch = Scratch(self.cache)
        with ExitStack() as undo:
            for module in self.found:
                undo.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                undo.callback(module.register_forward_hook(self._after, with_kwargs=True).remove)
            yield

    def commit(self, num_kept: int) -> None:
        """Has the cache hold the states after the first `num_kept` tokens of the last forward. After an error it holds
        what it held before that forward."""
        if self._scratch is None:
            return
        if num_kept < self._num_tokens:
            self._scratch = Scratch(self.cache)
            for module, arguments in self._calls:
                args, kwargs = self._advance(module, arguments, num_kept)
                module(*args, **kwargs)
        self._scratch.write_back()
        self._scratch = None
        self._calls, self._earlier = [], []

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> Arguments | None:
        if kwargs is None or not _is_among(self.cache, args, kwargs):
            return None
        self._calls.append((module, (args, kwargs)))
        return self._advance(module, (args, kwargs), self._num_tokens)

    def _after(self, module: nn.Module, args: tuple, *kwargs_and_output: Any) -> Any:
        if not self._earlier or len(kwargs_and_output) != 2 or not _is_among(self._scratch, args, kwargs_and_output[0]):
            return None
        outputs, self._earlier = [*self._earlier, kwargs_and_output[1]], []
        return _joined(outputs)

    def _advance(self, module: nn.Module, arguments: Arguments, num_tokens: int) -> Arguments:
        """Returns the arguments with which a mixer runs over the first `num_tokens`. Where it computes something else
        over several than one by one, as plain decoding does, it is run over all but the last here."""
        if num_tokens == 1 or not self.differs_by_steps(module, arguments):
            return self._cut(arguments, slice(num_tokens), self._scratch)
        earlier = []
        for i in range(num_tokens - 1):
            args, kwargs = self._cut(arguments, slice(i, i + 1), self._scratch)
            earlier.append(module(*args, **kwargs))
        self._earlier = earlier  # only now: `_after` is called for each of these, too
        return self._cut(arguments, slice(num_tokens - 1, num_tokens), self._scratch)

    def differs_by_steps(self, module: nn.Module, arguments: Arguments) -> bool:
        """Returns whether a mixer gives something else for two tokens at once than for one after the other: Mamba's
        scan begins at zero, Nemotron-H and Zamba2 bound the time step. It is tried once."""
        if module not in _differs_by_steps:
            _differs_by_steps[module] = any(self._try_steps(module, arguments, *tried) for tried in TRIED)
        return _differs_by_steps[module]

    def _try_steps(self, module: nn.Module, arguments: Arguments, tokens: list[int], scale: float) -> bool:
        at_once, by_steps = Scratch(self.cache), Scratch(self.cache)
        args, kwargs = self._cut(arguments, tokens, at_once, scale)
        given, steps = module(*args, **kwargs), []
        for token in tokens:
            args, kwargs = self._cut(arguments, [token], by_steps, scale)
            steps.append(module(*args, **kwargs))
        pairs = [(given, _joined(steps))]
        pairs += [(state, by_steps.recurrences[key]) for key, state in at_once.recurrences.items()]
        return any(_differ(*pair) for pair in pairs)

    def _cut(
        self, arguments: Arguments, tokens: slice | list[int], states: Scratch | None, scale: float = 1.0
    ) -> Arguments:
        """The arguments with `states` in place of the cache, and of each tensor over the forward's tokens (B, N, ...)
        some of them, floating point values `scale` times as large."""

        def cut(value: Any) -> Any:
            if value is self.cache:
                return states
            if isinstance(value, tuple | list):
                return type(value)(map(cut, value))
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == self._num_tokens:
                value = value[:, tokens]
                return value * scale if value.is_floating_point() and scale != 1 else value
            return value

        args, kwargs = arguments
        return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


def _is_among(cache: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    return any(value is cache for value in (*args, *kwargs.values()))


def _joined(outputs: list[Any]) -> Any:
    """The outputs of one forward from those of its tokens."""
    if isinstance(outputs[0], tuple | list):
        return type(outputs[0])(_joined([*each]) for each in zip(*outputs, strict=True))
    return torch.cat(outputs, dim=1) if isinstance(outputs[0], Tensor) else outputs[0]


def _differ(found: Any, expected: Any) -> bool:
    """Returns whether outputs (B, N, D), or states (B, H, D, E), of which each head counts for itself, are not the same
    up to rounding."""
    if isinstance(found, tuple | list):
        return _differ(found[0], expected[0])
    is_low = found.dtype in (torch.bfloat16, torch.float16)
    error = (found.float() - expected.float()).abs().amax((-2, -1))
    scale = expected.float().abs().amax((-2, -1)).clamp(min=torch.finfo(torch.float32).tiny)
    return not bool((error <= scale * (LOW_PRECISION_TOLERANCE if is_low else TOLERANCE)).all())
