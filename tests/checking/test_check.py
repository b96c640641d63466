"""`check_target`: what it says of a config is what happens with a model of it, for targets and for drafters beside
them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import build_drafter, build_target
from torch import nn
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from eagle31_hf import Eagle31Config, Eagle31DrafterModel, demo
from eagle31_hf.cache.states import HAS_METHODS
from eagle31_hf.cache_names import cache_in
from eagle31_hf.checking import check_target
from eagle31_hf.checking.check import CAPABILITIES
from eagle31_hf.checking.drafters import check_drafter
from eagle31_hf.checking.shrink import VOCAB, WIDTH, WINDOW, tiny_config
from eagle31_hf.checking.source import TargetSource, read_target
from eagle31_hf.checking.trial import WAYS
from eagle31_hf.cli import checking, loading

sys.path.append(str(Path(__file__).parents[1] / "generation"))

import families

ROPE = {"rope_theta": 1000000, "torch_dtype": "bfloat16"}
QWEN3_8B = ROPE | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "image_token_index": 262144,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "intermediate_size": 4304,
        "patch_size": 14,
    },
}
DEEPSEEK_V3 = {"model_type": "deepseek_v3"}  # whose sizes are its class's defaults
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 2048,
    "is_encoder_decoder": True,
    "vocab_size": 32128,
}
MAMBA = {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "state_size": 16, "vocab_size": 50280}
RECURRENT_GEMMA = {"model_type": "recurrent_gemma", "hidden_size": 2560, "num_hidden_layers": 26, "vocab_size": 256000}
ROFORMER = {"model_type": "roformer", "hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 50000}
BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "n_embed": 4096,
    "n_layer": 30,
    "num_attention_heads": 32,
}
# by the words of the families table
ANSWERS = {
    families.LOSSLESS: "works",
    families.CHAINS: "works otherwise",
    families.IN_STEP: "works otherwise",
    families.NOT_DRAFTED: "works otherwise",
    families.REFUSED: "refused",
}
FORMATS = Path(__file__).parents[1] / "fixtures" / "formats"
# Of a kind each: trees, chains only by what logits say, by layer types and by positions that are dropped, several
# states a token, padding that is not drafted for, refused.
OF_A_KIND = (
    "Gemma3 multimodal, window",
    "MPT, faint alibi",
    "LFM2",
    "Exaone4.5 multimodal",
    "Gemma3n text",
    "DeepSeek-V4",
    "Dory, window, loops",
    "Inkling2, loops",
    "RecurrentGemma",
)


def write(folder: Path, config: dict) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def answers(report) -> dict[str, str]:
    return {capability.name: capability.answer for capability in report.capabilities}


def test_a_config_file_alone_answers_everything(tmp_path):
    file = Path(write(tmp_path / "Qwen3-8B", QWEN3_8B), "config.json")
    report = check_target(str(file))
    assert answers(report) == dict.fromkeys(CAPABILITIES, "works")
    assert (report.works, report.verdict, report.notes) == (True, "works", [])
    assert (report.architecture, report.num_layers, report.hidden_size, report.vocab_size) == (
        "Qwen3ForCausalLM",
        36,
        4096,
        151936,
    )
    assert (report.num_parameters, report.num_bytes, report.dtype) == (8190735360, 2 * 8190735360, "bfloat16")
    assert [path.name for path in file.parent.iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", OF_A_KIND)
def test_what_it_says_of_a_family_is_what_the_families_table_finds(name):
    try:
        target = families.build_target(name, "sdpa")
    except families.NotThereError:
        target = families.build_target(name, "eager")
    family, report = families.FAMILIES[name], check_target(target.config)
    words = {
        "chain": family.expected("chain"),
        "tree": family.expected("tree"),
        "batch": family.expected("tree", num_prompts=2),
    }
    assert {way: report[way].answer for way in words} == {way: ANSWERS[word] for way, word in words.items()}
    assert "different" not in answers(report).values()
    assert report.works == (family.chain != families.REFUSED)
    for way, word in words.items():
        assert word == families.LOSSLESS or report[way].text, "a reason"
        assert "None" not in report[way].text
    assert (words["batch"] == families.NOT_DRAFTED) == ("nothing is drafted" in report["batch"].text)


def test_a_large_config_becomes_small_and_keeps_its_kinds():
    config = CONFIG_MAPPING["gemma3"].from_dict(GEMMA3_27B)
    text = tiny_config(config)[0].text_config
    assert set(text.layer_types) == {"sliding_attention", "full_attention"}
    assert (text.sliding_window, text.hidden_size, text.vocab_size) == (WINDOW, WIDTH, VOCAB)
    assert text.num_attention_heads == 2 * text.num_key_value_heads
    assert text.rope_parameters["full_attention"]["factor"] == 8.0
    tiny, notes = tiny_config(CONFIG_MAPPING["gpt_oss"].from_dict(GPT_OSS_20B))
    assert 1 < tiny.num_experts_per_tok < tiny.num_local_experts
    assert (tiny.layer_types, tiny.rope_parameters["rope_type"]) == (
        ["sliding_attention", "full_attention"] * 2,
        "yarn",
    )
    assert notes == ["tried without its quantization (mxfp4)"]
    tiny, _ = tiny_config(CONFIG_MAPPING["deepseek_v3"].from_dict(DEEPSEEK_V3))
    assert 0 < tiny.first_k_dense_replace < tiny.num_hidden_layers
    assert tiny.num_key_value_heads == tiny.num_attention_heads


def test_layers_that_come_late_are_there():
    config = LlamaConfig(num_hidden_layers=30).to_dict() | {
        "layer_types": ["full_attention"] * 29 + ["sliding_attention"],
        "max_window_layers": 29,
    }
    tiny, _ = tiny_config(
        CONFIG_MAPPING["qwen2"].from_dict(config | {"use_sliding_window": True, "sliding_window": 4096})
    )
    assert tiny.layer_types == ["full_attention"] * 29 + ["sliding_attention"]


def test_layers_that_share_keys_come_after_one_of_every_kind():
    config = CONFIG_MAPPING["gemma3n_text"](num_hidden_layers=35, num_kv_shared_layers=15)
    tiny, _ = tiny_config(config)
    front = tiny.num_hidden_layers - tiny.num_kv_shared_layers
    assert tiny.num_kv_shared_layers > 0
    assert set(tiny.layer_types[:front]) == set(tiny.layer_types) == set(config.layer_types)


def test_windows_sinks_experts_and_quantization(tmp_path):
    report = check_target(write(tmp_path, GPT_OSS_20B))
    assert answers(report) == dict.fromkeys(CAPABILITIES, "works")
    assert report.notes == ["tried without its quantization (mxfp4)"]
    assert report.num_bytes is None  # which its config does not say


@pytest.mark.parametrize(
    ("config", "word", "trains"),
    [
        (T5, "encoder-decoder", "refused"),
        (RECURRENT_GEMMA, "recurrent state", "works"),
        (ROFORMER, "is_decoder=True", "refused"),
    ],
    ids=["encoder-decoder", "recurrent", "encoder"],
)
def test_what_cannot_work_is_refused_as_generate_refuses_it(tmp_path, config, word, trains):
    report = check_target(write(tmp_path, config))
    assert answers(report) == dict.fromkeys((*WAYS, "sampling"), "refused") | {"training": trains}
    assert not report.works
    assert word in report.verdict


@pytest.mark.skipif(not HAS_METHODS, reason="transformers before 5.21 reads recurrent states in another way")
def test_recurrent_states_are_drafted_for(tmp_path):
    answered = answers(check_target(write(tmp_path, MAMBA)))
    assert {answered[way] for way in ("chain", "tree", "batch", "sampling")} == {"works"}


def test_code_of_a_repository_is_named_and_not_run(tmp_path):
    write(
        tmp_path,
        {"model_type": "homemade", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
    )
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    report = check_target(str(tmp_path))
    assert not report.works
    assert "homemade, is code in its repository (auto_map)" in report.verdict
    assert "trust_remote_code" in report["chain"].text
    assert not (tmp_path / "ran").exists()
    assert (
        "does not know the architecture homemade" in check_target(write(tmp_path, {"model_type": "homemade"})).verdict
    )


class Homemade(LlamaForCausalLM):
    """As code of a repository may be: not of transformers, and wrong over several tokens at once past the prompt."""

    def forward(self, input_ids=None, **kwargs):
        out = super().forward(input_ids=input_ids, **kwargs)
        cache = cache_in(kwargs)
        is_wrong = cache is not None and cache.get_seq_length() > input_ids.shape[1] > 1
        out.logits = out.logits.roll(1, -1) if is_wrong else out.logits
        return out


def test_a_model_in_memory_is_tried_by_its_own_class_and_a_wrong_text_is_found():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4
    )
    report = check_target(Homemade(config))
    assert report.architecture == "Homemade"
    assert report["chain"].answer == "different"
    assert not report.works
    assert "please report" in report.verdict


def test_what_cannot_be_tried_in_small_is_said():
    class Stubborn(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.table = nn.Embedding(40_000_000, 1, device="meta")

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4)
    )
    model.__class__ = Stubborn
    report = check_target(model)
    assert (report.works, report["chain"].answer) == (False, "not tried")
    assert report.verdict.startswith("not known: cannot be tried in small: even with small sizes it has 40,")


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({}, None),
        ({"vocab_size": 12}, None),
        ({"vocab_size": 700}, "the target's vocabulary has"),
        ({"hidden_size": 20, "target_hidden_size": 20}, "the target's width is"),
        ({"aux_hidden_state_layer_ids": [1, 4, 9]}, "reach past the target"),
        ({"fc_norm": False, "norm_output": False, "num_hidden_layers": 2, "draft_vocab_size": 8}, None),
        ({"q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}, None),
    ],
    ids=["fits", "padding", "another vocabulary", "another width", "more layers", "EAGLE 3, pruned", "MLA"],
)
def test_a_drafter_fits_where_generate_takes_it(fields, wrong):
    target = build_target()
    config = (
        build_drafter(target, "eagle31").config.to_dict()
        | {"target_hidden_size": None, "draft_vocab_size": None}
        | fields
    )
    drafter = Eagle31DrafterModel(
        Eagle31Config.from_dict(config | {"num_key_value_heads": None, "head_dim": None, "layer_types": None})
    ).eval()
    report = check_drafter(drafter, read_target(target.config))
    [said] = [finding.text for finding in report.findings if finding.name == "fits"]
    assert report.fits == (wrong is None)
    options = {"max_new_tokens": 3, "do_sample": False}
    if wrong is None:
        target.generate(torch.tensor([[1, 2, 3]]), assistant_model=drafter, **options)
    else:
        with pytest.raises(ValueError, match=wrong) as refusal:
            target.generate(torch.tensor([[1, 2, 3]]), assistant_model=drafter, **options)
        assert said == str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("vit", False),
        ("sam_mask_decoder", False),
        ("wav2vec2-bert", False),
        ("cpmant", True),
        ("roc_bert", True),
        ("rembert", True),
    ],
    ids=["no vocabulary", "no layers", "vocabulary None", "no end, no table", "no end", "a narrower embedding"],
)
def test_a_config_without_what_is_compared_is_answered_all_the_same(kind, known):
    """Whatever transformers' configs lack: `known`, where it has a model for them that generates text."""
    report = check_target(CONFIG_MAPPING[kind](), str(demo.FOLDER / "eagle31"))
    assert not report.works
    assert checking._lines(report)[-1].startswith("verdict")
    assert any(finding.name == "fits" for finding in report.drafter.findings) == known
    assert report.drafter.config is not None


def test_a_target_that_its_config_does_not_describe_decides_nothing():
    target = TargetSource("bare", PreTrainedConfig(), LlamaForCausalLM)
    findings = {finding.name: finding for finding in check_drafter(str(demo.FOLDER / "eagle31"), target).findings}
    assert [findings[name].fits for name in ("fits", "ends")] == [None] * 2
    assert findings["fits"].text == "not known: the target cannot be built by its config alone"


def test_a_drafter_is_not_said_to_fit_a_target_that_cannot_be_built():
    """Its padding token lies past the embedding of the whole target, and within that of none."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4}
    target = LlamaConfig(vocab_size=61, pad_token_id=999, **sizes)
    assert check_target(target).works
    report = check_target(target, str(demo.FOLDER / "eagle31"))
    assert not report.works
    assert report.verdict == "not known: whether this drafter fits"
    assert report.as_dict()["drafter"]["fits"] is None


def test_an_unknown_override_is_refused_with_the_nearest_field():
    with pytest.raises(ValueError, match="got norm_ouput; expected fields of Eagle31Config: did you mean norm_output"):
        check_drafter(str(demo.FOLDER / "eagle31"), read_target(LlamaConfig()), {"norm_ouput": True})


def test_the_demo_pair_fits_and_no_other_target(tmp_path):
    folder = demo.FOLDER / "eagle31"
    report = check_target(str(demo.FOLDER / "target"), str(folder))
    assert (report.works, report.verdict) == (True, "works, and the drafter fits")
    assert 0 < (folder / "model.safetensors").stat().st_size - report.drafter.num_bytes < 10_000  # its header
    drafter = check_drafter(str(folder), read_target(write(tmp_path, QWEN3_8B)))
    [wrong] = [finding.text for finding in drafter.findings if finding.fits is False]
    assert wrong.startswith("the target's width is 4096, the drafter expects 128")


def test_a_checkpoint_that_may_mean_two_things_names_what_decides(tmp_path):
    """The target is answered for all the same."""
    source = FORMATS / "specforge-fc-norm"
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    folder, target = (
        write(tmp_path, config | {"norm_output": True}),
        read_target(LlamaConfig(vocab_size=config["vocab_size"])),
    )
    drafter = check_drafter(folder, target)
    assert (drafter.fits, drafter.config) == (False, None)
    assert "Pass norm_output=False" in drafter.findings[0].text
    assert check_drafter(folder, target, {"norm_output": True}).config.norm_output is True


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000"),
        ({"hidden_size": 5}, "model_type is None"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "eagle31"}, r"is a drafter \(model_type 'eagle31'\); expected the target first"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "is a drafter"),
    ],
    ids=["layers", "nested layers", "no type", "no number", "native drafter", "drafter"],
)
def test_an_unsound_config_is_refused_by_file_and_field(tmp_path, config, words):
    folder = write(tmp_path, config)
    with pytest.raises(ValueError, match=words) as refusal:
        check_target(folder)
    assert folder in str(refusal.value)


@pytest.mark.parametrize("written", ["Infinity", '{"__float__": "Infinity"}'], ids=["by hand", "by transformers"])
def test_numbers_that_json_has_none_for_are_read_as_transformers_reads_them(tmp_path, written):
    config = {"model_type": "mamba2", "time_step_limit": [0.0, "LIMIT"], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config).replace('"LIMIT"', written))
    assert read_target(str(tmp_path)).config.time_step_limit[1] == float("inf")
    loading.refuse_drafter(str(tmp_path))


def test_a_target_that_fails_alone_is_not_known():
    class Broken(LlamaForCausalLM):
        def generate(self, **options):
            raise AttributeError("no such thing")

    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4
    )
    verdict = check_target(Broken(config)).verdict
    assert (
        verdict
        == "not known: cannot be tried in small: the target alone does not decode (AttributeError: no such thing)"
    )


def test_fields_that_fill_memory_or_lead_to_code_are_left_out(tmp_path):
    names = ("attn_implementation", "_experts_implementation")
    folder = write(tmp_path, QWEN3_8B | {"num_labels": 10**9} | dict.fromkeys(names, "someone/kernels"))
    config = read_target(folder).config
    assert len(config.id2label) == 2
    assert "someone/kernels" not in (config._attn_implementation, config._experts_implementation)


def test_a_config_that_switches_the_cache_off_is_tried_with_it(tmp_path):
    report = check_target(write(tmp_path, BLOOM | {"use_cache": False}))
    assert report.works
    assert report["tree"].answer == report["batch"].answer == "works otherwise"
    assert report["batch"].text.startswith("rows keep step")
    assert any("use_cache=True, which you pass" in note for note in report.notes)
