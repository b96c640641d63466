"""The store of captured rounds: graphs and arenas are kept from call to call, since capturing takes as long as a
hundred rounds, and are made anew when a model has changed.

What is captured serves every call of as many rows (`carry.rows_for`), of texts that its arena has room for, that
chooses tokens in the same way: temperature, top-p and min-p are read from tensors.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...cache.arena import Arena, leave_arena, move_into, slots_of
from ...kernels.operation import OPERATIONS, SWITCH, why_torch
from ...modeling import Eagle31DrafterModel
from ...targets.decoder_layer import forward_of
from ...targets.fused import why_not_fused
from ...targets.plain_values import plain_values, values_of_module
from ...targets.probe import bytes_of_a_slot
from ...targets.tree_attention import own_attention
from .. import processors
from ..executor import EagerExecutor
from ..target_runner import TargetRunner
from .carry import Carry, most_tokens, rows_for
from .drafting import Parts, Side
from .executor import CapturedExecutor
from .round import Round
from .seam import Seam, seam_of

MOST_KEPT = 6  # sizes of one pair, and ways to choose tokens of one size: those used last
MOST_PLANS = 64  # of one way to choose tokens when a call begins: those captured last


@dataclass
class Kept:
    """The rounds of one pair of models for calls of some size, by how they choose tokens, and the `models` they were
    captured with, as `kept_for` has them. `lock` is held by the call that uses them."""

    models: tuple
    carry: Carry
    arenas: tuple[Arena, Arena]  # of the target and the drafter
    seam: Seam
    by_choice: dict[tuple, Round] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    @contextmanager
    def serving(self, eager: EagerExecutor) -> Iterator[CapturedExecutor]:
        """A context with the executor of a call. To be entered before the prompt is read, by who holds the lock."""
        with self._holding(eager) as (target, drafter):
            rounds = self._rounds(eager)
            # Tried before anything is captured: what a trial does, or fails in, is forbidden to a capture.
            not_fused = why_not_fused(target.model)
            rounds.parts = Parts(target, drafter, eager.proposer.sampler, eager.sampler, not_fused)
            try:
                yield CapturedExecutor(eager, rounds, self.seam, self.failures)
            finally:
                rounds.parts = None  # models and caches are not kept alive
                for sampler in (eager.proposer.sampler, eager.sampler):
                    sampler.noise = None  # large, and read by no graph
                if self.failures:
                    self.give_up()

    @contextmanager
    def _holding(self, eager: EagerExecutor) -> Iterator[tuple[Side, Side]]:
        """A context in which both caches of a call lie in the arenas: the target's side and the drafter's, whose cache
        ends with the call."""
        runner, drafting = eager.runner, eager.proposer.runner
        in_slots = runner.placement  # that `adopt.slots` made, and asks in the end
        num_rows = len(eager.sequences)
        self.seam.wait_for_last()
        try:
            of_target = runner.placement = move_into(runner.past_key_values, self.arenas[0], num_rows)
            of_target.outlives_call = runner.cache_outlives_call or eager.collector.wanted
            of_drafter = drafting.placement = move_into(drafting.past_key_values, self.arenas[1], num_rows)
            states = eager.unread.captured
            target = Side(runner.target, runner.past_key_values, of_target, self.arenas[0], states, runner.mixers)
            yield target, Side(drafting.drafter, drafting.past_key_values, of_drafter, self.arenas[1])
        finally:
            in_slots.has_accepted = runner.placement.has_accepted
            leave_arena(runner.past_key_values)  # before the next call may have it
            self.seam.note_last()

    def _rounds(self, eager: EagerExecutor) -> Round:
        """Returns the rounds for the way in which a call chooses tokens. Its samplers read their numbers from there."""
        sampler = eager.sampler
        # of a processor those of its values that no tensor holds
        values = [(type(one), *plain_values(one, {processors.TUNABLE.get(type(one))})) for one in sampler.processors]
        choice = type(sampler), sampler.noise is None, *values
        rounds = self.by_choice.pop(choice, None) or Round(self.carry)
        while len(self.by_choice) >= MOST_KEPT:  # a server whose clients choose top_k, say
            del self.by_choice[next(iter(self.by_choice))]
        self.by_choice[choice] = rounds  # the last one: it is used now
        rounds.forget_plans(MOST_PLANS)
        if sampler.noise is not None:
            self.carry.hold_noise(sampler.noise.vocab_size)
        sampler.processors = processors.tuned(sampler.processors, rounds.numbers_of_processors, self.carry.text.device)
        eager.proposer.sampler.shape_by(sampler.processors)
        return rounds

    def give_up(self) -> None:
        """Drops all that takes memory: nothing of it will be used again."""
        self.by_choice.clear()
        self.carry.noise = self.carry.rope = None
        for arena in self.arenas:
            arena.clear()

    def num_bytes(self) -> int:
        """Bytes of keys, values and states."""
        return sum(arena.num_bytes() for arena in self.arenas)


Size = tuple[int, ...]  # rows, tokens a round commits at most, and the leading axes of positions
_kept: WeakKeyDictionary[Eagle31DrafterModel, WeakKeyDictionary[PreTrainedModel, dict[Size, Kept]]] = (
    WeakKeyDictionary()
)
_kept_lock = threading.Lock()
_thread = threading.local()  # `is_served`: whether a call of this thread holds a lock


@contextmanager
def kept_for(request: Any, eager: EagerExecutor, seam: Seam) -> Iterator[Kept | None]:
    """A context with what is kept for a request's models, made anew where it no longer holds. Another thread's call
    is waited for, since eager rounds take several times as long as captured ones; None within a call of this thread:
    it would wait for itself, or for a thread that waits for it."""
    if getattr(_thread, "is_served", False):
        yield None
        return
    target, drafter = request.target, request.drafter
    embedding = id(drafter.get_input_embeddings())
    # all that captures for these models take for granted
    models = fingerprint(target), fingerprint(drafter), embedding, os.environ.get(SWITCH), seam.name
    kept = _kept_of(request, eager.runner, seam, models)
    with kept.lock:
        _thread.is_served = True
        try:
            yield kept
        except torch.OutOfMemoryError:  # perhaps of the arenas': the next call does without
            kept.failures.append("an earlier call ran out of memory")
            kept.give_up()
            raise
        finally:
            _thread.is_served = False


def _kept_of(request: Any, runner: TargetRunner, seam: Seam, models: tuple) -> Kept:
    size = _size(request, runner)
    with _kept_lock:
        of_pair = _kept.setdefault(request.drafter, WeakKeyDictionary()).setdefault(request.target, {})
        if any(each.models != models for each in of_pair.values()):
            of_pair.clear()
        kept = of_pair.pop(size, None)
        if kept is None or kept.arenas[0].capacity < _slots(request, is_tight=True):
            kept = None  # its memory is free before more is asked for
            while len(of_pair) >= MOST_KEPT:
                del of_pair[next(iter(of_pair))]
            is_tight = 2 * _bytes(request, _slots(request)) > free_bytes(request.input_ids.device)
            num_rows, width, *axes = size
            capacity, config = _slots(request, is_tight), request.drafter.config
            with torch.inference_mode(False):  # another call may write to this in another mode
                num_states = config.num_aux_states * config.target_hidden_size
                states = request.drafter.like.new_empty(0, num_states, dtype=request.target.dtype)
                carry = Carry.empty((*axes, num_rows, 1), width, capacity, states)
                kept = Kept(models, carry, (Arena(capacity, num_rows), Arena(capacity, num_rows)), seam)
        of_pair[size] = kept  # the last one: it is used now
        return kept


def _size(request: Any, runner: TargetRunner) -> Size:
    return rows_for(len(request.input_ids)), most_tokens(request.settings), *runner.last_position.shape[:-2]


def _slots(request: Any, is_tight: bool = False) -> int:
    return slots_of(request.generation_config.max_length, request.input_ids.device, is_tight)


def _bytes(request: Any, slots: int) -> int:
    """Returns the bytes of the target's keys and values in so many slots."""
    return bytes_of_a_slot(request.target) * slots * rows_for(len(request.input_ids))


def free_bytes(device: torch.device) -> float:
    """Returns the bytes that tensors may still take on a GPU; no end elsewhere."""
    if device.type != "cuda":
        return float("inf")
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def why_no_room(request: Any, runner: TargetRunner) -> str | None:
    """Returns why there is no memory on the GPU for the target's keys and values of as long a text as was asked for;
    None where there is. What is kept for such calls counts as free: it is used again, or given up for a longer one."""
    with _kept_lock:
        kept = _kept.get(request.drafter, {}).get(request.target, {}).get(_size(request, runner))
    slots = _slots(request, is_tight=True)
    if kept is not None and kept.arenas[0].capacity >= slots and kept.arenas[0].buffers:
        return None
    wanted = _bytes(request, slots)
    free = free_bytes(request.input_ids.device) + (0 if kept is None else kept.num_bytes())
    if wanted <= free:
        return None
    return f"keys and values of max_length tokens take {wanted / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"


def fingerprint(model: PreTrainedModel) -> tuple:
    """All that a capture takes for granted of a model: where its weights lie, and the plain values its modules hold,
    such as training mode, which adapter is active and its scale, the forwards they run, and the config. Equal ones: the
    same operations on the same memory."""
    weights = list[tuple]()
    for weight in chain(model.parameters(), model.buffers()):
        # How often a table of ids was written to in place, as a draft vocabulary is: what rounds read is worked out of
        # it when they are captured. Other weights they read as they are.
        writes = 0 if weight.is_floating_point() or weight.is_inference() else weight._version
        weights.append((id(weight), weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), writes))
    config = model.config.get_text_config(decoder=True).to_json_string(use_diff=False)
    modules = tuple((forward_of(module), values_of_module(module)) for module in model.modules())
    implementation = own_attention(model)
    return implementation, ALL_ATTENTION_FUNCTIONS.get(implementation), config, tuple(weights), modules


def release(drafter: Eagle31DrafterModel | None = None) -> None:
    """Gives up what is kept for a drafter, None: for all: arenas and graphs. A call under way keeps its own."""
    with _kept_lock:
        # A compiled drafter is meant by the module it was made of, too.
        for one in [each for each in _kept if drafter in (None, each, getattr(each, "_orig_mod", None))]:
            del _kept[one]


def explained(drafter: Eagle31DrafterModel, target: PreTrainedModel) -> str:
    """Says what captured rounds keep for two models, and how every operation of theirs runs, in lines for people."""
    device = target.device
    with _kept_lock:
        by_target = _kept.get(drafter)
        kept = [*({} if by_target is None else by_target.get(target, {})).values()]
    lines = [
        f"rounds on {device}: "
        + ("CUDA graphs, where a call allows" if seam_of(device) else "eager, as everywhere but on a GPU")
    ]
    for one in kept:
        plans = sorted({plan.name for rounds in [*one.by_choice.values()] for plan in [*rounds.captured]})
        lines.append(
            f"kept for calls of {one.carry.num_rows} rows: {', '.join(plans) or 'nothing captured'}; keys and values,"
            f" {one.num_bytes() / 1e6:.0f} MB"
        )
        lines += [f"eagerly: {reason}" for reason in one.failures]
    ways = {name: why_torch(name, device) or "by Triton" for name in sorted(OPERATIONS)}
    lines += [
        f"operations {way}: {', '.join(name for name in ways if ways[name] == way)}"
        for way in sorted(set(ways.values()))
    ]
    return "\n".join(lines)
