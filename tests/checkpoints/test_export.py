"""Export: back and forth changes no byte, every key is one the engine reads, and a drafter it cannot run is refused.

V target vocabulary, Vd draft vocabulary.
"""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from close import assert_close
from conftest import import_peft
from factories import MLA, NORMS, VARIANTS, VOCAB, build, inputs, target
from folders import contents
from safetensors import safe_open
from safetensors.torch import load_file
from writers import KIMI_YARN, LAYOUTS, YARN

from eagle31_hf import Eagle31Config, Eagle31DrafterModel, convert_checkpoint, export_checkpoint
from eagle31_hf.checkpoints import EXPORT_FORMATS, engine_config, export_notes, launch_line
from eagle31_hf.checkpoints.export import refusal

WEIGHTS = "model.safetensors"
FORMATS = ("vllm", "sglang", "speculators")
PLAIN_TWO_LAYERS = {"num_hidden_layers": 2}
IDS = {"aux_hidden_state_layer_ids": [2, 16, 29]}
FULL = {"draft_vocab_size": VOCAB}
EVERYWHERE = {name: NORMS[name] for name in ("eagle31", "eagle3", "norm_before_fc")} | {
    "two_plain_layers": PLAIN_TWO_LAYERS,
    "full_vocabulary": FULL,
    "shared_embedding": {"share_target_embeddings": True},
    "shared_head": {"share_target_embeddings": True, "share_target_head": True} | FULL,
    "five_states": {"aux_hidden_state_layer_ids": [2, 7, 12, 17, 22]},
    "no_ids": {"aux_hidden_state_layer_ids": None},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 150000.0}},
    "partial_rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.67}},
    "named_target_and_tokens": {
        "target_model": "a/target",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
    },
    "other_sizes": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "initializer_range": 0.01,
        "attention_dropout": 0.1,
    },
}
ONLY_SOME = {
    "norm_before_residual": (NORMS["norm_before_residual"], ("vllm", "speculators")),
    "two_layers_with_norms_and_biases": (VARIANTS["two_layers"], ("speculators",)),
    "two_layers_with_norms": ({"num_hidden_layers": 2, "qk_norm": True}, ("vllm", "speculators")),
    "biases": ({"attention_bias": True}, ("vllm", "speculators")),
    "window": (VARIANTS["window_3"], ("vllm", "speculators")),
    "window_then_full": (VARIANTS["window_3_then_full"], ("speculators",)),
    "scaled_logits": ({"logit_scale": 0.5}, ("vllm", "speculators")),
    "mlp_bias": ({"mlp_bias": True}, ("vllm", "speculators")),
    "wider_target": (VARIANTS["wider_target"], ("vllm", "sglang")),
    "mla": (MLA, ("vllm", "sglang")),
    "mla_of_kimi": (MLA | FULL | {"rope_parameters": KIMI_YARN | {"rope_theta": 5e4}}, ("vllm", "sglang")),
}
DRAFTERS = EVERYWHERE | {name: fields for name, (fields, _) in ONLY_SOME.items()}
CASES = [(name, format) for name in EVERYWHERE for format in FORMATS]
CASES += [(name, format) for name, (_, formats) in ONLY_SOME.items() for format in formats]


def native(folder: Path, **fields) -> Eagle31DrafterModel:
    """Makes a native checkpoint in `folder`, converted from another format."""
    drafter = build(**IDS | fields)
    drafter.save_pretrained(folder.with_name("saved"), max_shard_size="4KB")
    convert_checkpoint(folder.with_name("saved"), folder)
    return drafter


@pytest.mark.parametrize(("name", "format"), CASES)
def test_back_and_forth_changes_no_byte(name, format, tmp_path):
    drafter = native(tmp_path / "native", **DRAFTERS[name])
    if format == "speculators" and drafter.d2t is not None:
        ascending(drafter).save_pretrained(tmp_path / "sorted")
        convert_checkpoint(tmp_path / "sorted", tmp_path / "ascending")
    source = tmp_path / "ascending" if (tmp_path / "ascending").exists() else tmp_path / "native"
    export_checkpoint(tmp_path / "native", tmp_path / "exported", format)
    checkpoint = convert_checkpoint(tmp_path / "exported", tmp_path / "again")
    assert "eagle31_hf export" in checkpoint.reasons[0]
    for file in ("config.json", WEIGHTS):
        assert (tmp_path / "again" / file).read_bytes() == (source / file).read_bytes()


@torch.no_grad()
def ascending(drafter: Eagle31DrafterModel) -> Eagle31DrafterModel:
    """Returns the same drafter with its draft vocabulary in ascending order."""
    order = drafter.draft_to_target_ids().argsort()
    drafter.lm_head.weight.copy_(drafter.lm_head.weight[order].clone())
    drafter.set_draft_vocabulary(drafter.draft_to_target_ids()[order].clone())
    return drafter


@torch.no_grad()
def test_an_unsorted_vocabulary_is_sorted_for_speculators_and_logits_with_it(tmp_path):
    drafter = build(**IDS)
    export_checkpoint(drafter, tmp_path / "exported", "speculators")
    loaded = Eagle31DrafterModel.from_pretrained(tmp_path / "exported")
    order = drafter.draft_to_target_ids().argsort()
    assert order.tolist() != list(range(len(order)))
    assert_close("ids", loaded.draft_to_target_ids(), drafter.draft_to_target_ids()[order])
    assert loaded.t2d.nonzero().flatten().tolist() == loaded.draft_to_target_ids().tolist()
    tokens, states = inputs(drafter)
    logits = [m(tokens, target_hidden_states=states).logits for m in (drafter, loaded)]
    assert_close("logits", logits[1], logits[0][..., order])
    with torch.device("meta"):  # beside a default device it is the same
        export_checkpoint(drafter, tmp_path / "again", "speculators")
    assert contents(tmp_path / "again") == contents(tmp_path / "exported")


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_and_its_checkpoint_are_exported_alike(format, tmp_path):
    native(tmp_path / "native")
    for name, source in (
        ("model", Eagle31DrafterModel.from_pretrained(tmp_path / "native")),
        ("path", tmp_path / "native"),
    ):
        assert export_checkpoint(source, tmp_path / name, format) == tmp_path / name
    assert contents(tmp_path / "model") == contents(tmp_path / "path")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["specforge", "original_release", "modelopt", "nemo", "torchspec"])
def test_a_foreign_checkpoint_is_exported_at_once(name, format, tmp_path):
    LAYOUTS[name].write(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "native")
    for source in ("source", "native"):
        export_checkpoint(tmp_path / source, tmp_path / f"exported-{source}", format)
    assert contents(tmp_path / "exported-source") == contents(tmp_path / "exported-native")


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_in_another_dtype_says_so(format, tmp_path):
    drafter = build(**IDS).bfloat16()
    export_checkpoint(drafter, tmp_path / "exported", format)
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    config = config.get("transformer_layer_config", config)
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    weights = load_file(tmp_path / "exported" / WEIGHTS)
    assert {w.dtype for name, w in weights.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (weights["d2t"].dtype, weights["t2d"].dtype) == (torch.int64, torch.bool)


# What engines read.

# The skeleton of one directory for both engines: a Llama of 32 layers as target, EAGLE 3.1, three states, a reduced
# vocabulary.
LARGE = {
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "aux_hidden_state_layer_ids": [2, 16, 29],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "dtype": "bfloat16",
}
SKELETON = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "num_aux_hidden_states": 3,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": True,
    "norm_output": True,
    "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
}
NESTED = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}
CONTAINER = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32000,
    "target_hidden_size": None,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": True,
    "norm_output": True,
    "embed_requires_grad": False,
    "tie_word_embeddings": False,
    "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
}


def part(value: dict, keys) -> dict:
    return {key: value[key] for key in keys}


def test_the_config_for_vllm_is_the_skeleton():
    config = engine_config(Eagle31Config(**LARGE), "vllm")
    assert part(config, SKELETON) == SKELETON
    assert (
        not {"eagle_config", "speculators_config", "target_layer_ids", "dflash_config", "transformers_version"}
        & config.keys()
    )


def test_the_config_for_sglang_is_the_skeleton_with_both_lists():
    config = engine_config(Eagle31Config(**LARGE), "sglang")
    assert part(config, SKELETON | NESTED) == SKELETON | NESTED


def test_the_config_for_speculators_is_the_container():
    config = engine_config(Eagle31Config(**LARGE, target_model="org/target"), "speculators")
    assert part(config, CONTAINER) == CONTAINER
    assert "model_type" not in config
    assert config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert part(proposal, ["proposal_type", "verifier_accept_k", "accept_tolerance"]) == {
        "proposal_type": "greedy",
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    geometry = SKELETON.keys() - CONTAINER.keys() - {"architectures", "model_type"}
    assert part(config["transformer_layer_config"], geometry) == part(SKELETON, geometry)
    assert config["transformer_layer_config"]["model_type"] == "llama"


@pytest.mark.parametrize(
    ("fields", "architecture", "model_type"),
    [
        pytest.param({}, "LlamaForCausalLMEagle3", "llama", id="llama"),
        pytest.param({"qk_norm": True}, "Eagle3Qwen3ForCausalLM", "qwen3", id="qk_norm"),
        pytest.param(MLA, "Eagle3DeepseekV2ForCausalLM", "deepseek_v2", id="mla"),
    ],
)
def test_the_architecture_for_vllm(fields, architecture, model_type):
    config = engine_config(Eagle31Config(**LARGE | fields), "vllm")
    assert (config["architectures"], config["model_type"]) == ([architecture], model_type)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_layer_for_speculators(qk_norm):
    config = engine_config(Eagle31Config(**LARGE, qk_norm=qk_norm), "speculators")
    assert config["transformer_layer_config"]["model_type"] == ("qwen3" if qk_norm else "llama")


def test_rope_is_written_in_every_spelling():
    rope = YARN | {"rope_theta": 150000.0, "partial_rotary_factor": 0.5}
    config = engine_config(Eagle31Config(**LARGE | {"rope_parameters": rope}), "vllm")
    assert (config["rope_parameters"], config["rope_theta"], config["partial_rotary_factor"]) == (rope, 150000.0, 0.5)
    assert config["rope_scaling"] == YARN


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["eagle31", "eagle3", "norm_before_fc"])
def test_every_flag_is_written_out(name, format):
    config = engine_config(Eagle31Config(**LARGE | NORMS[name]), format)
    wanted = {"fc_norm": True, "norm_output": True, "norm_before_fc": False, "norm_before_residual": False} | NORMS[
        name
    ]
    assert part(config, wanted) == wanted


SGLANG_IDS = [
    (None, [2, 16, 29], [1, 15, 28]),
    ("llama", [2, 16, 29], [1, 15, 28]),
    ("qwen3_moe", [1, 9, 17], [0, 8, 16]),
    ("gpt_oss", [2, 18, 33], [1, 17, 32]),
    ("gpt_oss", [24, 30, 36], [23, 29, 35]),
    ("gpt_oss", [1, 11, 21], [0, 10, 20]),
    ("deepseek_v3", [2, 30, 58], [1, 29, 57]),
    ("deepseek_v3", [3, 30, 58], [3, 30, 58]),
    ("kimi_k2", [2, 30, 58], [1, 29, 57]),
    ("kimi_k25", [5, 30, 58], [5, 30, 58]),
    ("glm4_moe_lite", [3, 23, 44], [3, 23, 44]),
    ("glm-moe-dsa", [3, 39, 75], [3, 39, 75]),
    (" GlmMoeDsaForCausalLM", [3, 39, 75], [3, 39, 75]),
    ("glm4_moe", [3, 23, 44], [2, 22, 43]),
    ("glm5_next", [3, 23, 44], [2, 22, 43]),
]


@pytest.mark.parametrize(("target_type", "boundary", "expected"), SGLANG_IDS)
def test_the_ids_sglang_reads(target_type, boundary, expected):
    config = Eagle31Config(**LARGE | {"aux_hidden_state_layer_ids": boundary})
    written = engine_config(config, "sglang", target_type)
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == expected
    assert written["eagle_aux_hidden_state_layer_ids"] == boundary


@pytest.mark.parametrize(
    ("target_model", "is_deepseek"),
    [
        ("org/DeepSeek-V3", True),
        ("moonshotai/Kimi-K2-Instruct", True),
        ("zai-org/GLM-4.7-Flash", True),
        ("zai-org/GLM-5", True),
        ("zai-org/GLM-5-FP8", True),
        ("zai-org/GLM-5.1", True),
        ("moonshotai/Moonlight-16B-A3B-Instruct/", True),
        ("deepseek-ai/DeepSeek-Math-V2", True),
        ("/cache/models--deepseek-ai--DeepSeek-V3/snapshots/0af3", True),
        ("/models/deepseek-ai_DeepSeek_V3", True),
        ("/models/DeepSeek_V3", True),
        ("zai-org/GLM-5.3-Flash", False),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", False),
        ("deepseek-ai/deepseek-coder-33b-instruct", False),
        ("moonshotai/Kimi-Dev-72B", False),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", False),
        ("deepseek/llama", False),
        ("openai/gpt-oss-20b", False),
        ("Qwen/Qwen3-8B", False),
        (None, False),
    ],
)
def test_the_target_is_told_from_its_name(target_model, is_deepseek):
    config = Eagle31Config(**LARGE | {"aux_hidden_state_layer_ids": [3, 16, 29]}, target_model=target_model)
    expected = [3, 16, 29] if is_deepseek else [2, 15, 28]
    assert engine_config(config, "sglang")["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == expected


@pytest.mark.parametrize(
    ("target_type", "ids"), [("deepseek_v3", [1, 30, 58]), ("kimi_k2", [1, 2, 3]), ("llama", [0, 5, 9])]
)
def test_ids_sglang_cannot_read_are_refused(target_type, ids, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be expressed|cannot express"):
        export_checkpoint(
            build(aux_hidden_state_layer_ids=ids), tmp_path / "exported", "sglang", target_type=target_type
        )
    assert not any(tmp_path.iterdir())


# Names of tensors.


def names(folder: Path) -> set[str]:
    with safe_open(folder / WEIGHTS, "pt") as tensors:
        return set(tensors.keys())


LAYER = {
    "input_layernorm.weight",
    "hidden_norm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
}
AROUND = {"fc.weight", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight", "norm.weight", "lm_head.weight"}
OTHERS = {"embed_tokens.weight", "d2t", "t2d"}


@pytest.mark.parametrize(
    ("format", "prefix"), [("vllm", "layers.0."), ("sglang", "midlayer."), ("speculators", "layers.0.")]
)
def test_the_tensors_of_one_layer(format, prefix, tmp_path):
    export_checkpoint(build(**IDS), tmp_path / "exported", format)
    assert names(tmp_path / "exported") == AROUND | OTHERS | {prefix + name for name in LAYER}


def test_a_later_layer_has_both_names_of_its_norm_for_sglang(tmp_path):
    export_checkpoint(build(**IDS | PLAIN_TWO_LAYERS), tmp_path / "exported", "sglang")
    assert names(tmp_path / "exported") == AROUND | OTHERS | {f"layers.{i}.{name}" for i in range(2) for name in LAYER}
    weights = load_file(tmp_path / "exported" / WEIGHTS)
    assert_close("norms", weights["layers.1.hidden_norm.weight"], weights["layers.1.input_layernorm.weight"])


@pytest.mark.parametrize("format", FORMATS)
def test_a_shared_head_is_the_targets(format, tmp_path):
    """SGLang takes the target's where no draft vocabulary is stated, and otherwise runs one that was never read."""
    drafter = build(**IDS | FULL | {"share_target_head": True})
    export_checkpoint(drafter, tmp_path / "exported", format)
    stated = json.loads((tmp_path / "exported" / "config.json").read_text())["draft_vocab_size"]
    assert stated == (None if format == "sglang" else drafter.config.vocab_size)
    assert "lm_head.weight" not in names(tmp_path / "exported")
    assert Eagle31DrafterModel.from_pretrained(tmp_path / "exported").config.share_target_head


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_vocabulary_has_no_map(format, tmp_path):
    export_checkpoint(build(**IDS | FULL), tmp_path / "exported", format)
    assert not {"d2t", "t2d"} & names(tmp_path / "exported")


@pytest.mark.parametrize("format", FORMATS)
def test_the_file_is_a_transformers_file(format, tmp_path):
    export_checkpoint(build(**IDS), tmp_path / "exported", format)
    with safe_open(tmp_path / "exported" / WEIGHTS, "pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}
    assert set(contents(tmp_path / "exported")) == {"config.json", WEIGHTS}


# What cannot be expressed.

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
DYNAMIC = LINEAR | {"rope_type": "dynamic"}
SCALED = YARN | {"rope_theta": 10000.0, "truncate": True, "attention_factor": 1.0}
UNTRUNCATED = YARN | {"rope_theta": 10000.0, "truncate": False}
CANNOT = [
    ("vllm", {"fc_bias": True}, "fc has a bias"),
    ("vllm", {"hidden_act": "gelu"}, "it knows silu alone"),
    ("vllm", MLA | {"fc_norm": False, "norm_before_fc": True}, "its MLA drafter has no norm_before_fc"),
    ("vllm", {"rope_parameters": DYNAMIC}, "its dynamic rope does not change"),
    ("vllm", MLA | {"rope_parameters": LINEAR}, "its MLA drafter takes any scaled rope for yarn"),
    ("vllm", MLA | {"rope_parameters": SCALED}, "for yarn, without attention_factor and truncate"),
    ("vllm", MLA | {"attention_bias": True}, "its MLA drafter drops biases"),
    ("vllm", MLA | {"mlp_bias": True}, "its MLA drafter drops biases"),
    ("vllm", MLA | {"layer_types": ["sliding_attention"], "sliding_window": 3}, "its MLA drafter has no window"),
    ("vllm", MLA | {"mask_token_id": 3}, "its MLA drafter does not draft in parallel"),
    ("vllm", MLA | {"q_lora_rank": None}, "its MLA drafter needs q_lora_rank"),
    ("vllm", VARIANTS["two_layers"], "drops o_proj's bias"),
    ("vllm", VARIANTS["window_3_then_full"], "all of them slide or none"),
    ("sglang", {"fc_bias": True}, "fc has a bias"),
    ("sglang", {"hidden_act": "gelu"}, "it knows silu alone"),
    ("sglang", VARIANTS["window_3"], "the drafter has a sliding window"),
    ("sglang", NORMS["norm_before_residual"], "it has no norm_before_residual"),
    ("sglang", {"qk_norm": True}, "has no q/k norm"),
    ("sglang", {"attention_bias": True}, "drops the biases of q, k and v"),
    ("sglang", {"rope_parameters": SCALED}, "computes yarn's attention_factor"),
    ("sglang", {"rope_parameters": DYNAMIC}, "its dynamic rope does not change"),
    ("sglang", {"mlp_bias": True}, "MLP has no bias"),
    ("sglang", {"logit_scale": 0.5}, "no logit_scale"),
    ("sglang", MLA | {"q_lora_rank": None}, "its MLA drafter needs q_lora_rank"),
    ("sglang", MLA | PLAIN_TWO_LAYERS, "its MLA drafter has one layer"),
    ("sglang", MLA | {"rope_parameters": LINEAR}, "its MLA drafter takes any scaled rope for yarn"),
    ("sglang", MLA | {"rope_parameters": UNTRUNCATED}, "for yarn, without attention_factor and truncate"),
    ("sglang", MLA | {"fc_norm": False, "norm_before_fc": True}, "its MLA drafter has no norm_before_fc"),
    ("sglang", {"aux_hidden_state_layer_ids": [2]}, "it skips fc"),
    ("speculators", {"fc_bias": True}, "fc has a bias"),
    ("speculators", {"hidden_act": "gelu"}, "it knows silu alone"),
    ("speculators", MLA, "it has no MLA drafter"),
    ("speculators", VARIANTS["wider_target"], "for a target as wide as the drafter"),
]


@pytest.mark.parametrize(("format", "fields", "reason"), CANNOT)
def test_what_an_engine_cannot_express_is_refused_and_nothing_written(format, fields, reason, tmp_path):
    drafter, source = build(**IDS | fields), tmp_path / "source"
    drafter.save_pretrained(source)
    before = contents(tmp_path)
    told = f"{EXPORT_FORMATS[format].engine} cannot run this drafter: .*{reason}.*Nothing was written"
    for given in (drafter, source):
        with pytest.raises(ValueError, match=told):
            export_checkpoint(given, tmp_path / "there" / "exported", format)
        assert contents(tmp_path) == before


def test_yarn_as_sglang_computes_it_is_exported():
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    for factor in (None, 1.2079441541679836):
        config = Eagle31Config(**LARGE | {"rope_parameters": rope | {"attention_factor": factor}})
        assert engine_config(config, "sglang")["rope_parameters"]["factor"] == 8.0


def test_notes_say_what_the_folder_does_not():
    noted = partial(export_notes, Eagle31Config(**LARGE, target_model="org/Qwen3-8B"), "sglang")
    assert "SGLang's other classes read" in noted()[0]
    assert "SGLang's DeepSeek class reads" in noted("deepseek_v3")[0]
    assert export_notes(Eagle31Config(**LARGE | {"aux_hidden_state_layer_ids": None}), "sglang") == []
    served = Eagle31Config(**LARGE | {"rope_parameters": DYNAMIC})
    assert export_notes(served, "speculators") == [refusal(served, "vllm")]
    assert export_notes(Eagle31Config(**LARGE), "speculators") == []


def test_all_reasons_are_told_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"no q/k norm.*no logit_scale"):
        export_checkpoint(build(**IDS, qk_norm=True, logit_scale=0.5), tmp_path / "exported", "sglang")


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="format is 'tgi'; expected one of vllm, sglang, speculators"):
        export_checkpoint(build(**IDS), tmp_path / "exported", "tgi")
    assert not any(tmp_path.iterdir())


def test_a_destination_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "file").write_text("mine")
    with pytest.raises(ValueError, match="is there already; expected a folder that is new or empty"):
        export_checkpoint(build(**IDS), tmp_path / "exported")
    assert contents(tmp_path) == {"exported/file": b"mine"}


@pytest.mark.parametrize("format", FORMATS)
def test_weights_that_are_not_finite_are_refused(format, tmp_path):
    drafter = build(**IDS)
    with torch.no_grad():
        drafter.lm_head.weight[5, 5] = torch.nan
    with pytest.raises(ValueError, match=r"lm_head\.weight holds NaN or infinite values"):
        export_checkpoint(drafter, tmp_path / "exported", format)
    assert not any(tmp_path.iterdir())


def test_another_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got a LlamaForCausalLM; expected an Eagle31DrafterModel or a path"):
        export_checkpoint(target(), tmp_path / "exported")


def test_a_drafter_with_other_tensors_than_its_own_is_refused(tmp_path):
    adapted = build(**IDS)
    adapted.add_adapter(import_peft().LoraConfig(target_modules=["q_proj"]))
    for drafter in (adapted, torch.compile(build(**IDS))):
        with pytest.raises(ValueError, match=r"with other tensors than its config describes, .*Merge an adapter"):
            export_checkpoint(drafter, tmp_path / "exported")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"norm_output": False}, {"aux_layer_convention": "output"}])
def test_options_with_a_loaded_drafter_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match=f"got {next(iter(options))} for a drafter that is loaded"):
        export_checkpoint(build(**IDS), tmp_path / "exported", **options)
    assert not any(tmp_path.iterdir())


def test_options_decide_what_is_ambiguous(tmp_path):
    LAYOUTS["gpt_oss_v3"].write(tmp_path / "source")
    with pytest.raises(ValueError, match="aux_layer_convention"):
        export_checkpoint(tmp_path / "source", tmp_path / "exported")
    export_checkpoint(tmp_path / "source", tmp_path / "exported", aux_layer_convention="boundary", norm_output=True)
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (config["eagle_aux_hidden_state_layer_ids"], config["norm_output"]) == ([24, 30, 36], True)


@pytest.mark.parametrize("format", FORMATS)
def test_a_shell_reads_the_launch_line_as_it_is_meant(format):
    folder, name = '/a folder/it\'s "$(x)"', "demo target; x"
    words = shlex.split(launch_line(Eagle31Config(**LARGE, target_model=name), folder, format, 7))
    stated = (
        json.loads(words[-1])["model"]
        if format != "sglang"
        else words[words.index("--speculative-draft-model-path") + 1]
    )
    assert (name in words, stated) == (True, folder)
    assert "7" in words or json.loads(words[-1])["num_speculative_tokens"] == 7
