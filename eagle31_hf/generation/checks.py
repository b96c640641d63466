"""What this library cannot do yet, refused before anything is generated, with the reason and what to do instead."""

from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.generation import GenerationMode

from ..checkpoints.knobs import AUTO, KNOBS, LEAST, check_knob
from ..features import decoder_layers
from ..modeling import Eagle31DrafterModel
from . import cache

# What transformers fills in where nobody set a knob; such a value says nothing about the caller's wish.
OWN_DEFAULTS = {
    "num_assistant_tokens": AUTO,
    "assistant_confidence_threshold": 0.0,
    "draft_tree_top_k": AUTO,
    "draft_tree_total_tokens": AUTO,
}
STOCK_DEFAULTS = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}


@dataclass(frozen=True)
class Knobs:
    """`depth` None: auto. `top_k`, `total_tokens` None: what is usual for the depth."""

    depth: int | None
    threshold: float
    top_k: int | None
    total_tokens: int | None

    @property
    def is_auto(self) -> bool:
        return self.depth is None

    @property
    def may_draw_trees(self) -> bool:
        return self.is_auto if self.top_k is None else self.top_k > 1


SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)


def resolve_knobs(drafter: Eagle31DrafterModel, generation_config: GenerationConfig, given: dict[str, Any]) -> Knobs:
    """The value of every knob: what `generate(...)` was given, else its generation config's, else the drafter's.

    Raises ValueError for a value that cannot work.
    """
    values: dict[str, Any] = {}
    for name in KNOBS:
        configured = getattr(generation_config, name, None)
        configured = None if _is(configured, STOCK_DEFAULTS.get(name)) else configured
        wishes = {
            "": given.get(name),
            ", in the generation config": configured,
            ", in the drafter's generation_config": getattr(drafter.generation_config, name, None),
            "the defaults": OWN_DEFAULTS[name],
        }
        origin, values[name] = next((origin, wish) for origin, wish in wishes.items() if wish is not None)
        check_knob(name, values[name], origin=origin)
    depth, top_k, total = (None if values[name] == AUTO else int(values[name]) for name in LEAST)
    return Knobs(depth, float(values["assistant_confidence_threshold"]), top_k, total)


def _is(value: Any, stock: Any) -> bool:
    """Whether a value is what transformers fills in. An array, say, would compare as an array."""
    return isinstance(value, Real) and value == stock


def why_no_target(model_class: type, config: PreTrainedConfig) -> str | None:
    """Why no drafter can work for models of a class, whatever is asked of them; None where nothing is known against it."""
    name = model_class.__name__
    if config.is_encoder_decoder:
        return f"{name} is an encoder-decoder; expected a decoder-only causal LM"
    if getattr(model_class, "_is_stateful", False):
        return f"{name} keeps a recurrent state that cannot drop rejected tokens; expected an attention-only target"
    return None


def check_request(
    target: PreTrainedModel, drafter: Eagle31DrafterModel, config: GenerationConfig, mode: GenerationMode
) -> None:
    """Raises ValueError where drafter and target do not fit, or the generation config asks for what is not supported."""
    caches = (None, "dynamic", "static", "offloaded")
    refusal = why_no_target(type(target), target.config)
    rules = (
        (refusal is None, refusal),
        (
            config.num_beams == 1,
            f"num_beams is {config.num_beams}; expected 1: use greedy search or sampling, or drop assistant_model",
        ),
        (mode in SUPPORTED_MODES, f"generation mode is {mode.value}; expected greedy search or sampling"),
        (
            config.cache_implementation in caches,
            (
                f"cache_implementation is {config.cache_implementation!r}; expected one of {caches}: rejected tokens"
                " must be dropped"
            ),
        ),
        (config.use_cache, "use_cache is False; expected True"),
        (config.assistant_ensemble_weight is None, "assistant_ensemble_weight makes the output lossy; expected None"),
    )
    for holds, message in rules:
        if not holds:
            raise ValueError(f"EAGLE drafting: {message}.")
    drafter.load_target_embeddings(target)
    drafter.config.resolve_layer_ids(len(decoder_layers(target)))


def check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any], synced_gpus: bool) -> None:
    """Raises ValueError for an empty prompt, a prompt without token ids, or a cache that cannot drop tokens."""
    past_key_values = model_kwargs.get("past_key_values")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "EAGLE drafting: got inputs_embeds; expected input_ids, since the drafter reads the tokens themselves."
        )
    if input_ids.shape[1] == 0:
        raise ValueError("EAGLE drafting: the prompt is empty; expected at least one token, e.g. the BOS token.")
    if synced_gpus:
        raise ValueError(
            "EAGLE drafting: synced_gpus is set (transformers does where ZeRO-3 or FSDP shards the target); expected"
            " False: use a device_map to split the target."
        )
    for kind, reason in cache.UNSUPPORTED.items():
        if isinstance(past_key_values, kind):
            raise ValueError(f"EAGLE drafting: past_key_values is a {type(past_key_values).__name__}: {reason}.")
    if not isinstance(past_key_values, Cache):
        raise ValueError(
            f"EAGLE drafting: past_key_values is {type(past_key_values).__name__}; expected a transformers Cache."
        )
    if isinstance(past_key_values, StaticCache) and not cache.is_adoptable(past_key_values):
        raise ValueError(
            "EAGLE drafting: past_key_values is a StaticCache that is offloaded or has layers that are not attention's;"
            " expected a plain StaticCache, a DynamicCache or none."
        )
