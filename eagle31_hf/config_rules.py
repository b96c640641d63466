"""The rules that a drafter's config has to keep: bounds on its sizes, and fields that do not contradict each other."""

from collections.abc import Iterable
from math import isfinite
from typing import Any

LAYER_TYPES = ("full_attention", "sliding_attention")
# Bounds of what is built from a config before a tensor has shown its size: a drafter has one layer or two, the largest
# vocabularies have a sixtieth of MAX_SIZE, and no rope has ten parameters.
MAX_LAYERS = 256
MAX_SIZE = 2**24
MAX_LENGTH = 2**31
MAX_ROPE_PARAMETERS = 32
BOUNDS = {"num_hidden_layers": MAX_LAYERS, "sliding_window": MAX_LENGTH, "max_position_embeddings": MAX_LENGTH}
FLOATS = ("attention_dropout", "rms_norm_eps", "initializer_range", "logit_scale")
# Sizes that have to be above 0: of every drafter, of one with grouped-query attention, and of one with MLA.
SIZES = (
    "hidden_size", "target_hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
GQA_SIZES = ("head_dim",)
MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def check_bounds(config: Any, names: Iterable[str]) -> None:
    """Raises ValueError for a field, one of `names`, of a size that no drafter has.

    Called before anything is built that is as large as one of them says.
    """
    for name in names:
        value, bound = getattr(config, name), BOUNDS.get(name, MAX_SIZE)
        if type(value) is int and not name.endswith("_token_id") and value > bound:
            raise ValueError(f"Eagle31Config: {name} is {value}; expected at most {bound}.")
    rope = config.rope_parameters
    if isinstance(rope, dict) and len(rope) > MAX_ROPE_PARAMETERS:
        raise ValueError(
            f"Eagle31Config: rope_parameters are {len(rope)}; expected a rope of transformers, at most"
            f" {MAX_ROPE_PARAMETERS}."
        )


def check_rules(config: Any) -> None:
    """Raises ValueError with the message of the first of RULES that the config breaks."""
    for rule in RULES:
        message = rule(config)
        if message is not None:
            raise ValueError(f"Eagle31Config: {message}.")


def _sizes(config: Any) -> str | None:
    names = [*SIZES, *(GQA_SIZES if config.kv_lora_rank is None else MLA_SIZES)]
    if config.kv_lora_rank is not None and config.q_lora_rank is not None:
        names.append("q_lora_rank")
    wrong = [f"{name} is {getattr(config, name)}" for name in names if (getattr(config, name) or 0) <= 0]
    return f"{', '.join(wrong)}; expected sizes above 0" if wrong else None


def _latent_attention(config: Any) -> str | None:
    if config.kv_lora_rank is None or not (config.qk_norm or (config.qk_rope_head_dim or 1) % 2):
        return None
    return (
        f"MLA layers (kv_lora_rank={config.kv_lora_rank}) with qk_norm={config.qk_norm},"
        f" qk_rope_head_dim={config.qk_rope_head_dim}; expected no qk_norm and an even qk_rope_head_dim"
    )


def _finite_numbers(config: Any) -> str | None:
    if all(isfinite(getattr(config, name)) for name in FLOATS):
        return None
    return f"{', '.join(f'{name} is {getattr(config, name)}' for name in FLOATS)}; expected finite numbers"


def _rotary_share(config: Any) -> str | None:
    factor = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    if type(factor) in (int, float) and 0 < factor <= 1:
        return None
    return (
        f"rope_parameters are {str(config.rope_parameters)[:200]}; expected a partial_rotary_factor above 0 and at"
        " most 1"
    )


def _layers(config: Any) -> str | None:
    count = config.num_hidden_layers
    return None if count >= 1 else f"num_hidden_layers is {count}; expected at least 1"


def _draft_vocabulary(config: Any) -> str | None:
    if 0 < config.draft_vocab_size <= config.vocab_size:
        return None
    return f"draft_vocab_size is {config.draft_vocab_size}; expected 1 to vocab_size ({config.vocab_size})"


def _heads(config: Any) -> str | None:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % max(1, groups) == 0:
        return None
    return f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({groups})"


def _norms(config: Any) -> str | None:
    if not (config.fc_norm and config.norm_before_fc):
        return None
    return (
        "fc_norm and norm_before_fc are both true; expected at most one: fc_norm norms each captured state,"
        " norm_before_fc their concatenation"
    )


def _layer_ids(config: Any) -> str | None:
    ids = config.aux_hidden_state_layer_ids
    if ids is None:
        return None
    is_ascending = len(ids) > 0 and min(ids) >= 0 and sorted(set(ids)) == list(ids)
    if is_ascending and bool not in map(type, ids):
        return None
    return f"aux_hidden_state_layer_ids is {str(ids)[:200]}; expected distinct ids >= 0 in ascending order"


def _layer_types(config: Any) -> str | None:
    if len(config.layer_types) == config.num_hidden_layers and set(config.layer_types) <= set(LAYER_TYPES):
        return None
    return f"layer_types is {str(config.layer_types)[:200]}; expected {config.num_hidden_layers} of {LAYER_TYPES}"


def _window(config: Any) -> str | None:
    if "sliding_attention" not in config.layer_types or (config.sliding_window or 0) > 0:
        return None
    return f"layer_types asks for sliding attention but sliding_window is {config.sliding_window}; expected tokens > 0"


def _shared_embeddings(config: Any) -> str | None:
    if not config.share_target_embeddings or config.hidden_size == config.target_hidden_size:
        return None
    return (
        f"share_target_embeddings needs hidden_size ({config.hidden_size}) == target_hidden_size"
        f" ({config.target_hidden_size}); give the drafter its own table (share_target_embeddings=False)"
    )


def _shared_head(config: Any) -> str | None:
    has_equal_widths = config.hidden_size == config.target_hidden_size
    if not config.share_target_head or (has_equal_widths and config.draft_vocab_size == config.vocab_size):
        return None
    return (
        f"share_target_head needs equal widths ({config.hidden_size}, {config.target_hidden_size}) and a full draft"
        f" vocabulary ({config.draft_vocab_size} of {config.vocab_size}); give the drafter its own head"
        " (share_target_head=False)"
    )


# A rule returns what is wrong with a config, or None. The first one that is broken is reported.
RULES = (
    _sizes,
    _latent_attention,
    _finite_numbers,
    _rotary_share,
    _layers,
    _draft_vocabulary,
    _heads,
    _norms,
    _layer_ids,
    _layer_types,
    _window,
    _shared_embeddings,
    _shared_head,
)
