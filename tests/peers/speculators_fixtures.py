"""Writes `tests/fixtures/speculators/*.safetensors`: what speculators' own EAGLE 3 drafter computes, step by step.

Run by hand, in an environment of its own (`pip install torch==2.13.0 speculators==0.9.0`, then remove torchvision,
torchaudio):

    OMP_NUM_THREADS=1 python tests/peers/speculators_fixtures.py

Legend: T captured target states (14), h width of target and drafter (32), n captured layers (3), V target vocabulary
(61), Vd draft vocabulary (40), k depth of the chain (0 to 6).

Each file is one tiny drafter. Entry t of every tensor below is of position t.
- `target_hidden_states` (1, T, n*h) fp32, `input_ids` (1, T + 1) int64, `position_ids` (1, T) int64. At depth k
  position t embeds `input_ids[0, t + 1 + k]` (the tokens are given, never the drafter's own picks) at position
  `position_ids[0, t] + k`.
- `fused` (1, T, h): the target states after their norms and `fc`, what depth 0 reads.
- `logits.{k}` (1, T - k, Vd) and `states.{k}` (1, T - k, h): the draft logits of depth k and the state that depth k + 1
  reads. Entries past T - k would embed padding and are cut. Entry t equals a drafter with a key-value cache that saw
  `target_hidden_states[:, :t + 1]` beside `input_ids[:, 1:t + 2]`, then k tokens more on its own states.
- `weights.<name>`: the parameters under their canonical names, floats as bf16 (exact: rounded before the peer ran in
  fp32), `d2t` int64 (Vd,), `t2d` bool (V,).
- metadata: one key, `fixture`, JSON of {`config`: arguments of `Eagle31Config`, `speculators_version`}. One key,
  because safetensors writes several in random order, and a second run should give the same bytes.

Cases: {llama, qwen3} x VARIANTS x {1, 2} layers, all twenty. speculators refuses `norm_before_fc` with `fc_norm`,
builds `fc` for targets as wide as the drafter only, and has no MLA, so no file holds these. Its SDPA path is used,
whose mask is boolean; `states` come from the input of its first layer, so what is fed on is its own word.
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

FIXTURES = Path(__file__).parents[1] / "fixtures" / "speculators"
SEED = 100
NUM_STATES, DEPTHS = 14, 7
HIDDEN = 32
VOCAB = 61
DRAFT_VOCAB = 40
LAYER_IDS = [2, 4, 5]
STATE_SCALES = (0.5, 2.0, 6.0)
LAYER_CONFIGS = {"llama": (LlamaConfig, 8), "qwen3": (Qwen3Config, 16)}
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
VARIANTS = {
    "eagle3": (),
    "eagle31": ("fc_norm", "norm_output"),
    "norm_before_fc": ("norm_before_fc", "norm_output"),
    "norm_before_residual": ("norm_before_residual",),
    "eagle31_norm_before_residual": ("norm_before_residual", "fc_norm", "norm_output"),
}


def geometry(layer_type: str, num_layers: int) -> dict:
    """The sizes both libraries name alike."""
    return {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": LAYER_CONFIGS[layer_type][1],
        "attention_bias": False,
        "intermediate_size": 24,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "max_position_embeddings": 64,
    }


def our_config(layer_type: str, flags: dict, num_layers: int) -> dict:
    """Arguments of `Eagle31Config` for a drafter that holds its own embeddings and head."""
    return (
        geometry(layer_type, num_layers)
        | flags
        | {
            "draft_vocab_size": DRAFT_VOCAB,
            "target_hidden_size": HIDDEN,
            "aux_hidden_state_layer_ids": LAYER_IDS,
            "qk_norm": layer_type == "qwen3",
            "share_target_embeddings": False,
            "share_target_head": False,
        }
    )


def peer_model(layer_type: str, flags: dict, num_layers: int) -> Eagle3DraftModel:
    """The peer's drafter, weights not yet set."""
    layer_config = LAYER_CONFIGS[layer_type][0](**geometry(layer_type, num_layers))
    layer_config._attn_implementation = "sdpa"
    speculators_config = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTHS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=LAYER_IDS,
        speculators_config=speculators_config,
        **flags,
    )
    return Eagle3DraftModel(config).eval()


def draw_weights(model: Eagle3DraftModel, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Sets every parameter at random and returns them by canonical name: norms around 1, matrices at gain 0.7, floats
    bf16."""
    names = [name for name, _ in model.named_parameters() if not name.startswith("verifier_")]
    weights = {}
    for name in sorted(names):
        noise = torch.randn(model.get_parameter(name).shape, generator=generator)
        is_norm, gain = noise.dim() == 1, 0.7 * noise.shape[-1] ** -0.5
        drawn = 1 + 0.25 * noise if is_norm else noise if name == "embed_tokens.weight" else gain * noise
        weights[name] = drawn.to(torch.bfloat16)
    weights |= draw_vocabulary(generator)
    model.load_state_dict(weights, strict=False)
    return weights


def draw_vocabulary(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """`d2t` (Vd,) offsets in ascending order of target ids and `t2d` (V,)."""
    target_ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[target_ids] = True
    return {"d2t": target_ids - torch.arange(DRAFT_VOCAB), "t2d": t2d}


def draw_inputs(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Target states whose layers differ in size, as real ones do, tokens, and the peer's positions (from 1)."""
    layers = [scale * torch.randn(1, NUM_STATES, HIDDEN, generator=generator) for scale in STATE_SCALES]
    return {
        "target_hidden_states": torch.cat(layers, dim=-1),
        "input_ids": torch.randint(VOCAB, (1, NUM_STATES + 1), generator=generator),
        "position_ids": 1 + torch.arange(NUM_STATES)[None],
    }


@torch.no_grad()
def peer_outputs(model: Eagle3DraftModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs the peer's unroll one depth further than kept, to see the state it feeds on from the last depth."""
    fed, logits = [], []
    hooks = [
        model.layers[0].register_forward_pre_hook(lambda _, args: fed.append(args[0][..., HIDDEN:].clone())),
        model.lm_head.register_forward_hook(lambda _, args, output: logits.append(output.clone())),
    ]
    model(
        hidden_states=inputs["target_hidden_states"],
        input_ids=inputs["input_ids"][:, 1:],
        position_ids=inputs["position_ids"],
        document_ids=torch.zeros(1, NUM_STATES, dtype=torch.long),
        ttt_steps=DEPTHS + 1,
    )
    for hook in hooks:
        hook.remove()
    outputs = {"fused": fed[0]}
    for depth in range(DEPTHS):
        outputs[f"logits.{depth}"] = logits[depth][:, : NUM_STATES - depth]
        outputs[f"states.{depth}"] = fed[depth + 1][:, : NUM_STATES - depth]
    return outputs


def write_case(seed: int, layer_type: str, variant: str, num_layers: int) -> Path:
    """Writes one fixture and returns where. Raises ValueError if the peer computed anything not finite."""
    flags = {flag: flag in VARIANTS[variant] for flag in FLAGS}
    generator = torch.Generator().manual_seed(seed)
    model = peer_model(layer_type, flags, num_layers)
    weights = draw_weights(model, generator)
    inputs = draw_inputs(generator)
    outputs = peer_outputs(model, inputs)
    path = FIXTURES / f"{layer_type}_{variant}_{num_layers}_layer{'s' if num_layers > 1 else ''}.safetensors"
    if bad := [name for name, tensor in outputs.items() if not tensor.isfinite().all()]:
        raise ValueError(f"{path.name}: {bad} are not finite; expected finite outputs. Was a weight left unset?")
    tensors = {f"weights.{name}": tensor for name, tensor in weights.items()} | inputs | outputs
    fixture = {"config": our_config(layer_type, flags, num_layers), "speculators_version": version("speculators")}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"fixture": json.dumps(fixture)}
    )
    return path


def main():
    FIXTURES.mkdir(parents=True, exist_ok=True)
    cases = [(kind, variant, layers) for kind in LAYER_CONFIGS for variant in VARIANTS for layers in (1, 2)]
    for seed, case in enumerate(cases, start=SEED):
        path = write_case(seed, *case)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
