"""Shrinks a config to that of a tiny model: the same class, kinds of layers, attention, experts and windows, with small
sizes.

A field is known to be a size by its name, as configs of transformers use it, whatever the architecture; other fields
stay as they are. Of the layers the first ones stay, as many as show every kind.
"""

import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

VOCAB = 64
WIDTH = 64
HEADS = 4
HEAD_DIM = 16
WINDOW = 8
LEAST_LAYERS = 4
MOST_KINDS = 4  # a per-layer list with more distinct entries holds numbers, not kinds of layers

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
# so many first layers differ
FIRST_LAYERS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
SHARED_KEYS = "num_kv_shared_layers"  # so many last layers share others' keys
COUNTS_OF_LAYERS = (*FIRST_LAYERS, "max_window_layers", SHARED_KEYS)
PARTS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")  # of Dory, which are all of its layers
ROPES = ("rope_parameters", "rope_scaling")
# of a decoder with random weights, or its text would repeat one token
SPREAD = {"initializer_range": 0.5, "tie_word_embeddings": False, "ngpt_alpha_init": 0.6}
# Fields that load third-party code or make tables of any length, and that no language model needs.
NOT_READ = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "num_labels",
    "id2label",
    "label2id",
)
NEVER_TAKEN_OVER = (
    *NOT_READ,
    "quantization_config",
    # Layers that other code adds to a checkpoint or changes in it (multi-token prediction, adapters). The model's class
    # knows nothing of them, and their numbers would be taken for a kind of the decoder's layers.
    "mtp_layers",
    "layers_to_transform",
    # Sizes by layer number (Gemma 4: full attention has wider heads), which a config makes anew of the kinds of layers.
    "per_layer_config",
)


def key_value_heads(value: int, config: dict[str, Any]) -> int:
    """One, half as many as attention heads, or as many, as in the original (MQA, GQA, MHA)."""
    heads = next(
        (config[name] for name in ("num_attention_heads", "n_head", "num_heads", "n_heads") if config.get(name)), value
    )
    return HEADS if value >= heads else 1 if value == 1 else HEADS // 2


def tiny_head(value: int, config: dict[str, Any]) -> int:
    """The size of a head; where `head_dim` is that of its rotated part alone, as in some configs of latent attention,
    the part's."""
    return min(value, 8) if config.get("qk_rope_head_dim") == value else HEAD_DIM


def heads(value: int, config: dict[str, Any]) -> int:
    """HEADS; in a Mamba config as many as fill the inner width."""
    return config["expand"] * WIDTH // HEAD_DIM if "expand" in config and "state_size" in config else HEADS


# The first pattern that a name matches in full says how its size shrinks: to a number at most, or as a function of it
# and of the config.
RULES: tuple[tuple[str, int | Callable[[int, dict[str, Any]], int]], ...] = (
    (r"(text_|unpadded_)?vocab_size(_per_layer_input)?", lambda *_: VOCAB),
    # special tokens become the last ids, which the trial's prompt has none of
    (r"\w*token_(id|index)", lambda value, config: VOCAB - 1 - value % 8),
    (
        r"(text_|dense_|out_)?hidden_size|n_embd|d_model|embed_dim|lru_width|word_embed_proj_dim|embedding_size"
        r"|projection_dim|embedding_dim|emb_dim|vision_output_dim",
        lambda *_: WIDTH,
    ),
    (r"(\w+_)?(num_key_value_heads|num_kv_heads|kv_n_heads|n_kv_heads|num_global_key_value_heads)", key_value_heads),
    (r"o_groups|linear_num_key_heads|(mamba_)?n_groups?|num_expert_group", 2),
    # Looped transformers run some layers again: Inkling 2 those from `loop_layer_index_start` to `loop_layer_index_end`
    # less 1, which go by blocks of `n_layers_per_attn_res_block`; Dory `n_recurrent_layers`.
    (r"n_layers_per_attn_res_block|loop_layer_index_start|n_(input|output)_layers", 2),
    (r"loop_layer_index_end", 4),
    (r"n_recurrent_layers", 8),
    (r"linear_num_value_heads", HEADS),
    (r"mamba_(n|num)_heads", lambda value, config: config.get("mamba_expand", 2) * WIDTH // HEAD_DIM),
    (r"mamba_d_ssm|attention_hidden_size", lambda *_: 2 * WIDTH),
    # indexers rank by a sum of ReLUs: with many heads none is 0, and no tie is broken by chance
    (r"index_n_heads", 24),
    (r"(\w+_)?(num_attention_heads|n_head|n_heads|num_heads|attention_heads)", heads),
    (r"head_dim|attention_head_dim|d_head", tiny_head),
    (r"mamba_d_head|mamba_head_?dim", lambda *_: HEAD_DIM),
    (r"qk_head_dim", lambda *_: HEAD_DIM + 8),
    (r"(qk_rope_head|rotary)_dim", 8),
    (r"\w*head_dim", HEAD_DIM),
    (r"state_size|ssm_state_size|mamba_d_state", HEAD_DIM),
    (r"\w+_rank|hidden_size_per_layer_input", 8),
    (
        r"moe_(\w+_)?intermediate_size|\w*expert\w*_intermediate_size|shared_intermediate_size"
        r"|(expert_)?ffn_hidden_size",
        32,
    ),
    (r"\w*intermediate_size\w*|n_inner|dff|d_ff|\w*ffn_dim|\w*ffn_hidden_size|mlp_dim", 96),
    (r"(moe_)?num_experts_per_(tok|token|topk)|moe_top_?k|moe_k|top_k_experts|experts_per_token", 2),
    (r"n_shared_experts|(moe_)?num_shared_experts|topk_group", 1),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|zero_expert_num", 8),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len", 4096),
    (
        r"(\w+_)?sliding_window(_size)?|(attention_)?window_size|attention_chunk_size|local_attention"
        r"|index_topk|block_topk|msa_topk_blocks",
        WINDOW,
    ),
)


def tiny_config(config: PreTrainedConfig) -> tuple[PreTrainedConfig, list[str]]:
    """A config of the same class with small sizes, and notes on what a model of it does not show of the original.

    Raises whatever the config's own class raises where the small sizes contradict each other.
    """
    values, notes = config.to_dict(), []
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "an unnamed method")
        notes.append(f"tried without its quantization ({method})")
    # the field in which a multimodal config holds its decoder's config
    decoder, parts = config.get_text_config(decoder=True), getattr(config, "sub_configs", ())
    decoder_key = next((name for name in parts if getattr(config, name, None) is decoder), None)
    values = _tiny(values, is_decoder=decoder_key is None, decoder_key=decoder_key)
    return type(config).from_dict(values | {"dtype": "float32"}), notes


def _tiny(values: dict[str, Any], is_decoder: bool, decoder_key: str | None = None) -> dict[str, Any]:
    """A config, or a part of one, with small sizes. `is_decoder`: whether it is the text decoder's (other parts stay as
    deep as they are); `decoder_key`: the field that holds that part in a multimodal config, None elsewhere."""
    counts = [name for name in LAYER_COUNTS if isinstance(values.get(name), int)] if is_decoder else []
    num_layers = values[counts[0]] if counts else 0
    depth = _depth(values, num_layers) if counts else 0
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in NEVER_TAKEN_OVER:
            continue
        if isinstance(value, dict) and name not in ROPES and all(isinstance(key, str) for key in value):
            found[name] = _tiny(value, name == decoder_key)
        elif name in counts:
            found[name] = depth
        else:
            found[name] = _size(name, _of_first_layers(name, value, num_layers, depth), values)
    if counts and isinstance(values.get("attention_layers"), list) and "attention_types" in values:
        # GPT-Neo says its layers' kinds by layer, and again as repeated patterns: one pattern of all does
        found["attention_types"] = [[found["attention_layers"], 1]]
    # of heads, whose sizes are known by now
    found |= {name: _tiny_rope(values[name], found) for name in ROPES if isinstance(values.get(name), dict)}
    if is_decoder or decoder_key:
        found |= {name: value for name, value in SPREAD.items() if name in found}
    return found


def _size(name: str, value: Any, values: dict[str, Any]) -> Any:
    """A field of the config `values`, made small where its name is that of a size."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return [_size(name, item, values) for item in value]
    if type(value) is not int or value < 1:
        return value
    rule = next((rule for pattern, rule in RULES if re.fullmatch(pattern, name)), value)
    return rule(value, values) if callable(rule) else min(value, rule)


def _depth(values: dict[str, Any], num_layers: int) -> int:
    """Returns how many first layers show every kind that a config names; twice as many where layers share the keys of
    others, so that the second half can. Of Dory, whose config counts attention and MLP as a layer each: those of its
    parts."""
    if all(name in values for name in PARTS):
        return sum(_size(name, values[name], values) for name in PARTS)
    depth = LEAST_LAYERS
    for name, value in values.items():
        kinds = [str(kind) for kind in _by_layer(name, value, num_layers)]
        if len(set(kinds)) <= MOST_KINDS:
            depth = max([depth, *(1 + kinds.index(kind) for kind in set(kinds))])
        if re.search(r"_(interval|period|step|freq|pattern)$", name) and type(value) is int and value <= num_layers:
            depth = max(depth, value)
    return min(num_layers, 2 * depth if values.get(SHARED_KEYS) else depth)


def _by_layer(name: str, value: Any, num_layers: int) -> list[Any]:
    """Returns what a field says of each layer: its own entries (a list of tokens may be as long), or whether a list of
    layer numbers or a number of first layers has the layer. Empty where it says nothing of layers."""
    if isinstance(value, list) and len(value) == num_layers and not name.endswith("_id"):
        return value
    if isinstance(value, list) and re.search(r"layers|indices|indexes|idxs|layer_ids", name):
        are_layers = all(type(layer) is int and 0 <= layer < num_layers for layer in value)
        return [layer in value for layer in range(num_layers)] if are_layers else []
    return [layer < value for layer in range(num_layers)] if name in FIRST_LAYERS and type(value) is int else []


def _of_first_layers(name: str, value: Any, num_layers: int, depth: int) -> Any:
    """A field of a decoder's config as it is for its first `depth` layers; of other parts, with 0 of 0, as it is."""
    said = _by_layer(name, value, num_layers)[:depth]
    if said and isinstance(value, list):
        return said if len(value) == num_layers else [layer for layer in value if layer < depth]
    limit = depth // 2 if name == SHARED_KEYS else depth
    return min(value, limit) if depth and name in COUNTS_OF_LAYERS and type(value) is int else value


def _tiny_rope(rope: dict[str, Any], tiny: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters with factors and sections cut to a tiny head; the others stay. Those given by layer type are done
    one by one."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _tiny_rope(value, tiny) if isinstance(value, dict) else value for name, value in rope.items()}
    head = tiny.get("qk_rope_head_dim") or tiny.get("head_dim") or HEAD_DIM
    share = rope.get("partial_rotary_factor") or tiny.get("partial_rotary_factor") or 1.0
    count = int(head * share) // 2
    found = {name: value[:count] if isinstance(value, list) else value for name, value in rope.items()}
    sections = rope.get("mrope_section")
    if isinstance(sections, list):  # in their proportions, the last what is left
        found["mrope_section"] = [max(1, count * size // sum(sections)) for size in sections]
        found["mrope_section"][-1] += count - sum(found["mrope_section"])
    return found
