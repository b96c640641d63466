"""A drafter to the formats other engines read. One row a format: what it cannot express, its config, its names."""

import json
import os
import shlex
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import vocab
from ..configuration import Eagle31Config
from ..storage.folders import new_folder, write_json
from ..storage.tensor_file import DTYPES, Entry
from . import layer_ids
from .convert import entries
from .files import HUB_OPTIONS, WEIGHTS
from .keys import FLAGS, write_geometry
from .producers import EXPORTED_BY, NATIVE
from .read import read_checkpoint
from .sharing import stamps, unchanged
from .write import write_weights

Rule = tuple[Callable[[Eagle31Config], bool], str]  # what is true of a config that cannot be expressed, and why

NO_BIAS: Rule = (lambda c: c.fc_bias, "fc has a bias, which it would drop")
SILU: Rule = (lambda c: c.hidden_act != "silu", "it computes silu, whatever hidden_act says")
WINDOW: Rule = (
    lambda c: "sliding_attention" in c.layer_types,
    "it attends to everything; the drafter has a sliding window",
)
QWEN_MLP: Rule = (
    lambda c: c.qk_norm and c.mlp_bias,
    "its drafter with q/k norm (Qwen3) has no MLP bias and drops it silently",
)
VLLM_CANNOT: tuple[Rule, ...] = (
    NO_BIAS,
    SILU,
    QWEN_MLP,
    (lambda c: c.qk_norm and c.attention_bias, "its drafter with q/k norm (Qwen3) drops o_proj's bias silently"),
    (lambda c: len(set(c.layer_types)) > 1, "its drafter's layers share one cache: all of them slide or none"),
    (lambda c: c.kv_lora_rank is not None and c.q_lora_rank is None, "its MLA drafter needs q_lora_rank"),
    (lambda c: c.kv_lora_rank is not None and c.norm_before_fc, "its MLA drafter has no norm_before_fc"),
    (lambda c: c.kv_lora_rank is not None and c.norm_before_residual, "its MLA drafter has no norm_before_residual"),
)
SGLANG_CANNOT: tuple[Rule, ...] = (
    NO_BIAS,
    SILU,
    WINDOW,
    (
        lambda c: c.norm_before_residual,
        "it has no norm_before_residual, and no weights can stand in for it: the norm depends on the input",
    ),
    (lambda c: c.qk_norm, "its drafter has no q/k norm"),
    (lambda c: c.attention_bias, "its drafter's first layer has no attention bias and drops it silently"),
    (lambda c: c.mlp_bias, "its drafter's MLP has no bias"),
    (lambda c: c.logit_scale != 1.0, "it has no logit_scale"),
    (lambda c: c.kv_lora_rank is not None and c.q_lora_rank is None, "its MLA drafter needs q_lora_rank"),
    (lambda c: c.kv_lora_rank is not None and c.num_hidden_layers > 1, "its MLA drafter has one layer"),
)
SPECULATORS_CANNOT: tuple[Rule, ...] = (
    NO_BIAS,
    SILU,
    QWEN_MLP,
    (lambda c: c.kv_lora_rank is not None, "it has no MLA drafter"),
    (lambda c: c.hidden_size != c.target_hidden_size, "it builds fc for a target as wide as the drafter"),
    (lambda c: c.num_aux_states != 3 and c.aux_hidden_state_layer_ids is None, "it needs the layer ids written out"),
)  # fmt: skip


@dataclass(frozen=True)
class ExportFormat:
    engine: str
    cannot: tuple[Rule, ...]
    config: Callable[[Eagle31Config, str | None], dict[str, Any]]
    names: Callable[[Eagle31Config, str], list[str]]  # native name -> names in the file
    command: Callable[[str, str, int], list[str]]  # target, folder, depth -> the words of the command that serves them
    ascending_vocabulary: bool = False


def flat_config(config: Eagle31Config, target_type: str | None = None) -> dict[str, Any]:
    """The flat layout vLLM and SGLang share, every flag written out. Layer ids: boundary at the top, which vLLM reads."""
    architecture, model_type = (
        ("Eagle3DeepseekV2ForCausalLM", "deepseek_v2")
        if config.kv_lora_rank is not None
        else ("Eagle3Qwen3ForCausalLM", "qwen3")
        if config.qk_norm
        else ("LlamaForCausalLMEagle3", "llama")
    )
    ids = config.aux_hidden_state_layer_ids
    return (
        write_geometry(config)
        | {name: getattr(config, name) for name in FLAGS}
        | {
            "architectures": [architecture],
            "model_type": model_type,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            "target_model": config.target_model,
            "num_aux_hidden_states": config.num_aux_states,
            **({} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}),
        }
    )


def sglang_config(config: Eagle31Config, target_type: str | None = None) -> dict[str, Any]:
    """The same with the ids once more as SGLang reads them, which depends on the target: see `sglang_ids`."""
    ids = config.aux_hidden_state_layer_ids
    nested = (
        {}
        if ids is None
        else {"eagle_aux_hidden_state_layer_ids": sglang_ids(ids, target_type or _target_type(config))}
    )
    latent = {} if config.kv_lora_rank is None else {"model_type": "deepseek_v3"}
    return flat_config(config) | latent | {"eagle_config": {"use_aux_hidden_state": True, **nested}}


def sglang_ids(ids: list[int], target_type: str | None) -> list[int]:
    """Boundary ids as SGLang's model for that target wants them: it adds 1, for gpt-oss never, for DeepSeek only if
    they start at 1.

    Raises ValueError where no list means these layers. Source: SGLang #25454 and #32334.
    """
    kind = (target_type or "").replace("-", "_").lower()
    if kind.startswith("gpt_oss"):
        return ids
    if kind.startswith(("deepseek", "kimi")) and ids[0] != 2:
        if ids[0] == 1:
            raise ValueError(
                f"SGLang reads layer ids that start at 1 as one more on a {kind} target: {ids} cannot be expressed."
            )
        return ids
    return layer_ids.as_output(ids)


def _target_type(config: Eagle31Config) -> str | None:
    name = (config.target_model or "").split("/")[-1].lower()
    if "distill" in name:  # DeepSeek's name on a Llama or Qwen
        return None
    return next((kind for kind in ("gpt-oss", "deepseek", "kimi") if name.startswith(kind)), None)


def speculators_config(config: Eagle31Config, target_type: str | None = None) -> dict[str, Any]:
    """speculators' container: geometry nested, flags and boundary ids outside, no `model_type` at the top."""
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


def same_name(config: Eagle31Config, name: str) -> list[str]:
    return [name]


def sglang_names(config: Eagle31Config, name: str) -> list[str]:
    """One layer: `midlayer.*`, as every version reads it. More: later layers call their first norm hidden_norm, vLLM
    input_layernorm."""
    if config.num_hidden_layers == 1:
        return [name.replace("layers.0.", "midlayer.", 1)]
    is_later_norm = name.endswith(".input_layernorm.weight") and not name.startswith("layers.0.")
    return [name, name.replace("input_layernorm", "hidden_norm")] if is_later_norm else [name]


def vllm_command(target: str, folder: str, depth: int) -> list[str]:
    return [
        "vllm",
        "serve",
        target,
        "--speculative-config",
        json.dumps({"method": "eagle3", "model": folder, "num_speculative_tokens": depth}),
    ]


def sglang_command(target: str, folder: str, depth: int) -> list[str]:
    return [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        target,
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        folder,
        "--speculative-num-steps",
        str(depth),
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        str(depth + 1),
    ]


EXPORT_FORMATS = {
    "vllm": ExportFormat("vLLM", VLLM_CANNOT, flat_config, same_name, vllm_command),
    "sglang": ExportFormat("SGLang", SGLANG_CANNOT, sglang_config, sglang_names, sglang_command),
    "speculators": ExportFormat(
        "speculators", SPECULATORS_CANNOT, speculators_config, same_name, vllm_command, ascending_vocabulary=True
    ),
}


def engine_config(config: Eagle31Config, format: str = "vllm", target_type: str | None = None) -> dict[str, Any]:
    """The config.json `format` reads for a drafter with this config. Raises ValueError, with the reason, where there is
    none."""
    if format not in EXPORT_FORMATS:
        raise ValueError(f"format is {format!r}; expected one of {', '.join(EXPORT_FORMATS)}.")
    row = EXPORT_FORMATS[format]
    reasons = [reason for applies, reason in row.cannot if applies(config)]
    if reasons:
        raise ValueError(f"{row.engine} cannot run this drafter: {'; '.join(reasons)}.")
    return row.config(config, target_type) | {EXPORTED_BY: NATIVE}  # so that it is read back without a question


def launch_line(config: Eagle31Config, folder: str | os.PathLike, format: str, depth: int = 5) -> str:
    """The shell command that serves the target with an exported drafter, whatever characters their names have."""
    return shlex.join(EXPORT_FORMATS[format].command(config.target_model or "TARGET", os.fspath(folder), depth))


def export_checkpoint(
    drafter_or_path: PreTrainedModel | str | os.PathLike,
    destination: str | os.PathLike,
    format: str = "vllm",
    *,
    target_type: str | None = None,
    aux_layer_convention: str | None = None,
    **options: Any,
) -> Path:
    """Writes a drafter, loaded or a checkpoint of any format, as `format` ("vllm", "sglang", "speculators") reads it.

    `target_type`: the target's `model_type`, where SGLang's layer ids depend on it (gpt_oss, deepseek_v3, kimi_k2);
    without it, it is told from `target_model`. speculators takes draft vocabularies in ascending order only: rows of
    the head are put so. Returns the new folder. Raises ValueError (before anything is written) when the engine cannot
    express the drafter, or the destination is not empty; OSError when the checkpoint is not there or changes meanwhile.
    `options` are those of `convert_checkpoint`.
    """
    path, subfolder = (
        None if isinstance(drafter_or_path, PreTrainedModel) else drafter_or_path,
        options.get("subfolder"),
    )
    before = stamps(path, subfolder)
    if isinstance(drafter_or_path, PreTrainedModel):
        config, tensors, source = _of_model(drafter_or_path)
    else:
        hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
        checkpoint = read_checkpoint(str(drafter_or_path), options, aux_layer_convention, **hub)
        config = checkpoint.config
        tensors = entries(checkpoint)
        source = checkpoint.source
    try:
        values = engine_config(config, format, target_type)
    except ValueError as error:
        raise ValueError(f"{error} Nothing was written.") from None
    row, destination = EXPORT_FORMATS[format], Path(destination)
    if row.ascending_vocabulary and "d2t" in tensors:
        tensors = _ascending(tensors, config.vocab_size)
    named = {name: entry for native, entry in tensors.items() for name in row.names(config, native)}
    with new_folder(destination) as folder, unchanged(before, path, subfolder):
        write_weights(folder / WEIGHTS, named, source)
        write_json(folder / "config.json", values)
    return destination


def _of_model(model: PreTrainedModel) -> tuple[Eagle31Config, dict[str, Entry], str]:
    config: Any = model.config
    if not isinstance(config, Eagle31Config):
        raise ValueError(f"export_checkpoint got a {type(model).__name__}; expected an Eagle31DrafterModel or a path.")
    config = deepcopy(config)
    config.dtype = model.dtype  # it may have been moved to another since it was loaded
    return config, {name: Entry.of_tensor(value) for name, value in model.state_dict().items()}, type(model).__name__


def _ascending(tensors: Mapping[str, Entry], vocab_size: int) -> dict[str, Entry]:
    """The draft vocabulary in ascending order of target ids, the rows of the head with it."""
    ids = vocab.target_ids(_tensor(tensors["d2t"]))
    order = ids.argsort()
    if torch.equal(order, torch.arange(len(order))):
        return dict(tensors)
    head = tensors["lm_head.weight"]
    return dict(tensors) | {
        "d2t": Entry.of_tensor(vocab.offsets(ids[order])),
        "lm_head.weight": replace(head, chunks=lambda: Entry.of_tensor(_tensor(head)[order]).chunks()),
    }


def _tensor(entry: Entry) -> Tensor:
    data = bytearray().join(entry.chunks())
    return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
