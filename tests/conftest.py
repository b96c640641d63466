"""Tiny real targets and drafters for them, built from configs and seeds; and which tests belong to which marker."""

import gc
import os
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

# Tests know nothing of what was measured on this machine before, and leave nothing: they have a cache folder of their
# own, which pytest's workers share. The Hub's client reads HF_HOME when it is imported.
if "PYTEST_XDIST_WORKER" not in os.environ:
    cache_folder = TemporaryDirectory(prefix="eagle31_hf-")
    os.environ["HF_HOME"] = cache_folder.name

# Triton's kernels run in its interpreter where there is no GPU. It reads this when it is imported, by transformers.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import transformers
import transformers_suite
from packaging.version import Version
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tolerances import compares_numbers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from eagle31_hf import Eagle31Config, Eagle31DrafterModel
from eagle31_hf.cache_names import IS_RENAMED
from eagle31_hf.checking import trial
from eagle31_hf.generation.captured import drafting
from eagle31_hf.generation.captured.fused_drafter import run_fused
from eagle31_hf.generation.captured.kept import release
from eagle31_hf.targets import probe
from eagle31_hf.targets.layers import decoder_layers

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "generation"))  # helpers there serve other folders, too
sys.path.append(str(ROOT / "benchmarks"))
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # pytest's workers share the CPU's cores

# Test modules from every part of the library that together take under a minute on two cores, for a developer between
# two edits: `pytest -m quick -n 2`.
QUICK = {
    "test_attention",
    "test_close",
    "test_configuration",
    "test_layers",
    "test_latent_attention",
    "test_docs",
    "test_habits",
    "test_layering",
    "test_model_cards",
    "test_modeling",
    "test_vocab",
    "test_formats",
    "test_golden",
    "test_producers",
    "test_cache",
    "test_chain",
    "test_refusals",
    "test_sequences",
    "test_hook",
    "test_drafter_outputs",
    "test_acceptance",
    "test_streaming",
    "test_chats",
    "test_chunked",
    "test_drift",
    "test_fresh",
    "test_losses",
    "test_objective",
    "test_packing",
    "test_records",
    "test_loss_mask",
    "test_shape",
    "test_target",
    "test_unroll_attention",
    "test_walk",
}
# Test modules that take a quarter of a minute and more on one core, most of them processes, trainings or random trials.
SLOW = {
    "test_at_once",
    "test_bench_gpu",
    "test_callers_cache",
    "test_captured_executor",
    "test_captured_nodes",
    "test_captured_rounds",
    "test_cases",
    "test_cli_errors",
    "test_cli_training",
    "test_demo",
    "test_distributed",
    "test_compile_ahead",
    "test_engines",
    "test_examples",
    "test_families",
    "test_fuzz_folders",
    "test_killed_training",
    "test_safety",
    "test_soak",
    "test_trainer",
    "test_training_families",
}

# Modules whose tests all look at the outcome of a long run, or ask one server, which one worker makes once. xdist's own
# mark for this, `xdist_group`, has no effect with pytest 9.2.
ONE_WORKER = {
    "test_acceptance_report",
    "test_captured_nodes",
    "test_compile_ahead",
    "test_distributed",
    "test_drift_report",
    "test_host_waits",
    "test_safety",
    "test_serving",
}


def pytest_collection_modifyitems(config, items):
    """Marks tests: `quick` and `slow` by the lists above, `numeric` where a test compares numbers within one of
    close's tolerances, which takes seconds to tell and is told where it is asked for. Skips those marked `gpu` where
    there is none."""
    asked = "numeric" in config.getoption("markexpr")
    compares = cache(compares_numbers)
    for item in items:
        name = item.module.__name__.rpartition(".")[2]
        marks = {"quick": name in QUICK, "slow": name in SLOW, "numeric": asked and compares(item.function)}
        for mark, holds in marks.items():
            if holds:
                item.add_marker(mark)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    """What has been imported by now stays: collecting garbage, as every training does when it begins, need not look
    through it, which takes half a second."""
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture
def poisoned_memory():
    """torch.empty is filled with NaN or the largest integer: an unwritten tensor cannot pass for a loaded one."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def on_the_gpu():
    """Tensors are made on the GPU, where there is one: there Triton compiles, and does not interpret."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.hookimpl(optionalhook=True)  # of xdist, which need not be there
def pytest_xdist_make_scheduler(config, log):
    """Returns the scheduler of `--dist loadgroup`: tests go one by one to whichever worker is free, but those of a
    module in ONE_WORKER together."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.split("::")[0]
            return path if Path(path).stem in ONE_WORKER else nodeid

    return ByModule(config, log)


@pytest.fixture(autouse=True)
def own_measurements(monkeypatch, request, tmp_path_factory):
    """What a test measures of this machine is kept in a folder of its own, which need not be made."""
    name = f"measured-{abs(hash(request.node.nodeid))}"
    monkeypatch.setattr("eagle31_hf.storage.measured.FOLDER", str(tmp_path_factory.getbasetemp() / name))


@pytest.fixture
def nothing_is_kept():
    """Gives up what captured rounds keep from call to call, before a test and after it."""
    release()
    yield
    release()


@pytest.fixture
def fused_widths(monkeypatch) -> list[int]:
    """Returns the widths of the forwards that drafters run fused, as they come."""
    widths = []

    def noted(drafter, ids, *given):
        widths.append(ids.shape[1])
        return run_fused(drafter, ids, *given)

    monkeypatch.setattr(drafting, "run_fused", noted)
    return widths


def pytest_configure(config):
    for name in transformers_suite.MARKERS:
        config.addinivalue_line("markers", f"{name}: of transformers' own tests, see transformers_suite.py")


VOCAB, WIDTH = 11, 36
PROMPT = ((1, 2, 3, 5, 8),)
KNOWN_TOKENS = 32  # after PROMPT, to which a drafter is fitted, with errors, so that rounds commit few tokens and many

NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROPED = {
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 128,
}
TARGETS = {
    "llama": (LlamaConfig, ROPED | {"num_hidden_layers": 7}),  # the default layer ids need so many
    "qwen3": (Qwen3Config, ROPED),
    "mistral_window_8": (MistralConfig, ROPED | {"sliding_window": 8}),
    "gemma3_window_8": (
        Gemma3TextConfig,
        ROPED | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gpt2": (GPT2Config, {"n_embd": WIDTH, "n_layer": 4, "n_head": 3, "n_positions": 128}),
}
# transformers before 5.23 runs a prompt's cached tokens once more where it reads the prompt in chunks.
REREADS_IN_CHUNKS = Version(transformers.__version__) < Version("5.23")
PRUNED_IDS = (10, 0, 9, 2, 4, 5, 3, 8)  # unsorted on purpose
DRAFTERS = {
    "eagle31": {},
    "eagle3": {"fc_norm": False, "norm_output": False},
    "norm_before_fc": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
    "pruned": {"draft_vocab_size": len(PRUNED_IDS)},
    "two_layers": {"num_hidden_layers": 2, "qk_norm": True, "attention_bias": True},
    "window_4": {"layer_types": ["sliding_attention"], "sliding_window": 4},
    "target_head": {"share_target_head": True},
    "own_embedding": {"hidden_size": 20, "head_dim": 10, "target_hidden_size": WIDTH, "share_target_embeddings": False},
    "mla": {"q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
    "padded_vocabulary": {"vocab_size": VOCAB + 5},  # proposes ids the target does not have
}


def build_target(kind: str = "llama", attention: str = "sdpa", **overrides) -> PreTrainedModel:
    """One of TARGETS. A large initializer range and a head of its own keep its greedy text from repeating one token."""
    config_class, fields = TARGETS[kind]
    common = {"vocab_size": VOCAB, "tie_word_embeddings": False, "initializer_range": 0.5} | NO_SPECIAL_TOKENS
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config_class(**common | fields | overrides), attn_implementation=attention
    ).eval()


def import_peft():
    """PEFT, where it is there and transformers takes it: from 5.24 on `add_adapter` wants 0.22, and prefix tuning of
    older releases hands its cache over by a name that is not read any more."""
    peft = pytest.importorskip("peft")
    if IS_RENAMED and Version(peft.__version__) < Version("0.22"):
        pytest.skip(f"PEFT {peft.__version__} is too old for transformers {transformers.__version__}")
    return peft


def build_drafter(
    target: PreTrainedModel, name: str = "eagle31", attention: str = "sdpa", **overrides
) -> Eagle31DrafterModel:
    """One of DRAFTERS, fitted to the target."""
    num_layers = len(decoder_layers(target))
    fields = {
        "vocab_size": target.config.get_text_config().vocab_size,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "aux_hidden_state_layer_ids": None if num_layers >= 7 else [0, num_layers // 2, num_layers],
    }
    torch.manual_seed(1)
    config = Eagle31Config(**fields | DRAFTERS[name] | overrides)
    drafter = Eagle31DrafterModel._from_config(config, attn_implementation=attention).eval()
    if drafter.d2t is not None:
        drafter.set_draft_vocabulary(torch.tensor(PRUNED_IDS))
    if drafter.lm_head is not None:
        fit_head(drafter, target)
    return drafter


def fit_head(drafter: Eagle31DrafterModel, target: PreTrainedModel, depth: int = 4) -> None:
    """Fits the drafter's head to the target's greedy text after PROMPT, some tokens of it wrong."""
    trial.fit_head(drafter, target, greedy_text(target), depth)


@cache
def greedy_text(target: PreTrainedModel) -> Tensor:
    """PROMPT and what the target alone generates after it."""
    return target.generate(torch.tensor(PROMPT), max_new_tokens=KNOWN_TOKENS, do_sample=False)


@pytest.fixture(scope="session")
def make_target():
    """`make_target(kind, attention, **config)`; the same arguments give the same model, so leave it as it was."""
    return cache(build_target)


@pytest.fixture(scope="session")
def make_drafter():
    """`make_drafter(target, name, attention, **config)`; the same arguments give the same model: leave it as it was."""
    cached = cache(build_drafter)

    def make(target: PreTrainedModel, *args, **overrides) -> Eagle31DrafterModel:
        drafter = cached(target, *args, **overrides)
        drafter.load_target_embeddings(target)  # another test may have tied it to a target that is gone
        return drafter

    return make


@pytest.fixture
def target(make_target) -> PreTrainedModel:
    return make_target()


@pytest.fixture
def drafter(make_drafter, target) -> Eagle31DrafterModel:
    return make_drafter(target)


@pytest.fixture
def logged_by_probe(monkeypatch) -> list[str]:
    """The lines that the probe of targets logs, beginning with nothing known."""
    lines: list[str] = []
    monkeypatch.setattr(probe, "_verdicts", {})
    monkeypatch.setattr(probe.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


@pytest.fixture
def prompt() -> Tensor:
    return torch.tensor(PROMPT)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return letters()


def letters(vocab_size: int = VOCAB, **options) -> PreTrainedTokenizerFast:
    """One letter a token: "a" is 0. `options`: of a `WordLevel` model, as `unk_token`."""
    backend = Tokenizer(models.WordLevel({chr(ord("a") + i): i for i in range(vocab_size)}, **options))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
