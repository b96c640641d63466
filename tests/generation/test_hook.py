"""The hook: found nothing, left nothing, and touches no assistant but this library's drafters."""

import inspect

import pytest
import torch
from close import assert_close
from conftest import build_drafter
from observers import speculate
from transformers import GenerationConfig

import eagle31_hf
from eagle31_hf.generation import hook

GREEDY = {"max_new_tokens": 16, "do_sample": False}


def methods():
    return [getattr(owner, wrapper.__name__) for owner, wrapper in hook.WRAPPERS]


def found():
    """The methods as the classes hold them, class methods unbound."""
    return [vars(owner)[wrapper.__name__] for owner, wrapper in hook.WRAPPERS]


@pytest.fixture
def uninstalled():
    eagle31_hf.uninstall()
    yield
    eagle31_hf.install()


def test_installed_by_the_import_once():
    installed = methods()
    eagle31_hf.install()
    assert methods() == installed
    originals = [method._eagle31_original for method in installed]
    assert not any(hasattr(getattr(original, "__func__", original), "_eagle31_original") for original in originals)


def test_uninstall_restores_what_was_found(uninstalled):
    originals = found()
    assert not any(hasattr(method, "_eagle31_original") for method in methods())
    assert all(method.__module__.startswith("transformers.") for method in methods())
    eagle31_hf.uninstall()
    assert found() == originals
    eagle31_hf.install()
    assert [method._eagle31_original for method in methods()] == originals
    eagle31_hf.uninstall()
    assert found() == originals


def test_signatures_stay(uninstalled):
    """`generate` inspects them."""
    before = [inspect.signature(method) for method in methods()]
    eagle31_hf.install()
    assert [inspect.signature(method) for method in methods()] == before


def test_a_callable_that_decodes_wins_over_the_assistant_model(target, drafter, prompt):
    asked = {"max_new_tokens": 8, "do_sample": False, "num_assistant_tokens": 3}
    with eagle31_hf.track_acceptance() as stats:
        both = target.generate(prompt, assistant_model=drafter, custom_generate=drafter.decode, **asked)
    assert both.tolist() == target.generate(prompt, assistant_model=drafter, **asked).tolist()
    assert stats.target_forwards


OTHERS = {
    "plain": lambda assistant: {},
    "beams": lambda assistant: {"num_beams": 3},
    "assisted": lambda assistant: {"assistant_model": assistant, "num_assistant_tokens": 3},
    "prompt_lookup": lambda assistant: {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("kwargs", OTHERS.values(), ids=OTHERS)
def test_other_ways_to_generate_are_untouched(target, make_target, prompt, kwargs, uninstalled):
    def run():
        forwards = []
        handle = target.register_forward_hook(lambda module, args, output: forwards.append(output.logits.shape))
        try:
            return target.generate(prompt, **GREEDY, **kwargs(make_target("qwen3"))), forwards
        finally:
            handle.remove()

    expected, expected_forwards = run()
    eagle31_hf.install()
    output, forwards = run()
    assert_close("text", output, expected)
    assert forwards == expected_forwards


def depth_drafted(target, drafter, prompt, **kwargs) -> int:
    _, stats = speculate(target, drafter, prompt, **GREEDY, **kwargs)
    return len(stats.drafted_per_position)


def test_precedence_of_knobs(target, prompt):
    drafter = build_drafter(target)
    config = GenerationConfig(num_assistant_tokens=4)
    assert drafter.generation_config.num_assistant_tokens == "auto", "the default"
    _, stats = speculate(target, drafter, prompt, **GREEDY)
    assert sum(stats.choices.values()) == stats.target_forwards, "the default was not heard"
    drafter.generation_config.num_assistant_tokens = 3
    assert depth_drafted(target, drafter, prompt) == 3, "the drafter's"
    assert depth_drafted(target, drafter, prompt, generation_config=config) == 4, (
        "the generation config's, before the drafter's"
    )
    assert depth_drafted(target, drafter, prompt, generation_config=config, num_assistant_tokens=2) == 2, (
        "the call's, before all"
    )
    assert depth_drafted(target, drafter, prompt, num_assistant_tokens=None) == 3, "None says nothing"
    assert depth_drafted(target, drafter, prompt) == 3, "a knob of an earlier call stayed"
    assert config.num_assistant_tokens == 4


def test_a_call_may_ask_for_the_depth_transformers_would_fill_in(target, prompt):
    """20 tokens are transformers' default; given in the call they are meant."""
    assert depth_drafted(target, build_drafter(target), prompt, num_assistant_tokens=20) == 14  # all there is room for


def test_a_call_may_ask_for_the_threshold_transformers_would_fill_in(target, prompt):
    """The same of 0.4, and of 0."""
    drafter = build_drafter(target)
    drafter.generation_config.update(num_assistant_tokens=5, assistant_confidence_threshold=0.999)
    assert depth_drafted(target, drafter, prompt) < 5
    assert depth_drafted(target, drafter, prompt, assistant_confidence_threshold=0.4) == 5, "taken for the default"
    assert depth_drafted(target, drafter, prompt, assistant_confidence_threshold=0.0) == 5


def test_the_targets_own_generation_config_counts_too(make_target, make_drafter, prompt):
    target = make_target("qwen3")
    drafter, found = make_drafter(target), target.generation_config.num_assistant_tokens
    target.generation_config.num_assistant_tokens = 2
    try:
        assert depth_drafted(target, drafter, prompt) == 2
    finally:
        target.generation_config.num_assistant_tokens = found


def test_without_the_hook_a_drafter_is_refused_not_misused(target, drafter, prompt, uninstalled):
    with pytest.raises(Exception):  # noqa: B017, PT011 - transformers' own, which we do not word
        target.generate(prompt, assistant_model=drafter, **GREEDY)
    eagle31_hf.install()
    assert torch.is_tensor(target.generate(prompt, assistant_model=drafter, **GREEDY))
