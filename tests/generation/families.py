"""Decoder families of transformers as tiny random targets, and what a drafter beside each of them is expected to do.

`FAMILIES` is the one table. A word of it is the outcome of a combination of family, drafting and number of prompts:

same text: drafts are accepted and rejected, and text and logits are the target's own; prompts of a batch go at their
own pace; chains: the same, but a tree was asked for and chains were drafted, with a logged reason; in step: the same
for a batch, whose sequences were kept equally long and drafted for in chains, with a logged reason; not drafted: the
same for a padded batch, without any draft; refused: generate raises ValueError before anything is decoded.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest.mock import patch

import torch
import transformers
from conftest import NO_SPECIAL_TOKENS, PROMPT, ROPED, WIDTH, fit_head, greedy_text
from observers import noting
from recurrent_families import CHAINS_OF_STATES, COMPRESSED, RECURRENT_FAMILIES, STREAMS
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import ModelOutput

from eagle31_hf import AcceptanceStats, Eagle31Config, Eagle31DrafterModel, track_acceptance
from eagle31_hf.acceptance import LOCK_STEP, TREES
from eagle31_hf.cache.states import HAS_METHODS
from eagle31_hf.checking.trial import difference
from eagle31_hf.targets import probe
from eagle31_hf.targets.layers import decoder_layers

LOSSLESS, CHAINS, IN_STEP = "same text", "chains", "in step"
NOT_DRAFTED, REFUSED, DIFFERENT = "not drafted", "refused", "different"
ATTENTIONS = ("eager", "sdpa")
BATCHES = (1, 4)  # prompts a call
DRAFTINGS = {
    "chain": {"num_assistant_tokens": 4},
    "tree": {"num_assistant_tokens": 4, "draft_tree_top_k": 3, "draft_tree_total_tokens": 10},
}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}
ASKED = {"max_new_tokens": 16, "do_sample": False} | LOGITS
ASKED_OF_A_PROMPT = ASKED | {"max_new_tokens": 24}  # that the drafter does not know: it guesses right now and then
ASKED_OF_A_BATCH = {"max_new_tokens": 12, "do_sample": False}  # for more than tokens its sequences would keep step
VOCAB, WINDOW = 29, 8  # the text outgrows the window twice or more
# A batch is PROMPT and these: PROMPT with so many tokens of the text the drafter knows, so that its errors, and with
# them the bursts, come at other times in every sequence; and a stranger, of which it knows nothing. In step a stranger
# would keep all sequences from accepting anything.
AHEAD, AHEAD_IN_STEP, STRANGER = (3, 7), (3, 7, 1), (7, 6)

SHAPE = ROPED | {"num_hidden_layers": 3}
GPT = {"n_embd": WIDTH, "n_layer": 3, "n_head": 3, "n_positions": 128}
FALCON = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 3, "max_position_embeddings": 128}
MPT = {"d_model": WIDTH, "n_heads": 3, "n_layers": 3, "max_seq_len": 128, "use_cache": True}
GPT_NEO = {
    "hidden_size": WIDTH, "num_layers": 3, "attention_types": [[["global", "local", "global"], 1]], "num_heads": 3,
    "window_size": WINDOW, "max_position_embeddings": 128,
}  # fmt: skip
WINDOWED = SHAPE | {"sliding_window": WINDOW}
TURNED_ON = WINDOWED | {"use_sliding_window": True, "max_window_layers": 1}
ALTERNATING = WINDOWED | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 20,
}
ROUTED = (
    SHAPE
    | EXPERTS
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
)
LATENT = ROUTED | {
    "num_key_value_heads": 3,
    "q_lora_rank": 18,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "head_dim": 4,
}
# Indexers rank by a sum of ReLUs over heads; with many heads none is exactly 0, so that no tie is broken by the number
# of rows.
INDEXED = LATENT | {"index_topk": WINDOW, "index_n_heads": 24, "index_head_dim": 8}
HALF_ROPE = SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
SECTIONED = SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}}
PER_LAYER = ALTERNATING | {
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 6,
    "num_kv_shared_layers": 0,
}
SHARED_KEYS = PER_LAYER | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
LOOPED = WINDOWED | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "n_input_layers": 1,
    "n_recurrent_layers": 2,
    "n_output_layers": 1,
    "n_recurrent_loops": 3,
    "ngpt_alpha_init": 0.6,  # else a text repeats one token, whatever its layers say
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "patch_size": 14, "out_hidden_size": WIDTH,
    "fullatt_block_indexes": [0],
}  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """What is wrong in our own code, where which words are expected, from which version of transformers on."""

    reason: str
    words: tuple[str, ...] = (LOSSLESS, CHAINS, IN_STEP, REFUSED)
    since: str = "5.17"


@dataclass(frozen=True)
class Family:
    """`config_class`: its name in transformers, which a version may lack; `chain`, `tree`: the outcomes expected for
    one prompt."""

    config_class: str
    fields: dict = field(default_factory=lambda: dict(SHAPE))
    chain: str = LOSSLESS
    tree: str = LOSSLESS
    seed: int = 0
    bug: Bug | None = None
    batch: str | None = None  # of one that is padded; None: as `tree` says

    def expected(self, drafting: str, num_prompts: int = 1) -> str:
        if num_prompts > 1 and self.batch is not None:
            return self.batch
        if num_prompts > 1 and self.tree == CHAINS:  # rows of different lengths are verified under masks of trees
            return IN_STEP
        return {"chain": self.chain, "tree": self.tree}[drafting]


def of_recurrent(name: str, config_class: str, fields: dict, seed: int = 0) -> Family:
    """Before transformers 5.21 only convolutions can be taken back, and batches keep step."""
    if HAS_METHODS and name not in CHAINS_OF_STATES:
        return Family(config_class, fields, seed=seed)
    works = HAS_METHODS or config_class.startswith("Lfm")
    return Family(config_class, fields, seed=seed, **({"tree": CHAINS} if works else ALWAYS_REFUSED))


ALWAYS_REFUSED = {"chain": REFUSED, "tree": REFUSED}
FAMILIES = {
    # dense
    "Llama": Family("LlamaConfig"),
    "Qwen2": Family("Qwen2Config"),
    "Qwen3": Family("Qwen3Config"),
    "Gemma": Family("GemmaConfig"),
    "Phi": Family("PhiConfig"),
    "Phi3": Family("Phi3Config"),
    "OLMo2": Family("Olmo2Config"),
    "Granite": Family("GraniteConfig"),
    "GLM-4": Family("Glm4Config"),
    "SmolLM3": Family("SmolLM3Config"),
    "StableLM": Family("StableLmConfig", HALF_ROPE),
    "Nemotron": Family("NemotronConfig", HALF_ROPE),
    "Persimmon": Family("PersimmonConfig", HALF_ROPE),
    "GPT-NeoX": Family("GPTNeoXConfig", HALF_ROPE),
    "GPT-J": Family("GPTJConfig", GPT | {"rotary_dim": 6}),
    "CodeGen": Family("CodeGenConfig", GPT | {"n_head": 4, "n_embd": 32, "rotary_dim": 4}),
    "Falcon, rope": Family("FalconConfig", FALCON),
    "Cohere": Family("CohereConfig"),
    "Apertus": Family("ApertusConfig"),
    "Apertus 1.5": Family("Apertus1p5TextConfig"),
    "Arcee": Family("ArceeConfig"),
    "Helium": Family("HeliumConfig"),
    "ModernBERT decoder": Family(
        "ModernBertDecoderConfig",
        ALTERNATING | {"local_attention": WINDOW} | dict.fromkeys(NO_SPECIAL_TOKENS, -1),  # which it has to have
    ),
    "Seed-OSS": Family("SeedOssConfig"),
    "EXAONE": Family("ExaoneConfig"),
    "HunYuan": Family("HunYuanDenseV1Config"),
    "ERNIE 4.5": Family("Ernie4_5Config"),
    "DiffLlama": Family("DiffLlamaConfig", SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2}),
    # learned or sinusoidal positions
    "GPT-2": Family("GPT2Config", GPT),
    "GPTBigCode": Family("GPTBigCodeConfig", GPT),
    "OPT": Family("OPTConfig", SHAPE | {"ffn_dim": 40, "word_embed_proj_dim": WIDTH}),
    "XGLM": Family(
        "XGLMConfig",
        {"d_model": WIDTH, "ffn_dim": 40, "num_layers": 3, "attention_heads": 3, "max_position_embeddings": 128},
    ),
    "CTRL": Family("CTRLConfig", {"n_embd": WIDTH, "dff": 40, "n_layer": 3, "n_head": 3, "n_positions": 128}),
    # alibi: by row of the cache, not by position
    "Falcon, alibi": Family("FalconConfig", FALCON | {"alibi": True}, tree=CHAINS),
    "BLOOM": Family("BloomConfig", {"hidden_size": WIDTH, "n_layer": 3, "n_head": 3}, tree=CHAINS),
    "MPT": Family("MptConfig", MPT, tree=CHAINS),
    "MPT, faint alibi": Family("MptConfig", MPT | {"initializer_range": 0.7}, tree=CHAINS, seed=100),
    # windows shorter than the text
    "Qwen2, window": Family("Qwen2Config", TURNED_ON),
    "Mistral, window": Family("MistralConfig", WINDOWED),
    "Ministral, window": Family("MinistralConfig", ALTERNATING),
    "Gemma2, window, softcap": Family("Gemma2Config", ALTERNATING | {"query_pre_attn_scalar": 12}),
    "VaultGemma, window, softcap": Family("VaultGemmaConfig", ALTERNATING | {"query_pre_attn_scalar": 12}),
    "Gemma3 text, window": Family("Gemma3TextConfig", ALTERNATING),
    "Gemma4 text, window": Family(
        "Gemma4TextConfig",
        PER_LAYER | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "global_head_dim": 8},
    ),
    "Gemma4 text, shared keys": Family("Gemma4TextConfig", SHARED_KEYS | {"global_head_dim": 8}),
    "Gemma3n text": Family(
        "Gemma3nTextConfig",
        SHARED_KEYS | {"laurel_rank": 5, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "Phi3, window": Family("Phi3Config", WINDOWED),
    "OLMo3, window": Family("Olmo3Config", ALTERNATING),
    "StarCoder2, window": Family("Starcoder2Config", WINDOWED),
    "SmolLM3, window": Family("SmolLM3Config", ALTERNATING | {"use_sliding_window": True}),
    "Cohere2, window": Family("Cohere2Config", ALTERNATING),
    "Exaone4, window": Family("Exaone4Config", ALTERNATING),
    "GPT-Neo, window": Family("GPTNeoConfig", GPT_NEO, tree=CHAINS),
    "GPT-Neo, longer window": Family("GPTNeoConfig", GPT_NEO | {"window_size": 16}, tree=CHAINS),
    "Llama4 text, chunks": Family(
        "Llama4TextConfig", SHAPE | EXPERTS | {"intermediate_size_mlp": 40, "attention_chunk_size": WINDOW}, tree=CHAINS
    ),
    # experts
    "Mixtral": Family("MixtralConfig", SHAPE | EXPERTS),
    "Mixtral, window": Family("MixtralConfig", WINDOWED | EXPERTS),
    "Qwen2-MoE, window": Family("Qwen2MoeConfig", TURNED_ON | EXPERTS),
    "Qwen3-MoE": Family("Qwen3MoeConfig", SHAPE | EXPERTS),
    "Qwen3-MoE, window": Family("Qwen3MoeConfig", TURNED_ON | EXPERTS),
    "OLMoE": Family("OlmoeConfig", SHAPE | EXPERTS),
    "FlexOlmo": Family("FlexOlmoConfig", SHAPE | EXPERTS),
    "Granite-MoE": Family("GraniteMoeConfig", SHAPE | EXPERTS),
    "PhiMoE, window": Family("PhimoeConfig", WINDOWED | EXPERTS),
    "GLM-4-MoE": Family("Glm4MoeConfig", ROUTED),
    "Sarvam-MoE": Family("SarvamMoEConfig", ROUTED),
    "dots1, window": Family("Dots1Config", ROUTED | ALTERNATING),
    "AFMoE, window": Family("AfmoeConfig", ALTERNATING | EXPERTS),
    "MiniMax-M2": Family("MiniMaxM2Config", SHAPE | EXPERTS | {"rotary_dim": 6}),
    "GPT-OSS, window, sinks": Family("GptOssConfig", ALTERNATING | EXPERTS),
    "DBRX": Family(
        "DbrxConfig",
        {
            "d_model": WIDTH,
            "n_heads": 3,
            "n_layers": 3,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    # latent and sparse attention
    "DeepSeek-V2 (MLA)": Family("DeepseekV2Config", LATENT | {"topk_method": "greedy"}),
    "DeepSeek-V3 (MLA)": Family("DeepseekV3Config", LATENT),
    "Sarvam (MLA)": Family("SarvamMLAConfig", LATENT),
    "LongCat-Flash (MLA)": Family(  # its layers attend twice each
        "LongcatFlashConfig",
        {k: v for k, v in LATENT.items() if k != "num_hidden_layers"}
        | {"num_layers": 3, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 20, "zero_expert_num": 2, "moe_topk": 2},
    ),
    "DeepSeek-V3.2 (sparse)": Family(
        "DeepseekV32Config", INDEXED | {"mlp_layer_types": ["dense", "sparse", "sparse"]}, tree=CHAINS
    ),
    "GLM-MoE-DSA (sparse)": Family("GlmMoeDsaConfig", INDEXED, tree=CHAINS),
    "HY-V4 (sparse)": Family("HYV4Config", INDEXED | {"hc_mult": 2}, tree=CHAINS),
    # looped: some layers run several times in a forward, each time over keys of their own, or over those of the last
    "Dory, window, loops": Family("DoryConfig", LOOPED),
    "Dory, keys of the last loop": Family(
        "DoryConfig", LOOPED | {"recurrent_kv_cache_mode": "last_loop"}, **ALWAYS_REFUSED
    ),
    # multimodal, over text
    "Gemma3 multimodal, window": Family(
        "Gemma3Config", {"text_config": ALTERNATING, "vision_config": VISION, "mm_tokens_per_image": 4}
    ),
    "Qwen2-VL": Family(
        "Qwen2VLConfig",
        {
            "text_config": SECTIONED,
            "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": WIDTH},
        },
    ),
    "Qwen2.5-VL": Family("Qwen2_5_VLConfig", {"text_config": SECTIONED, "vision_config": QWEN_VISION}),
    "Qwen3-VL": Family(
        "Qwen3VLConfig", {"text_config": SECTIONED, "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}}
    ),
    "LLaVA": Family(
        "LlavaConfig",
        {"text_config": SHAPE | {"model_type": "llama"}, "vision_config": VISION | {"model_type": "clip_vision_model"}},
    ),
    "Exaone4.5 multimodal": Family(  # drops the positions that generate() gives it
        "Exaone4_5_Config",
        {"text_config": SHAPE | {"model_type": "exaone4"}, "vision_config": QWEN_VISION | {"num_key_value_heads": 1}},
        tree=CHAINS,
    ),
    # recurrent, convolutional, hybrid
    **{name: of_recurrent(name, *kind) for name, kind in RECURRENT_FAMILIES.items()},
    **{name: Family(*kind, **({"tree": CHAINS} if HAS_METHODS else ALWAYS_REFUSED)) for name, kind in STREAMS.items()},
    "DeepSeek-V4": Family(*COMPRESSED, tree=CHAINS, batch=NOT_DRAFTED),
    "Moshi, window": Family("MoshiConfig", WINDOWED | {"ffn_dim": 40}, **ALWAYS_REFUSED),
    "MiniMax": Family(
        "MiniMaxConfig",
        SHAPE | EXPERTS | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        **ALWAYS_REFUSED,
    ),
    "RecurrentGemma": Family(
        "RecurrentGemmaConfig",
        SHAPE
        | {"lru_width": WIDTH, "attention_window_size": WINDOW, "block_types": ["recurrent", "recurrent", "attention"]},
        **ALWAYS_REFUSED,
    ),
}


class NotThereError(Exception):
    """This version of transformers has not the family, or not with this attention implementation."""


@cache
def build_target(name: str, attention: str, **overrides) -> PreTrainedModel:
    """With these fields of its config in place of the table's. Its greedy text varies: see `conftest.build_target`.
    Raises NotThereError."""
    family = FAMILIES[name]
    config_class = getattr(transformers, family.config_class, None)
    if config_class is None:
        raise NotThereError(f"transformers {transformers.__version__} has no {family.config_class}")
    common = {"vocab_size": VOCAB, "tie_word_embeddings": False, "initializer_range": 0.5} | NO_SPECIAL_TOKENS
    fields = family.fields | overrides
    if "text_config" in fields:
        fields["text_config"] = common | fields["text_config"]
        common = {"tie_word_embeddings": False, "image_token_id": VOCAB - 1, "image_token_index": VOCAB - 1}
    torch.manual_seed(family.seed)
    config = config_class(**common | fields)
    auto = transformers.AutoModelForImageTextToText if "text_config" in fields else AutoModelForCausalLM
    try:
        target = auto.from_config(config, attn_implementation=attention)
    except ValueError as refusal:
        if "attention implementation" not in str(refusal):
            raise
        raise NotThereError(f"transformers {transformers.__version__} has no {attention} for {name}") from refusal
    target.generation_config.eos_token_id = None  # of a config that has to have one
    return target.eval()


@cache
def build_drafter(name: str, **overrides) -> Eagle31DrafterModel:
    """Knows the target's greedy text, errors included: see `conftest.fit_head`. Raises NotThereError."""
    target = build_target(name, "eager", **overrides)
    num_layers = len(decoder_layers(target))
    torch.manual_seed(1)
    config = Eagle31Config(
        vocab_size=VOCAB,
        hidden_size=target.get_input_embeddings().weight.shape[1],
        intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
        aux_hidden_state_layer_ids=[0, num_layers // 2, num_layers],
    )
    drafter = Eagle31DrafterModel._from_config(config, attn_implementation="sdpa").eval()
    if FAMILIES[name].chain != REFUSED:  # else there may be no states to learn from
        fit_head(drafter, target)
    return drafter


def build_batch(name: str) -> dict[str, Tensor]:
    """Prompts of different lengths, padded on the left, the first of them PROMPT. Raises NotThereError."""
    known, in_step = greedy_text(build_target(name, "eager"))[0].tolist(), FAMILIES[name].tree == CHAINS
    texts = [known[: len(PROMPT[0]) + ahead] for ahead in (0, *(AHEAD_IN_STEP if in_step else AHEAD))]
    return padded(texts if in_step else [*texts, list(STRANGER)])


def padded(texts: list[list[int]]) -> dict[str, Tensor]:
    """A batch (B, L), padded on the left with a token that means something elsewhere."""
    longest = max(map(len, texts))
    ids = [[0] * (longest - len(text)) + text for text in texts]
    mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@dataclass
class Outcome:
    """`word`: one of the table's, or "different" where text or logits are not the target's own; `reason`: the one
    logged or raised, or what is different.

    `accepted`, `rejected`: the numbers of drafted levels; `accepted_by_sequence`: of each prompt; `num_trees`,
    `num_ragged`: the forwards that verified trees, and sequences of different lengths.
    """

    word: str
    reason: str = ""
    accepted: int = 0
    rejected: int = 0
    accepted_by_sequence: tuple[int, ...] = ()
    num_trees: int = 0
    num_ragged: int = 0


def decode(
    name: str, attention: str, drafting: str, num_prompts: int = 1, prompt: dict[str, Tensor] | None = None
) -> Outcome:
    """Generates with a drafter and compares with the target alone. `prompt`: another than the table's. Raises
    NotThereError."""
    target, drafter = build_target(name, attention), build_drafter(name)
    asked = ASKED_OF_A_BATCH if num_prompts > 1 else ASKED if prompt is None else ASKED_OF_A_PROMPT
    is_ragged = noting(lambda sequences, drafts, logits: not sequences.lengths.is_uniform)
    with track_acceptance() as stats, probed_anew() as warnings, is_ragged as ragged:
        try:
            ours = target.generate(
                **(prompt or prompts(name, num_prompts)), assistant_model=drafter, **asked, **DRAFTINGS[drafting]
            )
        except ValueError as refusal:
            return Outcome(REFUSED, str(refusal))
    alone = decode_alone(name, attention, num_prompts) if prompt is None else target.generate(**prompt, **asked)
    accepted, drafted = sum(stats.accepted_per_position), sum(stats.drafted_per_position)
    wrong = difference(ours, alone)
    return Outcome(
        DIFFERENT if wrong else way_of(stats, drafting),
        wrong or "; ".join(warnings),
        accepted,
        drafted - accepted,
        tuple(sum(one.accepted_per_position) for one in stats.sequences),
        stats.kinds[TREES],
        sum(ragged),
    )


def way_of(stats: AcceptanceStats, drafting: str) -> str:
    """The table's word for calls that gave the target's own text."""
    if not any(stats.drafted_per_position):
        return NOT_DRAFTED
    if stats.kinds[LOCK_STEP]:
        return IN_STEP
    return CHAINS if drafting == "tree" and not stats.kinds[TREES] else LOSSLESS


def prompts(name: str, num_prompts: int) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(PROMPT)} if num_prompts == 1 else build_batch(name)


@cache
def decode_alone(name: str, attention: str, num_prompts: int) -> ModelOutput:
    """What plain generate makes of the table's prompts, always with its logits."""
    return build_target(name, attention).generate(
        **prompts(name, num_prompts), **(ASKED if num_prompts == 1 else ASKED_OF_A_BATCH | LOGITS)
    )


class Warnings(logging.Handler):
    """The reasons that the probe of targets logs."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def probed_anew() -> Iterator[list[str]]:
    """A context in which no verdict about a target is remembered from earlier calls. Gives the reasons logged in it."""
    with patch.dict(probe._verdicts, clear=True):
        warnings = Warnings()
        probe.logger.addHandler(warnings)
        try:
            yield warnings.lines
        finally:
            probe.logger.removeHandler(warnings)
