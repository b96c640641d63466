"""The rules that a drafter's config has to keep: bounds on its sizes, and fields that do not contradict each other."""

from collections.abc import Iterable, Iterator
from itertools import chain
from math import isfinite
from typing import Any

LAYER_TYPES = ("full_attention", "sliding_attention")
# Bounds of what is built from a config before a tensor has shown its size: a drafter has one layer or two, the largest
# vocabularies have a sixtieth of MAX_SIZE, and no rope has ten parameters.
MAX_LAYERS = 256
MAX_SIZE = 2**24
MAX_LENGTH = 2**31
MAX_HEAD_DIM = 2**16
MAX_ROPE_PARAMETERS = 32
BOUNDS = {"num_hidden_layers": MAX_LAYERS, "sliding_window": MAX_LENGTH, "max_position_embeddings": MAX_LENGTH}
FLOATS = ("attention_dropout", "rms_norm_eps", "initializer_range", "logit_scale")
# Sizes that have to be above 0: of every drafter, and of one with MLA.
SIZES = (
    "hidden_size", "target_hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
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


def is_mla(config: Any) -> bool:
    """Returns whether layers are of multi-head latent attention (MLA), which caches one latent for keys and values."""
    return config.kv_lora_rank is not None


def check_rules(config: Any) -> None:
    """Raises ValueError with the first thing that is wrong with a config."""
    message = next(chain(_wrong_numbers(config), _contradictions(config)), None)
    if message is not None:
        raise ValueError(f"Eagle31Config: {message}.")


def _wrong_numbers(config: Any) -> Iterator[str]:
    """Yields what is wrong with single fields. A check may rely on those before it: nothing is asked once one fails."""
    names = [*SIZES, *(MLA_SIZES if is_mla(config) else ("head_dim",))]
    if is_mla(config) and config.q_lora_rank is not None:
        names.append("q_lora_rank")
    wrong = [f"{name} is {getattr(config, name)}" for name in names if (getattr(config, name) or 0) <= 0]
    if wrong:
        yield f"{', '.join(wrong)}; expected sizes above 0"
    if (config.head_dim or 0) > MAX_HEAD_DIM:
        yield f"head_dim (of MLA qk_rope_head_dim) is {config.head_dim}; expected at most {MAX_HEAD_DIM}"
    if is_mla(config) and (config.qk_norm or config.qk_rope_head_dim % 2):
        yield (
            f"MLA layers (kv_lora_rank={config.kv_lora_rank}) with qk_norm={config.qk_norm},"
            f" qk_rope_head_dim={config.qk_rope_head_dim}; expected no qk_norm and an even qk_rope_head_dim"
        )
    if not all(isfinite(getattr(config, name)) for name in FLOATS):
        yield f"{', '.join(f'{name} is {getattr(config, name)}' for name in FLOATS)}; expected finite numbers"
    factor = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    if type(factor) not in (int, float) or not 0 < factor <= 1:
        rope = str(config.rope_parameters)[:200]
        yield f"rope_parameters are {rope}; expected a partial_rotary_factor above 0 and at most 1"
    if config.num_hidden_layers < 1:
        yield f"num_hidden_layers is {config.num_hidden_layers}; expected at least 1"
    if not 0 < config.draft_vocab_size <= config.vocab_size:
        yield f"draft_vocab_size is {config.draft_vocab_size}; expected 1 to vocab_size ({config.vocab_size})"
    if config.mask_token_id is not None and not 0 <= config.mask_token_id < config.vocab_size:
        yield f"mask_token_id is {config.mask_token_id}; expected an id below vocab_size ({config.vocab_size})"


def _contradictions(config: Any) -> Iterator[str]:
    """Yields what is wrong with fields beside others, whose numbers are sound."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % groups:
        yield f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({groups})"
    if config.fc_norm and config.norm_before_fc:
        yield (
            "fc_norm and norm_before_fc are both true; expected at most one: fc_norm norms each captured state,"
            " norm_before_fc their concatenation"
        )
    ids, kinds = config.aux_hidden_state_layer_ids, config.layer_types
    if ids is not None and not (ids and min(ids) >= 0 and sorted(set(ids)) == list(ids) and bool not in map(type, ids)):
        yield f"aux_hidden_state_layer_ids is {str(ids)[:200]}; expected distinct ids >= 0 in ascending order"
    if len(kinds) != config.num_hidden_layers or not set(kinds) <= set(LAYER_TYPES):
        yield f"layer_types is {str(kinds)[:200]}; expected {config.num_hidden_layers} of {LAYER_TYPES}"
    window = config.sliding_window
    if "sliding_attention" in kinds and (window or 0) <= 0:
        yield f"layer_types asks for sliding attention but sliding_window is {window}; expected tokens > 0"
    width, target_width = config.hidden_size, config.target_hidden_size
    if config.share_target_embeddings and width != target_width:
        yield (
            f"share_target_embeddings needs hidden_size ({width}) == target_hidden_size ({target_width}); give the"
            " drafter its own table (share_target_embeddings=False)"
        )
    if config.share_target_head and (width != target_width or config.draft_vocab_size != config.vocab_size):
        yield (
            f"share_target_head needs equal widths ({width}, {target_width}) and a full draft vocabulary"
            f" ({config.draft_vocab_size} of {config.vocab_size}); give the drafter its own head"
            " (share_target_head=False)"
        )
