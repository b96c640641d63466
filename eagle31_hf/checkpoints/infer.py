"""The native config of a checkpoint that another library wrote: inferred from its config and its tensors' shapes."""

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from .. import vocab
from ..config_rules import is_mla
from ..configuration import Eagle31Config
from . import keys, layer_ids
from .files import FLOATS, CheckpointFiles
from .producers import SPECULATORS, Producer
from .tensors import MASK, Shapes, layer_count

# What config classes raise for values that contradict each other or have the wrong type.
CONTRADICTIONS = (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def foreign_config(
    files: CheckpointFiles,
    producer: Producer,
    shapes: Shapes,
    overrides: dict[str, Any],
    convention: str | None,
    reasons: list[str],
    notes: list[str],
) -> Eagle31Config:
    """Returns the native config of another producer's checkpoint.

    Fields come from its config, from its tensors, whose `shapes` have native names, and from the caller's `overrides`;
    the latter win. Appends to `reasons` and `notes`. Raises ValueError for contradictions and ambiguities.
    """
    source = files.source
    fields = keys.read_fields(files.config, source)
    _check_ambiguous(producer, fields, overrides, source)
    if producer.norm_output_had_two_meanings and fields.get("norm_output") is False:
        scored = "SpecForge before its change #879 scored states without norm, as no engine does"
        notes.append(f"norm_output is false, with which {scored}")
    fields |= {name: value for name, value in overrides.items() if name in keys.FLAGS}
    _add_from_tensors(fields, shapes, source, notes)
    if "aux_hidden_state_layer_ids" not in overrides:
        ids, reason = _find_ids(files, producer, convention)
        fields["aux_hidden_state_layer_ids"] = ids
        (notes if ids is None else reasons).append(reason.removeprefix(f"{source}: "))
    fields |= overrides
    _add_mask(fields, files, shapes, overrides)
    _add_target_width(fields, files, shapes, notes)
    stored = sorted(files.tensors.items())
    dtype = next(each.dtype for name, each in stored if name.endswith("fc.weight") or each.dtype in FLOATS)
    fields["dtype"] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(dtype, "float32")
    return build_config(fields | {"architectures": ["Eagle31DrafterModel"]}, source)


def _check_ambiguous(producer: Producer, fields: dict[str, Any], overrides: Mapping[str, Any], source: str) -> None:
    if producer.norm_output_had_two_meanings and fields.get("norm_output") is True and "norm_output" not in overrides:
        raise ValueError(
            f"{source}: config.json: norm_output is true, which SpecForge wrote from May to September 2026 for EAGLE 3"
            " and writes since for EAGLE 3.1. Pass norm_output=False for a drafter trained before SpecForge's change"
            " #879, norm_output=True for a later one."
        )
    if producer.name == SPECULATORS and "norm_before_residual" not in {**fields, **overrides}:
        raise ValueError(
            f"{source}: config.json has no norm_before_residual, which speculators reads as false and vLLM as true. "
            "Pass norm_before_residual=True or False, as the drafter was trained (speculators' command line: True)."
        )


def _add_mask(fields: dict[str, Any], files: CheckpointFiles, shapes: Shapes, overrides: Mapping[str, Any]) -> None:
    """Adds the mask token of a P-EAGLE drafter, which has a `mask_hidden`. Raises ValueError where config, tensors and
    caller disagree on whether it is one, and where they do not name one token."""
    source, stated = files.source, keys.states_parallel(files.config)
    is_asked = overrides.get("mask_token_id") is not None
    if MASK not in shapes:
        if stated or is_asked:
            who = "config.json" if stated else "the caller"
            found = f"{source}: {who} says that this is a P-EAGLE drafter, the weights have no {MASK}"
            raise ValueError(f"{found}; expected both or neither.")
        return
    if stated is False:
        raise keys.contradicted(source, "parallel_drafting", stated, f"{MASK}, of a P-EAGLE drafter", "both or neither")
    if is_asked:
        return
    places = (files.config, keys.eagle_config(files.config))
    # several where its tokenizer has another mask
    tokens = {place[name] for place in places for name in keys.MASK_TOKENS if type(place.get(name)) is int}
    if len(tokens) != 1:
        found = f"{source}: config.json states {sorted(tokens) or 'no token'} as {', '.join(keys.MASK_TOKENS)}"
        raise ValueError(f"{found}; expected one, which stands for a mask with {MASK}. Pass mask_token_id=...")
    (fields["mask_token_id"],) = tokens


def _add_from_tensors(fields: dict[str, Any], shapes: Shapes, source: str, notes: list[str]) -> None:
    """Adds the fields that the tensors decide, whatever the config says. Raises ValueError for flags that contradict
    them."""
    for flag, sign in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        stated, shown = fields.get(flag), sign in shapes
        if stated is not None and stated != shown:
            raise keys.contradicted(source, flag, stated, f"{'a' if shown else 'no'} {sign}", "both or neither")
        if shown and stated is None:
            notes.append(f"{flag} is on: the weights have {sign}, though config.json does not say so")
        fields[flag] = shown
    fields.setdefault("norm_output", False)
    fields.setdefault("norm_before_residual", False)
    first = "layers.0.self_attn"
    fields |= {
        "attention_bias": any(name.startswith(first) and name.endswith(".bias") for name in shapes),
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in shapes,
        "fc_bias": "fc.bias" in shapes,
        "qk_norm": f"{first}.q_norm.weight" in shapes,
        "share_target_embeddings": "embed_tokens.weight" not in shapes,
        "share_target_head": "lm_head.weight" not in shapes,
    }
    layers = layer_count(shapes)
    if fields.get("num_hidden_layers", layers) != layers:
        notes.append(f"config.json says num_hidden_layers={fields['num_hidden_layers']}, the weights have {layers}")
    fields["num_hidden_layers"] = layers
    if isinstance(fields.get("layer_types"), list) and len(fields["layer_types"]) != layers:
        notes.append(f"layer_types lists {len(fields['layer_types'])} layers, the target's: not used")
        del fields["layer_types"]
    if f"{first}.kv_a_proj_with_mqa.weight" not in shapes:
        for name in keys.LATENT:
            fields.pop(name, None)  # of the target, whose whole config some producers write
    elif fields.get("kv_lora_rank") is None:
        found = f"{source}: the weights have {first}.kv_a_proj_with_mqa, config.json no kv_lora_rank"
        raise ValueError(f"{found}; expected MLA's sizes.")
    _add_sizes(fields, shapes, source, notes)


def _add_sizes(fields: dict[str, Any], shapes: Shapes, source: str, notes: list[str]) -> None:
    """Adds the sizes that a config may leave out, and the two vocabularies'. Raises ValueError where they contradict
    the tensors."""
    rows = {name: shape[0] for name, shape in shapes.items() if shape}
    for name, weight in (("hidden_size", "norm.weight"), ("intermediate_size", "layers.0.mlp.gate_proj.weight")):
        size = rows.get(weight)
        if fields.setdefault(name, size) != size and size is not None:
            raise keys.contradicted(source, name, fields[name], size, "the same")
    heads = fields.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        raise keys.wrong(source, "num_attention_heads", heads, "a number, which the weights do not tell")
    fields.setdefault("num_key_value_heads", heads)
    size = fields.setdefault("vocab_size", rows.get("t2d", rows.get("embed_tokens.weight")))
    if type(size) is not int:
        raise keys.wrong(source, "vocab_size", size, "the target's, which these weights do not tell")
    table = rows.get("embed_tokens.weight", size)
    if table > size and vocab.same_vocabulary(table, size):
        notes.append(f"the embedding has {table} rows for a vocabulary of {size}: padding, kept")
        fields["vocab_size"] = table
    drafted, stated = rows.get("lm_head.weight", rows.get("d2t", fields["vocab_size"])), fields.get("draft_vocab_size")
    if stated not in (None, drafted) and not (stated == size and drafted == fields["vocab_size"]):
        raise keys.contradicted(source, "draft_vocab_size", stated, f"{drafted} rows", "as many")
    fields["draft_vocab_size"] = drafted


def _find_ids(files: CheckpointFiles, producer: Producer, convention: str | None) -> tuple[list[int] | None, str]:
    """Returns the boundary ids of the captured states and where they were found; None and what to do where they are
    nowhere."""
    config, where = files.config, f"{files.source}: config.json: "
    key = "eagle_aux_hidden_state_layer_ids"
    at_top, in_nest = config.get(key), keys.eagle_config(config).get(key)
    as_output = config.get("aux_hidden_states_layer_ids")
    if at_top is not None:
        ids, reason = layer_ids.resolve(at_top, f"{where}{key}", convention or "boundary", None)
        if in_nest is not None and convention is None and in_nest not in (ids, [i - 1 for i in ids]):
            raise ValueError(f"{where}{key} is {ids}, in eagle_config {in_nest}; expected the same layers.")
        return ids, reason
    if as_output is not None:
        return layer_ids.resolve(as_output, f"{where}aux_hidden_states_layer_ids", convention or "output", None)
    if in_nest is not None:
        return layer_ids.resolve(in_nest, f"{where}eagle_config.{key}", convention, producer.convention)
    return None, (
        "config.json names no target layers: the engines' default [2, L // 2, L - 3] is used; pass"
        " aux_hidden_state_layer_ids=[...] if the drafter was trained on others (low acceptance is the sign)"
    )


def _add_target_width(fields: dict[str, Any], files: CheckpointFiles, shapes: Shapes, notes: list[str]) -> None:
    """Adds the target's width, and checks that fc reads that many captured states of that width.

    Raises ValueError where it does not.
    """
    source, fc = files.source, shapes["fc.weight"]
    if len(fc) != 2:
        raise ValueError(f"{source}: fc.weight has shape {fc}; expected two dimensions.")
    ids, stated = fields.get("aux_hidden_state_layer_ids"), files.config.get("num_aux_hidden_states")
    count, count_from = (stated, "num_aux_hidden_states") if stated is not None else (3, "the default")
    if ids:
        count, count_from = len(ids), f"the {len(ids)} layer ids"
    width, width_from = fields.get("target_hidden_size"), "target_hidden_size"
    if width is None:
        width, width_from = fields["hidden_size"], "hidden_size"
        is_known = fields["share_target_embeddings"] or type(width) is not int or type(count) is not int or count < 1
        if not is_known and fc[1] != count * width and fc[1] % count == 0:
            width, width_from = fc[1] // count, "fc's width"
            notes.append(f"the target's width is {width}: fc.weight reads {fc[1]} = {count} x {width}")
    if type(count) is not int or type(width) is not int or count < 1 or count * width != fc[1]:
        is_multiple = type(width) is int and width and fc[1] % width == 0
        fits = f"{fc[1] // width} states would fit" if is_multiple else "no number of states fits"
        raise ValueError(
            f"{source}: fc.weight reads {fc[1]} values, but {count} states ({count_from}) of width {width}"
            f" ({width_from}) were expected; {fits}. Pass aux_hidden_state_layer_ids=[...] or target_hidden_size=...,"
            " whichever is wrong."
        )
    if ids and stated is not None and stated != len(ids):
        raise keys.wrong(source, "num_aux_hidden_states", stated, f"{len(ids)}, as many as there are layer ids: {ids}")
    if not ids and count != 3:
        found = f"{source}: fc.weight reads {count} states, config.json does not say of which layers"
        raise ValueError(f"{found}; pass aux_hidden_state_layer_ids=[...].")
    fields["target_hidden_size"] = width


def build_config(fields: dict[str, Any], source: str) -> Eagle31Config:
    """Returns the config of these fields. Raises ValueError, naming the checkpoint, for fields that it refuses."""
    try:
        return Eagle31Config.from_dict(fields)
    except CONTRADICTIONS as error:
        raise ValueError(f"{source}: config.json: {str(error)[:500]}") from error


def check_computable(config: Eagle31Config, source: str) -> None:
    """Raises ValueError for an activation or a rope that transformers cannot compute, before anything is built or
    written."""
    if config.hidden_act not in ACT2FN:
        raise keys.wrong(source, "hidden_act", config.hidden_act, "one of transformers' activations")
    try:
        frequencies = Phi3RotaryEmbedding(config).inv_freq  # type: ignore[arg-type]
        reason = "" if frequencies.isfinite().all() else "frequencies are not finite"
        factors = [config.rope_parameters.get(name, 1.0) for name in ("factor", "mscale_all_dim")]
        if is_mla(config) and not all(isinstance(factor, int | float) for factor in factors):
            reason = "factor or mscale_all_dim is no number"
    except (*CONTRADICTIONS, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        expected = f"a rope of transformers, complete ({reason[:200]})"
        raise keys.wrong(source, "rope_parameters", config.rope_parameters, expected)
