"""The store of captured rounds: graphs and arenas are kept from call to call, since capturing takes as long as a few
dozen rounds, and are made anew when a model or the kind of call has changed."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ...cache.arena import Arena, move_into, slots_of
from ...kernels.operation import OPERATIONS, SWITCH, why_torch
from ...modeling import Eagle31DrafterModel
from ...targets.decoder_layer import forward_of
from ...targets.tree_attention import own_attention
from ..executor import EagerExecutor
from .carry import Carry
from .drafting import Parts, Side
from .executor import Captured, CapturedExecutor
from .round import Round
from .seam import Seam, seam_of
from .why import most_tokens

OF_MODULES = set(vars(nn.Module())) - {"training"}  # hooks among them, those that capture states too
PLAIN = (int, float, str, bool, type(None))


@dataclass
class Kept:
    """The rounds of one pair of models for calls of one size, and what they were captured with: the `key`. `lock` is
    held by the call that uses them."""

    key: tuple
    rounds: Round
    arenas: tuple[Arena, Arena]  # of the target and the drafter
    seam: Seam
    captured: Captured = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    samplers: list[Any] = field(default_factory=list)  # graphs read tensors of those they were captured with
    lock: Any = field(default_factory=threading.Lock)

    @contextmanager
    def serving(self, eager: EagerExecutor) -> Iterator[CapturedExecutor]:
        """A context with the executor of a call. To be entered before the prompt is read, by who holds the lock."""
        runner, drafting = eager.runner, eager.proposer.runner
        of_target = runner.placement = move_into(runner.past_key_values, self.arenas[0])
        of_target.outlives_call = runner.cache_outlives_call or eager.collector.wanted
        of_drafter = drafting.placement = move_into(drafting.past_key_values, self.arenas[1])
        states = eager.unread.captured
        target = Side(runner.target, runner.past_key_values, of_target, self.arenas[0], states)
        drafter = Side(drafting.drafter, drafting.past_key_values, of_drafter, self.arenas[1])
        self.rounds.parts = Parts(target, drafter, eager.proposer.sampler, eager.sampler)
        num_captured = len(self.captured)
        try:
            yield CapturedExecutor(eager, self.rounds, self.seam, self.captured, self.failures)
        finally:
            self.rounds.parts = None  # models and caches are not kept alive
            if len(self.captured) > num_captured:
                self.samplers += [eager.proposer.sampler, eager.sampler]
            if self.failures:
                self._give_up()

    def _give_up(self) -> None:
        """Drops all that takes memory: nothing of it will be used again."""
        self.captured.clear()
        self.samplers.clear()
        self.rounds.drafts.clear()
        self.rounds.out.clear()
        for arena in self.arenas:
            arena.buffers.clear()
            arena.table = None


_kept: WeakKeyDictionary[Eagle31DrafterModel, WeakKeyDictionary[PreTrainedModel, Kept]] = WeakKeyDictionary()
_kept_lock = threading.Lock()


@contextmanager
def kept_for(request: Any, eager: EagerExecutor, seam: Seam) -> Iterator[Kept | None]:
    """A context with what is kept for a request's models, made anew where it no longer holds; None where another call
    uses it."""
    kept = _kept_of(request, eager, seam)
    if not kept.lock.acquire(blocking=False):
        yield None
        return
    try:
        yield kept
    finally:
        kept.lock.release()


def _kept_of(request: Any, eager: EagerExecutor, seam: Seam) -> Kept:
    drafter, target = request.drafter, request.target
    capacity = slots_of(request.generation_config.max_length, request.input_ids.device)
    noise = eager.sampler.noise
    vocab_size = None if noise is None else noise.vocab_size
    size = (most_tokens(request.settings), capacity, vocab_size, eager.runner.last_position.shape, seam.name)
    models = fingerprint(target), fingerprint(drafter), id(drafter.get_input_embeddings())
    samplers = type(eager.sampler), tuple(map(_plain_values, request.logits_processor))
    key = size, models, samplers, os.environ.get(SWITCH)
    with _kept_lock:
        by_target = _kept.setdefault(drafter, WeakKeyDictionary())
        kept = by_target.get(target)
        if kept is None or kept.key != key:
            del kept
            by_target.pop(target, None)  # its memory is free before more is asked for
            kept = by_target[target] = _made(request, key, size, seam)
        return kept


def _made(request: Any, key: tuple, size: tuple, seam: Seam) -> Kept:
    width, capacity, vocab_size, positions, _ = size
    config = request.drafter.config
    with torch.inference_mode(False):  # another call may write to this in another mode
        states = request.drafter.like.new_empty(
            0, config.num_aux_states * config.target_hidden_size, dtype=request.target.dtype
        )
        carry = Carry.empty(positions, width, capacity, states, vocab_size)
        return Kept(key, Round(carry), (Arena(capacity), Arena(capacity)), seam)


def fingerprint(model: PreTrainedModel) -> tuple:
    """All that a capture takes for granted of a model: where its weights lie, and the plain values its modules hold,
    such as training mode, which adapter is active and its scale, the forwards they run, and the config. Equal ones: the
    same operations on the same memory."""
    weights = [
        (id(weight), weight.data_ptr(), weight.dtype)
        for group in (model.parameters(), model.buffers())
        for weight in group
    ]
    config = model.config.get_text_config(decoder=True).to_json_string(use_diff=False)
    modules = tuple((forward_of(module), _plain_values(module)) for module in model.modules())
    return own_attention(model), config, tuple(weights), modules


def _plain_values(one: object) -> tuple:
    """The class of a module or processor, and those of its attributes that are plain values or hold only such."""
    return (
        type(one),
        id(one) if isinstance(one, nn.Module) else 0,
        *((name, str(value)) for name, value in vars(one).items() if name not in OF_MODULES and _is_plain(value)),
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def release(drafter: Eagle31DrafterModel | None = None) -> None:
    """Gives up what is kept for a drafter, None: for all: arenas and graphs. A call under way keeps its own."""
    with _kept_lock:
        if drafter is None:
            _kept.clear()
        else:
            for one in [each for each in _kept if drafter in (each, getattr(each, "_orig_mod", None))]:  # compiled, too
                del _kept[one]


def explained(drafter: Eagle31DrafterModel, target: PreTrainedModel) -> str:
    """Says what captured rounds keep for two models, and how every operation of theirs runs, in lines for people."""
    device = target.device
    with _kept_lock:
        by_target = _kept.get(drafter)
        kept = None if by_target is None else by_target.get(target)
    lines = [
        f"rounds on {device}: "
        + ("CUDA graphs, where a call allows" if seam_of(device) else "eager, as everywhere but on a GPU")
    ]
    if kept is not None:
        plans = sorted({plan.name for _, plan in list(kept.captured)})
        held = sum(arena.num_bytes() for arena in kept.arenas) / 1e6
        lines.append(
            f"kept for the next call: {', '.join(plans) or 'nothing captured'}; keys and values, {held:.0f} MB"
        )
        lines += [f"eagerly: {reason}" for reason in kept.failures]
    ways = {name: why_torch(name, device) or "by Triton" for name in sorted(OPERATIONS)}
    lines += [
        f"operations {way}: {', '.join(name for name in ways if ways[name] == way)}"
        for way in sorted(set(ways.values()))
    ]
    return "\n".join(lines)
