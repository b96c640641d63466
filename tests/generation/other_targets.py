"""Tiny targets of other families than `conftest.TARGETS`: MLA, alibi, rope of Falcon's kind."""

from functools import cache

import torch
from conftest import NO_SPECIAL_TOKENS, VOCAB, WIDTH
from transformers import AutoModelForCausalLM, BloomConfig, DeepseekV3Config, FalconConfig, MptConfig

OTHERS = {"vocab_size": VOCAB, "initializer_range": 0.5, "use_cache": True} | NO_SPECIAL_TOKENS
OTHER_TARGETS = {
    "deepseek": (
        DeepseekV3Config,
        {
            "hidden_size": WIDTH,
            "intermediate_size": 40,
            "moe_intermediate_size": 12,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 18,
            "kv_lora_rank": 14,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        },
    ),
    "bloom": (BloomConfig, {"hidden_size": WIDTH, "n_layer": 4, "n_head": 3}),
    "mpt": (MptConfig, {"d_model": WIDTH, "n_layers": 4, "n_heads": 3, "max_seq_len": 128}),
    "falcon": (FalconConfig, {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 3, "alibi": False}),
    "falcon_alibi": (
        FalconConfig,
        {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 3, "alibi": True},
    ),
}


@cache
def build_other(kind: str):
    """One of OTHER_TARGETS."""
    config_class, fields = OTHER_TARGETS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**OTHERS | fields), attn_implementation="eager").eval()
    model.generation_config.use_cache = True  # a config of MPT's turns it off
    return model
