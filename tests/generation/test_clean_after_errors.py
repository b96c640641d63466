"""Whatever ends a call, wherever: nothing of it is left behind, and the next call is like the first."""

import pytest
import torch
from close import assert_close
from draftings import CACHES, DRAFTINGS, steady_clock
from observers import InterruptError, Puts, num_hooks
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from eagle31_hf import acceptance, track_acceptance
from eagle31_hf.targets import probe
from eagle31_hf.targets.layers import decoder_layers

LENGTH = 20
BATCH = torch.tensor([[1, 2, 3, 5, 8], [4, 4, 4, 4, 4], [9, 0, 7, 7, 1]])
PLACES = ("processor", "criterion", "streamer", "drafter", "target")
STOCK_LAYERS = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}


class Fuse:
    """Raises at the `call`-th call, else returns `result(args)`."""

    def __init__(self, call: int, error: type[BaseException], result=None):
        self.left, self.error, self.result = call, error, result

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.result(*args) if self.result else None


def go_on(ids: Tensor, scores) -> Tensor:
    return torch.zeros(len(ids), dtype=torch.bool)


def failing_generate(
    target, drafter, prompt: Tensor, place: str, call: int, error: type[BaseException] = InterruptError, **kwargs
):
    """Generates until it fails in that place, at its `call`-th call."""
    fuse, handle = Fuse(call, error), None
    if place == "processor":
        fuse.result = lambda ids, scores: scores
        kwargs["logits_processor"] = LogitsProcessorList([fuse])
    elif place == "criterion":
        fuse.result = go_on
        kwargs["stopping_criteria"] = StoppingCriteriaList([fuse])
    elif place == "streamer":
        kwargs["streamer"] = Puts()
        kwargs["streamer"].put = fuse
    else:
        # some layers have written to the cache, others not
        layer = drafter.layers[0] if place == "drafter" else decoder_layers(target)[2]
        handle = layer.register_forward_pre_hook(fuse)
    try:
        with steady_clock(target, drafter), pytest.raises(error):
            target.generate(prompt, max_new_tokens=LENGTH, do_sample=False, **{"assistant_model": drafter} | kwargs)
    finally:
        if handle is not None:
            handle.remove()
    assert fuse.left == 0


def all_hooks(*models) -> list:
    return [
        hook
        for model in models
        for m in model.modules()
        for hooks in (m._forward_hooks, m._forward_pre_hooks)
        for hook in hooks.values()
    ]


def assert_clean(target, drafter, prompt: Tensor, way: str) -> None:
    """No hooks, no open trackers, and a next call that says what the target says, counted from zero."""
    assert num_hooks(target) == num_hooks(drafter) == 0
    assert acceptance._trackers.get() == ()
    with steady_clock(target, drafter), track_acceptance() as stats:
        output = target.generate(
            prompt, assistant_model=drafter, max_new_tokens=LENGTH, do_sample=False, **DRAFTINGS[way]
        )
    assert_close("text of the next call", output, target.generate(prompt, max_new_tokens=LENGTH, do_sample=False))
    assert stats.prefills == len(prompt)
    assert stats.generated_tokens == LENGTH * len(prompt)


@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("prompts", "way"), [("alone", "auto"), ("batch", "tree")])
def test_nothing_is_left_behind(make_target, make_drafter, prompt, prompts, way, place, call):
    """Not even by an error in the midst of a forward, or between a draft and its verification."""
    target = make_target("gemma3_window_8")
    drafter, prompt = make_drafter(target), BATCH if prompts == "batch" else prompt
    before = all_hooks(target, drafter)
    with track_acceptance() as stats:
        failing_generate(target, drafter, prompt, place, call, **DRAFTINGS[way])
    counted = stats.generated_tokens
    assert all_hooks(target, drafter) == before
    assert_clean(target, drafter, prompt, way)
    assert stats.generated_tokens == counted, "the next call was counted by a tracker that was closed"


@pytest.mark.parametrize("place", PLACES)
def test_the_user_may_interrupt(target, drafter, prompt, place):
    """KeyboardInterrupt is no Exception: what cleans up must not catch by kind."""
    way = "chain"
    past = DynamicCache(config=target.config)
    failing_generate(target, drafter, prompt, place, 3, KeyboardInterrupt, past_key_values=past, **DRAFTINGS[way])
    assert {type(layer) for layer in past.layers} == {DynamicLayer}
    assert_clean(target, drafter, prompt, way)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_in_a_prompt_read_in_chunks(target, drafter, prompt, call):
    """While it is read a hook on the target itself hands every chunk to the drafter."""
    for place in ("target", "drafter"):
        failing_generate(target, drafter, prompt, place, call, prefill_chunk_size=2, **DRAFTINGS["chain"])
        assert all_hooks(target, drafter) == []
    assert_clean(target, drafter, prompt, "chain")


@pytest.mark.parametrize("place", ["processor", "target"])
def test_without_the_hook(target, drafter, prompt, place):
    failing_generate(target, drafter, prompt, place, 3, custom_generate=drafter.decode, assistant_model=None)
    assert_clean(target, drafter, prompt, "tree")


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_while_the_target_is_tried_out(target, drafter, prompt, monkeypatch, error):
    """An interrupted self-test is no verdict: the next call tries again."""
    monkeypatch.setattr(probe, "_verdicts", {})
    failing_generate(target, drafter, prompt, "target", 1, error, **DRAFTINGS["tree"])
    assert probe._verdicts == {}
    assert_clean(target, drafter, prompt, "tree")
    assert list(probe._verdicts.values()) == [None]


# --- the caller's cache ---


@pytest.mark.parametrize(("place", "way"), [("processor", "chain"), ("drafter", "auto"), ("target", "tree")])
@pytest.mark.parametrize("cache", CACHES)
def test_the_callers_cache_has_its_layers_again(make_target, make_drafter, prompt, cache, way, place):
    """The very same ones; and it still remembers what it held before."""
    target = make_target("gemma3_window_8")
    drafter, past = make_drafter(target), CACHES[cache](target.config)
    target(prompt[:, :3], past_key_values=past)
    layers, found = past.layers, list(past.layers)
    kinds, recording = [type(layer) for layer in found], [getattr(layer, "record_past", None) for layer in found]
    keys = [layer.keys[:, :, :3].clone() for layer in found]
    failing_generate(target, drafter, prompt, place, 2, past_key_values=past, **DRAFTINGS[way])
    assert past.layers is layers
    assert len(past.layers) == len(found)
    assert all(layer is was for layer, was in zip(past.layers, found, strict=True))
    assert [type(layer) for layer in past.layers] == kinds
    assert set(kinds) <= STOCK_LAYERS
    assert [getattr(layer, "record_past", None) for layer in past.layers] == recording
    for layer, held in zip(past.layers, keys, strict=True):
        if not layer.is_sliding:
            assert_close("keys of the first tokens", layer.keys[:, :, :3], held)
