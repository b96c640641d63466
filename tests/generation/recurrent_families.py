"""Families of transformers whose layers keep recurrent states, or those of convolutions: their configs' classes and
fields, and the seed of their weights where it is not 0."""

from conftest import ROPED, WIDTH

L, F, S = "linear_attention", "full_attention", "sliding_attention"
SHAPE = ROPED | {"num_hidden_layers": 4}
EXPERTS = {
    "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20,
}  # fmt: skip
DELTA = SHAPE | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "layer_types": [L, F, L, F],
}  # fmt: skip
KIMI = SHAPE | EXPERTS | {
    "num_key_value_heads": 3, "kv_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "linear_head_dim": 8, "linear_num_heads": 3,
}  # fmt: skip
SSD = SHAPE | {"mamba_n_heads": 6, "mamba_d_head": 12, "mamba_n_groups": 1, "mamba_d_state": 6, "mamba_chunk_size": 8}
MAMBA = {"mamba_d_state": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
ALONE = {"hidden_size": WIDTH, "num_hidden_layers": 3}
SWA = SHAPE | EXPERTS | {
    "swa_num_attention_heads": 3, "swa_num_key_value_heads": 1, "swa_head_dim": 12, "sliding_window_size": 8,
    "d_rel": 4, "rel_extent": 64, "n_shared_experts": 1, "local_layer_ids": [0, 2],
}  # fmt: skip
SWA_2 = {k: v for k, v in SWA.items() if k != "intermediate_size"} | {
    "unpadded_vocab_size": 23, "n_layers_per_attn_res_block": 2,
}  # fmt: skip
NEMOTRON = {
    "mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 1, "ssm_state_size": 6, "chunk_size": 8,
    "layers_block_type": ["mamba", "mlp", "mamba", "attention", "moe"],
    "n_routed_experts": 4, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 20,
}  # fmt: skip
ZAMBA2 = {
    "mamba_d_state": 6, "mamba_ngroups": 1, "n_mamba_heads": 6, "mamba_headdim": 12, "chunk_size": 8,
    "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1,
}  # fmt: skip
# With weights as large as other families' a change of 1e-7 of them changes states by up to 9e-4 of their scale, which
# is more than tests allow of rounding; with these by 8e-5 at most.
CALM = {"initializer_range": 0.15}

RECURRENT_FAMILIES = {
    "Qwen3-Next": ("Qwen3NextConfig", DELTA | EXPERTS | CALM),
    "Qwen3.5": ("Qwen3_5TextConfig", DELTA),
    "Qwen3.5-MoE": ("Qwen3_5MoeTextConfig", DELTA | EXPERTS | CALM),
    "Lara-Mini": ("LaraMiniConfig", DELTA | EXPERTS | CALM | {"layer_types": [L, S, L, F], "sliding_window": 8}),
    "OLMo-Hybrid": ("OlmoHybridConfig", DELTA),
    "Kimi-Linear": ("KimiLinearConfig", KIMI | {"layer_types": [L, F, L, F]}, 2),
    "Bailing-Hybrid": (
        "BailingHybridConfig",
        KIMI | {"head_dim": 12, "num_local_experts": 8, "n_group": 2, "topk_group": 1, "layer_group_size": 2},
    ),
    "Falcon-H1": ("FalconH1Config", SSD | {"mamba_d_ssm": 72}, 1),
    "Bamba": ("BambaConfig", SSD | {"attn_layer_indices": [1, 3]}),
    "Granite-MoE-Hybrid": (
        "GraniteMoeHybridConfig",
        SSD | EXPERTS | CALM | {"layer_types": [L, F, L, F], "shared_intermediate_size": 20},
    ),
    "Nemotron-H": ("NemotronHConfig", {k: v for k, v in SHAPE.items() if k != "num_hidden_layers"} | NEMOTRON),
    "Zamba2": ("Zamba2Config", SHAPE | ZAMBA2 | CALM | {"num_key_value_heads": 3}),
    "Mamba2": (
        "Mamba2Config",
        ALONE | {"num_heads": 6, "head_dim": 12, "state_size": 6, "n_groups": 1, "chunk_size": 8},
        2,
    ),
    "Mamba": ("MambaConfig", ALONE | {"state_size": 6}),
    "FalconMamba": ("FalconMambaConfig", ALONE | {"state_size": 6}),
    "Jamba": ("JambaConfig", SHAPE | EXPERTS | MAMBA),
    "Zamba": (
        "ZambaConfig",
        SHAPE | MAMBA | CALM | {"num_hidden_layers": 6, "num_key_value_heads": 3, "n_mamba_heads": 2},
    ),
    "LFM2": ("Lfm2Config", SHAPE | {"layer_types": ["conv", F, "conv", F]}),
    "LFM2-MoE": ("Lfm2MoeConfig", SHAPE | EXPERTS | {"layer_types": ["conv", F, "conv", F], "num_dense_layers": 1}),
    "LFM3": ("Lfm3Config", SHAPE | {"sliding_window": 8, "layer_types": ["conv", S, F, "conv"]}),
    "ZAYA": (
        "ZayaConfig",
        SHAPE
        | EXPERTS
        | {
            "num_experts_per_tok": 1,
            "sliding_window": 8,
            "router_hidden_size": 16,
            "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        },
    ),
    "Inkling": ("InklingTextConfig", SWA),
    "Inkling2": ("Inkling2TextConfig", SWA_2, 1),
    "Inkling2, loops": (
        "Inkling2LoopTextConfig",
        SWA_2
        | CALM
        | {"num_hidden_layers": 6, "layer_types": ["hybrid_sliding", "hybrid"] * 3, "loop_gate_rank": 5}
        | {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 3},
    ),
}
# Chains, and batches in step: they attend by where tokens stand in the longest sequence.
CHAINS_OF_STATES = ("Inkling", "Inkling2", "Inkling2, loops")
# Chains, and batches in step: of each token their layers pass several states on, of hyper-connections.
STREAMS = {
    "Qwen4-Exp": (
        "Qwen4ExpTextConfig",
        DELTA
        | EXPERTS
        | CALM
        | {
            "eos_token_id": 1,
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_layer_ids": [1, 3],
            "ngram_vocab_size_base": 50,
            "heads_per_ngram": 2,
            "split_ngram_parts": 1,
            "make_ngram_vocab_size_divisible_by": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 12,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
    ),
    "GLM5-Next": (
        "Glm5NextConfig",
        {
            "text_config": KIMI
            | {
                "index_topk": 128, "index_head_dim": 12, "index_n_heads": 2, "index_kpool": 4, "hc_mult": 2,
                "q_lora_rank": 16, "qk_rope_head_dim": 0, "qk_nope_head_dim": 12,
            },
            "vision_config": {
                "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": WIDTH,
            },
        },
    ),
}  # fmt: skip
# So does DeepSeek-V4, whose cache keeps compressed keys beside a window.
HCA, CSA = "heavily_compressed_attention", "compressed_sparse_attention"
COMPRESSED = (
    "DeepseekV4Config",
    SHAPE
    | EXPERTS
    | {
        "sliding_window": 16, "num_key_value_heads": 1, "head_dim": 12, "q_lora_rank": 16, "o_groups": 3,
        "o_lora_rank": 16, "index_n_heads": 24, "index_head_dim": 12, "index_topk": 64, "hc_mult": 2,
        "layer_types": ["sliding_attention", HCA, CSA, HCA], "compress_rates": {HCA: 5, CSA: 3},
    },
)  # fmt: skip
