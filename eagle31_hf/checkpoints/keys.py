"""The config keys of other producers, and the fields of `Eagle31Config` they stand for, in both directions."""

from typing import Any

from ..config_rules import FLOATS
from ..configuration import Eagle31Config

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Named alike everywhere: in flat configs, in speculators' nested transformer_layer_config, and here.
GEOMETRY = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_dropout",
    "initializer_range", "logit_scale", "layer_types", "sliding_window", "bos_token_id", "eos_token_id", "pad_token_id",
    *LATENT,
)  # fmt: skip
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
DRAFTER = ("draft_vocab_size", "target_hidden_size", "target_model", *FLAGS)
# Values of absent keys in transformers' LlamaConfig, with which every engine reads these configs.
ABSENT = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu"}
DEFAULT_ROPE_THETA = 10000.0

# Keys, at the top level or in eagle_config, that switch to another network: key, the values under which it is EAGLE 3,
# and what a drafter with another value does.
OTHER_GRAPH_KEYS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("use_aux_hidden_state", (True, None), "reads the target's last state only and has no fc"),
    ("parallel_draft_step", (1, 0, None), "drafts in parallel by several heads (ModelOpt)"),
    ("use_mtp_layernorm", (False, None), "is an MTP head"),
    ("use_last_layernorm", (True, None), "has no norm before its head"),
    ("next_layer_regular", (True, None), "feeds the embedding to every layer"),
    ("eh_proj_before_attn", (False, None), "fuses embedding and state before attention"),
    ("eagle_aux_injection_mode", ("fused_fc", None), "injects the target's states in another way"),
    ("quantization_config", (None, {}), "is quantized: use the original"),
)
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # names of the token that is a mask in P-EAGLE
SPECULATORS_TYPES = ("eagle3", "peagle", None)
SPECULATORS_LAYERS = ("llama", "qwen3")
MAX_SHOWN = 200  # characters of a value in a message


def wrong(source: str, key: str, value: Any, expected: str) -> ValueError:
    """Returns the error for a value of config.json that cannot be; `expected` ends without a full stop."""
    return ValueError(f"{source}: config.json: {key} is {repr(value)[:MAX_SHOWN]}; expected {expected}.")


def contradicted(source: str, key: str, value: Any, weights: Any, expected: str) -> ValueError:
    """Returns the error for a value of config.json beside what the weights have, which is something else."""
    shown = repr(value)[:MAX_SHOWN]
    return ValueError(f"{source}: config.json says {key}={shown}, the weights have {weights}; expected {expected}.")


def eagle_config(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the object that several producers nest in their config.json, empty where there is none."""
    nested = config.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def refuse_other_graphs(config: dict[str, Any], source: str) -> None:
    """Raises ValueError for a config whose drafter computes something else than EAGLE 3 and 3.1 do."""
    nested = eagle_config(config)
    for key, ours, what in OTHER_GRAPH_KEYS:
        for place, where in ((config, "config.json"), (nested, "config.json: eagle_config")):
            if key in place and place[key] not in ours:
                found = f"{source}: {where}: {key} is {str(place[key])[:80]}, so this drafter {what}"
                raise ValueError(f"{found}; expected {ours[0]}.")
    _object(config, "speculators_config", source)
    kind = _speculators_kind(config)
    if kind not in SPECULATORS_TYPES:
        raise wrong(source, "speculators_model_type", kind, "'eagle3' or 'peagle', the kinds read here")


def _speculators_kind(config: dict[str, Any]) -> Any:
    """Returns the kind of drafter that speculators' config names; None where it is none of speculators'."""
    stated = config.get("speculators_config")
    algorithm = stated.get("algorithm") if isinstance(stated, dict) else None
    return config.get("speculators_model_type", algorithm)


def read_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns the fields of `Eagle31Config` that another producer's config states, as they are stated.

    Layer ids are not among them; fields that the tensors decide may still be wrong. Raises ValueError, naming the key,
    for values that contradict each other or have the wrong type.
    """
    if "transformer_layer_config" in config:  # speculators nests the geometry in it, with the flags outside
        inner = _object(config, "transformer_layer_config", source)
        kind = inner.get("model_type")
        if kind not in SPECULATORS_LAYERS:
            raise wrong(source, "transformer_layer_config.model_type", kind, f"one of {SPECULATORS_LAYERS}")
        verifier = _object(_object(config, "speculators_config", source), "verifier", source)
        outer = {name: config[name] for name in DRAFTER if name in config}
        config = inner | outer | {"target_model": verifier.get("name_or_path")}
    nested = eagle_config(config)
    fields = {name: config[name] for name in (*GEOMETRY, *DRAFTER) if config.get(name) is not None}
    for name, alias in (("norm_before_fc", nested.get("norm_before_fc")), ("fc_norm", config.get("use_aux_norm"))):
        if alias is not None:
            stated = fields.setdefault(name, alias)
            if stated != alias:
                found = f"{source}: config.json states {name} twice, as {stated} and {alias}"
                raise ValueError(f"{found}; expected one value.")
    for name in FLOATS:
        if type(fields.get(name)) is int:
            fields[name] = float(fields[name])
    return ABSENT | fields | {"rope_parameters": rope_parameters(config, source)}


def states_parallel(config: dict[str, Any]) -> bool | None:
    """Returns whether a config says that its drafter is P-EAGLE; None where it says nothing of it."""
    if _speculators_kind(config) == "peagle":
        return True
    stated = [place.get("parallel_drafting") for place in (config, eagle_config(config))]
    return next((value is True for value in stated if value is not None), None)


def _object(config: dict[str, Any], key: str, source: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise wrong(source, key, value, "an object or null")
    return value


def rope_parameters(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns rope as transformers 5 spells it, out of rope_parameters, or rope_scaling with rope_theta, and
    partial_rotary_factor.

    Raises ValueError where they contradict each other.
    """
    given, scaling = (_object(config, name, source) for name in ("rope_parameters", "rope_scaling"))
    if any(isinstance(value, dict) for value in given.values()):
        found = f"{source}: config.json: rope_parameters differ by layer type ({', '.join(given)})"
        remedy = "Pass the one the drafter was trained with, rope_parameters={...}."
        raise ValueError(f"{found}; expected one set. {remedy}")
    rope = dict(scaling or given)
    thetas = [place["rope_theta"] for place in (config, rope, given) if place.get("rope_theta") is not None]
    if not all(isinstance(theta, int | float) and theta > 0 for theta in thetas):
        raise wrong(source, "rope_theta", thetas, "a number above 0")
    if len(set(thetas)) > 1:
        found = f"{source}: config.json states rope_theta as {' and '.join(map(str, thetas))}"
        raise ValueError(f"{found}; expected one value. Pass rope_parameters={{...}}.")
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope.pop("mrope_section", None) is not None or kind == "mrope":  # on text all its axes are the same position
        rope.pop("mrope_interleaved", None)
        kind = "default" if kind == "mrope" else kind
    rope |= {"rope_type": kind, "rope_theta": float(thetas[0]) if thetas else DEFAULT_ROPE_THETA}
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return rope


def write_geometry(config: Eagle31Config) -> dict[str, Any]:
    """Returns the keys that both families of formats share, with rope in every spelling, for old and new readers."""
    given = {name: getattr(config, name) for name in GEOMETRY}
    values = {name: x for name, x in given.items() if x is not None or name not in (*LATENT, "sliding_window")}
    rope = dict(config.rope_parameters)
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    partial = {"partial_rotary_factor": rope["partial_rotary_factor"]} if "partial_rotary_factor" in rope else {}
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    # Qwen3's switches
    windows = {"use_sliding_window": True, "max_window_layers": 0} if "sliding_attention" in config.layer_types else {}
    always = {
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return values | partial | windows | always
