"""Writes `tests/fixtures/formats/`: tiny EAGLE 3 drafters, saved by their producers' own code, and what that code
computes with them.

Run by hand, once per producer, each in an environment of its own that starts with `pip install torch==2.13.0`:

    OMP_NUM_THREADS=1 python tests/peers/producer_fixtures.py PRODUCER DESTINATION

- specforge: `pip install --no-deps specforge==0.2.0`, then `pip install transformers==5.8.1 safetensors accelerate
  datasets pydantic psutil pyyaml openai-harmony`. Its triton and sglang are for training and capturing only.
- speculators: `pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0`, then `pip install transformers==5.19.0
  datasets safetensors loguru pydantic pydantic-settings rich typer click httpx openai protobuf psutil aiohttp tqdm`.
- modelopt: `pip install nvidia-modelopt==0.47.0 transformers==5.14.1 accelerate datasets requests`.
- nemo: `pip install --no-deps nemo-automodel==0.7.0 megatron-fsdp==0.5.0`, then `pip install transformers==5.18.0
  datasets pyyaml accelerate tiktoken torchdata pillow requests`.
- angelslim: `pip install --no-deps angelslim==0.5.0`, then `pip install transformers==5.19.0 accelerate datasets
  pillow`.

Legend: T captured target states (9), ht target width, n captured layers, V target vocabulary (120), Vd draft vocabulary
(50), h drafter width (24), k depth of the chain (0 to 3).

Each checkpoint is a folder as the producer wrote it. Beside it lies NAME.golden.safetensors. Entry t of every tensor
below is of position t.
- `input_ids` (1, T) int64, the token after each state, and `target_hidden_states` (1, T, n*ht) fp32. At depth k
  position t embeds `input_ids[0, t + k]`: the tokens are given, never the drafter's own picks.
- `logits.{k}` (1, T - k, Vd) and `state.{k}` (1, T - k, h) fp32: the draft logits of depth k and the state that depth k
  + 1 reads. Entry t equals a drafter with a key-value cache that saw states and tokens up to t, then k tokens more on
  its own states. Fewer entries where the producer trains something else than any engine serves; the case says what.
- `target_ids` (Vd,) int64: the target id of each draft id. `embed` (V, h) bf16: the target's table, when the checkpoint
  has none.
- metadata: one key, `fixture`, JSON of {`written_by`, `arguments`: what the loader has to be told, `expected`: fields
  of its config}. One key, because safetensors writes several in random order, and a second run should give the same
  bytes.

All weights are drawn at random, norms and biases included, and rounded to bf16 before the producer runs in fp32, so
that files in bf16 hold exactly what was run.
"""

import json
import os
import sys
import tempfile
import types
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree
from typing import Any

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # read when torch is imported; some of these compile their norms

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config

NUM_STATES, DEPTHS = 9, 4
VOCAB = 120
DRAFT_VOCAB = 50
WIDTH = 24
OUTPUT_IDS = [1, 3, 6]  # counted as layer outputs
LAYER_IDS = [2, 4, 7]  # the same as indices into `hidden_states`
STATE_SCALES = (0.5, 2.0, 6.0, 3.0)
GEOMETRY = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
TARGET = GEOMETRY | {"num_hidden_layers": 10, "rope_parameters": ROPE}
PLAIN = {
    "fc_norm": False,
    "norm_output": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "qk_norm": False,
    "num_hidden_layers": 1,
    "target_hidden_size": WIDTH,
    "draft_vocab_size": DRAFT_VOCAB,
    "aux_hidden_state_layer_ids": LAYER_IDS,
    "rms_norm_eps": 1e-5,
    "head_dim": 10,
    "share_target_embeddings": False,
}
Steps = list[tuple[Tensor, Tensor]]


@dataclass
class Case:
    """A checkpoint to be: `write` puts the producer's files into an empty folder. `expected`: where its config differs
    from PLAIN."""

    name: str
    write: Callable[[Path], Any]
    inputs: dict[str, Tensor]
    steps: Steps
    target_ids: Tensor
    embed: Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


@torch.no_grad()
def draw(module: nn.Module, generator: torch.Generator) -> None:
    """Sets every parameter at random: norms around 1, biases and embeddings like states, matrices at gain 0.7; bf16
    values."""
    for name, weight in sorted(module.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias") or "embed_tokens" in name:
            drawn = noise
        else:
            drawn = 1 + 0.25 * noise if noise.dim() == 1 else 0.7 * noise.shape[-1] ** -0.5 * noise
        weight.copy_(drawn.to(torch.bfloat16))


def draw_ids(generator: torch.Generator, ascending: bool) -> Tensor:
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB]
    return ids.sort().values if ascending else ids


def offsets(ids: Tensor) -> Tensor:
    return ids - torch.arange(len(ids))


def members(ids: Tensor) -> Tensor:
    return torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)


def draw_inputs(generator: torch.Generator, width: int = WIDTH, num_layers: int = 3) -> dict[str, Tensor]:
    """Target states whose layers differ in size, as real ones do, and tokens."""
    layers = [scale * torch.randn(1, NUM_STATES, width, generator=generator) for scale in STATE_SCALES[:num_layers]]
    return {
        "target_hidden_states": torch.cat(layers, dim=-1),
        "input_ids": torch.randint(VOCAB, (1, NUM_STATES), generator=generator),
    }


@torch.no_grad()
def unroll(inputs: dict[str, Tensor], fused: Tensor, step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Steps:
    """The training-time test most of these share: tokens move left by one a step, positions past the end would embed
    padding and are cut.

    `step` takes tokens (1, T) and the state (1, T, h), keeps its keys itself, and returns logits and the next state.
    """
    tokens = inputs["input_ids"]
    state = fused
    steps = []
    for k in range(DEPTHS):
        logits, state = step(tokens, state)
        steps.append((logits[:, : NUM_STATES - k], state[:, : NUM_STATES - k]))
        tokens = torch.cat([tokens[:, 1:], tokens.new_zeros(1, 1)], dim=1)
    return steps


def without_init(*packages: str) -> None:
    """Lets modules below `packages` be imported without running the packages' own `__init__`."""
    root = Path(find_spec(packages[0]).submodule_search_locations[0]).parent
    for name in packages:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")))]


# SpecForge: its exports of a training checkpoint, for SGLang without an embedding, for itself with one.

SPECFORGE = {  # variant: exporter, config keys, the loader's arguments, expected
    "sglang": ("to_sglang", {}, {}, {}),
    "hf": ("to_hf", {"norm_output": True}, {"norm_output": False}, {}),
    "fc-norm": ("to_sglang", {"fc_norm": True, "norm_output": True}, {"norm_output": False}, {"fc_norm": True}),
    "full-vocabulary": ("to_sglang", {"draft_vocab_size": None}, {}, {"draft_vocab_size": VOCAB}),
    "default-layers": ("to_hf", {"eagle_config": None}, {}, {"aux_hidden_state_layer_ids": None}),
    "wider-target": ("to_hf", {"target_hidden_size": 36}, {}, {"target_hidden_size": 36}),
    "llama3": (
        "to_sglang",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {},
        {},
    ),
    "yarn": (
        "to_sglang",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            }
        },
        {},
        {},
    ),
}


def specforge() -> Iterable[Case]:
    """`norm_output` true is what 0.2.0 calls plain EAGLE 3; false would score un-normed states, which no reader can
    tell."""
    from specforge.export import to_hf, to_sglang
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    exporters = {"to_hf": to_hf.export_to_hf, "to_sglang": to_sglang.export_to_sglang}
    for variant, (exporter, keys, arguments, expected) in SPECFORGE.items():
        name = f"specforge-{variant}"
        generator = seeded(name)
        config = GEOMETRY | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "rope_theta": 5000.0,
            "torch_dtype": "bfloat16",
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": OUTPUT_IDS},
        }
        config = {
            key: value for key, value in (config | keys).items() if value is not None or key == "draft_vocab_size"
        }
        with tempfile.TemporaryDirectory() as scratch:
            config_file = Path(scratch, "draft.json")
            config_file.write_text(json.dumps(config))
            model = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(config_file))).eval()
            draw(model, generator)
            is_full = config["draft_vocab_size"] is None
            ids = torch.arange(VOCAB) if is_full else draw_ids(generator, ascending=True)
            model.d2t.copy_(offsets(ids))
            model.t2d.copy_(members(ids))
            inputs = draw_inputs(generator, config.get("target_hidden_size", WIDTH))
            has_table = exporter == "to_hf"
            yield Case(
                name,
                lambda folder, run=exporters[exporter], args=(model, config_file, has_table): specforge_export(
                    run, *args, folder
                ),
                inputs,
                specforge_steps(model, inputs),
                ids,
                None if has_table else model.embed_tokens.weight,
                arguments,
                {"share_target_embeddings": not has_table} | expected,
            )


def specforge_steps(model: nn.Module, inputs: dict[str, Tensor]) -> Steps:
    cache: list[list[Tensor]] = [[], []]
    mask = torch.ones(1, NUM_STATES, dtype=torch.bool)

    def step(tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        causal = model.prepare_decoder_attention_mask(mask, state, 1, NUM_STATES, 0)
        state = model.backbone(model.embed_input_ids(tokens), state, cache, causal, torch.arange(NUM_STATES)[None])
        return model.compute_logits(state), state

    with torch.no_grad():
        fused = model.project_hidden_states(inputs["target_hidden_states"])
    return unroll(inputs, fused, step)


def specforge_export(export: Callable, model: nn.Module, config_file: Path, has_table: bool, folder: Path) -> None:
    """As after training: a checkpoint without the frozen table, the draft's config, and the target to take the table
    from."""
    scratch = config_file.parent
    weights = model.state_dict()
    save_file({"model.embed_tokens.weight": weights.pop("embed_tokens.weight")}, scratch / "model.safetensors")
    torch.save({"strategy": "eagle3", "draft_state_dict": weights}, scratch / "training_state.pt")
    source = {"embedding_source": str(scratch)} if has_table else {}
    export(str(scratch), str(config_file), str(folder), **source)


# speculators: what its trainer saves, and what its converter makes of a checkpoint in the layout of the original
# release.

DEFAULT_FLAGS = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}  # of its training command
EAGLE31_FLAGS = {"fc_norm": True, "norm_output": True}
SLIDING = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
SPECULATORS = {  # variant: layer type, flags, fields of the layer's config, other fields
    "train-defaults": ("llama", DEFAULT_FLAGS, SLIDING | {"sliding_window": 2048}, {}),
    "qwen3": ("qwen3", DEFAULT_FLAGS, {}, {}),
    "eagle31": ("llama", EAGLE31_FLAGS, {}, {}),
    "eagle3": ("llama", {}, {}, {}),
    "two-layers": (
        "llama",
        EAGLE31_FLAGS | {"norm_before_residual": True},
        {"num_hidden_layers": 2, "attention_bias": True},
        {},
    ),
    "four-states": ("llama", EAGLE31_FLAGS, {}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 6, 7]}),
    "window": ("llama", EAGLE31_FLAGS, SLIDING | {"sliding_window": 5}, {}),
    "full-vocabulary": ("llama", EAGLE31_FLAGS, {}, {"draft_vocab_size": VOCAB}),
}


def speculators() -> Iterable[Case]:
    for variant, (layer_type, flags, fields, others) in SPECULATORS.items():
        name = f"speculators-{variant}"
        generator = seeded(name)
        model = speculators_model(layer_type, flags, fields, others)
        draw(model, generator)
        is_full = model.d2t is None
        ids = torch.arange(VOCAB) if is_full else draw_ids(generator, ascending=True)
        if not is_full:
            model.load_vocab_mappings(members(ids), offsets(ids))
        layer_ids = model.config.eagle_aux_hidden_state_layer_ids
        inputs = draw_inputs(generator, num_layers=len(layer_ids))
        steps = speculators_steps(model, inputs)
        if fields.get("sliding_window", NUM_STATES) < NUM_STATES:
            # It keeps the window where depth 0 had it; served, it slides on with each drafted token: the same while it
            # is not full.
            steps = [
                (y[:, : fields["sliding_window"] - k], x[:, : fields["sliding_window"] - k]) if k else (y, x)
                for k, (y, x) in enumerate(steps)
            ]
        expected = {
            name: fields[name] for name in ("num_hidden_layers", "layer_types", "sliding_window") if name in fields
        }
        expected |= flags | {
            "aux_hidden_state_layer_ids": layer_ids,
            "draft_vocab_size": len(ids),
            "qk_norm": layer_type == "qwen3",
        }
        yield Case(
            name, lambda folder, model=model: speculators_save(model, folder), inputs, steps, ids, expected=expected
        )
    yield speculators_converted()


def speculators_save(model: nn.Module, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model.to(torch.bfloat16).save_pretrained(scratch)
        keep_data(Path(scratch), folder)


def keep_data(written: Path, folder: Path) -> None:
    """Without the copy of its own source (config.py) that its `save_pretrained` adds: no reader needs it, and it is not
    ours to keep."""
    copytree(written, folder, dirs_exist_ok=True, ignore=ignore_patterns("*.py", "__pycache__"))


def speculators_model(layer_type: str, flags: dict, fields: dict, others: dict) -> nn.Module:
    """Its drafter as its trainer builds it, but for attention that runs on a CPU."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[layer_type]
    layer = config_class(**GEOMETRY | {"num_hidden_layers": 1, "rope_parameters": ROPE} | fields)
    layer._attn_implementation = "sdpa"
    config = {
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": LAYER_IDS,
        "speculators_config": SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="owner/target", architectures=["LlamaForCausalLM"]),
        ),
    }
    return Eagle3DraftModel(Eagle3SpeculatorConfig(**config | flags | others)).eval()


@torch.no_grad()
def speculators_steps(model: nn.Module, inputs: dict[str, Tensor]) -> Steps:
    """Its unroll, one depth further than kept, to see the state it feeds on from the last depth."""
    fed, logits = [], []
    hooks = [
        model.layers[0].register_forward_pre_hook(lambda _, args: fed.append(args[0][..., WIDTH:].clone())),
        model.lm_head.register_forward_hook(lambda _, args, output: logits.append(output.clone())),
    ]
    model(
        hidden_states=inputs["target_hidden_states"],
        input_ids=inputs["input_ids"],
        document_ids=torch.zeros(1, NUM_STATES, dtype=torch.long),
        ttt_steps=DEPTHS + 1,
    )
    for hook in hooks:
        hook.remove()
    return [(logits[k][:, : NUM_STATES - k], fed[k + 1][:, : NUM_STATES - k]) for k in range(DEPTHS)]


def speculators_converted() -> Case:
    """Its converter takes layer ids from an argument only, and writes them as they are."""
    from speculators.convert import convert_model

    name = "speculators-converted"
    generator = seeded(name)
    model = speculators_model("llama", {}, {}, {})
    draw(model, generator)
    ids = draw_ids(generator, ascending=True)
    model.load_vocab_mappings(members(ids), offsets(ids))
    inputs = draw_inputs(generator)

    def convert(folder: Path) -> None:
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)  # it writes the verifier's name as given, which should not be a path of this machine
            try:
                write_original(model, Path("original"), Path("target"))
                convert_model(
                    "original",
                    verifier="target",
                    algorithm="eagle3",
                    output_path="out",
                    validate_device=None,
                    eagle_aux_hidden_state_layer_ids=LAYER_IDS,
                )
            finally:
                os.chdir(before)
            keep_data(Path(scratch, "out"), folder)

    expected = {"share_target_embeddings": True}
    return Case(
        name, convert, inputs, speculators_steps(model, inputs), ids, model.embed_tokens.weight, expected=expected
    )


def write_original(model: nn.Module, folder: Path, target: Path) -> None:
    """The drafter in the layout of the original release, and the config of its target."""
    config = GEOMETRY | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": 5000.0,
        "draft_vocab_size": DRAFT_VOCAB,
        "torch_dtype": "bfloat16",
    }
    for path, values in (
        (folder, config),
        (target, LlamaConfig(**TARGET).to_dict() | {"architectures": ["LlamaForCausalLM"]}),
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(values))
    weights = {
        key.replace("layers.0.", "midlayer."): value
        for key, value in model.state_dict().items()
        if "verifier" not in key
    }
    del weights["embed_tokens.weight"]
    weights = {key: value.to(torch.bfloat16) if value.is_floating_point() else value for key, value in weights.items()}
    torch.save(weights, folder / "pytorch_model.bin")


# ModelOpt: a Llama converted by `modelopt.torch.speculative`, its draft exported.

MODELOPT = {  # variant: architecture, other options, the loader's arguments, expected
    # By default the export puts a YaRN scaling into the config that training did not have; the expected logits have it
    # too.
    "default": ({}, {}, {}, {}),
    "plain-rope": ({}, {"eagle_export_rope_scaling": {}}, {}, {}),
    "four-states-two-layers": (
        {"num_hidden_layers": 2, "eagle_aux_hidden_state_layer_ids": [0, 2, 5, 9]},
        {"eagle_export_rope_scaling": {}},
        {"aux_layer_convention": "output"},
        {"num_hidden_layers": 2, "aux_hidden_state_layer_ids": [1, 3, 6, 10]},
    ),
    "full-vocabulary": (
        {"draft_vocab_size": VOCAB},
        {"eagle_export_rope_scaling": {}},
        {},
        {"draft_vocab_size": VOCAB},
    ),
}


def modelopt() -> Iterable[Case]:
    """Its layer 0 runs `input_layernorm` over the state too, before `hidden_norm`, which no engine does.

    Scale alone cancels, so here that norm is constant: with any other the logits are not those of EAGLE 3. An eps of
    1e-8 keeps what is left of the difference below rounding.
    """
    from modelopt.torch.export import export_speculative_decoding

    for variant, (architecture, options, arguments, expected) in MODELOPT.items():
        name = f"modelopt-{variant}"
        generator = seeded(name)
        model = modelopt_model(architecture, options)
        draw(model, generator)
        draft = model.eagle_module
        nn.init.constant_(draft.layers[0].input_layernorm.weight, 0.75)
        is_full = not hasattr(draft, "d2t")
        ids = torch.arange(VOCAB) if is_full else draw_ids(generator, ascending=False)
        if not is_full:
            draft.d2t.copy_(offsets(ids))
        inputs = draw_inputs(generator, num_layers=len(model.eagle_config.eagle_aux_hidden_state_layer_ids))
        runner = model
        if model.eagle_export_rope_scaling:
            scaled = {"rope_scaling": ROPE | model.eagle_export_rope_scaling}
            runner = modelopt_model(architecture | scaled, {"eagle_export_rope_scaling": {}})
            runner.load_state_dict(model.state_dict())
        steps = modelopt_steps(runner, inputs)
        table = model.get_input_embeddings().weight.detach().clone()
        yield Case(
            name,
            lambda folder, model=model: export_speculative_decoding(model.to(torch.bfloat16), export_dir=folder),
            inputs,
            steps,
            ids,
            table,
            arguments,
            {"share_target_embeddings": True, "rms_norm_eps": 1e-8} | expected,
        )


def modelopt_model(architecture: dict, options: dict) -> nn.Module:
    import modelopt.torch.speculative as mtsp

    model = LlamaForCausalLM(LlamaConfig(**TARGET)).eval()
    geometry = {
        key: GEOMETRY[key] for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }
    architecture = (
        {
            "draft_vocab_size": DRAFT_VOCAB,
            "rms_norm_eps": 1e-8,
            "rope_theta": 5000.0,
            "rope_scaling": dict(ROPE),
            "eagle_aux_hidden_state_layer_ids": OUTPUT_IDS,
        }
        | geometry
        | architecture
    )
    options = {"eagle_use_torch_compile": False} | options
    mtsp.convert(model, [("eagle", options | {"eagle_architecture_config": architecture})])
    return model


@torch.no_grad()
def modelopt_steps(model: nn.Module, inputs: dict[str, Tensor]) -> Steps:
    """Its training-time test moves the states right instead of the tokens left: entry t of depth k is its t + k."""
    draft, steps = model.eagle_module, []
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    state = draft.fc(inputs["target_hidden_states"])
    draft._maybe_init_rope(device=state.device)
    cache = DynamicCache(config=draft.config)
    for k in range(DEPTHS):
        causal = model._prepare_decoder_attention_mask(None, (1, NUM_STATES), 0, state.device, state.dtype)
        mask = model._get_ttt_attention_mask(1, NUM_STATES, k) if k else causal
        _, state, logits, cache = model._eagle_forward(state, embeds, mask, torch.arange(NUM_STATES)[None], cache)
        steps.append((logits[:, k:], state[:, k:]))
        state = state.roll(1, 1)
    return steps


# NeMo Automodel: the config its training recipe makes of the target's, saved by its checkpointer.

MLA = {
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": None,
}
NEMO = {  # variant: the target's config class, its fields, what the recipe sets
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}, {}),
    "qwen3-eagle31": (Qwen3Config, {}, {"fc_norm": True, "norm_output": True}),
    "llama3-full-vocabulary": (
        LlamaConfig,
        {
            "rope_parameters": (
                ROPE
                | {
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            )
        },
        {"draft_vocab_size": VOCAB},
    ),
    "deepseek": (DeepseekV3Config, MLA, {}),
    "deepseek-eagle31": (DeepseekV3Config, MLA | {"q_lora_rank": None}, {"fc_norm": True, "norm_output": True}),
}


def nemo() -> Iterable[Case]:
    """Its configs name no layer ids; its MLA drafters say LlamaEagle3DraftModel too."""
    from nemo_automodel.components.speculative.eagle.draft_deepseek import DeepseekV3Eagle3DraftModel
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

    for variant, (config_class, fields, recipe) in NEMO.items():
        name = f"nemo-{variant}"
        generator = seeded(name)
        is_mla = config_class is DeepseekV3Config
        config = (
            config_class(**TARGET | fields).to_dict()
            | {
                "draft_vocab_size": DRAFT_VOCAB,
                "target_hidden_size": WIDTH,
                "architectures": ["LlamaEagle3DraftModel"],
                "tie_word_embeddings": False,
                "attn_implementation": "eager",
                "fc_norm": False,
                "norm_output": False,
                "parallel_drafting": False,
            }
            | recipe
        )
        model = (
            (DeepseekV3Eagle3DraftModel if is_mla else LlamaEagle3DraftModel)(config_class.from_dict(config))
            .float()
            .eval()
        )
        draw(model, generator)
        ids = torch.arange(VOCAB)
        if model.has_vocab_compression:
            special = torch.tensor([0, 1, 2])
            by_frequency = torch.randperm(VOCAB - 3, generator=generator)[: DRAFT_VOCAB - 3] + 3
            ids = torch.cat([special, by_frequency])
            model.set_vocab_mapping(ids)
        inputs = draw_inputs(generator)
        expected = {key: recipe[key] for key in recipe} | {"aux_hidden_state_layer_ids": None}
        expected |= {"head_dim": MLA["qk_rope_head_dim"], "kv_lora_rank": 12} if is_mla else {}
        yield Case(
            name,
            lambda folder, model=model: nemo_save(model, folder),
            inputs,
            nemo_steps(model, inputs),
            ids,
            expected=expected,
        )


def nemo_steps(model: nn.Module, inputs: dict[str, Tensor]) -> Steps:
    cache: list[list[Tensor]] = [[], []]

    def step(tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = model(tokens, state, torch.ones(1, NUM_STATES, dtype=torch.long), torch.arange(NUM_STATES)[None], cache)
        return model.compute_logits(state), state

    with torch.no_grad():
        fused = model.project_hidden_states(inputs["target_hidden_states"])
    return unroll(inputs, fused, step)


def nemo_save(model: nn.Module, folder: Path) -> None:
    """The consolidated part of what its checkpointer writes: the rest are shards of the same tensors for its own
    resuming."""
    from nemo_automodel.components.checkpoint.checkpointing import CheckpointingConfig

    model.to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as scratch:
        config = CheckpointingConfig(
            enabled=True,
            checkpoint_dir=scratch,
            model_save_format="safetensors",
            model_repo_id="owner/target",
            model_cache_dir=scratch,
            save_consolidated=True,
            is_peft=False,
            model_state_dict_keys=list(model.state_dict()),
        )
        checkpointer = config.build(dp_rank=0, tp_rank=0, pp_rank=0, moe_mesh=None)
        checkpointer.save_model(model, f"{scratch}/step", is_final_checkpoint=True)
        copytree(f"{scratch}/step/model/consolidated", folder, dirs_exist_ok=True)


# AngelSlim: what its trainer saves.

ANGELSLIM = {  # variant: config keys, expected
    "default-layers": ({}, {"aux_hidden_state_layer_ids": None}),
    "three-layers": ({"aux_hidden_states_layer_ids": OUTPUT_IDS}, {}),
}


def angelslim() -> Iterable[Case]:
    """It trains at a rope base of 10000 whatever `rope_theta` says, so only that base can be in the config here."""
    package = "angelslim.compressor.speculative.train"
    # Its wheel lacks a part that these packages import.
    without_init(
        "angelslim",
        "angelslim.compressor",
        "angelslim.compressor.speculative",
        package,
        f"{package}.models",
        f"{package}.data",
    )
    module = import_module(f"{package}.models.draft.llama_eagle3")
    factory = import_module(f"{package}.models.draft.draft_model_factory")
    for variant, (keys, expected) in ANGELSLIM.items():
        name = f"angelslim-{variant}"
        generator = seeded(name)
        config = (
            GEOMETRY
            | keys
            | {
                "architectures": [module.Eagle3LlamaForCausalLM.__name__],
                "model_type": "llama",
                "num_hidden_layers": 1,
                "torch_dtype": "bfloat16",
                "rope_theta": 10000,
                "rope_scaling": None,
                "draft_vocab_size": DRAFT_VOCAB,
            }
        )
        with tempfile.TemporaryDirectory() as scratch:
            Path(scratch, "draft.json").write_text(json.dumps(config))
            # Not by its factory: that builds in bf16, which leaves rope's tables rounded when the model is run in fp32.
            model = module.Eagle3LlamaForCausalLM(factory.DraftModelConfig.from_file(f"{scratch}/draft.json")).eval()
        draw(model, generator)
        ids = draw_ids(generator, ascending=True)
        model.d2t.copy_(offsets(ids))
        model.t2d.copy_(members(ids))
        inputs = draw_inputs(generator)
        steps = angelslim_steps(model, inputs)
        yield Case(name, model.to(torch.bfloat16).save_pretrained, inputs, steps, ids, expected=expected)


def angelslim_steps(model: nn.Module, inputs: dict[str, Tensor]) -> Steps:
    cache: list[list[Tensor]] = [[], []]
    mask = torch.ones(1, NUM_STATES, dtype=torch.bool)

    def step(tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal cache
        causal = model.prepare_decoder_attention_mask(mask, (1, NUM_STATES), state, 0)
        embeds = model.embed_input_ids(tokens)
        state, cache = model.encode_layers(embeds, state, cache, causal, torch.arange(NUM_STATES)[None], use_cache=True)
        return model.compute_logits(state), state

    with torch.no_grad():
        fused = model.combine_hidden_states(inputs["target_hidden_states"])
    return unroll(inputs, fused, step)


PRODUCERS = {  # name: its cases and the packages that wrote them
    "specforge": (specforge, "specforge"),
    "speculators": (speculators, "speculators"),
    "modelopt": (modelopt, "nvidia-modelopt"),
    "nemo": (nemo, "nemo-automodel"),
    "angelslim": (angelslim, "angelslim"),
}


def write(case: Case, destination: Path, package: str) -> Path:
    """Writes a checkpoint and what is expected of it. Raises ValueError if the producer computed NaN or infinity."""
    tensors = case.inputs | {"target_ids": case.target_ids}
    for k, (logits, state) in enumerate(case.steps):
        tensors |= {f"logits.{k}": logits, f"state.{k}": state}
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(f"{case.name}: {bad} are not finite; expected finite outputs. Was a weight left unset?")
    if case.embed is not None:
        tensors["embed"] = case.embed.to(torch.bfloat16)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    folder = destination / case.name
    rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case.write(folder)
    fixture = {
        "written_by": f"{package} {version(package)}",
        "arguments": case.arguments,
        "expected": PLAIN | case.expected,
    }
    save_file(tensors, destination / f"{case.name}.golden.safetensors", metadata={"fixture": json.dumps(fixture)})
    return folder


def main(producer: str, destination: str) -> None:
    cases, package = PRODUCERS[producer]
    for case in cases():
        folder = write(case, Path(destination), package)
        print(f"{case.name}: {sum(file.stat().st_size for file in folder.iterdir())} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
