"""Targets whose layers have the form of Llama's, and others that look like it."""

import torch
from conftest import NO_SPECIAL_TOKENS, ROPED, VOCAB
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

LAYERS = ROPED["num_hidden_layers"]
ALL_FUSED = [None] * (LAYERS + 1)
SAME = {
    "llama": LlamaConfig(**ROPED),
    "llama with biases": LlamaConfig(**ROPED, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**ROPED),
    "qwen3": Qwen3Config(**ROPED),
    "mistral with a window": MistralConfig(**ROPED | {"sliding_window": 8}),
}
OTHER = {
    "a scaled residual": (GraniteConfig(**ROPED, residual_multiplier=0.3), "its states differ"),
    "gates of GELU": (LlamaConfig(**ROPED, hidden_act="gelu"), "its states differ"),
    "more norms": (Gemma3TextConfig(**ROPED), "it has other weights: post_feedforward_layernorm.weight"),
}


def build(config, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A target of a config, with random weights, biases and norms too."""
    for name, value in {"vocab_size": VOCAB, "tie_word_embeddings": False, **NO_SPECIAL_TOKENS}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, weight in target.named_parameters():
            scale = 0.3 if weight.dim() == 1 else weight.shape[1] ** -0.5
            weight.copy_(scale * torch.randn_like(weight) + (name.endswith("norm.weight")))
    return target.to(dtype)


def assert_own_forwards(target: PreTrainedModel) -> None:
    """Asserts that no module of a target has a forward in place of its class's."""
    assert [name for name, module in target.named_modules() if "forward" in vars(module)] == []
