"""Export of a drafter to the formats that other engines read; EXPORT_FORMATS has an entry for each of them."""

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import vocab
from ..config_rules import is_mla
from ..configuration import HUB_OPTIONS, Eagle31Config
from ..quantized import refuse_quantized
from ..storage.folders import new_folder, write_json
from ..storage.tensor_file import DTYPES, Entry
from .convert import entries, write_weights
from .files import WEIGHTS
from .keys import DRAFTER, FLAGS, write_geometry
from .producers import EXPORTED_BY, NATIVE
from .read import read_checkpoint
from .sharing import stamps, unchanged
from .tensors import expected_tensors

Rule = tuple[Callable[[Eagle31Config], bool], str]  # a test of configs that an engine cannot run, and the reason


def _rope(config: Eagle31Config) -> str:
    return config.rope_parameters["rope_type"]


def _has_usual_scale(rope: Mapping[str, Any]) -> bool:
    """Returns whether yarn multiplies attention by 1 + 0.1 ln(factor), as it does where no attention_factor is set."""
    scale = rope.get("attention_factor")
    return scale is None or math.isclose(scale, 1 + 0.1 * math.log(max(rope.get("factor") or 1, 1)), rel_tol=1e-6)


def _has_yarn_extras(rope: Mapping[str, Any]) -> bool:
    """Returns whether rope has an option of yarn that DeepSeek's yarn, with which both engines run MLA, lacks."""
    return rope.get("attention_factor") is not None or rope.get("truncate") is False


NO_BIAS: Rule = (lambda c: c.fc_bias, "fc has a bias, which it would drop")
SILU: Rule = (lambda c: c.hidden_act != "silu", "it knows silu alone")
DYNAMIC: Rule = (lambda c: _rope(c) == "dynamic", "its dynamic rope does not change with the text's length")
QWEN_MLP: Rule = (
    lambda c: c.qk_norm and c.mlp_bias,
    "its drafter with q/k norm (Qwen3) has no MLP bias and drops it silently",
)
MLA_QUERY: Rule = (lambda c: is_mla(c) and c.q_lora_rank is None, "its MLA drafter needs q_lora_rank")
MLA_NORM: Rule = (lambda c: is_mla(c) and c.norm_before_fc, "its MLA drafter has no norm_before_fc")
MLA_ROPE: Rule = (
    lambda c: is_mla(c) and (_rope(c) not in ("default", "yarn") or _has_yarn_extras(c.rope_parameters)),
    "its MLA drafter takes any scaled rope for yarn, without attention_factor and truncate",
)
VLLM_CANNOT: tuple[Rule, ...] = (
    NO_BIAS,
    SILU,
    DYNAMIC,
    QWEN_MLP,
    (lambda c: c.qk_norm and c.attention_bias, "its drafter with q/k norm (Qwen3) drops o_proj's bias silently"),
    (lambda c: len(set(c.layer_types)) > 1, "its drafter's layers share one cache: all of them slide or none"),
    MLA_QUERY,
    MLA_NORM,
    MLA_ROPE,
    (lambda c: is_mla(c) and (c.attention_bias or c.mlp_bias), "its MLA drafter drops biases silently"),
    (lambda c: is_mla(c) and "sliding_attention" in c.layer_types, "its MLA drafter has no window"),
    (lambda c: is_mla(c) and c.is_parallel, "its MLA drafter does not draft in parallel (P-EAGLE)"),
)
SGLANG_CANNOT: tuple[Rule, ...] = (
    (lambda c: c.is_parallel, "it does not draft in parallel (P-EAGLE)"),
    NO_BIAS,
    SILU,
    DYNAMIC,
    (lambda c: "sliding_attention" in c.layer_types, "it attends to everything; the drafter has a sliding window"),
    (
        lambda c: c.norm_before_residual,
        "it has no norm_before_residual, and no weights can stand in for it: the norm depends on the input",
    ),
    (lambda c: c.qk_norm, "its drafter has no q/k norm"),
    (lambda c: c.attention_bias, "its drafter drops the biases of q, k and v silently"),
    (lambda c: c.mlp_bias, "its drafter's MLP has no bias"),
    (lambda c: c.logit_scale != 1.0, "it has no logit_scale"),
    (
        lambda c: _rope(c) == "yarn" and not _has_usual_scale(c.rope_parameters),
        "it computes yarn's attention_factor itself",
    ),
    (
        lambda c: c.num_aux_states * c.target_hidden_size == c.hidden_size,
        "it skips fc where the captured states together are as wide as the drafter",
    ),
    (lambda c: is_mla(c) and c.num_hidden_layers > 1, "its MLA drafter has one layer"),
    MLA_QUERY,
    MLA_NORM,
    MLA_ROPE,
)
SPECULATORS_CANNOT: tuple[Rule, ...] = (
    (lambda c: c.is_parallel, "P-EAGLE is not written in its format, only in vLLM's"),
    NO_BIAS,
    SILU,
    QWEN_MLP,
    (is_mla, "it has no MLA drafter"),
    (lambda c: c.hidden_size != c.target_hidden_size, "it builds fc for a target as wide as the drafter"),
)

# Targets that SGLang runs by its DeepSeek class or a copy of it: how their model_type or class begins, without "_", and
# how their name does, without the words of other models that are named after them.
DEEPSEEK_TYPES = ("deepseek", "kimi", "glm4moelite", "glmmoedsa")
DEEPSEEK_NAMES = ("deepseek-", "kimi-k2", "moonlight-", "glm-4.7-flash-", "glm-5-", "glm-5.1-", "glm-5.2-")
OTHER_NAMES = ("distill", "qwen", "llama", "-coder-1", "-coder-6", "-coder-33b", "-7b-", "-67b-")


@dataclass(frozen=True)
class ExportFormat:
    """A format: the engine that reads it, the drafters this cannot run, and how config and tensors are written."""

    engine: str
    cannot: tuple[Rule, ...]
    config: Callable[[Eagle31Config, str | None], dict[str, Any]]  # a config and the target's model_type -> config.json
    # config, target, folder, depth -> the words of the command that serves them
    command: Callable[[Eagle31Config, str, str, int], list[str]]
    names: Callable[[Eagle31Config, str], list[str]] = lambda config, name: [name]  # native name -> names in the file
    ascending_vocabulary: bool = False


def flat_config(config: Eagle31Config, target_type: str | None = None) -> dict[str, Any]:
    """Returns the flat config.json that vLLM and SGLang share, with every flag written out.

    Its layer ids are boundary ids at the top level, where vLLM reads them.
    """
    architecture, model_type = "LlamaForCausalLMEagle3", "llama"
    if is_mla(config):
        architecture, model_type = "Eagle3DeepseekV2ForCausalLM", "deepseek_v2"
    elif config.qk_norm:
        architecture, model_type = "Eagle3Qwen3ForCausalLM", "qwen3"
    ids = config.aux_hidden_state_layer_ids
    return write_geometry(config) | {
        **{name: getattr(config, name) for name in DRAFTER},
        "architectures": [architecture],
        "model_type": model_type,
        "num_aux_hidden_states": config.num_aux_states,
        **({} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}),
        **({"parallel_drafting": True, "ptd_token_id": config.mask_token_id} if config.is_parallel else {}),
    }


def sglang_config(config: Eagle31Config, target_type: str | None = None) -> dict[str, Any]:
    """Returns the flat config.json with the layer ids once more, as SGLang reads them: see `sglang_ids`."""
    nested: dict[str, Any] = {"use_aux_hidden_state": True}
    ids = config.aux_hidden_state_layer_ids
    if ids is not None:
        nested["eagle_aux_hidden_state_layer_ids"] = sglang_ids(ids, is_deepseek(config.target_model, target_type))
    latent = {"model_type": "deepseek_v3"} if is_mla(config) else {}
    shared = {"draft_vocab_size": None} if config.share_target_head else {}  # by this it takes the target's head
    return flat_config(config) | latent | shared | {"eagle_config": nested}


def is_deepseek(target: str | None, target_type: str | None) -> bool:
    """Returns whether SGLang runs a target by its DeepSeek class. `target_type`, the target's `model_type`, tells;
    without it `target`, the name of its repository or folder (also of the Hub's cache), has to."""
    if target_type is not None:
        return re.sub(r"[\W_]", "", target_type).lower().startswith(DEEPSEEK_TYPES)
    path = re.sub(r"/snapshots/[^/]+$", "", (target or "").rstrip("/")).replace("--", "/")
    name = path.split("/")[-1].lower().replace("_", "-") + "-"
    return name.startswith(DEEPSEEK_NAMES) and not any(word in name for word in OTHER_NAMES)


def sglang_ids(ids: list[int], deepseek: bool) -> list[int]:
    """Returns boundary ids as SGLang has to be told them, for a target that its DeepSeek class runs or another.

    SGLang adds 1 to the ids it reads; its DeepSeek class does so only if they start at 1, and before 0.5.13 always.
    (Its gpt-oss class keeps a list whose last id is the number of layers, but no list is written that ends so.) Raises
    ValueError where no list means these layers. Source: `set_eagle3_layers_to_capture` of its models, 0.5.5 to 0.5.23.
    """
    if deepseek and ids[0] == 1:
        found = "SGLang's DeepSeek class reads layer ids that start at 1 as one more"
        raise ValueError(f"{found}: {ids} cannot be expressed.")
    if deepseek and ids[0] != 2:  # those that start at 2 are written so that all versions read them right
        return ids
    if ids[0] == 0:
        found = f"aux_hidden_state_layer_ids {ids} hold 0, the embedding's output"
        raise ValueError(f"{found}, which output ids cannot express.")
    return [i - 1 for i in ids]


def speculators_config(config: Eagle31Config, target_type: str | None = None) -> dict[str, Any]:
    """Returns speculators' config.json: geometry nested, flags and boundary ids outside, no `model_type` at the top."""
    layer = write_geometry(config) | {"model_type": "qwen3" if config.qk_norm else "llama"}
    layer["num_aux_hidden_states"] = config.num_aux_states  # vLLM makes its config of this dict and sizes fc by it
    return {name: getattr(config, name) for name in FLAGS} | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": config.target_model, "architectures": []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": config.aux_hidden_state_layer_ids,
    }


def sglang_names(config: Eagle31Config, name: str) -> list[str]:
    """Returns the names of a tensor for SGLang.

    The layer of a drafter with one is `midlayer.*`, which every version reads. In a drafter with more, the first norm
    of a later layer is hidden_norm; it is also written as input_layernorm, which vLLM reads.
    """
    if config.num_hidden_layers == 1:
        return [name.replace("layers.0.", "midlayer.", 1)]
    is_later_norm = name.endswith(".input_layernorm.weight") and not name.startswith("layers.0.")
    return [name, name.replace("input_layernorm", "hidden_norm")] if is_later_norm else [name]


def vllm_speculation(config: Eagle31Config, folder: str, depth: int) -> dict[str, Any]:
    """Returns vLLM's `speculative_config` for a drafter in a folder that drafts `depth` tokens."""
    speculation = {"method": "eagle3", "model": folder, "num_speculative_tokens": depth}
    return speculation | ({"parallel_drafting": True} if config.is_parallel else {})


def vllm_command(config: Eagle31Config, target: str, folder: str, depth: int) -> list[str]:
    """Returns the words of the command by which vLLM serves a target with a drafter that drafts `depth` tokens."""
    return ["vllm", "serve", target, "--speculative-config", json.dumps(vllm_speculation(config, folder, depth))]


def sglang_command(config: Eagle31Config, target: str, folder: str, depth: int) -> list[str]:
    """Returns the words of the command by which SGLang serves a target with a drafter that drafts `depth` tokens."""
    options = {
        "model-path": target,
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": folder,
        "speculative-num-steps": str(depth),
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": str(depth + 1),
    }
    words = (word for name, value in options.items() for word in (f"--{name}", value))
    return ["python", "-m", "sglang.launch_server", *words]


EXPORT_FORMATS = {
    "vllm": ExportFormat("vLLM", VLLM_CANNOT, flat_config, vllm_command),
    "sglang": ExportFormat("SGLang", SGLANG_CANNOT, sglang_config, sglang_command, sglang_names),
    "speculators": ExportFormat(
        "speculators", SPECULATORS_CANNOT, speculators_config, vllm_command, ascending_vocabulary=True
    ),
}


def engine_config(config: Eagle31Config, format: str = "vllm", target_type: str | None = None) -> dict[str, Any]:
    """Returns the config.json of a drafter in an export format.

    `target_type`: see `export_checkpoint`. Raises ValueError, with the reasons, where the engine cannot run it.
    """
    if format not in EXPORT_FORMATS:
        raise ValueError(f"format is {format!r}; expected one of {', '.join(EXPORT_FORMATS)}.")
    chosen = EXPORT_FORMATS[format]
    reasons = [reason for applies, reason in chosen.cannot if applies(config)]
    if reasons:
        raise ValueError(f"{chosen.engine} cannot run this drafter: {'; '.join(reasons)}.")
    return chosen.config(config, target_type) | {EXPORTED_BY: NATIVE}  # so that it is read back without a question


def refusal(config: Eagle31Config, format: str) -> str | None:
    """Returns why the engine of an export format cannot run a drafter, None where it can."""
    try:
        engine_config(config, format)
    except ValueError as error:
        return str(error)
    return None


def export_notes(config: Eagle31Config, format: str, target_type: str | None = None) -> list[str]:
    """Returns what is to be known of an export: how SGLang's layer ids were chosen, and what vLLM, which serves the
    format of speculators, too, does not run of it."""
    if format == "sglang" and config.aux_hidden_state_layer_ids is not None:
        which = "DeepSeek class reads" if is_deepseek(config.target_model, target_type) else "other classes read"
        return [f"layer ids are written as SGLang's {which} them; --target-type, the target's model_type, decides"]
    reason = refusal(config, "vllm") if format == "speculators" else None
    return [] if reason is None else [reason]


def launch_line(config: Eagle31Config, folder: str | os.PathLike, format: str, depth: int = 5) -> str:
    """Returns the shell command that serves the target with an exported drafter, its words quoted where need be.

    `depth`: tokens drafted a round.
    """
    target = config.target_model or "TARGET"
    return shlex.join(EXPORT_FORMATS[format].command(config, target, os.fspath(folder), depth))


def export_checkpoint(
    drafter_or_path: PreTrainedModel | str | os.PathLike,
    destination: str | os.PathLike,
    format: str = "vllm",
    *,
    target_type: str | None = None,
    aux_layer_convention: str | None = None,
    **options: Any,
) -> Path:
    """Writes a drafter, loaded or a checkpoint of any format, in the format "vllm", "sglang" or "speculators".

    `target_type`: the target's `model_type`, where SGLang's layer ids depend on it (deepseek_v3, kimi_k2, glm_moe_dsa);
    by default it is guessed from how the name of `target_model` begins. speculators reads draft vocabularies in
    ascending order only, so for it the rows of the head are sorted. `aux_layer_convention` and `options`, those of
    `convert_checkpoint`, are for a checkpoint; a loaded drafter is written as its config says.

    Returns the new folder. Raises ValueError, before anything is written, where the engine cannot run the drafter, it
    is loaded and has adapters or is wrapped, or the destination is not empty; OSError where the checkpoint is not there
    or changes meanwhile.
    """
    path = None if isinstance(drafter_or_path, nn.Module) else drafter_or_path
    subfolder = options.get("subfolder")
    before = stamps(path, subfolder)
    if isinstance(drafter_or_path, nn.Module):
        if options or aux_layer_convention:
            found = f"export_checkpoint got {', '.join(options) or 'aux_layer_convention'} for a drafter that is loaded"
            raise ValueError(f"{found}; expected no options with it: set fields in its config.")
        config, tensors, source = _of_model(drafter_or_path)
    else:
        hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
        checkpoint = read_checkpoint(str(drafter_or_path), options, aux_layer_convention, **hub)
        config, source = checkpoint.config, checkpoint.source
        tensors = entries(checkpoint)
    try:
        values = engine_config(config, format, target_type)
    except ValueError as error:
        raise ValueError(f"{error} Nothing was written.") from None
    chosen, destination = EXPORT_FORMATS[format], Path(destination)
    if chosen.ascending_vocabulary and "d2t" in tensors:
        tensors = _ascending(tensors, config.vocab_size)
    named = {name: entry for native, entry in tensors.items() for name in chosen.names(config, native)}
    with new_folder(destination) as folder, unchanged(before, path, subfolder):
        write_weights(folder / WEIGHTS, named, source)
        write_json(folder / "config.json", values)
    return destination


def _of_model(model: nn.Module) -> tuple[Eagle31Config, dict[str, Entry], str]:
    """Returns config, tensors and class of a loaded drafter. Raises ValueError for another model, and for a drafter
    with other tensors than its own."""
    config: Any = getattr(model, "config", None)
    if not isinstance(config, Eagle31Config):
        raise ValueError(f"export_checkpoint got a {type(model).__name__}; expected an Eagle31DrafterModel or a path.")
    refuse_quantized(model, "exported")
    config = deepcopy(config)
    config.dtype = model.dtype  # it may have been moved to another since it was loaded
    tensors = {name: Entry.of_tensor(value) for name, value in model.state_dict().items()}
    others = sorted(tensors.keys() ^ expected_tensors(config).keys())
    if others:
        found = f"export_checkpoint got a drafter with other tensors than its config describes, as {others[0]}"
        remedy = "Merge an adapter, and take a compiled drafter out of its wrapper, first."
        raise ValueError(f"{found}; expected its own. {remedy}")
    return config, tensors, type(model).__name__


def _ascending(tensors: Mapping[str, Entry], vocab_size: int) -> dict[str, Entry]:
    """Sorts the draft vocabulary by target ids, and the rows of the head with it."""
    ids = vocab.target_ids(_tensor(tensors["d2t"]))
    if bool((ids[1:] > ids[:-1]).all()):
        return dict(tensors)
    order, head = ids.argsort(), tensors["lm_head.weight"]
    return dict(tensors) | {
        "d2t": Entry.of_tensor(vocab.offsets(ids[order])),
        "lm_head.weight": replace(head, chunks=lambda: Entry.of_tensor(_tensor(head)[order]).chunks()),
    }


def _tensor(entry: Entry) -> Tensor:
    data = bytearray().join(entry.chunks())
    return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
