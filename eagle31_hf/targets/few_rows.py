"""Forwards of few rows on a CPU, those of rounds: linear layers run the kernel that is fastest there, and in 16 bits
what a row gives does not depend on how many rows there are.

In 16 bits two tokens are often equally likely to the last bit, and which of them a text goes on with is a matter of
rounding. Where one row is rounded as it is among others, the text does not depend on what was drafted.

T rows, K width of a layer's input; H heads, Hkv heads of keys and values, D head_dim, S keys.
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.utils import logging

from ..kernels.operation import why_switched_off
from ..kernels.packed_linear import DTYPES, is_available, packed, packed_linear
from ..storage.measured import Measured, machine

logger = logging.get_logger(__name__)

NAME = "packed_linear"  # of the operation, for EAGLE31_KERNELS
LOW = (torch.bfloat16, torch.float16)
MOST_ROWS = 64  # more are a prompt's, and run as the model has them
TIMED_ROWS = (1, 3, 8)
TIMED_BYTES = 2**26  # of weights of one shape that kernels are timed on: more than a cache holds
TIMES = 3
COMPARED_ROWS = 64
LEAST = (1, 2, None)  # what `Choice.least_rows` may be
SAMPLED = 16  # rows of a weight that are looked at
CGROUP = Path("/sys/fs/cgroup")
SHARE_OF_MEMORY = 0.5  # of what is free, that packed weights may take
MEASURED = Measured("linear_layers")
Run = Callable[[Tensor], Tensor]  # (..., K) -> (..., N)


@dataclass(frozen=True)
class Choice:
    """A decision for all linear layers of one shape: the kernel that multiplies few rows. `is_packed`: oneDNN over
    packed weights, else torch's own; `least_rows`: the smallest number of rows from which on, in 16 bits, a row's
    result does not depend on their number, 2 where a lone row is run twice; None: there is no such number."""

    is_packed: bool
    least_rows: int | None


@dataclass
class FewRowsLayer:
    """A linear layer as it runs few rows. `key`: the weight that it was made for."""

    key: tuple
    choice: Choice
    packed_weight: Tensor | None

    @property
    def num_bytes(self) -> int:
        return 0 if self.packed_weight is None else self.packed_weight.numel() * self.packed_weight.element_size()


class _Forwards(threading.local):
    """Two settings of this thread, which `in_rounds` makes and the stand-ins read. `are_rounds`: its forwards are those
    of rounds; `num_before`: the number of keys before the new ones, where attention is to run position by position."""

    are_rounds = False
    num_before: int | None = None


_forwards = _Forwards()
_lock = threading.RLock()
_layers: WeakKeyDictionary[nn.Linear, FewRowsLayer] = WeakKeyDictionary()
_users: WeakKeyDictionary[nn.Linear, int] = WeakKeyDictionary()  # contexts that a layer is in, of all threads


def _begin_anew() -> None:
    """In a process that was forked no context of its parent goes on, nor does anyone hold the lock."""
    global _lock
    _lock = threading.RLock()
    _users.clear()


if hasattr(os, "register_at_fork"):  # Windows has none, and does not fork
    os.register_at_fork(after_in_child=_begin_anew)


@dataclass(frozen=True)
class FewRows:
    """The outcome for a model. `num_bytes`: what packed weights take beside the model's own; `is_exact`: it is of 16
    bits, and what a row gives depends on no other row."""

    num_bytes: int = 0
    is_exact: bool = False


@contextmanager
def few_rows(model: PreTrainedModel) -> Iterator[FewRows]:
    """A context in which forwards of a model that are `in_rounds` run few rows as is fastest here. All other forwards,
    of other threads too, stay the model's own, and so does the model when the context ends."""
    with _lock:
        layers = {} if torch.is_autocast_enabled("cpu") else _prepared(model)
        for layer, few in layers.items():
            vars(layer)["forward"] = _StandIn(layer, few)  # where another context has one, its weight may be an old one
            _users[layer] = _users.get(layer, 0) + 1
    try:
        yield FewRows(sum(few.num_bytes for few in layers.values()), _is_exact(model, layers))
    finally:
        with _lock:
            for layer in layers:
                _users[layer] = _users.get(layer, 1) - 1
                if not _users[layer] and isinstance(vars(layer).get("forward"), _StandIn):
                    del vars(layer)["forward"]


def _is_exact(model: nn.Module, layers: dict[nn.Linear, FewRowsLayer]) -> bool:
    """Returns whether a model is of 16 bits, and all its matrices but tables of tokens are of layers whose rows do not
    depend on each other."""
    if not layers or any(layer.weight.dtype not in LOW or not few.choice.least_rows for layer, few in layers.items()):
        return False
    known = {id(layer.weight) for layer in layers}
    known |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return all(parameter.dim() < 2 or id(parameter) in known for parameter in model.parameters())


@contextmanager
def in_rounds(num_before: int | None = None) -> Iterator[None]:
    """A context whose forwards are those of rounds. `num_before`: the number of keys before the new ones of one
    sequence, where its attention is to run position by position."""
    if torch.is_autocast_enabled("cpu"):
        yield
        return
    known = _forwards.are_rounds, _forwards.num_before
    _forwards.are_rounds, _forwards.num_before = True, num_before
    try:
        yield
    finally:
        _forwards.are_rounds, _forwards.num_before = known


# -- linear layers


class _StandIn:
    """The forward of a linear layer in rounds, in place of its own."""

    stands_in = True  # for `decoder_layer.forward_of`

    def __init__(self, layer: nn.Linear, few: FewRowsLayer | None):
        self.layer = layer  # of a copy that is made it may have nothing yet
        self.least_rows = (few and few.choice.least_rows) or 1
        self.run = None if few is None else _run(layer, few.packed_weight)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.layer.in_features
        if self.run is None or not _forwards.are_rounds or not 0 < num_rows <= MOST_ROWS:
            return type(self.layer).forward(self.layer, x)
        return _at_least(self.least_rows, self.run, x, num_rows)

    def __reduce__(self) -> tuple:
        """A copy of a layer, made meanwhile, runs its own forward."""
        return _StandIn, (self.layer, None)


def _at_least(least_rows: int, run: Run, x: Tensor, num_rows: int) -> Tensor:
    """Runs rows x (..., K), a single one as often as `least_rows` says."""
    if num_rows >= least_rows:
        return run(x)
    return run(x.reshape(1, -1).expand(least_rows, -1).contiguous())[:1].view(*x.shape[:-1], -1)


def _run(layer: nn.Linear, packed_weight: Tensor | None) -> Run:
    if packed_weight is None:
        return functools.partial(linear, weight=layer.weight, bias=layer.bias)
    return functools.partial(packed_linear, weight=packed_weight, bias=layer.bias)


def _prepared(model: nn.Module) -> dict[nn.Linear, FewRowsLayer]:
    """The linear layers of a model that few rows run through in another way, prepared where they are not yet; none
    where they were declined or memory is short."""
    own = [module for module in model.modules() if type(module) is nn.Linear and _is_plain(module)]
    if not own or why_switched_off(NAME) or not is_available():
        return {}
    layers = [layer for layer in own if (few := _layers.get(layer)) is None or few.key != _key(layer)]
    for layer in layers:
        _layers.pop(layer, None)
    needed, free = sum(map(_num_bytes, layers)), _free_memory()
    if needed > SHARE_OF_MEMORY * free:
        logger.warning_once(
            "EAGLE drafting: the linear layers of %s run as torch has them: packed for rounds on the CPU they would"
            " take another %d MiB, and %d are free; expected %d.",
            *(type(model).__name__, needed >> 20, free >> 20, int(needed / SHARE_OF_MEMORY) >> 20),
        )
        return {layer: _layers[layer] for layer in own if layer in _layers}
    for alike in _by_shape(layers).values():
        _prepare(alike)
    made = sum(_layers[layer].num_bytes for layer in layers)
    if made:
        logger.info("Linear layers of %s are packed: %d MiB.", type(model).__name__, made >> 20)
    return {layer: _layers[layer] for layer in own}


def _is_plain(layer: nn.Linear) -> bool:
    weight = layer.weight
    is_own = type(weight) in (nn.Parameter, Tensor) and weight.device.type == "cpu" and weight.dtype in DTYPES
    has_hooks = layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook")
    forward = vars(layer).get("forward")
    is_bare = forward is None or isinstance(forward, _StandIn)
    return is_own and is_bare and not has_hooks and weight.numel() > 0 and not weight.is_inference()


def _key(layer: nn.Linear) -> tuple:
    """Returns a tuple that differs once a layer's weight has changed, by which a stale packed copy is noticed. It holds
    some of the values: changes through `.data`, as PEFT's when it merges an adapter, leave no other trace."""
    weight = layer.weight.detach()
    step = max(1, len(weight) // SAMPLED)
    sample = (*weight[::step, 0].tolist(), *weight[::step, -1].tolist())
    facts = layer.weight._version, weight.dtype, weight.shape, torch.get_num_threads()
    return id(layer.weight), weight.data_ptr(), *facts, sample


def _free_memory() -> int:
    """The bytes that are free, by the limit of a container, too."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no such limit
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


def _num_bytes(layer: nn.Linear) -> int:
    return layer.weight.numel() * layer.weight.element_size()


def _by_shape(layers: list[nn.Linear]) -> dict[tuple, list[nn.Linear]]:
    alike = dict[tuple, list[nn.Linear]]()
    for layer in layers:
        alike.setdefault((*layer.weight.shape, layer.weight.dtype), []).append(layer)
    return alike


# -- which kernel


@torch.no_grad()
def _prepare(layers: list[nn.Linear]) -> None:
    """Packs the weights of layers of one shape, where that is faster by what was measured on this machine."""
    weight = layers[0].weight
    name = f"{machine()}, {str(weight.dtype).removeprefix('torch.')} {weight.shape[0]} x {weight.shape[1]}"
    try:
        choice = _choice_of(MEASURED.get(name))
        if choice is None:
            choice = _measured(layers)
            MEASURED.put(name, {"is_packed": choice.is_packed, "least_rows": choice.least_rows})
        weights = [packed(layer.weight) if choice.is_packed else None for layer in layers]
    except RuntimeError:  # no memory after all
        choice, weights = Choice(False, None), [None] * len(layers)
    for layer, packed_weight in zip(layers, weights, strict=True):
        _layers[layer] = FewRowsLayer(_key(layer), choice, packed_weight)


def _choice_of(kept: Any) -> Choice | None:
    """Reads a choice that an earlier process kept; None where there is none."""
    is_choice = isinstance(kept, dict) and isinstance(kept.get("is_packed"), bool)
    return Choice(kept["is_packed"], kept["least_rows"]) if is_choice and kept.get("least_rows", 0) in LEAST else None


def _measured(layers: list[nn.Linear]) -> Choice:
    """The choice for layers of one shape, by the times that they take."""
    timed = layers[: max(1, TIMED_BYTES // _num_bytes(layers[0]))]
    runs = [_run(layer, None) for layer in timed]
    seconds, is_packed = _seconds(runs, layers[0]), False
    with suppress(RuntimeError):  # a processor that oneDNN has no such kernel for
        over_packed = [_run(layer, packed(layer.weight)) for layer in timed]
        if _seconds(over_packed, layers[0]) < seconds:
            runs, is_packed = over_packed, True
    return Choice(is_packed, _least_rows(runs, layers[0]) if layers[0].weight.dtype in LOW else 1)


def _rows(num: int, layer: nn.Linear) -> Tensor:
    values = torch.randn(num, layer.in_features, generator=torch.Generator().manual_seed(num))
    return values.to(layer.weight.dtype)


def _seconds(runs: list[Run], layer: nn.Linear) -> float:
    """The seconds that layers take one after the other, over all numbers of rows that are timed: the least of several
    times, as other load only ever makes them longer."""
    inputs = [_rows(num, layer) for num in TIMED_ROWS]
    taken = list[list[float]]()
    for _ in range(TIMES + 1):  # the first time is not the usual one
        taken.append([])
        for x in inputs:
            begin = time.perf_counter()
            for run in runs:
                run(x)
            taken[-1].append(time.perf_counter() - begin)
    return sum(min(times) for times in zip(*taken[1:], strict=True))


def _least_rows(runs: list[Run], layer: nn.Linear) -> int | None:
    """The least number of rows, 1 or 2, from which on a row's result is the same, to the last bit, whatever the other
    rows and their number; None where there is none."""
    x = _rows(COMPARED_ROWS, layer)
    for least_rows in (1, 2):  # of LEAST
        if all(_is_same(run, x, least_rows) for run in runs):
            return least_rows
    return None


def _is_same(run: Run, x: Tensor, least_rows: int) -> bool:
    """Returns whether rows x (T, K) give the same one by one, by threes, by eights and all together."""
    together = run(x)
    alone = torch.cat([_at_least(least_rows, run, row, 1) for row in x.split(1)])
    by_size = [torch.cat([run(part) for part in x[:24].split(size)]) for size in (3, 8)]
    return torch.equal(alone, together) and all(torch.equal(some, together[:24]) for some in by_size)


# -- attention


def takes_positions(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> bool:
    """Returns whether attention is to run position by position: in rounds that ask for it, where every key of one
    sequence is seen by the position that it stands at and those after it."""
    num_before = _forwards.num_before
    if num_before is None or key.shape[2] != num_before + query.shape[2] or len(query) > 1:
        return False
    is_usual = kwargs.get("softcap") is None and kwargs.get("s_aux") is None and kwargs.get("position_bias") is None
    return is_usual and key.shape[3] == value.shape[3] and query.shape[1] % key.shape[1] == 0


def attend_by_position(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention of new positions, query (1, H, T, D), over key and value (1, Hkv, S, D), each position in a call of its
    own over the keys up to it -> (1, T, H, D).

    The heads that share keys are the rows of a call, two where there would be one: torch's kernel for one row takes
    three times as long in bf16.
    """
    num_heads, num_new, width = query.shape[1:]
    num_kv_heads, num_before = key.shape[1], key.shape[2] - num_new
    group = num_heads // num_kv_heads
    attended = list[Tensor]()
    for t in range(num_new):
        rows = query[:, :, t].view(1, num_kv_heads, group, width)
        if group == 1:
            rows = rows.expand(-1, -1, 2, -1)
        seen = num_before + t + 1
        out = scaled_dot_product_attention(rows, key[:, :, :seen], value[:, :, :seen], scale=scale)
        attended.append(out[:, :, :group].reshape(1, 1, num_heads, width))
    return attended[0] if num_new == 1 else torch.cat(attended, dim=1)
