"""Names and shapes of a drafter's tensors: those its config implies, those of other producers, those of other networks.

h drafter width, ht target width, n captured states, H heads, KV key-value heads, d head_dim, V target and Vd draft
vocabulary.
"""

import re
from collections import Counter
from collections.abc import Iterable

from ..configuration import Eagle31Config

Shapes = dict[str, tuple[int, ...]]
MASK = "mask_hidden"  # of P-EAGLE; others store it as (1, n*ht) or (1, 1, n*ht)

# Patterns of names on disk -> native names, applied in order, each at most once a name. Each is a spelling that some
# producer writes.
RENAMES = (
    (r"^model\.", ""),  # NeMo prefixes everything but the head and the vocabulary maps
    (r"^midlayer\.(\d+)\.", r"layers.\1."),  # Megatron export
    (r"^midlayer\.", "layers.0."),  # original release, SpecForge, AngelSlim
    (r"^aux_norm_low\.", "fc_norm.0."),  # older SGLang
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^fcs\.(\d+)\.", r"fc_norm.\1."),  # Qwen3.6 heads
    (r"^context_proj\.", "fc."),  # TorchSpec
    (r"^final_norm\.", "norm."),
    (r"^(layers\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm."),  # SGLang's later layers
)
# Patterns of names that are not read, and why.
DROPPED = (
    (r"rotary_emb\.", "computed from the config"),
    (r"^layers\.[1-9]\d*\.hidden_norm\.", "later layers have one norm before attention, input_layernorm"),
)

# Patterns of names that only other networks have, and what each is called.
OTHER_GRAPHS = (
    (r"lora_[AB]\b", "a LoRA adapter: merge it into its drafter first"),
    (r"(^|\.)(eh_proj|enorm)\.", "an MTP head (eh_proj)"),
    (r"(^|\.)fuse_w1\b", "AngelSlim's hawk variant"),
    (r"\.mlp\.(experts|gate)\.", "a drafter with a mixture-of-experts MLP"),
    (r"\.self_attn\.(g_proj|gate_proj)\.", "a drafter with gated attention"),
)


def native_name(name: str) -> str:
    """Returns the native name for a name on disk."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name, count=1)
    return name


def native_names(names: Iterable[str], source: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns names on disk -> native names, and the names that are left out -> why.

    Raises ValueError where two names become one.
    """
    renamed = {}
    dropped = {}
    short_names = {name.removeprefix("model.") for name in names}
    for name in sorted(names):
        short = name.removeprefix("model.")
        reason = next((why for pattern, why in DROPPED if re.search(pattern, short)), None)
        if reason is None or (
            "hidden_norm" in name and short.replace("hidden_norm", "input_layernorm") not in short_names
        ):
            renamed[name] = native_name(name)
        else:
            dropped[name] = reason
    for target, count in Counter(renamed.values()).items():
        if count > 1:
            found = " and ".join(name for name in renamed if renamed[name] == target)
            raise ValueError(f"{source}: {found} both mean {target}; expected one of them.")
    return renamed, dropped


def refuse_other_graphs(shapes: Shapes, source: str, model_type: str | None) -> None:
    """Raises ValueError for a checkpoint that is no EAGLE 3 drafter, saying what it is; `shapes` has native names."""
    for pattern, what in OTHER_GRAPHS:
        found = next((name for name in sorted(shapes) if re.search(pattern, name)), None)
        if found:
            raise ValueError(
                f"{source}: {found} marks {what}; expected an EAGLE 3 or 3.1 drafter, which has no such tensor."
            )
    num_layers = layer_count(shapes)
    if "fc.weight" not in shapes:
        if "hidden_norm.weight" in shapes:
            raise ValueError(
                f"{source}: hidden_norm.weight outside the layers marks a DFlash head; expected an EAGLE 3 or 3.1"
                " drafter."
            )
        what = (
            "looks like the target itself"
            if num_layers > 1 and "layers.0.hidden_norm.weight" not in shapes
            else "is no EAGLE 3 drafter"
        )
        raise ValueError(
            f"{source}: {len(shapes)} tensors in {num_layers} layers and no fc.weight (config.json: model_type"
            f" {model_type!r}): this {what}; expected the drafter's checkpoint."
        )
    if "layers.0.hidden_norm.weight" not in shapes:
        fc = shapes["fc.weight"]
        is_eagle1 = len(fc) == 2 and fc[1] == 2 * fc[0]
        what = "an EAGLE-1 or EAGLE-2 head (fc over [embedding, state])" if is_eagle1 else "another architecture"
        raise ValueError(
            f"{source}: fc.weight {fc} without layers.0.hidden_norm.weight marks {what}; expected an EAGLE 3 or 3.1"
            " drafter."
        )


def layer_count(shapes: Iterable[str]) -> int:
    """Returns the number of layers that native names have: 1 + the highest index."""
    return 1 + max(
        (int(match[1]) for match in (re.match(r"layers\.(\d{1,4})\.", name) for name in shapes) if match), default=-1
    )


def expected_tensors(config: Eagle31Config) -> Shapes:
    """Returns native names and shapes of all tensors of a checkpoint with this config.

    This is the one description of the native format.
    """
    h, width = config.hidden_size, config.target_hidden_size
    fused = config.num_aux_states * width
    shapes = _linear("fc", h, fused, config.fc_bias) | {"norm.weight": (h,)}
    if config.fc_norm:
        shapes |= {f"fc_norm.{k}.weight": (width,) for k in range(config.num_aux_states)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    if config.is_parallel:
        shapes[MASK] = (fused,)
    for i in range(config.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer(config, is_fused=i == 0).items()}
    if not config.share_target_head:
        shapes |= _linear("lm_head", config.draft_vocab_size, h)
    if not config.share_target_embeddings:
        shapes["embed_tokens.weight"] = (config.vocab_size, h)
    if config.draft_vocab_size < config.vocab_size:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return shapes


def _linear(name: str, out_features: int, in_features: int, has_bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out_features, in_features)}
    return shapes | {f"{name}.bias": (out_features,)} if has_bias else shapes


def _layer(config: Eagle31Config, is_fused: bool) -> Shapes:
    h, width = config.hidden_size, config.intermediate_size
    attention = _latent_attention if config.kv_lora_rank is not None else _grouped_attention
    shapes: Shapes = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    if is_fused:
        shapes["hidden_norm.weight"] = (h,)
    shapes |= {f"self_attn.{name}": shape for name, shape in attention(config, (2 if is_fused else 1) * h).items()}
    for name, size, in_features in (("gate_proj", width, h), ("up_proj", width, h), ("down_proj", h, width)):
        shapes |= _linear(f"mlp.{name}", size, in_features, config.mlp_bias)
    return shapes


def _grouped_attention(config: Eagle31Config, in_features: int) -> Shapes:
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = _linear("o_proj", config.hidden_size, q, config.attention_bias)
    for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        shapes |= _linear(name, size, in_features, config.attention_bias)
    if config.qk_norm:
        shapes |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    return shapes


def _latent_attention(config: Eagle31Config, in_features: int) -> Shapes:
    heads, bias = config.num_attention_heads, config.attention_bias
    q_rank, rank = config.q_lora_rank, config.kv_lora_rank
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    shapes = (
        _linear("kv_a_proj_with_mqa", rank + rope, in_features, bias)
        | {"kv_a_layernorm.weight": (rank,)}
        | _linear("kv_b_proj", heads * (nope + config.v_head_dim), rank)
        | _linear("o_proj", config.hidden_size, heads * config.v_head_dim, bias)
    )
    if q_rank is None:
        return shapes | _linear("q_proj", heads * (nope + rope), in_features)
    queries = _linear("q_a_proj", q_rank, in_features, bias) | _linear("q_b_proj", heads * (nope + rope), q_rank)
    return shapes | queries | {"q_a_layernorm.weight": (q_rank,)}
