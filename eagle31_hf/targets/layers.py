"""Captures the target states that a drafter reads, by forward hooks on exactly the layers needed.

Hooks leave the user's own `output_hidden_states` alone and mean the same in every version of transformers.
B batch, T tokens, n states read of each token, ht target width, V target vocabulary.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ..errors import DraftingRefusedError


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, found by their number. Raises ValueError where there is no such list."""
    num_layers = num_layers_of(target.config.get_text_config(decoder=True))
    for module in decoder_of(target).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ValueError(
        f"{type(target).__name__} has no list of {num_layers} decoder layers to capture states from; expected a"
        " decoder-only causal LM."
    )


def num_layers_of(config: PreTrainedConfig) -> int:
    """Returns the number of decoder layers, by a target's text config. LongCat's attend twice each, and its
    `num_hidden_layers` counts both; its class has their number besides."""
    return config.num_layers if hasattr(type(config), "num_layers") else config.num_hidden_layers


def decoder_of(target: PreTrainedModel) -> nn.Module:
    """The part of a target that runs its layers."""
    found = target.get_decoder() if hasattr(target, "get_decoder") else target
    is_head = found is target.get_output_embeddings()  # as ModernBERT calls its output layer
    return target.base_model if is_head else found


# Python modules whose hooks change nothing in a forward: our own, which act in those over their own call's cache, and
# the one of transformers whose hooks stay on every layer once hidden states or attentions were asked for, and do
# nothing in calls that ask for none.
OF_HARMLESS_HOOKS = (__package__, "transformers.utils.output_capturing")
# Packages whose hooks do the same whatever the rows of a module's input stand for: where a target has recurrent states,
# the rows are the paths of a tree.
OF_HOOKS_FOR_ANY_ROWS = ("eagle31_hf", "transformers")


def has_hooks(module: nn.Module, of_harmless: tuple[str, ...] = OF_HARMLESS_HOOKS) -> bool:
    """Returns whether a module has hooks that were defined elsewhere than in `of_harmless`, which may do anything."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    functions = (hook.func if isinstance(hook, partial) else hook for hook in hooks)
    return any(not (getattr(function, "__module__", None) or "").startswith(of_harmless) for function in functions)


def has_global_hooks() -> bool:
    """Returns whether there are hooks of all modules."""
    return bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)


class CapturedStates:
    """The states of one generate() call, in ascending layer order; filled by hooks, emptied by `take` and `pieces`.

    The hooks also see forwards that are not the call's own: those of other threads with the same target, and those that
    the user's streamers, logits processors, stopping criteria and hooks make during the call. The call's own forwards
    are those of its thread that are given its cache, `past_key_values`, or, where that is None, all of its thread.
    `config`: the target's, of its text. `on_forward` is called after each of the call's own forwards.

    Of a layer that a looped transformer runs several times in a forward the last states are kept.
    """

    def __init__(self, num_states: int, past_key_values: Cache | None = None, config: PreTrainedConfig | None = None):
        self._width = getattr(config, "hidden_size", None)  # ht
        self._stream = getattr(config, "altup_active_idx", None)  # Gemma 3n's: the state that layers work on
        # Hyper-connections: how many states of a token layers pass on, as (B, T, streams, ht) or (B, T, streams*ht).
        self._num_streams = getattr(config, "hc_mult", None) or getattr(config, "hc_count", None)
        self._chunks: list[list[Tensor]] = [[] for _ in range(num_states)]
        self._thread, self._past_key_values = threading.get_ident(), past_key_values
        self._is_looped = config is not None and loops_of(config)[2] > 1
        # of each forward under way, the innermost last: None, or, of our own, how many chunks each layer had before
        self._forwards: list[list[int] | None] = []
        self.on_forward: Callable[[], None] | None = None

    def begin(self, arguments: Iterable[object]) -> bool:
        """A forward of the decoder begins. Returns whether it is the call's own."""
        if threading.get_ident() != self._thread:
            return False
        is_ours = self._past_key_values is None or any(argument is self._past_key_values for argument in arguments)
        self._forwards.append([len(chunks) for chunks in self._chunks] if is_ours else None)
        return is_ours

    def end(self, has_failed: bool) -> None:
        """The innermost forward under way ends."""
        if threading.get_ident() == self._thread:
            is_ours = self._forwards.pop() is not None
            if is_ours and not has_failed and self.on_forward is not None:
                self.on_forward()

    def append(self, index: int, states: Tensor) -> None:
        num_before = self._forwards[-1] if self._forwards else None
        is_ours = self._past_key_values is None or num_before is not None
        if is_ours and threading.get_ident() == self._thread:
            if self._stream is not None and states.dim() == 4:
                states = states[self._stream]
            if self._num_streams is not None and states.shape[2:].numel() == self._num_streams * (self._width or 0):
                states = states.flatten(2).unflatten(2, (self._num_streams, -1)).mean(2)
            if states.dim() != 3 or self._width not in (None, states.shape[2]):
                raise DraftingRefusedError(
                    f"EAGLE drafting: the target's layers pass states of shape {tuple(states.shape)} on; expected"
                    f" (batch, tokens, {self._width or 'width'}). It does not work with this architecture."
                )
            if self._is_looped and num_before is not None:
                del self._chunks[index][num_before[index] :]  # of an earlier run in this forward
            self._chunks[index].append(states)

    def take(self) -> Tensor:
        """Everything captured since the last call, concatenated: (B, T, n*ht) on the device of the last layer read."""
        layers = self._by_layer()
        return torch.cat([states.to(layers[-1].device) for states in layers], dim=-1)

    def drop(self) -> None:
        """Drops everything captured since the last call of `take`."""
        for chunks in self._chunks:
            chunks.clear()

    def pieces(self, size: int) -> Iterator[Tensor]:
        """Yields what `take` returns, in pieces of at most `size` tokens, so that no copy of all of it is made."""
        layers = self._by_layer()
        for first in range(0, layers[0].shape[1], size):
            yield torch.cat([states[:, first : first + size].to(layers[-1].device) for states in layers], dim=-1)

    def _by_layer(self) -> list[Tensor]:
        """The states (B, T, ht) that each layer's hook captured since the last call."""
        if not all(self._chunks):
            raise DraftingRefusedError(
                "EAGLE drafting: the target skipped a layer that the drafter reads (as those for images, without one);"
                " expected every layer to run. Name others: aux_hidden_state_layer_ids."
            )
        layers = [chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1) for chunks in self._chunks]
        self.drop()
        lengths = {states.shape[1] for states in layers}
        if len(lengths) > 1:
            raise DraftingRefusedError(
                f"EAGLE drafting: the target ran the layers the drafter reads over {min(lengths)} and over"
                f" {max(lengths)} tokens (layers that share their keys are skipped in a prompt); expected all. It does"
                " not work with this architecture."
            )
        return layers


def are_streams_first(target: PreTrainedModel) -> bool:
    """Returns whether layers pass several states of a token on as (streams, B, T, ht), as Gemma 3n's do."""
    return hasattr(target.config.get_text_config(decoder=True), "altup_active_idx")


def loops_of(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Returns (first, end, times) of a looped transformer, by a target's text config: a forward runs the layers `first`
    to `end` - 1 one after the other, then all of them again, `times` times in all. (0, 0, 1) of other targets."""
    if getattr(config, "loop_num_passes", None):  # Inkling 2's
        return config.loop_layer_index_start, config.loop_layer_index_end, config.loop_num_passes
    if getattr(config, "n_recurrent_loops", None):  # Dory's
        first = config.n_input_layers
        return first, first + config.n_recurrent_layers, config.n_recurrent_loops
    return 0, 0, 1


def add_loops(cache: Cache, config: PreTrainedConfig) -> None:
    """Adds to a cache that has one layer for each of a looped transformer's those in which their later runs keep keys,
    run by run. The target's first forward would add copies itself, but within a call of ours the cache's layers are
    slot layers, which it must not copy. Changes nothing of a cache that has them, or has no layers yet."""
    first, end, times = loops_of(config)
    if times > 1 and len(cache.layers) == config.num_hidden_layers:
        cache.layers += [copy.deepcopy(layer) for layer in cache.layers[first:end] * (times - 1)]


def layers_read(target: PreTrainedModel) -> list[int]:
    """Returns which of a cache's layers each run of a layer reads, in the order of a forward; an empty list where run i
    reads layer i. Later runs of a looped transformer read layers that `add_loops` adds; the last layers of Gemma 3n and
    4, which keep no keys, those of the last layer of their kind that does."""
    config = target.config.get_text_config(decoder=True)
    first, end, times = loops_of(config)
    if times > 1:
        later = range(config.num_hidden_layers, config.num_hidden_layers + (times - 1) * (end - first))
        return [*range(end), *later, *range(end, config.num_hidden_layers)]
    count = getattr(config, "num_kv_shared_layers", None) or 0
    kinds = config.layer_types if count else []
    own = range(len(kinds) - count)
    return [*own, *(max(i for i in own if kinds[i] == kind) for kind in kinds[len(own) :])]


@contextmanager
def capture_states(
    target: PreTrainedModel, layer_ids: list[int], past_key_values: Cache | None = None
) -> Iterator[CapturedStates]:
    """A context in which forwards of this thread (with `past_key_values`: those that write to that cache) add their
    states at `layer_ids` to the yielded `CapturedStates`."""
    layers, config = decoder_layers(target), target.config.get_text_config(decoder=True)
    captured = CapturedStates(len(layer_ids), past_key_values, config)
    with ExitStack() as hooks:
        if past_key_values is not None or loops_of(config)[2] > 1:
            num_own_keys = len(layers) - (getattr(config, "num_kv_shared_layers", None) or 0)
            for hook in _forward_hooks(decoder_of(target), captured, max(layer_ids) > num_own_keys):
                hooks.enter_context(hook)
        for index, layer_id in enumerate(layer_ids):
            hooks.enter_context(_hook(layers, layer_id, partial(captured.append, index)))
        yield captured


def _forward_hooks(decoder: nn.Module, captured: CapturedStates, reads_shared: bool) -> list:
    """Hooks that tell `captured` when a forward of the decoder begins and when it ends, by an error, too.
    `reads_shared`: states are read of layers that take their keys from others; Gemma 4 would run them over those tokens
    alone whose logits are asked for."""

    def before(module, args, kwargs=None):
        # another thread's forward may meet a hook while it is set or removed: torch then gives it no keyword arguments
        if kwargs is None:
            return None
        is_ours = captured.begin((*args, *kwargs.values()))
        is_to_change = is_ours and reads_shared and "logits_to_keep" in kwargs
        return (args, kwargs | {"logits_to_keep": 0}) if is_to_change else None

    def after(module, args, output):
        captured.end(has_failed=output is None)  # torch passes None where the forward raised

    return [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after, always_call=True),
    ]


def _hook(layers: nn.ModuleList, layer_id: int, append: Callable[[Tensor], None]):
    """Has `append` called with the state at a layer: 0 is the input of the first layer, i the output of the i-th
    (counted from 1), before any final norm; of one that is run several times, each time."""
    if layer_id == 0:

        def before(module, args, kwargs=None):
            if args or kwargs:
                append(args[0] if args else kwargs["hidden_states"])

        return layers[0].register_forward_pre_hook(before, with_kwargs=True)

    def after(module, args, output):
        append(output[0] if isinstance(output, tuple | list) else output)

    return layers[layer_id - 1].register_forward_hook(after)


@contextmanager
def rounded_anew(target: PreTrainedModel) -> Iterator[None]:
    """A context in which forwards of this thread round otherwise: what each layer and each of its innermost modules
    returns is off by up to half a unit in the last place, at random. How far the logits are off then is how far another
    order of the same sums may carry them."""
    thread = threading.get_ident()

    def after(seed, module, args, output):
        values = output[0] if isinstance(output, tuple | list) else output
        if threading.get_ident() != thread or not isinstance(values, Tensor) or not values.is_floating_point():
            return None
        generator = torch.Generator(values.device).manual_seed(seed)  # draws nothing from the caller's own
        units = torch.rand(values.shape, generator=generator, device=values.device) - 0.5
        rounded = (values.float() * (1 + torch.finfo(values.dtype).eps * units)).to(values.dtype)
        if hasattr(output, "_fields"):  # a named tuple
            return type(output)(rounded, *output[1:])
        return type(output)((rounded, *output[1:])) if isinstance(output, tuple | list) else rounded

    layers = decoder_layers(target)
    rounding = [module for module in layers.modules() if module in [*layers] or not [*module.children()]]
    with ExitStack() as hooks:
        for seed, module in enumerate(rounding):
            hooks.enter_context(module.register_forward_hook(partial(after, seed)))
        yield


@torch.no_grad()
def target_states(target: PreTrainedModel, input_ids: Tensor, layer_ids: list[int]) -> tuple[Tensor, Tensor]:
    """One forward of the target: (B, T) -> states (B, T, n*ht) and logits (B, T, V)."""
    with capture_states(target, layer_ids) as captured:
        logits = target(input_ids=input_ids, use_cache=False).logits
    return captured.take(), logits
