"""Decoder layers of the Llama form run by fewer operations than their own forward has. Where a mask of spans is
passed, on a GPU, these are the `kernels`: eight operations a layer, in place of forty and more. In rounds on a
CPU see `rows_layer`. Each layer has to prove that it has this form: that `through_layer` computes what it does.

N nodes of a tree, h target width.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ..cache import adopt
from ..cache.arena import Arena, move_into
from ..cache_names import CACHE
from ..kernels.tree_attention import is_spans
from .decoder_layer import (
    GATED,
    QKV,
    after_norm,
    arena_layer,
    forward_of,
    norm_sum,
    through_layer,
    why_no_norm,
    why_not_fusable,
)
from .few_rows import FewRows, can_pack, few_rows
from .layers import decoder_layers, decoder_of
from .plain_values import values_of_module
from .probe import ARENA, FAILURES, PREFIX, random_tree, tree_from_arena
from .rows_layer import RowsLayer
from .tree_attention import attention_of_rounds, own_attention
from .users import StandIn, Users, restore

logger = logging.get_logger(__name__)

# A share of the scale. Both forwards run in fp32, whatever the target runs in: there rounding, which is no more than
# 1e-5 of it, and another formula are far apart.
TOLERANCE = 1e-4
# Of all layers together, in the target's own dtype, as a share of the logits' spread: root mean square. That each layer
# is right is known by then. In bf16 a model whose weights are random and large is off by a tenth, a wrong one by 1.
TOLERANCE_OF_ALL = 1e-3
TOLERANCE_OF_ALL_LOW = 0.25
SPREAD = 0.05  # of random states: small beside what a layer adds to them, and large beside the eps of its norms
FAR = 2**20  # tokens, beyond the lengths at which some models scale queries
USUAL_TENSORS = {"attention_mask", "position_ids"}  # besides the states and the rotary embedding


@dataclass(eq=False, slots=True)
class Pair:
    """States (B, T, h) as fused layers hand them on: the sum of `x` and `residual`, which the next norm adds up. It has
    no operators, so that a model that does anything else with it fails."""

    x: Tensor
    residual: Tensor


# Stands for a final norm that is missing; one for all targets, as a verdict is known by the ids of modules. It is never
# run.
NO_NORM = nn.Identity()
# Of a target's trial: the modules and forwards that it was made with, and what `why_not_fused` returns.
_verdicts: WeakKeyDictionary[PreTrainedModel, tuple[tuple, list[str | None]]] = WeakKeyDictionary()
_users = Users()


@contextmanager
def fused_layers(target: PreTrainedModel, not_fused: list[str | None]) -> Iterator[None]:
    """A context in which the target's layers are fused, but for those that `why_not_fused` has a reason for, wherever
    they get a mask of spans and an arena, or few rows within `few_rows`. Other forwards meanwhile, of other threads
    too, are the target's own."""
    stages = _stages(target)
    with _users.using(target, lambda: _fuse(stages, not_fused), lambda: restore(stages)):
        yield


@contextmanager
def fused_rows(target: PreTrainedModel) -> Iterator[FewRows]:
    """A context in which rounds of a target on a CPU run few rows as is fastest there: by `few_rows`, and its layers,
    where they can be fused, by `rows_layer`."""
    attends_usually = own_attention(target) == "sdpa" and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    not_fused = why_not_fused(target) if can_pack() and attends_usually else []
    fused = [layer for layer, reason in zip(decoder_layers(target), not_fused, strict=False) if reason is None]
    groups = [[getattr(layer.self_attn, name) for name in QKV] for layer in fused]  # that read the same input
    groups += [[getattr(layer.mlp, name) for name in GATED] for layer in fused]
    with few_rows(target, groups) as rows, ExitStack() as stack:
        is_exact = rows.is_exact
        if fused:
            stack.enter_context(fused_layers(target, not_fused))
        for layer in fused:
            with _users.lock:
                forward = vars(layer).get("forward")
                if isinstance(forward, _LayerForward):
                    forward.rows = RowsLayer.of(layer)  # anew: another context's may be of weights that have changed
                is_exact = is_exact and getattr(forward, "rows", None) is not None  # else its groups are not joined
        yield replace(rows, is_exact=is_exact)


def why_not_fused(target: PreTrainedModel) -> list[str | None]:
    """Returns why each layer, and last the final norm, is not fused; None where it is. Found by a trial, which is made
    once for a target, and again where its modules have changed."""
    with _users.lock:
        stages = _stages(target)
        # With an adapter, say, the modules, their forwards and values are others, and the trial is made again.
        modules = (module for stage in stages for module in stage.modules())
        key = tuple((values_of_module(each), forward_of(each)) for each in modules), target.dtype, target.device
        known_key, reasons = _verdicts.get(target, (None, []))
        if known_key == key:
            return reasons
        with attention_of_rounds(target):
            reasons, is_kept = _tried(target, stages)
        if is_kept:
            _verdicts[target] = key, reasons
            first = next((f" ({reason})" for reason in reasons if reason), "")
            logger.info("%d of %d stages of the target are fused%s.", reasons.count(None), len(reasons), first)
        return reasons


def _stages(target: PreTrainedModel) -> list[nn.Module]:
    """The target's layers and its final norm; in the norm's place an empty module where there is none."""
    return [*decoder_layers(target), getattr(decoder_of(target), "norm", None) or NO_NORM]


# -- forwards


def _fuse(stages: list[nn.Module], reasons: list[str | None]) -> None:
    *layers, norm = stages
    for layer, follower, reason, next_reason in zip(layers, stages[1:], reasons[:-1], reasons[1:], strict=True):
        if reason is None:
            vars(layer)["forward"] = _LayerForward(layer, follower if next_reason is None else None)
    if reasons[-1] is None:
        vars(norm)["forward"] = _NormForward(norm)


class _LayerForward(StandIn):
    """`follower`: the stage after a layer, where that takes a pair; `rows`: what runs few rows on a CPU."""

    def __init__(self, layer: Any, follower: nn.Module | None):
        super().__init__(layer)
        self.follower = follower
        self.rows: RowsLayer | None = None

    def __call__(self, states: Any, *args: Any, **kwargs: Any) -> Any:
        mask, cache, rope = (kwargs.get(name) for name in ("attention_mask", CACHE, "position_embeddings"))
        kv = arena_layer(cache, self.module.self_attn.layer_idx) if is_spans(mask) else None
        if kv is not None:
            normed, residual = _normed(self.module.input_layernorm, states)
            x, residual = after_norm(self.module, normed, residual, rope, mask, kv)
            # Hooks get states: those of the layers that a drafter reads.
            is_seen = self.follower is None or self.module._forward_hooks or self.follower._forward_pre_hooks
            return residual + x if is_seen else Pair(x, residual)
        if self.rows is not None and rope is not None and not args and self.rows.takes(states, mask, cache):
            return self.rows(states, rope, mask, cache)
        return self.own(states, *args, **kwargs)


class _NormForward(StandIn):
    """The final norm's."""

    def __call__(self, states: Any, *args: Any, **kwargs: Any) -> Any:
        return _normed(self.module, states)[0] if isinstance(states, Pair) else self.own(states, *args, **kwargs)


def _normed(norm: Any, states: Any) -> tuple[Tensor, Tensor]:
    """Runs a norm on states as fused layers hand them on. Returns the normed states, and the states added up."""
    x, residual = (states.x, states.residual) if isinstance(states, Pair) else (states, None)
    return norm_sum(norm, x, residual)


# -- the trial


@dataclass
class Call:
    """The arguments of one call of a layer, but for the states; and `starts` (B, 1), the slots its cache wrote to."""

    args: tuple
    kwargs: dict[str, Any]
    starts: Tensor


def _tried(target: PreTrainedModel, stages: list[nn.Module]) -> tuple[list[str | None], bool]:
    """The reasons of `why_not_fused`, and whether they are the target's: not where there was no memory. An error that
    does not come again is that of a caller's hook, and is raised: who waits for it is to see it."""
    try:
        return _trial(target, stages), True
    except torch.OutOfMemoryError:
        return ["there was no memory for a trial"] * len(stages), False
    except FAILURES as failure:  # a model that does not hand on what a layer returns, as it is
        try:
            _trial(target, stages)
        except FAILURES:
            return [f"its forward refuses it ({type(failure).__name__}: {str(failure)[:100]})"] * len(stages), True
        raise


@torch.no_grad()
def _trial(target: PreTrainedModel, stages: list[nn.Module]) -> list[str | None]:
    restore(stages)  # a copy made within a context has its stand-ins
    *layers, norm = stages
    reasons = [why_not_fusable(layer) for layer in layers]
    if all(reasons):
        return [*reasons, "it follows none that is fused"]
    try:
        tree = random_tree(target)
        with _recorded_calls(layers) as calls:
            expected = tree_from_arena(target, tree).float()
        reasons = [reason or _why_not_same(target, layer, calls) for layer, reason in zip(layers, reasons, strict=True)]
        reasons.append("it follows none that is fused" if reasons[-1] else _why_not_same_norm(norm))
        _fuse(stages, reasons)
        error = float((tree_from_arena(target, tree).float() - expected).square().mean().sqrt() / expected.std())
    finally:
        restore(stages)
    if not error <= (TOLERANCE_OF_ALL if target.dtype == torch.float32 else TOLERANCE_OF_ALL_LOW):
        return [f"its logits differ ({error:.1g} of their spread)"] * len(stages)
    return reasons


@contextmanager
def _recorded_calls(layers: list[Any]) -> Iterator[dict[nn.Module, Call]]:
    """A context that notes how this thread calls layers with masks of spans."""
    calls, own_thread = dict[nn.Module, Call](), threading.get_ident()

    # Another thread's forward may meet a hook while it is set or removed, and torch then calls it without the keyword
    # arguments.
    def note(layer: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        cache = None if kwargs is None or threading.get_ident() != own_thread else kwargs.get(CACHE)
        if cache is not None and is_spans(kwargs.get("attention_mask")):
            calls[layer] = Call(args[1:], kwargs, cache.layers[0].placement.on_device)

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.register_forward_pre_hook(note, with_kwargs=True))
        yield calls


def _why_not_same(target: PreTrainedModel, layer: Any, calls: dict[nn.Module, Call]) -> str | None:
    """Returns why a layer that has the parts computes something else than `through_layer`; None where states, keys and
    values are the same, on random states in fp32."""
    call = calls.get(layer)
    rope = None if call is None else call.kwargs.get("position_embeddings")
    if call is None or call.args or not isinstance(rope, tuple) or any(part.dim() != 3 for part in rope):
        return "its model calls it in another way"
    others = {name for name, value in call.kwargs.items() if isinstance(value, Tensor)} - USUAL_TENSORS
    if others:
        return f"it is given {min(others)}"
    try:
        return _difference(target.config.get_text_config(decoder=True), layer, call)
    except FAILURES as failure:
        if isinstance(failure, torch.OutOfMemoryError):
            raise
        return f"it cannot be tried ({type(failure).__name__}: {str(failure)[:100]})"


def _difference(config: Any, layer: Any, call: Call) -> str | None:
    layer = _in_fp32(layer, config)
    mask, index = call.kwargs["attention_mask"], layer.self_attn.layer_idx
    rope = tuple(part.float() for part in call.kwargs["position_embeddings"])
    like = next(layer.parameters())
    x = _random((1, mask.shape[2], layer.input_layernorm.weight.shape[0]), like)
    caches = [_cache_in_arena(config, call.starts) for _ in range(2)]
    kwargs = call.kwargs | {CACHE: caches[0], "position_embeddings": rope}
    expected = type(layer).forward(layer, x, **kwargs)
    kv = arena_layer(caches[1], index)
    if kv is None or not isinstance(expected, Tensor):
        return "it does not return states"
    got, residual = through_layer(layer, x, None, rope, mask, kv)
    positions = call.kwargs.get("position_ids")
    if positions is not None:
        far = {CACHE: _cache_in_arena(config, call.starts), "position_ids": positions + FAR}
        if not _are_same(type(layer).forward(layer, x, **kwargs | far), expected):
            return "it depends on positions beside the rotary embedding"
    keys = [cache.layers[index].buffers for cache in caches]
    pairs = [("states", got + residual, expected), *zip(("keys", "values"), keys[1], keys[0], strict=True)]
    return next((f"its {name} differ" for name, ours, own in pairs if not _are_same(ours, own)), None)


def _why_not_same_norm(norm: Any) -> str | None:
    if why_no_norm(norm) or "forward" in vars(norm):
        return "it is not an RMSNorm"
    norm = _in_fp32(norm, None)
    x, residual = (_random((1, PREFIX, norm.weight.shape[0]), norm.weight, seed) for seed in range(2))
    same = _are_same(norm_sum(norm, x, residual)[0], type(norm).forward(norm, x + residual))
    return None if same else "it norms in another way"


def _in_fp32(module: Any, config: Any) -> Any:
    """A copy of a module in fp32, whose config is shared."""
    memo: dict[int, Any] = {id(config): config}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = tensor.detach().float() if tensor.is_floating_point() else tensor
    return copy.deepcopy(module, memo)


def _random(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return (values * SPREAD).to(like.device)


def _cache_in_arena(config: Any, starts: Tensor) -> Cache:
    cache, _ = adopt.slot_cache(config)
    move_into(cache, Arena(ARENA)).on_device = starts
    return cache


def _are_same(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() <= TOLERANCE * expected.abs().max())
