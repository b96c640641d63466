"""The conditions for captured rounds: a call that does not meet them is decoded eagerly, and told why."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import EtaLogitsWarper

from ...cache.arena import why_not_in_arena
from ...cache_names import NAMES
from ...kernels.tree_attention import MOST_NEW
from ...targets.layers import has_global_hooks, has_hooks
from ...targets.masks import windows_of
from ...targets.probe import why_no_spans
from ...targets.tree_attention import STANDS_IN_FOR, own_attention
from .. import processors
from ..planning.buckets import plans_of
from ..planning.plan import UNLIMITED, FixedPlanner
from .carry import most_tokens
from .drafting import MOST_CANDIDATES, can_fit
from .kept import why_no_room

USUAL_ARGUMENTS = {"attention_mask", "cache_position", "logits_to_keep", "position_ids", "use_cache", *NAMES}
ROPES_THAT_BRANCH = ("dynamic", "longrope")  # on how long the text is


def why_not_captured(request: Any, runner: Any, mode: Any) -> str | None:
    """Returns why a call's rounds run eagerly; None where they are captured."""
    return next(chain(_of_call(request, runner, mode), _of_models(request, runner, mode)), None)


def _of_call(request: Any, runner: Any, mode: Any) -> Iterator[str]:
    """The reasons that lie in what is asked for, and in the inputs."""
    settings, config = request.settings, request.generation_config
    if not request.may_capture:
        yield "disable_compile is set"
    if not mode.may_draft:
        yield "nothing is drafted"
    if mode.is_lock_step:
        yield "the batch is decoded in lock-step"
    if settings.threshold and not settings.is_auto:
        yield "assistant_confidence_threshold has the host look at every draft"
    if runner.mixers.is_needed and mode.draws_trees and not settings.is_auto:
        yield "recurrent states are kept along chains alone"
    if settings.lookup:
        yield "prompt_lookup_num_tokens has the host look at the text"
    if torch.is_autocast_enabled(request.input_ids.device.type):
        yield "autocast is on"  # the casts of weights that it keeps are gone with it
    for each in request.logits_processor:
        if type(each) not in processors.POINTWISE:
            yield f"{type(each).__name__} reads the text"
    if any(isinstance(each, EtaLogitsWarper) for each in request.logits_processor):
        yield "EtaLogitsWarper reads its scores on the host"
    for name in ("scores", "logits", "hidden_states"):
        if config.return_dict_in_generate and getattr(config, f"output_{name}"):
            yield f"output_{name} is asked for"
    given = {name for name, value in request.model_kwargs.items() if isinstance(value, torch.Tensor) or value}
    if given - USUAL_ARGUMENTS:
        yield f"the target was given {', '.join(sorted(given - USUAL_ARGUMENTS))}"
    if not runner.passes_positions(request.input_ids):
        yield "the target is not told positions"
    if runner.seen is not None:
        padding = torch.tensor(runner.num_padding, device=runner.seen.device)[:, None]
        if bool((runner.seen != (torch.arange(runner.seen.shape[1], device=padding.device) >= padding)).any()):
            yield "the attention mask leaves out more than left padding"
    if max(runner.num_padding) >= request.input_ids.shape[1]:
        yield "a prompt is padding alone"
    if runner.num_before:
        yield "the cache holds tokens that the inputs lack"
    why_not = why_not_in_arena(runner.past_key_values, config.max_length)
    if why_not is not None:
        yield why_not


def _of_models(request: Any, runner: Any, mode: Any) -> Iterator[str]:
    """The reasons that lie in the models, and in the sizes of drafts."""
    target, drafter = request.target, request.drafter
    settings = request.settings
    for model, name in ((target, "target"), (drafter, "drafter")):
        reason = _why_not_by_model(model)
        if reason is not None:
            yield f"the {name} {reason}"
    if drafter.config.is_parallel:
        yield "the drafter drafts all levels at once (P-EAGLE)"
    places = {weight.device for model in (target, drafter) for weight in model.parameters()}
    if places != {request.input_ids.device}:
        on = ", ".join(sorted(map(str, places)))
        yield f"the models' weights are on {on}, the inputs on {request.input_ids.device}"
    reason = why_no_spans(target) or why_no_room(request, runner)
    if reason is not None:
        yield reason
    width = most_tokens(settings)
    fixed = None if settings.is_auto else FixedPlanner.of(settings, mode.draws_trees)
    plans = [fixed.plan(width - 1, UNLIMITED, [], 0)] if fixed else plans_of(settings, mode.draws_trees)
    if not all(map(can_fit, plans)):
        deepest = f"{MOST_NEW - 2} levels of a chain, fewer of a tree, {MOST_CANDIDATES // 2} drafts after a token"
        yield f"drafts are deeper or wider than a captured round takes ({deepest})"
    windows = [*windows_of(target, runner.mixers.is_needed).values()]
    windows += [drafter.config.sliding_window] if "sliding_attention" in drafter.config.layer_types else []
    if any(window is not None and window <= width for window in windows):
        yield f"a window of {min(filter(None, windows))} tokens is no longer than a draft is deep"


def _why_not_by_model(model: PreTrainedModel) -> str | None:
    implementation = own_attention(model)
    if has_global_hooks():
        return "has hooks of all modules, which a replay would not run"
    if model.training:
        return "is in training mode"
    if implementation not in STANDS_IN_FOR:
        return f"attends by {implementation}"
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            return "is offloaded, or split over devices"
        if has_hooks(module):
            return f"has hooks, on {type(module).__name__}, which a replay would not run"
        # bitsandbytes' `int8_vectorwise_quant` asks the host whether any activation is above the threshold, which a
        # capture forbids
        if type(module).__name__ == "Linear8bitLt" and getattr(getattr(module, "state", None), "threshold", 0.0) > 0.0:
            return "is in 8 bits by LLM.int8, which has the host look for outliers (llm_int8_threshold=0 does not)"
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    branches = kinds.intersection(ROPES_THAT_BRANCH)
    return "has a rotary embedding that branches on the length of the text" if branches else None
