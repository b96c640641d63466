"""Targets whose layers keep recurrent states, or those of convolutions, beside keys or in place of them.

Rejected tokens cannot be taken back from a state. So the modules that read states, here *mixers*, work on a copy of the
states while drafts are verified. Once it is known which tokens are accepted, a mixer alone runs again, over these, and
the result is kept. In eager rounds that is when the next forward comes to it: what the target sets up around its layers
(autocast, weights that an offload brings) is there then. In a mixer each path of a tree, from the root to a leaf, is a
sequence of its own. B sequences, N tokens of a verifying forward: the nodes of a chain or tree.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ..cache.states import METHODS, RECURRENCE, Scratch, StateArena, is_recurrent
from ..errors import DraftingRefusedError
from .linear_outputs import LinearOutputs, Outputs
from .paths import Paths

Arguments = tuple[tuple, dict[str, Any]]

# What a mixer gives for two tokens at once and one by one is the same up to these shares of its scale. One that bounds
# a gate in one of the ways only shows it where the gate is small for both tokens. For each head it is, for a token that
# comes twice and is LOUD times as large, with one of both signs.
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 0.05
LOUD = 30.0
TRIED = (([0, 1], 1.0), ([0, 0], LOUD), ([0, 0], -LOUD))  # which of a forward's tokens, and how many times as large

# Whether a mixer computes something else over several tokens than one by one, by the device and dtype of what it is
# given. Threads that race store the same.
_differs_by_steps: WeakKeyDictionary[nn.Module, dict[tuple, bool]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Call:
    """The arguments of a call of a mixer, over `num_tokens` tokens (N)."""

    cache: Any  # among the arguments
    args: tuple
    kwargs: dict[str, Any]
    num_tokens: int
    num_rows: int  # B
    rows: Tensor | None = None  # the sequences of the cache that it is over; None: all
    outputs: Outputs = field(default_factory=dict)  # of linear layers, for running again; shared by all copies

    def over(self, tokens: slice | list[int], states: Any, scale: float = 1.0) -> Arguments:
        """The arguments with `states` in place of the cache, and of each tensor over the tokens (B, N, ...) some of
        them, floating point values `scale` times as large."""

        def cut(value: Tensor) -> Tensor:
            if value.dim() < 2 or value.shape[1] != self.num_tokens:
                return value
            is_slice = isinstance(tokens, slice)
            value = value[:, tokens] if is_slice else torch.cat([value[:, i : i + 1] for i in tokens], dim=1)
            return value * scale if value.is_floating_point() and scale != 1 else value

        return self._mapped(cut, states)

    def along(self, rows: list[int], paths: list[list[int]]) -> "Call":
        """The call over paths, equally long lists of tokens, each in one of the sequences `rows`."""
        index, path = torch.tensor(rows, device="cpu"), torch.tensor(paths, device="cpu")
        are_all = rows == [*range(self.num_rows)]

        def chosen(value: Tensor) -> Tensor:
            if value.dim() < 2:
                return value
            is_by_row = value.shape[0] == self.num_rows  # else its single row is shared by all
            row = index.to(value.device)
            if value.shape[1] == self.num_tokens:
                return value[(row if is_by_row else torch.zeros_like(row))[:, None], path.to(value.device)]
            return value[row] if is_by_row and not are_all else value

        args, kwargs = self._mapped(chosen, self.cache)
        of = None if are_all else index
        return replace(self, args=args, kwargs=kwargs, rows=of, num_rows=len(rows), num_tokens=path.shape[1])

    def _mapped(self, change: Callable[[Tensor], Tensor], states: Any) -> Arguments:
        """The arguments with their tensors changed, and `states` in place of the cache."""

        def mapped(value: Any) -> Any:
            if value is self.cache:
                return states
            if isinstance(value, tuple | list):
                return type(value)(map(mapped, value))
            return change(value) if isinstance(value, Tensor) else value

        return tuple(map(mapped, self.args)), {name: mapped(value) for name, value in self.kwargs.items()}

    def first(self, count: int) -> "Call":
        """The call over its first tokens."""
        args, kwargs = self.over(slice(count), self.cache)
        return replace(self, args=args, kwargs=kwargs, num_tokens=count)

    def copied(self, states: Any) -> "Call":
        """The call with the tensors over its tokens as they are now: a mixer, or a hook, may write to them. `states` is
        in place of the cache, which ends with a call of `generate`, while what is captured stays."""

        def copy(value: Tensor) -> Tensor:
            return value.clone() if value.dim() > 1 and value.shape[1] == self.num_tokens else value

        args, kwargs = self._mapped(copy, states)
        return replace(self, cache=states, args=args, kwargs=kwargs)


@dataclass(frozen=True)
class Unsettled:
    """A forward over a chain whose tokens are not accepted yet: what each mixer was called with, and the states after
    all of them. It may outlive the target, which mixers may refer to."""

    calls: list[tuple[ref[nn.Module], Call]]
    after_all: Scratch


@contextmanager
def found_mixers(target: PreTrainedModel, cache: Cache) -> Iterator[list[nn.Module]]:
    """A context for a forward, after which the list has its mixers: the innermost module that was given the cache when
    one of its states is read or written, none of them within another one."""
    running, found = list[nn.Module](), list[nn.Module]()  # running: those that were given the cache, innermost last

    # Another thread's forward may meet a hook while it is set or removed, and torch then calls it without the keyword
    # arguments.
    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is not None and _is_among(cache, args, kwargs):
            running.append(module)

    def leave(module: nn.Module, args: tuple, *kwargs_and_output: Any) -> None:
        if len(kwargs_and_output) == 2 and _is_among(cache, args, kwargs_and_output[0]):
            running.pop()

    def note(method: Callable, *args: Any, **kwargs: Any) -> Tensor | None:
        found.extend(module for module in running[-1:] if module not in found)
        return method(*args, **kwargs)

    with ExitStack() as undo:
        for module in target.modules():
            undo.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            undo.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        for method in METHODS:
            setattr(cache, method, partial(note, getattr(cache, method)))
            undo.callback(delattr, cache, method)
        yield found
    within = {inner for module in found for inner in module.modules() if inner is not module}
    found[:] = [module for module in found if module not in within]


class Mixers:
    """The mixers of a target, for one call and its cache: `finding` while the prompt runs, then `verifying` and
    `commit` in every round, and `settle`. A context, after which no hook is left. They do nothing where the cache holds
    no states."""

    def __init__(self, target: PreTrainedModel, cache: Cache):
        self.target = target
        self.cache = cache
        self.is_needed = is_recurrent(cache)
        self.found: list[nn.Module] = []
        self._hooks = ExitStack()
        self._num_rows = self._num_tokens = 0  # B, N
        self._calls: list[tuple[nn.Module, Call]] = []  # of the last forward
        self._scratch: Scratch | None = None  # its states; None: none is under way
        self._paths: Paths | None = None  # of the trees it verifies; None: chains
        self._due: dict[nn.Module, list[Call]] = {}  # over accepted tokens, which are not in the cache's states yet
        self._awaited: Scratch | None = None  # with which a mixer is run now, over all tokens or the last one
        self._earlier: list[Any] = []  # its outputs for the tokens before that
        self._untold: set[nn.Module] = set()  # of which `differs_by_steps` was tried in vain: not again in this call
        self._linear: LinearOutputs | None = None

    def __enter__(self) -> "Mixers":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._hooks.close()

    @contextmanager
    def finding(self) -> Iterator[None]:
        """A context in which mixers are found by what they do, as `found_mixers` says, unless they are known."""
        if not self.is_needed or self.found:
            yield
            return
        with found_mixers(self.target, self.cache) as found:
            yield
        self.found = found
        for module in self.found:
            # before the user's own hooks, which a mixer that runs again meets again
            hook = module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
            self._hooks.callback(hook.remove)
            self._hooks.callback(module.register_forward_hook(self._after, with_kwargs=True).remove)

    def check(self) -> None:
        """Raises DraftingRefusedError where states are kept, but no mixer was found."""
        if self.is_needed and not self.found:
            raise DraftingRefusedError(
                f"EAGLE drafting: no module of {type(self.target).__name__} reads the recurrent states of"
                f" its {type(self.cache).__name__} by the cache's methods; expected some ({', '.join(METHODS)}):"
                " rejected tokens could not be taken back. Drop assistant_model."
            )

    @contextmanager
    def verifying(
        self, num_rows: int, num_tokens: int, parents: list[list[int]] | None = None, states: StateArena | None = None
    ) -> Iterator[None]:
        """A context for one forward over `num_tokens` of every sequence: it changes the cache's states by what is due
        only. `parents`: those of a tree's nodes but the root, by sequence; None: chains. `states`: read in place of the
        cache's; outputs of linear layers are then noted for `run_again`."""
        if not self.is_needed:
            yield
            return
        self._num_rows, self._num_tokens = num_rows, num_tokens
        self._calls = []
        self._paths = None if parents is None else Paths(parents)
        rows = None if self._paths is None else torch.tensor(self._paths.rows, device="cpu")
        self._scratch = Scratch(states or self.cache, rows)
        try:
            with self._with_linear(None if states is None else LinearOutputs(gives=False)):
                yield
        except BaseException:
            self._scratch = None
            raise

    @contextmanager
    def _with_linear(self, mode: LinearOutputs | None) -> Iterator[None]:
        before, self._linear = self._linear, mode
        try:
            with mode or nullcontext():
                yield
        finally:
            self._linear = before

    def commit(self, paths: list[list[int]]) -> None:
        """Accepts the tokens `paths[b]` of every sequence b of the last forward, none of one that has ended: its states
        are not read again. Where that is not all of a chain, mixers run over them in the next forward, once for every
        length."""
        if self._scratch is None:
            return
        scratch, self._scratch = self._scratch, None
        counts = sorted({len(path) for path in paths} - {0})
        if self._paths is None and counts in ([], [self._num_tokens]):
            scratch.write_back()
            counts = []
        for count in counts:
            rows = [b for b, path in enumerate(paths) if len(path) == count]
            for module, call in self._calls:
                self._due.setdefault(module, []).append(call.along(rows, [paths[b] for b in rows]))
        self._calls = []

    def take_unsettled(self) -> Unsettled | None:
        """Hands the last forward to the caller, who has accepted tokens kept later by `run_again`; None without mixers.
        What is captured cannot wait for the next forward, as `commit` does."""
        scratch, self._scratch = self._scratch, None
        calls, self._calls = self._calls, []
        return None if scratch is None else Unsettled([(ref(module), call) for module, call in calls], scratch)

    def settle(self) -> None:
        """Has the cache hold the states after all accepted tokens."""
        for module in [*self._due]:
            self._run_due(module)

    def _run_due(self, module: nn.Module) -> None:
        if module in self._due:
            calls = self._due[module]
            while calls:  # each is over once its states are in the cache
                scratch = Scratch(self.cache, calls[0].rows)
                self.run_again(module, calls[0], scratch)
                scratch.write_back()
                del calls[0]
            del self._due[module]

    def run_again(self, module: nn.Module, call: Call, scratch: Scratch) -> None:
        """Has a scratch hold the states after the tokens of a call."""
        with self._with_linear(LinearOutputs(gives=True) if call.outputs else None):
            args, kwargs = self._advance(module, call, scratch)
            module(*args, **kwargs)

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> Arguments | None:
        if self._scratch is None or kwargs is None or not _is_among(self.cache, args, kwargs):
            return None
        self._run_due(module)
        call = Call(self.cache, args, kwargs, self._num_tokens, self._num_rows)
        self._calls.append((module, call.copied(self._scratch.cache)))
        if self._paths is not None:
            call = call.along(self._paths.rows, self._paths.nodes)
        return self._advance(module, call, self._scratch)

    def _after(self, module: nn.Module, args: tuple, *kwargs_and_output: Any) -> Any:
        scratch = self._awaited
        if scratch is None or len(kwargs_and_output) != 2 or not _is_among(scratch, args, kwargs_and_output[0]):
            return None
        output = kwargs_and_output[1]
        if self._earlier:
            output = _joined([*self._earlier, output])
        self._earlier = []
        self._awaited = None
        if self._linear is not None:
            self._linear.end()
        if self._paths is None or scratch is not self._scratch:
            return output
        scratch.forget()  # a state for every path takes much memory
        return self._paths.to_nodes(output)

    def _advance(self, module: nn.Module, call: Call, scratch: Scratch) -> Arguments:
        """Returns the arguments with which a mixer runs over a call's tokens. Where it computes something else over
        several than one by one, as plain decoding does, it is run over all but the last here."""
        self._awaited = None
        earlier = list[Any]()
        rest = slice(None)
        goes_by_steps = call.num_tokens > 1 and self.differs_by_steps(module, call, scratch.cache)
        if self._linear is not None:  # only now: what a trial gives is not to be noted
            self._linear.begin(call.outputs, (call.num_rows, 1 if goes_by_steps else call.num_tokens))
        if goes_by_steps:
            for i in range(call.num_tokens - 1):
                args, kwargs = call.over(slice(i, i + 1), scratch)
                earlier.append(module(*args, **kwargs))
            rest = slice(call.num_tokens - 1, None)
        self._earlier = earlier
        self._awaited = scratch  # only now: `_after` is called for each of these, too
        return call.over(rest, scratch)

    def differs_by_steps(self, module: nn.Module, call: Call, states: Any) -> bool:
        """Returns whether a mixer gives something else for two tokens at once than for one after the other: Mamba's
        scan begins at zero, Nemotron-H and Zamba2 bound the time step. It is tried once for a device and dtype, on
        states and tokens that can tell."""
        found = _differs_by_steps.setdefault(module, {})
        like = next(each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Tensor))
        kind = like.device, like.dtype
        if kind not in found and module not in self._untold:
            trials = [_try_steps(module, call, states, *tried) for tried in TRIED]
            if None in trials:
                self._untold.add(module)
            else:
                found[kind] = any(trials)
        return found.get(kind, True)


def _try_steps(module: nn.Module, call: Call, states: Any, tokens: list[int], scale: float) -> bool | None:
    """Returns whether a mixer differs over some tokens; None where what it gives is zero, which tells nothing."""
    at_once, by_steps = Scratch(states, call.rows), Scratch(states, call.rows)
    args, kwargs = call.over(tokens, at_once, scale)
    given, steps = _first(module(*args, **kwargs)), []
    for token in tokens:
        args, kwargs = call.over([token], by_steps, scale)
        steps.append(_first(module(*args, **kwargs)))
    pairs = [(given, torch.cat(steps, dim=1))]
    pairs += [(state, by_steps.states[key]) for key, state in at_once.states.items() if key[0] == RECURRENCE]
    if not all(bool(expected.any()) for _, expected in pairs):
        return None
    is_low = given.dtype in (torch.bfloat16, torch.float16)  # whatever its states are in
    return any(_differ(*pair, LOW_PRECISION_TOLERANCE if is_low else TOLERANCE) for pair in pairs)


def _is_among(cache: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    return any(value is cache for value in (*args, *kwargs.values()))


def _joined(outputs: list[Any]) -> Any:
    """The outputs of one forward from those of its tokens."""
    if isinstance(outputs[0], tuple | list):
        return type(outputs[0])(_joined([*each]) for each in zip(*outputs, strict=True))
    return torch.cat(outputs, dim=1) if isinstance(outputs[0], Tensor) else outputs[0]


def _first(output: Any) -> Tensor:
    """The states (B, N, D) among a mixer's outputs."""
    return _first(output[0]) if isinstance(output, tuple | list) else output


def _differ(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Returns whether outputs (B, N, D), or states (B, H, D, E), of which each head counts for itself, are not the same
    up to a share of their scale."""
    error = (found.float() - expected.float()).abs().amax((-2, -1))
    scale = expected.float().abs().amax((-2, -1)).clamp(min=torch.finfo(torch.float32).tiny)
    return not bool((error <= scale * tolerance).all())
