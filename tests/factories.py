"""Tiny drafters with random weights for the tests of the model half: sizes are awkward, and every weight matters.

B batch, T tokens, n captured states, ht target width, V target vocabulary, Vd draft vocabulary.
"""

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, LlamaConfig, PreTrainedModel

from eagle31_hf import Eagle31Config, Eagle31DrafterModel

VOCAB, DRAFT_VOCAB, WIDTH = 61, 37, 20
FIELDS = {
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 28,
    "max_position_embeddings": 64,
    "aux_hidden_state_layer_ids": [1, 2, 4],
    "share_target_embeddings": False,
}
EAGLE3 = {"fc_norm": False, "norm_output": False}
NORMS = {
    "eagle31": {},
    "eagle3": EAGLE3,
    "norm_before_fc": {"fc_norm": False, "norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True} | EAGLE3,
}
MLA = {"q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
VARIANTS = NORMS | {
    "two_layers": {"num_hidden_layers": 2, "qk_norm": True, "attention_bias": True},
    "window_3": {"layer_types": ["sliding_attention"], "sliding_window": 3},
    "window_3_then_full": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 3,
    },
    "full_vocabulary": {"draft_vocab_size": VOCAB, "logit_scale": 0.5},
    "wider_target": {"target_hidden_size": 28},
    "mla": MLA,
    "parallel": {"mask_token_id": 9},
}
ATTENTIONS = ("eager", "sdpa")


def build(attention: str = "sdpa", seed: int = 0, **fields) -> Eagle31DrafterModel:
    """A drafter with random norms and biases too, and a draft vocabulary in no order."""
    generator = torch.Generator().manual_seed(seed)
    drafter = AutoModel.from_config(Eagle31Config(**FIELDS | fields), attn_implementation=attention).eval()
    with torch.no_grad():
        for name, weight in sorted(drafter.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias") or name.startswith("embed_tokens"):
                weight.copy_(noise)
            else:
                weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else noise * weight.shape[1] ** -0.5)
        if drafter.d2t is not None:
            drafter.set_draft_vocabulary(
                torch.randperm(drafter.config.vocab_size, generator=generator)[: len(drafter.d2t)]
            )
    return drafter


def inputs(drafter: Eagle31DrafterModel, length: int = 13, batch: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens (B, T), distinct within a row, and captured states (B, T, n*ht) whose layers differ in size."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack(
        [torch.randperm(drafter.config.vocab_size, generator=generator)[:length] for _ in range(batch)]
    )
    layers = [
        scale * torch.randn(batch, length, drafter.config.target_hidden_size, generator=generator)
        for scale in (0.5, 2.0, 6.0)[: drafter.config.num_aux_states]
    ]
    return tokens, torch.cat(layers, dim=-1)


def chain(
    drafter: Eagle31DrafterModel, tokens: Tensor, states: Tensor, slot: int, depth: int
) -> list[tuple[Tensor, Tensor]]:
    """What a drafter with a cache computes from `slot` on when it serves: per depth the logits (B, Vd) and its state
    (B, h)."""
    cache, steps = DynamicCache(), []
    rows, source = tokens[:, 1 : slot + 2], {"target_hidden_states": states[:, : slot + 1]}
    for k in range(depth):
        out = drafter(rows, **source, past_key_values=cache)
        steps.append((out.logits[:, -1], out.last_hidden_state[:, -1]))
        rows, source = tokens[:, slot + 2 + k : slot + 3 + k], {"hidden_states": out.last_hidden_state[:, -1:]}
    return steps


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def target(kind: str = "llama", **fields) -> PreTrainedModel:
    """A tiny target as wide as the drafters; "gemma3" multiplies its embedding by sqrt(width)."""
    torch.manual_seed(0)
    config_class = {"llama": LlamaConfig, "gemma3": Gemma3TextConfig}[kind]
    common = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 28,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return AutoModelForCausalLM.from_config(config_class(**common | fields)).eval()
