"""Shrinks a config to that of a tiny model: the same class, kinds of layers, attention, experts and windows, with small
sizes.

A field is known to be a size by its name, as configs of transformers use it, whatever the architecture; other fields
stay as they are.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

VOCAB = 64
WIDTH = 64
HEADS = 4
HEAD_DIM = 16
WINDOW = 8
POSITIONS = 4096
LEAST_LAYERS = 4
MOST_KINDS = 4  # a per-layer list with more distinct entries holds numbers, not kinds of layers

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
# so many first layers differ
FIRST_LAYERS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "max_window_layers")
PER_LAYER = "per_layer_config"  # layer number -> the fields in which it differs from the others
ROPES = ("rope_parameters", "rope_scaling")
# of a decoder with random weights, or its text would repeat one token
SPREAD = {"initializer_range": 0.5, "tie_word_embeddings": False}
NEVER_TAKEN_OVER = (
    "quantization_config",
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "torch_dtype",
    "auto_map",
    "architectures",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "id2label",
    "label2id",
    "num_labels",
    # Layers that other code adds to a checkpoint or changes in it (multi-token prediction, adapters). The model's class
    # knows nothing of them, and their numbers would be taken for a kind of the decoder's layers.
    "mtp_layers",
    "layers_to_transform",
)
Rule = Callable[[Any, dict[str, Any]], Any]


def at_most(limit: int) -> Rule:
    return lambda value, config: min(value, limit)


def always(size: int) -> Rule:
    return lambda value, config: size


def key_value_heads(value: int, config: dict[str, Any]) -> int:
    """One, half as many as attention heads, or as many, as in the original (MQA, GQA, MHA)."""
    heads = next(
        (config[name] for name in ("num_attention_heads", "n_head", "num_heads", "n_heads") if config.get(name)), value
    )
    return HEADS if value >= heads else 1 if value == 1 else HEADS // 2


def part_of_head(value: int, config: dict[str, Any]) -> int:
    """Returns as large a share of the tiny head as `value` is of the original's head, an even number."""
    whole = config.get("head_dim") or value * 4
    return max(2, HEAD_DIM * value // whole // 2 * 2)


def tiny_head(value: int, config: dict[str, Any]) -> int:
    """The size of a head; where `head_dim` is that of its rotated part alone, as in some configs of latent attention,
    the part's."""
    return min(value, 8) if config.get("qk_rope_head_dim") == value else HEAD_DIM


def heads(value: int, config: dict[str, Any]) -> int:
    """HEADS; in a Mamba config as many as fill the inner width."""
    return config["expand"] * WIDTH // HEAD_DIM if "expand" in config and "state_size" in config else HEADS


def mamba_heads(value: int, config: dict[str, Any]) -> int:
    return config.get("mamba_expand", 2) * WIDTH // HEAD_DIM


def wide_head(value: int, config: dict[str, Any]) -> int:
    """The width of a head in some layers: twice the usual where the original's differs from its `head_dim`."""
    return HEAD_DIM if value == config.get("head_dim") else 2 * HEAD_DIM


def groups(value: int, config: dict[str, Any]) -> int:
    return 1 if value <= 1 else 2


# The first pattern that a name matches in full says how its size shrinks.
RULES: tuple[tuple[str, Rule], ...] = (
    (r"(text_)?vocab_size(_per_layer_input)?|padded_vocab_size", always(VOCAB)),
    (
        r"hidden_size|n_embd|d_model|dim|embed_dim|lru_width|word_embed_proj_dim|embedding_size|dense_hidden_size"
        r"|out_hidden_size"
        r"|projection_dim|text_hidden_size|embedding_dim|emb_dim|vision_output_dim",
        always(WIDTH),
    ),
    (r"(\w+_)?(num_key_value_heads|num_kv_heads|kv_n_heads|n_kv_heads|num_global_key_value_heads)", key_value_heads),
    (r"linear_num_key_heads|mamba_n_groups|n_groups", at_most(2)),
    (r"linear_num_value_heads", at_most(HEADS)),
    (r"mamba_n_heads|mamba_num_heads", mamba_heads),
    (r"mamba_d_head|mamba_head_?dim", always(HEAD_DIM)),
    (r"mamba_d_ssm", always(2 * WIDTH)),
    # indexers rank by a sum of ReLUs: with many heads none is 0, and no tie is broken by chance
    (r"index_n_heads", at_most(24)),
    (r"(\w+_)?(num_attention_heads|n_head|n_heads|num_heads|attention_heads)", heads),
    (r"head_dim|attention_head_dim|d_head", tiny_head),
    (r"qk_head_dim", always(HEAD_DIM + 8)),
    (r"qk_nope_head_dim", at_most(HEAD_DIM)),
    (r"qk_rope_head_dim", at_most(8)),
    (r"v_head_dim|swa_v_head_dim", at_most(12)),
    (r"global_head_dim", wide_head),
    (r"rotary_dim|rotary_ndims", part_of_head),
    (r"index_topk|block_topk|msa_topk_blocks", at_most(WINDOW)),
    (r"\w*head_dim", at_most(HEAD_DIM)),
    (r"kv_lora_rank", at_most(20)),
    (r"q_lora_rank", at_most(24)),
    (r"laurel_rank|\w+_rank|hidden_size_per_layer_input", at_most(8)),
    (
        r"moe_(\w+_)?intermediate_size|\w*expert\w*_intermediate_size|shared_intermediate_size"
        r"|(expert_)?ffn_hidden_size",
        at_most(32),
    ),
    (r"\w*intermediate_size\w*|n_inner|dff|d_ff|\w*ffn_dim|\w*ffn_hidden_size|mlp_dim", at_most(96)),
    (
        r"num_experts_per_tok(en)?|num_experts_per_topk|moe_top_?k|moe_k|top_k_experts|experts_per_token"
        r"|moe_num_experts_per_tok",
        at_most(2),
    ),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", at_most(1)),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|zero_expert_num", at_most(8)),
    (r"n_group|num_expert_group", groups),
    (r"topk_group|num_limited_groups", at_most(1)),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length", at_most(POSITIONS)),
    (
        r"(\w+_)?sliding_window(_size)?|window_size|attention_window_size|attention_chunk_size|local_attention",
        at_most(WINDOW),
    ),
    (r"state_size|ssm_state_size|mamba_d_state|time_step_rank|mamba_dt_rank", at_most(HEAD_DIM)),
)


def tiny_config(config: PreTrainedConfig) -> tuple[PreTrainedConfig, list[str]]:
    """A config of the same class with small sizes, and notes on what a model of it does not show of the original.

    Raises whatever the config's own class raises where the small sizes contradict each other.
    """
    notes: list[str] = []
    values = config.to_dict()
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "an unnamed method")
        notes.append(f"tried without its quantization ({method})")
    text_key = _decoder_key(config)
    values = _tiny(values, is_decoder=text_key is None, text_key=text_key)
    _number_special_tokens(values)
    values |= {"dtype": "float32"}
    return type(config).from_dict(values), notes


def _decoder_key(config: PreTrainedConfig) -> str | None:
    """The field in which a multimodal config holds its decoder's config; None in a config that is the decoder's."""
    decoder = config.get_text_config(decoder=True)
    return next((name for name in getattr(config, "sub_configs", ()) if getattr(config, name, None) is decoder), None)


@dataclass(frozen=True)
class Layers:
    """The layers of a config: how many there are, and the numbers of those that a tiny model keeps, in its order. Only
    a text decoder's are chosen; other parts have 0 of 0, and stay as deep as they are."""

    count: int = 0
    kept: list[int] = field(default_factory=list)


def _tiny(values: dict[str, Any], is_decoder: bool, text_key: str | None = None) -> dict[str, Any]:
    """A config, or a part of one, with small sizes. `is_decoder`: whether it is the text decoder's; `text_key`: the
    field that holds that part in a multimodal config, None elsewhere. Fields that follow from several others are set
    last."""
    counts = [name for name in LAYER_COUNTS if isinstance(values.get(name), int)] if is_decoder else []
    layers = Layers(values[counts[0]], _kept_layers(values, values[counts[0]])) if counts else Layers()
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str) or name in NEVER_TAKEN_OVER:
            continue
        if name in counts:
            found[name] = len(layers.kept)
        elif _is_part(name, value):
            found[name] = _tiny(value, name == text_key)
        else:
            found[name] = _tiny_field(name, value, values, layers)
    for settle in (_settle_first_layers, _settle_shared_keys, _settle_attention_types, _settle_ropes):
        found |= settle(values, found, layers)
    if is_decoder or text_key:
        found |= {name: value for name, value in SPREAD.items() if name in found}
    return found


def _is_part(name: str, value: Any) -> bool:
    """Returns True where a field holds a config of its own (`text_config`), and no rope or table by layer number
    (`per_layer_config`)."""
    return isinstance(value, dict) and name not in (*ROPES, PER_LAYER) and all(isinstance(key, str) for key in value)


def _tiny_field(name: str, value: Any, values: dict[str, Any], layers: Layers) -> Any:
    """One field of the config `values`, made small."""
    if name == PER_LAYER and value:
        by_layer = {int(layer): fields for layer, fields in value.items()}
        return {i: _tiny_layer(by_layer[layer], values) for i, layer in enumerate(layers.kept) if layer in by_layer}
    if isinstance(value, list) and layers.count:
        return _of_layers(name, value, layers.count, layers.kept, values)
    return value if isinstance(value, dict) else _size(name, value, values)


def _settle_first_layers(values: dict[str, Any], found: dict[str, Any], layers: Layers) -> dict[str, Any]:
    """Numbers of first layers that differ: as many as are kept of these."""
    names = [name for name in FIRST_LAYERS if type(values.get(name)) is int and layers.count]
    return {name: sum(i < values[name] for i in layers.kept) for name in names}


def _settle_shared_keys(values: dict[str, Any], found: dict[str, Any], layers: Layers) -> dict[str, Any]:
    """The number of last layers that share others' keys: as many as are kept of these."""
    shared = values.get("num_kv_shared_layers")
    return {"num_kv_shared_layers": sum(i >= layers.count - shared for i in layers.kept)} if shared else {}


def _settle_attention_types(values: dict[str, Any], found: dict[str, Any], layers: Layers) -> dict[str, Any]:
    """GPT-Neo's kinds of layers, which it states twice: by layer, and as repeated patterns. One pattern of all kept
    layers does."""
    kinds = values.get("attention_layers")
    says_twice = isinstance(kinds, list) and "attention_types" in values
    return {"attention_types": [[[kinds[i] for i in layers.kept], 1]]} if says_twice else {}


def _settle_ropes(values: dict[str, Any], found: dict[str, Any], layers: Layers) -> dict[str, Any]:
    """Rope parameters that fit the tiny heads, whose sizes are known by now."""
    return {name: _tiny_rope(values[name], found) for name in ROPES if isinstance(values.get(name), dict)}


def _tiny_layer(fields: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Fields in which one layer differs from the others (Gemma 4: full attention has wider heads)."""
    return {
        name: wide_head(size, values) if name == "head_dim" else _size(name, size, values)
        for name, size in fields.items()
    }


def _size(name: str, value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_size(name, item, values) for item in value] if all(type(item) is int for item in value) else value
    if type(value) is not int or value < 1:
        return value
    rule = next((rule for pattern, rule in RULES if re.fullmatch(pattern, name)), None)
    return value if rule is None else rule(value, values)


def _kept_layers(values: dict[str, Any], num_layers: int) -> list[int]:
    """Numbers of the layers to keep: the first ones, at least a whole period, then the first of every kind that these
    lack. Layers that share others' keys are kinds of their own."""
    front = num_layers - (values.get("num_kv_shared_layers") or 0)
    periods = [
        period
        for name, period in values.items()
        if re.search(r"_(interval|period|step|freq|pattern)$", name) and type(period) is int
    ]
    kept = list(range(min(front, max([LEAST_LAYERS, *(period for period in periods if period <= front)]))))
    kinds = [(_kind(values, num_layers, layer), layer >= front) for layer in range(num_layers)]
    for layer, kind in enumerate(kinds):
        if kind not in {kinds[i] for i in kept}:
            kept.append(layer)
    return kept


def _kind(values: dict[str, Any], num_layers: int, layer: int) -> tuple:
    """Returns what a config says of one layer: in lists with an entry per layer, in lists of layer numbers, and in
    counts of first layers."""
    kind: list[Any] = []
    for name, value in values.items():
        if (
            isinstance(value, list)
            and len(value) == num_layers
            and not name.endswith("_id")
            and len(set(map(str, value))) <= MOST_KINDS
        ):
            kind.append(str(value[layer]))
        elif _lists_layers(name, value, num_layers):
            kind.append(layer in value)
        elif name in FIRST_LAYERS and type(value) is int:
            kind.append(layer < value)
    by_layer = {int(i): fields for i, fields in (values.get(PER_LAYER) or {}).items()}
    kind.append(str(by_layer.get(layer)))
    return tuple(kind)


def _lists_layers(name: str, value: Any, num_layers: int) -> bool:
    named = re.search(r"layers|indices|indexes|idxs|layer_ids", name)
    return bool(named) and isinstance(value, list) and all(type(i) is int and 0 <= i < num_layers for i in value)


def _of_layers(name: str, value: list, num_layers: int, kept: list[int], values: dict[str, Any]) -> list:
    """A list of a decoder's config, for the kept layers where it is about layers."""
    if len(value) == num_layers and not name.endswith("_id"):
        return _size(name, [value[i] for i in kept], values)
    if _lists_layers(name, value, num_layers):
        return [kept.index(i) for i in value if i in kept]
    return _size(name, value, values)


def _tiny_rope(rope: dict[str, Any], tiny: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters with factors and sections cut to a tiny head; the others stay. Those given by layer type are done
    one by one."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _tiny_rope(value, tiny) if isinstance(value, dict) else value for name, value in rope.items()}
    head = tiny.get("qk_rope_head_dim") or tiny.get("head_dim") or HEAD_DIM
    share = rope.get("partial_rotary_factor") or tiny.get("partial_rotary_factor") or 1.0
    count = int(head * share) // 2
    found = dict(rope)
    for name in ("long_factor", "short_factor"):
        if isinstance(rope.get(name), list):
            found[name] = rope[name][:count]
    if isinstance(rope.get("mrope_section"), list):
        found["mrope_section"] = _sections(rope["mrope_section"], count)
    return found


def _sections(sizes: list[int], total: int) -> list[int]:
    """Sizes in these proportions that add up to `total`, each at least 1."""
    parts = [max(1, total * size // sum(sizes)) for size in sizes]
    parts[-1] += total - sum(parts)
    return parts


def _number_special_tokens(values: dict[str, Any]) -> None:
    """Renumbers special tokens in place: they become the last ids of the tiny vocabulary, different ones where they
    were."""
    taken: dict[int, int] = {}

    def renumber(part: dict[str, Any]) -> None:
        for name, value in part.items():
            if _is_part(name, value):
                renumber(value)
            elif re.search(r"token_(id|index)$", name):
                ids = value if isinstance(value, list) else [value]
                if all(type(token) is int and token >= 0 for token in ids):
                    new = [taken.setdefault(token, VOCAB - 1 - len(taken) % (VOCAB // 2)) for token in ids]
                    part[name] = new if isinstance(value, list) else new[0]

    renumber(values)
