"""Requests that cannot be served, refused before anything is generated, with the reason and what to do instead."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.generation import GenerationMode

from ..cache import adopt as cache
from ..cache.compressed import has_compressed
from ..cache.states import is_of_transformers, is_recurrent
from ..cache_names import CACHE, cache_in
from ..errors import DraftingRefusedError
from ..modeling import Eagle31DrafterModel
from ..targets.layers import decoder_layers, loops_of
from .sequences import Stopping

DIFFERS_BY_STEPS = "so that over several tokens it computes something else than one by one"
SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)


def why_no_target(model_class: type, config: PreTrainedConfig) -> str | None:
    """Returns why no drafter can work for models of a class, whatever is asked of them; None where nothing is known
    against it."""
    name = model_class.__name__
    if config.is_encoder_decoder:
        return f"{name} is an encoder-decoder; expected a decoder-only causal LM"
    if not getattr(model_class, "_supports_default_dynamic_cache", lambda: True)():
        return f"{name} makes a cache of its own kind; expected a target for which generate() makes a DynamicCache"
    text = config.get_text_config(decoder=True)
    if hasattr(config, "vision_config") and hasattr(text, "cross_attention_layers"):
        return f"{name} keeps an image's states among its cached keys; expected a target whose cache holds the text's"
    if loops_of(text)[2] > 1 and getattr(text, "recurrent_kv_cache_mode", None) == "last_loop":
        expected = "expected recurrent_kv_cache_mode='per_loop' in the config"
        return f"{name} keeps the keys of its last loop alone, {DIFFERS_BY_STEPS}; {expected}"
    if config.model_type == "moshi":
        return f"{name} keeps the keys of a window, and masks none among new ones, {DIFFERS_BY_STEPS}; expected another"
    is_stateful = getattr(model_class, "_is_stateful", False)
    own = DynamicCache(config=text) if is_stateful else None
    if own is not None and not is_recurrent(own) and not has_compressed(own):
        return (
            f"{name} keeps a recurrent state that cannot drop rejected tokens; expected an attention-only target or,"
            " from transformers 5.21 on, one whose states are in a DynamicCache"
        )
    return None


def check_request(
    target: PreTrainedModel, drafter: Eagle31DrafterModel, config: GenerationConfig, mode: GenerationMode
) -> None:
    """Raises ValueError where drafter and target do not fit, or the generation config asks for what is not
    supported."""
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
    check_rules(rules)
    layers = decoder_layers(target)
    seeing = f"{type(target).__name__} is an encoder, whose tokens see later ones"
    check_rules([(not _is_of_encoder(layers[0]), f"{seeing}; expected a decoder: load it with is_decoder=True")])
    drafter.load_target_embeddings(target)
    drafter.config.resolve_layer_ids(len(layers))


def _is_of_encoder(layer: nn.Module) -> bool:
    """Returns whether a layer attends to later tokens, as BERT's do unless loaded with `is_decoder=True`."""
    return any(getattr(module, "is_decoder", None) is False for module in layer.modules())


def check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any], synced_gpus: bool) -> None:
    """Raises ValueError for an empty prompt, a prompt without token ids, or a cache that cannot drop tokens."""
    past_key_values = cache_in(model_kwargs)
    kind = type(past_key_values).__name__
    rules = (
        (
            model_kwargs.get("inputs_embeds") is None,
            "got inputs_embeds; expected input_ids, since the drafter reads the tokens themselves",
        ),
        (input_ids.shape[1] > 0, "the prompt is empty; expected at least one token, e.g. the BOS token"),
        (
            not synced_gpus,
            "synced_gpus is set (transformers does where ZeRO-3 or FSDP shards the target); expected False: use a"
            " device_map to split the target",
        ),
        (
            not isinstance(past_key_values, QuantizedCache),
            f"{CACHE} is a {kind}: a quantized cache cannot drop rejected tokens (they are rounded together"
            " with accepted ones); pass a DynamicCache or no cache",
        ),
        (isinstance(past_key_values, Cache), f"{CACHE} is {kind}; expected a transformers Cache"),
        (
            not isinstance(past_key_values, StaticCache)
            or (cache.is_adoptable(past_key_values) and not is_recurrent(past_key_values)),
            f"{CACHE} is a StaticCache that is offloaded or has layers that are not attention's; expected a"
            " plain StaticCache, a DynamicCache or none",
        ),
        (
            not (isinstance(past_key_values, Cache) and is_recurrent(past_key_values))
            or (is_of_transformers(past_key_values) and not past_key_values.offloading),
            f"{CACHE} is a {kind} with recurrent states, which are not written as transformers' own classes write them,"
            " or are offloaded; expected a DynamicCache of transformers itself, not offloaded, nor copied while a call"
            " with a drafter ran, or none",
        ),
        (
            not (isinstance(past_key_values, Cache) and has_compressed(past_key_values) and past_key_values.offloading),
            f"{CACHE} is offloaded and compresses keys; expected one that stays on the target's device (nor"
            " cache_implementation='offloaded')",
        ),
    )
    check_rules(rules)


def check_rules(rules: Iterable[tuple[bool, str | None]]) -> None:
    """Raises ValueError with the message of the first rule that does not hold."""
    for holds, message in rules:
        if not holds:
            raise DraftingRefusedError(f"EAGLE drafting: {message}.")


def check_room(past_key_values: Cache, num_before: int, prompt_length: int, stopping: Stopping) -> None:
    """Raises ValueError where a static cache has fewer slots than the text is sure to need. The last token of a text is
    never written.

    `past_key_values`: within `cache.slots`; `num_before`: tokens it holds before the prompt.
    """
    capacity = cache.capacity(past_key_values)
    longest = stopping.max_length - 1 if stopping.is_length_alone else 0
    needed = num_before + max(prompt_length, longest)
    if capacity is not None and needed > capacity:
        raise DraftingRefusedError(
            f"EAGLE drafting: {CACHE} is a static cache of {capacity} tokens; expected {needed} or more, for"
            f" {num_before + prompt_length} of the prompt{' and all that follow' if longest else ''}: make it larger"
            " (max_cache_len), or ask for fewer tokens (max_new_tokens)."
        )
