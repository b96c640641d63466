"""The shape of a new drafter, read from the config of its target."""

from typing import Any

from ..configuration import default_layer_ids

# fields a drafter takes from its target's config under the same name, where it has them
SAME = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def drafter_fields(config: Any) -> dict[str, Any]:
    """Returns the fields of an `Eagle31Config` that follow from a target's text config: sizes, rope, layer ids."""
    values = {name: of_first_layer(config, name) for name in SAME}
    values |= {name: getattr(config, name, None) for name in SPECIAL_IDS}
    values = {name: value for name, value in values.items() if value is not None}
    return values | {
        "hidden_size": config.hidden_size,
        "aux_hidden_state_layer_ids": layer_ids_for(config),
        "rope_parameters": rope_of(config),
    }


def layer_ids_for(config: Any) -> list[int]:
    """Returns the states a new drafter reads: `[2, L // 2, L - 3]` of L layers, or an early, a middle and the last one
    where that is too deep."""
    num_layers = config.num_hidden_layers
    try:
        return default_layer_ids(num_layers)
    except ValueError:
        return sorted({0 if num_layers < 3 else 1, num_layers // 2, num_layers})


def of_first_layer(config: Any, name: str) -> Any:
    """Returns a field of a config, None where it has none; where every layer has a value of its own, as in Gemma 3n and
    4, that of the first."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # how a config says that its layers differ in it
        value = getattr(config.per_layer_config[0], name)
    return (value[0] if isinstance(value, list | tuple) else value) or None  # GLM5-Next says 0 for what it derives


def rope_of(config: Any) -> dict[str, Any] | None:
    """Returns the target's rope parameters; where its layer types have some each, those of full attention."""
    rope = getattr(config, "rope_parameters", None)
    if rope and "rope_type" not in rope:
        rope = rope.get("full_attention") or next(iter(rope.values()))
    return dict(rope) if rope else None
