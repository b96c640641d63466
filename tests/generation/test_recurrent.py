"""Targets with recurrent states: what a drafted call leaves in their caches and modules. That their texts are plain
decoding's is shown with all other families."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from close import TARGET_FORWARD, assert_close
from conftest import PROMPT
from families import ASKED, DRAFTINGS, build_drafter, build_target
from transformers import DynamicCache

from eagle31_hf.cache.states import HAS_METHODS, METHODS
from eagle31_hf.cache_names import CACHE
from eagle31_hf.errors import DraftingRefusedError
from eagle31_hf.targets import recurrent
from eagle31_hf.targets.recurrent import Mixers

pytestmark = pytest.mark.skipif(not HAS_METHODS, reason="transformers before 5.21 reads states in another way")

CHAIN = DRAFTINGS["chain"]
# states beside attention layers; keys and states in one layer; no keys; tokens one by one; convolutions alone
KINDS = ("Qwen3-Next", "Falcon-H1", "Mamba2", "Jamba", "LFM2", "ZAYA")


def target_of(name: str):
    return build_target(name, "eager")


def cache_of(target) -> DynamicCache:
    return DynamicCache(config=target.config)


def cache_name(name: str) -> str:
    return "cache_params" if CACHE != "cache" and "Mamba" in name else CACHE


def held(cache: DynamicCache) -> dict[str, torch.Tensor]:
    """All tensors of a cache, by layer and name."""
    found = {}
    for number, layer in enumerate(cache.layers):
        for name, value in vars(layer).items():
            if name in ("keys", "values") and isinstance(value, torch.Tensor):
                found[f"{number}.{name}"] = value
            elif name in ("conv_states", "recurrent_states"):
                found |= {f"{number}.{name}.{key}": one for key, one in value.items() if one is not None}
    return found


def assert_same_states(found: DynamicCache, expected: DynamicCache) -> None:
    ours, theirs = held(found), held(expected)
    assert ours.keys() == theirs.keys()
    for name, states in theirs.items():
        assert_close(name, ours[name], states, TARGET_FORWARD)


def num_hooks(target) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


@pytest.mark.parametrize("name", KINDS)
def test_the_callers_cache_is_left_as_plain_decoding_leaves_it(name):
    target, prompt = target_of(name), torch.tensor(PROMPT)
    ours, alone = cache_of(target), cache_of(target)
    key = cache_name(name)
    text = target.generate(prompt, assistant_model=build_drafter(name), **{key: ours}, **ASKED, **CHAIN).sequences
    assert torch.equal(text, target.generate(prompt, **{key: alone}, **ASKED).sequences)
    assert_same_states(ours, alone)
    assert not vars(ours).keys() & set(METHODS)
    assert not any(getattr(layer, "record_past", False) for layer in ours.layers)


@pytest.mark.parametrize("name", KINDS)
def test_an_error_while_drafts_are_verified_leaves_accepted_tokens_alone(name):
    target, drafter, prompt = target_of(name), build_drafter(name), torch.tensor(PROMPT)
    before, cache, texts = num_hooks(target), cache_of(target), []

    def fail(input_ids, scores, **kwargs):
        texts.append(input_ids.clone())
        if input_ids.shape[1] > prompt.shape[1] + 6:
            raise KeyError("of a user's own")
        return torch.zeros(len(input_ids), dtype=torch.bool)

    with pytest.raises(KeyError, match="own"):
        target.generate(
            prompt, assistant_model=drafter, stopping_criteria=[fail], **{cache_name(name): cache}, **ASKED, **CHAIN
        )
    assert num_hooks(target) == before
    assert not vars(cache).keys() & set(METHODS)
    plain = cache_of(target)
    length = cache.get_seq_length() if name != "Mamba2" else None
    if length is not None:
        target.generate(
            prompt, max_new_tokens=length - prompt.shape[1] + 1, do_sample=False, **{cache_name(name): plain}
        )
        assert_same_states(cache, plain)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Jamba"])
def test_threads_that_share_a_target_do_not_see_each_other(name):
    target, drafter, prompt = target_of(name), build_drafter(name), torch.tensor(PROMPT)
    alone = target.generate(prompt, max_new_tokens=24, do_sample=False)

    def texts(count: int) -> list[torch.Tensor]:
        given = {"assistant_model": drafter, "max_new_tokens": 24, "do_sample": False, **CHAIN}
        return [target.generate(prompt, **given) for _ in range(count)]

    with ThreadPoolExecutor(3) as pool:
        found = [text for of_thread in pool.map(texts, [4] * 3) for text in of_thread]
    assert len(found) == 12
    assert all(torch.equal(text, alone) for text in found)


@pytest.mark.parametrize(
    ("name", "differs"), [("Mamba", True), ("Jamba", True), ("Nemotron-H", True), ("Zamba2", True), ("Mamba2", False),
                          ("Qwen3-Next", False), ("Kimi-Linear", False), ("ZAYA", False)],
)  # fmt: skip
def test_mixers_are_asked_whether_several_tokens_are_as_one_by_one(name, differs):
    target = target_of(name)
    target.generate(torch.tensor(PROMPT), assistant_model=build_drafter(name), **ASKED, **CHAIN)
    asked = {recurrent._differs_by_steps[each] for each in target.modules() if each in recurrent._differs_by_steps}
    assert asked == {differs}


def test_states_that_nobody_reads_by_the_cache_are_refused():
    cache = cache_of(target_of("Qwen3-Next"))
    mixers = Mixers(build_target("Llama", "eager"), cache)
    with (
        pytest.raises(DraftingRefusedError, match="no module of LlamaForCausalLM reads the recurrent states"),
        mixers.finding(),
    ):
        pass


def test_an_offloaded_cache_is_refused():
    cache = cache_of(target_of("Qwen3-Next"))
    cache.offloading = True
    with pytest.raises(DraftingRefusedError, match="offloaded DynamicCache with recurrent states"):
        target_of("Qwen3-Next").generate(
            torch.tensor(PROMPT), assistant_model=build_drafter("Qwen3-Next"), **{CACHE: cache}, **ASKED, **CHAIN
        )
