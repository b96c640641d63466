"""The caller's cache after a call that ended by an error: a refused call leaves it as it was, bit for bit, one that
failed later with the tokens that were accepted (`test_cases.py` has those).

H tokens that the cache holds of an earlier turn.
"""

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import families
import pytest
import torch
from close import assert_close
from conftest import build_drafter, build_target
from draftings import CACHES, DRAFTINGS, steady_clock
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache, StoppingCriteriaList

from eagle31_hf.cache.layer import CacheFullError
from eagle31_hf.cache_names import CACHE, NAMES, OLD_NAMES
from eagle31_hf.errors import DraftingRefusedError
from eagle31_hf.targets.layers import decoder_layers

NEW = 6  # tokens of the user's after those that the cache holds
TEXT = torch.randint(0, 11, (3, 40), generator=torch.Generator().manual_seed(3))
OWN_LAYERS = ("LFM2", "DeepSeek-V3.2 (sparse)")  # caches with layers of convolutions, and of an index


def attributes(cache: Cache) -> list[dict[str, Any]]:
    """What its layers hold, tensors as they are."""
    return [vars(layer) for layer in cache.layers]


def assert_same(name: str, ours: Any, theirs: Any) -> None:
    """Equal, tensors bit for bit and of one shape, however deep they lie."""
    assert type(ours) is type(theirs), name
    if isinstance(ours, Tensor):
        assert_close(name, ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), name
        for key in ours:
            assert_same(f"{name}: {key}", ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), name
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(f"{name} {i}", one, other)
    else:
        assert ours == theirs, name


def filled(target, cache: Cache, num_held: int, num_sequences: int = 1) -> Cache:
    """The cache, of which an earlier turn has filled `num_held` slots."""
    if num_held:
        target.generate(TEXT[:num_sequences, :num_held], past_key_values=cache, max_new_tokens=1, do_sample=False)
    return cache


def asked(
    cache: Cache, num_held: int, num_sequences: int = 1, is_whole: bool = True, num_new: int = NEW
) -> dict[str, Any]:
    """The arguments of the next turn, which passes the whole text or only what is new of it."""
    text = TEXT[:num_sequences, : num_held + num_new]
    return {
        "inputs": text if is_whole else text[:, num_held:],
        "attention_mask": torch.ones_like(text),
        "past_key_values": cache,
        "max_new_tokens": 8,
        "do_sample": False,
    }


# --- calls that are refused ---


def hide_a_layer(target) -> None:
    """Has the target run a layer so that no hook of it is called: as if it were skipped."""
    layer = decoder_layers(target)[len(decoder_layers(target)) // 2 - 1]
    hidden = {"__call__": lambda self, *args, **kwargs: self.forward(*args, **kwargs)}
    layer.__class__ = type(type(layer).__name__, (type(layer),), hidden)


def repeat_a_token(target) -> None:
    """Has the target write a token more than it is given, as adapters with tokens of their own do."""
    forward = target.forward

    @wraps(forward)
    def longer(input_ids, *, attention_mask=None, position_ids=None, **kwargs):
        return forward(torch.cat((input_ids, input_ids[:, :1]), dim=1), **kwargs)

    target.forward = longer


def keep_nothing(target) -> None:
    """Has the target run as if it were given no cache, as one with gradient checkpointing did before transformers
    5.24."""
    forward = target.model.forward

    @wraps(forward)
    def without_cache(*args, use_cache=None, **kwargs):
        return forward(*args, use_cache=False, **{name: kwargs[name] for name in kwargs.keys() - {*NAMES, *OLD_NAMES}})

    target.model.forward = without_cache


def leave(target) -> None:
    pass


Refusal = tuple[Callable, dict[str, Any], str]
REFUSALS: dict[str, Refusal] = {
    "knob": (leave, {"num_assistant_tokens": 0}, "num_assistant_tokens is 0"),
    "synced_gpus": (leave, {"synced_gpus": True}, "synced_gpus is set"),
    "layer": (hide_a_layer, {}, "skipped a layer"),
    "layer_of_a_chunk": (hide_a_layer, {"prefill_chunk_size": 2}, "skipped a layer"),
    "more_tokens": (repeat_a_token, {}, "the target's cache holds"),
    "no_cache": (keep_nothing, {}, "kept nothing in a cache|must match"),  # its mask, torch says, is for more keys
}


@pytest.fixture(scope="module")
def refusing():
    """`refusing(kind, refusal)`: a target for which calls are refused, with its drafter."""
    made: dict[tuple[str, str], tuple] = {}

    def make(kind: str, refusal: str):
        if (kind, refusal) not in made:
            target = build_target(kind)
            drafter = build_drafter(target)
            REFUSALS[refusal][0](target)
            made[kind, refusal] = target, drafter
        return made[kind, refusal]

    return make


REFUSED = [  # of the window of 8, which some layers of Gemma 3 have, less is held, and more
    ("qwen3", "static", 5),
    ("gemma3_window_8", "static", 0),
    ("gemma3_window_8", "dynamic", 17),
]


@pytest.mark.parametrize(("kind", "cache", "num_held"), REFUSED)
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_call_leaves_the_cache_as_it_was(make_target, refusing, refusal, kind, cache, num_held):
    """And the target alone goes on from it."""
    target, drafter = refusing(kind, refusal)
    _, knobs, message = REFUSALS[refusal]
    for num_sequences, is_whole in ((1, True), (2, False)):
        past = filled(make_target(kind), CACHES[cache](target.config), num_held, num_sequences)
        before = copy.deepcopy(past)
        request = asked(past, num_held, num_sequences, is_whole)
        with pytest.raises((ValueError, RuntimeError), match=message):
            target.generate(**request, assistant_model=drafter, **knobs)
        assert_same("layers", attributes(past), attributes(before))
        expected = make_target(kind).generate(**request | {"past_key_values": before})
        assert_close("text", make_target(kind).generate(**request), expected)


@pytest.mark.parametrize("cache", CACHES)
def test_a_refusal_in_the_midst_of_a_text(cache):
    """Of a target that skips a layer once the prompt is read."""
    num_held = 17
    target = build_target("gemma3_window_8")
    drafter, past = build_drafter(target), filled(target, CACHES[cache](target.config), num_held)
    before, seen = copy.deepcopy(past), list[int]()

    def hide(module, args, output):
        seen.append(int(past.get_seq_length()))
        if len(seen) == 1:
            hide_a_layer(target)

    target.register_forward_hook(hide)
    with pytest.raises(DraftingRefusedError, match="skipped a layer"):
        target.generate(**asked(past, num_held), assistant_model=drafter, num_assistant_tokens=3)
    assert seen[0] == num_held + NEW, "the prompt was not read"
    assert_same("layers", attributes(past), attributes(before))


@pytest.mark.parametrize("cache", CACHES)
def test_nothing_is_copied_for_it(refusing, make_target, cache):
    """The layers keep the very tensors that they had."""
    target, drafter = refusing("gemma3_window_8", "layer")
    past = filled(make_target("gemma3_window_8"), CACHES[cache](target.config), 17)
    tensors = [(layer.keys, layer.values) for layer in past.layers]
    with pytest.raises(DraftingRefusedError):
        target.generate(**asked(past, 17), assistant_model=drafter)
    for layer, (keys, values) in zip(past.layers, tensors, strict=True):
        assert layer.keys is keys
        assert layer.values is values


@pytest.mark.parametrize("cache", CACHES)
def test_an_empty_cache_then_takes_another_batch(refusing, make_target, cache):
    """A static layer that has been written to is of one batch size for good."""
    target, drafter = refusing("gemma3_window_8", "layer")
    past = CACHES[cache](target.config)
    with pytest.raises(DraftingRefusedError):
        target.generate(**asked(past, 0), assistant_model=drafter)
    alone = make_target("gemma3_window_8")
    text = alone.generate(**asked(past, 0, num_sequences=3))
    assert_close("text", text, alone.generate(**asked(DynamicCache(config=target.config), 0, num_sequences=3)))


@pytest.mark.parametrize("num_new", [0, -3])
def test_a_cache_that_holds_the_whole_prompt_is_refused_first(make_target, make_drafter, num_new):
    target, past = make_target("qwen3"), DynamicCache()
    before = copy.deepcopy(filled(target, past, 17))
    message = rf"holds 17 tokens, and the prompt has {17 + num_new}; .*{CACHE}.crop\({num_new - 1}\)"
    with pytest.raises(DraftingRefusedError, match=message):
        target.generate(**asked(past, 17, num_new=num_new), assistant_model=make_drafter(target))
    assert_same("layers", attributes(past), attributes(before))
    past.crop(num_new - 1)
    target.generate(**asked(past, 17, num_new=num_new), assistant_model=make_drafter(target))


# --- static caches that are too short ---

SLOTS = 30


@pytest.mark.parametrize(
    ("kind", "num_held", "chunk"), [("qwen3", 5, None), ("gemma3_window_8", 0, 4), ("gemma3_window_8", 17, None)]
)
def test_a_text_that_does_not_fit_is_refused_first(make_target, make_drafter, kind, num_held, chunk):
    """Where it cannot end before, or the prompt alone is too long."""
    target, calls = make_target(kind), list[object]()
    drafter = make_drafter(target)
    handle = decoder_layers(target)[0].register_forward_pre_hook(lambda *args: calls.append(args))
    try:
        for is_whole, length, stops in ((True, SLOTS, False), (False, SLOTS, False), (True, 8, True)):
            slots = SLOTS if length == SLOTS else num_held + NEW - 1
            past = filled(target, StaticCache(config=target.config, max_cache_len=slots), num_held)
            before, ran = copy.deepcopy(past), len(calls)
            request = asked(past, num_held, is_whole=is_whole) | {"max_new_tokens": length, "prefill_chunk_size": chunk}
            needed = num_held + NEW + (0 if stops else length - 1)
            with pytest.raises(
                DraftingRefusedError, match=f"static cache of {slots} tokens; expected {needed} or more"
            ):
                target.generate(**request, assistant_model=drafter, eos_token_id=4 if stops else None)
            assert len(calls) == ran, "the target ran"
            assert_same("layers", attributes(past), attributes(before))
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("kind", "drafting", "num_held"), [("qwen3", "auto", 0), ("gemma3_window_8", "chain", 17), ("qwen3", "tree", 17)]
)
def test_a_text_that_ends_too_late(make_target, make_drafter, kind, drafting, num_held):
    """It might have ended in time. A full cache could not be gone on from."""
    target = make_target(kind)
    past = filled(target, StaticCache(config=target.config, max_cache_len=SLOTS), num_held)
    before = copy.deepcopy(past)
    never = StoppingCriteriaList([lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)])
    request = asked(past, num_held) | {"max_new_tokens": 90, "stopping_criteria": never}
    drafter = make_drafter(target)
    with steady_clock(target, drafter), pytest.raises(CacheFullError, match=f"{SLOTS} tokens got token {SLOTS + 1}"):
        target.generate(**request, assistant_model=drafter, **DRAFTINGS[drafting])
    assert int(past.get_seq_length()) == num_held
    request = asked(past, num_held)
    expected = target.generate(**request | {"past_key_values": before})
    assert_close("text", target.generate(**request), expected)


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_a_text_that_ends_in_time(make_target, make_drafter, drafting):
    """However many tokens were allowed."""
    target = make_target("qwen3")
    alone = target.generate(**asked(DynamicCache(config=target.config), 0) | {"max_new_tokens": 12})
    past = StaticCache(config=target.config, max_cache_len=SLOTS)
    request = asked(past, 0) | {"max_new_tokens": 90, "eos_token_id": int(alone[0, -1])}
    expected = target.generate(**request | {"past_key_values": DynamicCache(config=target.config)})
    drafter = make_drafter(target)
    with steady_clock(target, drafter):
        assert_close("text", target.generate(**request, assistant_model=drafter, **DRAFTINGS[drafting]), expected)


# --- caches that keep their layers ---


@pytest.fixture(scope="module")
def other_family():
    """`other_family(name)`: a target whose caches keep their own layers, with its drafter."""

    def make(name: str):
        try:
            return families.build_target(name, "eager"), families.build_drafter(name)
        except families.NotThereError as error:
            pytest.skip(str(error))

    return make


@pytest.mark.parametrize("num_held", [0, 17])
@pytest.mark.parametrize("name", OWN_LAYERS)
def test_a_cache_that_keeps_its_layers_after_a_refusal(other_family, name, num_held):
    target, drafter = other_family(name)
    past = filled(target, DynamicCache(config=target.config), num_held)
    before, refusing = copy.deepcopy(past), copy.deepcopy(target)
    hide_a_layer(refusing)
    drafter.load_target_embeddings(refusing)
    with pytest.raises(DraftingRefusedError, match="skipped a layer"):
        refusing.generate(**asked(past, num_held), assistant_model=drafter)
    drafter.load_target_embeddings(target)
    assert_same("layers", attributes(past), attributes(before))
