"""Forwards of few rows on a CPU, those of rounds: linear layers run the kernel that is fastest there, those that read
the same input as one, and in 16 bits what a row gives does not depend on how many rows there are. The prompt's many
rows run that kernel, too, where it is faster by far.

In 16 bits two tokens are often equally likely to the last bit, and which of them a text goes on with is a matter of
rounding. Where one row is rounded as it is among others, the text does not depend on what was drafted.

T rows, K width of a layer's input, N of its output.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..kernels.operation import why_switched_off
from .linear_kernels import (
    ALIKE_ROWS,
    DTYPES,
    LOW,
    TORCH,
    Choice,
    Group,
    Kind,
    Packed,
    at_least,
    by_kind,
    choice_for,
    engine,
    is_available,
    pack,
    run_with,
    size_of,
)
from .users import StandIn, Users, restore

logger = logging.get_logger(__name__)

NAME = "packed_linear"  # of the operation, for EAGLE31_KERNELS
MOST_ROWS = 64  # of a round; a forward of more is taken for a prompt's
QUARTERS = 4  # of a row, whose bits are added up
CGROUP = Path("/sys/fs/cgroup")
MOST_PACKED_AT_ONCE = 4  # groups of layers
SHARE_OF_MEMORY = 0.5  # of what is free, that packed weights may take
FORWARD = nn.Linear.forward  # as imported: where somebody has put another in its place since, no layer is packed


@dataclass
class FewRowsLayer:
    """A linear layer, or a group of them that run as one, as it runs few rows. `keys`: of the weights that it was made
    for."""

    keys: list[tuple]
    choice: Choice
    packed: Packed | None

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes if self.packed else 0


class _Forwards(threading.local):
    """Two settings of this thread, made by `in_drafted_call` (see there) and read by what stands in for forwards."""

    is_drafted = False
    num_before: int | None = None


_forwards = _Forwards()
# By the first layer of a group:
_layers: WeakKeyDictionary[nn.Linear, FewRowsLayer] = WeakKeyDictionary()
_stand_ins: WeakKeyDictionary[nn.Linear, "_LinearForward"] = WeakKeyDictionary()  # of groups, within contexts
_users = Users(_stand_ins.clear)  # of the first layers of groups


@dataclass(frozen=True)
class FewRows:
    """The outcome for a model. `num_bytes`: what packed weights take beside the model's own; `is_exact`: it is of 16
    bits, and its linear layers are batch-invariant: they give each row the same result, whatever rows run with it.
    False in fp32."""

    num_bytes: int = 0
    is_exact: bool = False


@contextmanager
def few_rows(model: PreTrainedModel, groups: Iterable[Sequence[Any]] = ()) -> Iterator[FewRows]:
    """A context in which forwards of a model that are `in_drafted_call` run few rows as is fastest here. All others, of
    other threads too, stay the model's own, and so does the model when the context ends.

    `groups`: layers that read the same input. What `run_of` returns runs few rows of a group as one; the layers' own
    forwards stay as they are."""
    with _users.lock:
        prepared = _prepared(model, groups) if can_pack() else {}
        firsts = {first for first, *_ in prepared}
        # what another context has put there may be of old weights
        _restore([each for each in model.modules() if isinstance(each, nn.Linear) and each not in firsts])
        for group, few in prepared.items():
            first, stand_in = group[0], _LinearForward(group, few)
            if len(group) > 1:
                _stand_ins[first] = stand_in
            else:
                vars(first)["forward"] = stand_in
            _users.enter(first)
    try:
        yield FewRows(sum(few.num_bytes for few in prepared.values()), _is_exact(model, prepared))
    finally:
        with _users.lock:
            for first, *_ in prepared:
                if _users.leave(first):
                    _restore([first])


def _restore(layers: list[nn.Linear]) -> None:
    for layer in layers:
        _stand_ins.pop(layer, None)
    restore(layers)


def _is_exact(model: nn.Module, prepared: dict[Group, FewRowsLayer]) -> bool:
    """Returns whether a model is of 16 bits, and all its matrices but tables of tokens are of layers whose rows do not
    depend on each other."""
    weights = {layer.weight: few.choice for group, few in prepared.items() for layer in group}
    if not weights or any(weight.dtype not in LOW or not choice.least_rows for weight, choice in weights.items()):
        return False
    known = {id(weight) for weight in weights}
    known |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return all(parameter.dim() < 2 or id(parameter) in known for parameter in model.parameters())


@contextmanager
def in_drafted_call(num_before: int | None = None) -> Iterator[None]:
    """A context whose forwards are those of a drafted call: of its prompt and its rounds. `num_before`: the number of
    cached keys, if attention is to be batch-invariant: each new position gets the same result, to the last bit, as if
    it were run alone. For one sequence without padding or sliding windows. None: attention runs as usual."""
    if torch.is_autocast_enabled("cpu"):
        yield
        return
    known = _forwards.is_drafted, _forwards.num_before
    _forwards.is_drafted, _forwards.num_before = True, num_before
    try:
        yield
    finally:
        _forwards.is_drafted, _forwards.num_before = known


# -- linear layers


class _LinearForward(StandIn):
    """The forward of a linear layer in rounds, in place of its own; of a group, of all its layers."""

    def __init__(self, group: Group, few: FewRowsLayer):
        super().__init__(group[0])
        self.layers = group
        self.takes_prompts = few.choice.takes_prompts
        self.least_rows = few.choice.least_rows or 1
        self.run = run_with(group, few.packed)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.module.in_features
        if not takes_rows(num_rows, self.takes_prompts):
            return torch.cat([type(layer).forward(layer, x) for layer in self.layers], dim=-1)
        if num_rows > ALIKE_ROWS and keys_before() is not None:  # a row is to be rounded as it is among few
            parts = x.reshape(-1, x.shape[-1]).split(ALIKE_ROWS)
            results = [at_least(self.least_rows, self.run, part, len(part)) for part in parts]
            return torch.cat(results).view(*x.shape[:-1], -1)
        return at_least(self.least_rows, self.run, x, num_rows)


def takes_rows(num_rows: int, takes_prompts: bool) -> bool:
    """Returns whether a forward of this thread runs the chosen kernel: within a drafted call and without autocast, if
    its rows are few, or the kernel is used for prompts too, or no result may depend on the number of rows."""
    is_few = num_rows > 0 and (takes_prompts or num_rows <= MOST_ROWS or keys_before() is not None)
    # autocast may be switched on within, by a forward that somebody wrapped
    return is_few and _forwards.is_drafted and not torch.is_autocast_enabled("cpu")


def can_pack() -> bool:
    """Returns whether layers may be packed: torch has oneDNN (FBGEMM is not used without it), `EAGLE31_KERNELS` does
    not decline it, and no autocast is on."""
    return is_available() and not why_switched_off(NAME) and not torch.is_autocast_enabled("cpu")


def run_of(*group: nn.Linear) -> "_LinearForward | None":
    """Returns what runs a group of layers, or a single one, within `few_rows`, (..., K) -> (..., N of all); None where
    nothing does."""
    stand_in = _stand_ins.get(group[0]) if len(group) > 1 else vars(group[0]).get("forward")
    return stand_in if isinstance(stand_in, _LinearForward) and stand_in.layers == group else None


def keys_before() -> int | None:
    """Returns the number of cached keys where attention of this thread is to be batch-invariant, else None."""
    return _forwards.num_before


def _prepared(model: nn.Module, groups: Iterable[Sequence[Any]]) -> dict[Group, FewRowsLayer]:
    """Returns the layers of a model that can run few rows by another kernel, packing those that are not packed yet. A
    layer is a group of its own unless `groups` joins it with others. Where memory is short: those packed earlier."""
    own = [group for group in _all_groups(model, groups) if all(map(_is_plain, group))]
    new = [group for group in own if (few := _layers.get(group[0])) is None or few.keys != [*map(_key_of_layer, group)]]
    for layer in (layer for group in new for layer in group):  # one may have been prepared alone
        _layers.pop(layer, None)
    needed, free = sum(map(size_of, new)), free_memory()
    if needed > SHARE_OF_MEMORY * free:
        logger.warning_once(
            "EAGLE drafting: the linear layers of %s run as torch has them: packed for rounds on the CPU they would"
            " take another %d MiB, and %d are free; expected %d.",
            *(type(model).__name__, needed >> 20, free >> 20, int(needed / SHARE_OF_MEMORY) >> 20),
        )
        return {group: _layers[group[0]] for group in own if group[0] in _layers}
    for kind, alike in by_kind(new).items():
        _prepare(alike, kind)
    made = sum(_layers[group[0]].num_bytes for group in new)
    if made:
        logger.info("Linear layers of %s are packed: %d MiB.", type(model).__name__, made >> 20)
    return {group: _layers[group[0]] for group in own}


def _all_groups(model: nn.Module, groups: Iterable[Sequence[Any]]) -> list[Group]:
    """The groups that can be joined, and every other linear layer of a model alone."""
    joined = list[Group]()
    for group in map(tuple, groups):
        kinds = {(layer.weight.dtype, layer.weight.shape[1:], layer.bias is None) for layer in group}
        if len(kinds) == 1 and all(map(_is_plain, group)):
            joined.append(group)
    known = {layer for group in joined for layer in group}
    alone = [module for module in model.modules() if type(module) is nn.Linear and module not in known]
    return [*joined, *((layer,) for layer in alone)]


def _is_plain(layer: nn.Linear) -> bool:
    weight = layer.weight
    is_own = type(weight) in (nn.Parameter, Tensor) and weight.device.type == "cpu" and weight.dtype in DTYPES
    has_hooks = layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook")
    forward = vars(layer).get("forward")
    is_bare = (forward is None or isinstance(forward, StandIn)) and nn.Linear.forward is FORWARD
    return is_own and is_bare and not has_hooks and weight.numel() > 0 and not weight.is_inference()


def _key_of_layer(layer: nn.Linear) -> tuple:
    """Returns a tuple that differs once a layer's weight or bias has changed, by which a stale packed copy is noticed.
    It holds the sums of the bits in each row, by quarters: changes through `.data`, as PEFT's when it merges an
    adapter, leave no other trace; those that only change places within a quarter leave none. The weights are read in a
    third of the time that a token takes."""
    weight = layer.weight.detach().contiguous()
    size = weight.itemsize
    bits = weight.view(torch.int64 if weight.shape[1] * size % 8 == 0 else {2: torch.int16, 4: torch.int32}[size])
    parts = bits.view(len(bits), QUARTERS if bits.shape[1] % QUARTERS == 0 else 1, -1)
    sums = hash(parts.sum(-1, dtype=torch.int64).numpy().tobytes())
    bias = None if layer.bias is None else hash(layer.bias.detach().float().numpy().tobytes())
    made_of = id(layer.weight), weight.data_ptr(), weight.dtype, weight.shape, torch.get_num_threads(), engine()
    return *made_of, layer.weight._version, sums, bias


def free_memory() -> int:
    """The bytes that are free, by the limit of a container, too."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no such limit
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))  # files that were read, which make room
    return free


@torch.no_grad()
def _prepare(groups: list[Group], kind: Kind) -> None:
    """Packs the weights of groups of one kind, where that is faster by what was measured on this machine."""
    choice, each = Choice(TORCH, None), list[Packed | None]([None] * len(groups))  # where no memory is left
    for may_be_known in (True, False):  # what an earlier process found may not hold any more
        with suppress(RuntimeError):
            found = choice_for(groups, kind, may_be_known)
            # oneDNN packs with all threads by itself, FBGEMM with one, and needs a copy in fp32 meanwhile
            workers = min(MOST_PACKED_AT_ONCE, torch.get_num_threads()) if found.kernel == "fbgemm" else 1
            with ThreadPoolExecutor(workers) as pool:
                choice, each = found, list(pool.map(pack, groups, repeat(found.kernel)))
            break
    for group, packed in zip(groups, each, strict=True):
        _layers[group[0]] = FewRowsLayer([*map(_key_of_layer, group)], choice, packed)
