"""Tiny drafters written as each producer writes them.

Names and config keys are spelled out here, so that no table of the library is its own witness. V target vocabulary, Vd
draft vocabulary, n captured states.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from factories import EAGLE3, MLA, VARIANTS, build
from safetensors.torch import save_file
from torch import Tensor

from eagle31_hf import Eagle31DrafterModel

EAGLE31 = {"fc_norm": True, "norm_output": True}
SHARED = {"share_target_embeddings": True}
FULL = {"draft_vocab_size": 61}
SIZES = {
    "vocab_size": 61, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, "rms_norm_eps": 1e-05, "hidden_act": "silu",
}  # fmt: skip
LLAMA = SIZES | {"model_type": "llama", "draft_vocab_size": 37, "rope_theta": 10000.0, "tie_word_embeddings": False}
LLAMA_EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 8,
}
KIMI_YARN = {
    "rope_type": "yarn", "factor": 64.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def nested(ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    listed = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    return {"eagle_config": {"use_aux_hidden_state": True, **listed, **more}}


@dataclass(frozen=True)
class Layout:
    """A producer's way to write a drafter.

    `fields`: the drafter's own config; `config`: the keys that the producer writes; `renames`: native prefix -> its
    names, all of which are written; `without`: native names that are not written; `options`: arguments that the user
    has to give when loading, and no others.
    """

    fields: dict[str, Any]
    config: dict[str, Any]
    renames: dict[str, tuple[str, ...]] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    extra: dict[str, Tensor] = field(default_factory=dict)
    ascending: bool = True
    dtype: torch.dtype = torch.float32
    file: str = "model.safetensors"
    shards: int = 1
    subfolder: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    side_file: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Eagle31DrafterModel:
        drafter = build(**self.fields)
        for weight in drafter.parameters():  # `to` would round rope's frequencies too
            weight.data = weight.data.to(self.dtype)
        if drafter.d2t is not None and self.ascending:
            drafter.set_draft_vocabulary(drafter.draft_to_target_ids().sort().values)
        if "self_attn.o_proj.bias" in "".join(self.without):
            torch.nn.init.zeros_(drafter.layers[0].self_attn.o_proj.bias)
        return drafter

    def write(self, folder: Path) -> Eagle31DrafterModel:
        """Writes the checkpoint and returns the drafter it holds."""
        drafter = self.build()
        tensors = {
            name: w.clone() for native, w in drafter.state_dict().items() for name in self.names(native)
        } | self.extra
        (folder / self.subfolder).mkdir(parents=True, exist_ok=True)
        write_weights(folder / self.subfolder, tensors, self.file, self.shards, self.metadata)
        (folder / self.subfolder / "config.json").write_text(json.dumps(self.config))
        if self.side_file:
            torch.save({"selected_token_ids": drafter.draft_to_target_ids()}, folder / self.subfolder / self.side_file)
        return drafter

    def names(self, native: str) -> Iterable[str]:
        if native in self.without:
            return []
        prefix = max((p for p in self.renames if native.startswith(p)), key=len, default="")
        return [new + native.removeprefix(prefix) for new in self.renames.get(prefix, ("",))]


def write_weights(
    folder: Path, tensors: dict[str, Tensor], file: str, shards: int = 1, metadata: dict[str, str] | None = None
) -> None:
    """Writes one file, or several with an index, as safetensors or pickles."""
    stem, suffix = file.rsplit(".", 1)
    save: Callable = (
        (lambda t, p: torch.save(t, p))
        if suffix == "bin"
        else (lambda t, p: save_file(t, p, metadata or {"format": "pt"}))
    )
    if shards == 1:
        save(tensors, folder / file)
        return
    weight_map = {}
    for i in range(shards):
        part, name = dict(list(tensors.items())[i::shards]), f"{stem}-{i + 1:05}-of-{shards:05}.{suffix}"
        save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    total = sum(w.numel() * w.element_size() for w in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{file}.index.json").write_text(json.dumps(index))


MIDLAYER = {"layers.0.": ("midlayer.",)}
TARGET_OF_36_LAYERS = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "layer_types": ["full_attention"] * 36,
    "max_window_layers": 36,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "q_lora_rank": None,
}
NEMO = {"": ("model.",), "lm_head.": ("lm_head.",), "d2t": ("d2t",), "t2d": ("t2d",)}

LAYOUTS = {
    # Width 24, because its reader takes heads of hidden_size / num_attention_heads.
    "original_release": Layout(
        EAGLE3 | SHARED | {"hidden_size": 24, "aux_hidden_state_layer_ids": None},
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 61,
            "draft_vocab_size": 37,
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "use_cache": True,
        },
        MIDLAYER,
        file="pytorch_model.bin",
        dtype=torch.float16,
    ),
    "original_release_of_another_width": Layout(  # the width is fc's, the layer count in its config wrong
        EAGLE3 | {"target_hidden_size": 28, "aux_hidden_state_layer_ids": None},
        LLAMA | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40},
        MIDLAYER,
        file="pytorch_model.bin",
        shards=3,
    ),
    "specforge": Layout(
        EAGLE3 | SHARED | {"aux_hidden_state_layer_ids": [2, 47, 91]},
        LLAMA_EAGLE3
        | nested([1, 46, 90])
        | {
            "norm_output": False,
            "fc_norm": False,
            "torch_dtype": "bfloat16",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        MIDLAYER,
        dtype=torch.bfloat16,
    ),
    "specforge_of_two_meanings": Layout(
        EAGLE31 | SHARED | {"aux_hidden_state_layer_ids": [2, 16, 29]},
        LLAMA_EAGLE3 | nested([1, 15, 28]) | EAGLE31,
        MIDLAYER,
        options={"norm_output": True},
    ),
    "specforge_full_vocabulary": Layout(
        EAGLE3 | FULL | {"aux_hidden_state_layer_ids": [2, 16, 29]},
        LLAMA_EAGLE3 | nested([1, 15, 28]) | FULL,
        MIDLAYER,
        extra={"d2t": torch.zeros(61, dtype=torch.int64), "t2d": torch.ones(61, dtype=torch.bool)},
    ),
    "speculators": Layout(
        {
            "fc_norm": False,
            "norm_before_fc": True,
            "norm_output": True,
            "norm_before_residual": True,
            "qk_norm": True,
            "layer_types": ["sliding_attention"],
            "sliding_window": 3,
            "aux_hidden_state_layer_ids": [2, 46, 91, 93],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "target_model": "a/target",
        },
        {
            "architectures": ["Eagle3DraftModel"],
            "auto_map": {"": "eagle3.Eagle3DraftModel"},
            "speculators_model_type": "eagle3",
            "speculators_version": "0.8.0",
            "draft_vocab_size": 37,
            "target_hidden_size": None,
            "has_no_defaults_at_init": False,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "fc_norm": False,
            "norm_output": True,
            "embed_requires_grad": False,
            "eagle_aux_hidden_state_layer_ids": [2, 46, 91, 93],
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "verifier": {"name_or_path": "a/target", "architectures": []},
            },
            "transformer_layer_config": (
                SIZES
                | {
                    "model_type": "qwen3",
                    "layer_types": ["sliding_attention"],
                    "sliding_window": 3,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                }
            ),
        },
        shards=2,
    ),
    # neither layer ids nor rope_parameters, llama layers, and its head is the whole vocabulary's
    "speculators_older": Layout(
        EAGLE3 | FULL | {"norm_before_residual": False, "aux_hidden_state_layer_ids": None},
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 61,
            "eagle_aux_hidden_state_layer_ids": None,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None}},
            "transformer_layer_config": SIZES | {"model_type": "llama", "rope_theta": 10000.0},
        },
        options={"norm_before_residual": False},
    ),
    "modelopt": Layout(
        EAGLE3 | SHARED | {"aux_hidden_state_layer_ids": [2, 16, 29]},
        LLAMA_EAGLE3
        | nested(
            [1, 15, 28],
            use_input_layernorm_in_first_layer=True,
            use_last_layernorm=True,
            use_mtp_layernorm=False,
            next_layer_regular=True,
            parallel_draft_step=1,
        )
        | {"producer": {"name": "modelopt", "version": "0.33"}, "target_hidden_size": 20},
        without=("t2d",),
        ascending=False,
    ),
    "torchspec": Layout(
        EAGLE31
        | FULL
        | {"aux_hidden_state_layer_ids": [2, 30, 58], "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        LLAMA_EAGLE3
        | FULL
        | EAGLE31
        | nested([1, 29, 57])
        | {"_torchspec_version": "0.1", "rope_theta": 5e4, "rope_scaling": None},
        MIDLAYER | {"fc.": ("context_proj.",), "norm.": ("final_norm.",)},
        metadata={"format": "pt", "torchspec_version": "0.1"},
    ),
    "nemo": Layout(
        EAGLE3 | {"aux_hidden_state_layer_ids": None},
        LLAMA | TARGET_OF_36_LAYERS | {"architectures": ["LlamaEagle3DraftModel"], "norm_output": False},
        NEMO,
        ascending=False,
        shards=3,
        subfolder="model/consolidated",
    ),
    "nemo_older": Layout(
        EAGLE3 | {"aux_hidden_state_layer_ids": None},
        LLAMA | TARGET_OF_36_LAYERS | {"architectures": ["LlamaEagle3DraftModel"]},
        NEMO,
        without=("d2t", "t2d"),
        ascending=False,
        side_file="eagle_meta.pt",
    ),
    "angelslim": Layout(
        EAGLE3 | SHARED | {"aux_hidden_state_layer_ids": [2, 18, 33]},
        LLAMA
        | {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
            "aux_hidden_states_layer_ids": [1, 17, 32],
            "eagle_aux_injection_mode": "fused_fc",
        },
        MIDLAYER,
        dtype=torch.bfloat16,
    ),
    "angelslim_training_key": Layout(
        EAGLE3 | SHARED | {"aux_hidden_state_layer_ids": [2, 18, 33]},
        LLAMA_EAGLE3 | {"aux_hidden_states_layer_ids": [1, 17, 32]},
        MIDLAYER,
    ),
    "nebius": Layout(
        EAGLE3 | SHARED | {"aux_hidden_state_layer_ids": None, "rope_parameters": YARN | {"rope_theta": 150000.0}},
        LLAMA
        | {
            "architectures": ["LlamaForCausalLM"],
            "truncated_vocab_size": 37,
            "rope_theta": 150000.0,
            "rope_scaling": YARN,
        },
        MIDLAYER,
    ),
    "specdrift": Layout(
        EAGLE31 | SHARED | {"aux_hidden_state_layer_ids": [2, 7, 12, 17, 22]},
        LLAMA_EAGLE3 | EAGLE31 | nested([1, 6, 11, 16, 21]) | {"num_aux_hidden_states": 5},
    ),
    "inferact": Layout(
        EAGLE31 | FULL | {"head_dim": 12, "aux_hidden_state_layer_ids": [2, 30, 57]},
        LLAMA_EAGLE3
        | EAGLE31
        | FULL
        | {"head_dim": 12, "eagle_aux_hidden_state_layer_ids": [2, 30, 57], "num_aux_hidden_states": 3},
    ),
    "gpt_oss_v3": Layout(
        {"fc_norm": False, "norm_output": False, "norm_before_fc": True, "aux_hidden_state_layer_ids": [24, 30, 36]}
        | SHARED,
        LLAMA_EAGLE3 | nested([24, 30, 36], norm_before_fc=True, use_last_layernorm=True),
        without=("t2d",),
        ascending=False,
        options={"aux_layer_convention": "boundary"},
    ),
    "sglang_norms_by_place": Layout(
        {"fc_norm": True, "norm_output": False, "aux_hidden_state_layer_ids": [2, 16, 29]} | SHARED,
        LLAMA_EAGLE3 | nested([1, 15, 28]) | {"use_aux_norm": True},
        MIDLAYER | {f"fc_norm.{k}.": (f"aux_norm_{place}.",) for k, place in enumerate(("low", "mid", "high"))},
    ),
    "norms_called_fcs": Layout(
        {
            "fc_norm": True,
            "norm_output": False,
            "aux_hidden_state_layer_ids": [4, 32, 60],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        }
        | SHARED,
        LLAMA_EAGLE3
        | nested([3, 31, 59])
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}, "rope_theta": 1e7},
        {"fc_norm.": ("fcs.",)},
        options={"aux_layer_convention": "output"},
    ),
    "megatron_two_layers": Layout(
        EAGLE3 | FULL | {"num_hidden_layers": 2, "aux_hidden_state_layer_ids": [2, 16, 29]},
        LLAMA_EAGLE3
        | FULL
        | nested([1, 15, 28], use_last_layernorm=True)
        | {"num_hidden_layers": 2, "draft_vocab_size": None},
        {
            "layers.0.": ("midlayer.0.",),
            "layers.1.": ("midlayer.1.",),
            "layers.1.input_layernorm.": ("midlayer.1.hidden_norm.",),
        },
    ),
    "two_layers_with_hidden_norm": Layout(
        EAGLE31 | {"num_hidden_layers": 2, "aux_hidden_state_layer_ids": [2, 16, 29]},
        LLAMA_EAGLE3 | EAGLE31 | nested([1, 15, 28]) | {"num_hidden_layers": 2},
        {"layers.1.input_layernorm.": ("layers.1.hidden_norm.",)},
    ),
    "two_layers_with_both_norms": Layout(
        EAGLE31 | {"num_hidden_layers": 2, "aux_hidden_state_layer_ids": [2, 16, 29]},
        LLAMA_EAGLE3 | EAGLE31 | nested([1, 15, 28]) | {"num_hidden_layers": 2},
        {"layers.1.input_layernorm.": ("layers.1.hidden_norm.", "layers.1.input_layernorm.")},
    ),
    "kimi_mla": Layout(
        EAGLE31
        | FULL
        | MLA
        | {
            "num_key_value_heads": 4,
            "aux_hidden_state_layer_ids": [2, 30, 58],
            "rope_parameters": KIMI_YARN | {"rope_theta": 5e4},
        },
        SIZES
        | FULL
        | EAGLE31
        | nested([2, 30, 58])
        | {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "num_key_value_heads": 4,
            "head_dim": 64,
            "q_lora_rank": 18,
            "kv_lora_rank": 14,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
            "n_routed_experts": 384,
            "rope_theta": 5e4,
            "rope_scaling": {name: v for name, v in KIMI_YARN.items() if name != "rope_type"} | {"type": "yarn"},
            "num_nextn_predict_layers": 0,
        },
    ),
    "partial_rotary": Layout(
        EAGLE3
        | SHARED
        | {
            "head_dim": 16,
            "aux_hidden_state_layer_ids": [2, 16, 29],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
        LLAMA_EAGLE3 | nested([1, 15, 28]) | {"head_dim": 16, "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        MIDLAYER,
    ),
    "biases": Layout(  # q, k and v only, as their readers have it
        EAGLE3 | {"attention_bias": True, "mlp_bias": True, "fc_bias": True, "aux_hidden_state_layer_ids": [2, 16, 29]},
        LLAMA_EAGLE3 | nested([1, 15, 28]) | {"attention_bias": True, "mlp_bias": True, "bias": True},
        MIDLAYER,
        without=("layers.0.self_attn.o_proj.bias",),
    ),
    "stray_buffers": Layout(
        EAGLE3 | SHARED | {"aux_hidden_state_layer_ids": [2, 16, 29]},
        LLAMA_EAGLE3 | nested([1, 15, 28]),
        MIDLAYER,
        extra={"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(3)},
        shards=2,
        file="pytorch_model.bin",
    ),
    "native": Layout(
        EAGLE31 | VARIANTS["two_layers"],
        {
            "architectures": ["Eagle31DrafterModel"],
            "model_type": "eagle31",
            "vocab_size": 61,
            "draft_vocab_size": 37,
            "hidden_size": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "intermediate_size": 28,
            "max_position_embeddings": 64,
            "aux_hidden_state_layer_ids": [1, 2, 4],
            "share_target_embeddings": False,
            "num_hidden_layers": 2,
            "qk_norm": True,
            "attention_bias": True,
            "dtype": "float32",
        },
        ascending=False,
        shards=2,
    ),
}
