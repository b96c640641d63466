"""A call that goes on from an earlier one's cache drafts as one that reads the whole text anew: the drafter's keys are
kept with the cache, as far as the cache still holds the tokens that they were made of."""

import copy
import functools
import gc
import io
import weakref
from contextlib import nullcontext

import families
import pytest
import torch
from close import FORWARD, assert_close
from conftest import VOCAB, build_drafter, build_target
from draftings import CACHES, CHAIN, CHAIN_OR_TREE
from observers import InterruptError, Puts, raise_at
from torch import Tensor
from transformers import Cache, DynamicCache

from eagle31_hf import track_acceptance
from eagle31_hf.generation.captured.seam import Uncaptured, seams
from eagle31_hf.generation.read_text import ATTRIBUTE, ReadText, read_text_of

TURNS, SAID, NEW = 4, 9, 5  # turns of a conversation, tokens of an answer, tokens that a turn asks
TEXT = torch.randint(0, VOCAB, (3, 60), generator=torch.Generator().manual_seed(4))
KINDS = ("qwen3", "gemma3_window_8")
ROUNDS = {"eager": nullcontext, "captured": lambda: seams(lambda device: Uncaptured())}


@functools.cache
def pair_of(kind: str):
    """A target and its drafter, for all tests that leave them as they were."""
    target = build_target(kind) if kind in KINDS else families.build_target(kind, "eager")
    return target, (build_drafter(target) if kind in KINDS else families.build_drafter(kind))


def asked(text: Tensor, cache: Cache | None = None, is_whole: bool = True, **knobs) -> dict:
    """The arguments of a call for texts (B, L), of which those with a left padding of -1 have fewer tokens; not
    `is_whole`: it is given only what the cache lacks."""
    given = {"attention_mask": (text >= 0).long(), "max_new_tokens": SAID, "do_sample": False, "pad_token_id": 0}
    if cache is not None:
        given["past_key_values"] = cache
    held = 0 if is_whole or cache is None else int(cache.get_seq_length())
    return {"inputs": text.clamp(min=0)[:, held:], **given, **knobs}


def drafted(pair, text: Tensor, cache: Cache, is_whole: bool = True, **knobs) -> tuple[Tensor, list[int], list[int]]:
    """Returns what is generated (B, SAID), how many were drafted at every depth, and how many of them accepted."""
    given = asked(text, cache, is_whole, **knobs)
    with track_acceptance() as stats:
        ids = pair[0].generate(**given, assistant_model=pair[1])
    return ids[:, given["inputs"].shape[1] :], stats.drafted_per_position, stats.accepted_per_position


def kept_with(cache: Cache) -> ReadText:
    return getattr(cache, ATTRIBUTE)


def assert_same_reading(found: ReadText, expected: ReadText) -> None:
    """Both know the same tokens, at the same positions, and have the same keys of those that both have read."""
    assert found.counts == expected.counts
    assert found.first_slots == expected.first_slots
    assert found.padding == expected.padding
    length = min(*found.lengths, *expected.lengths)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_close("keys of the drafter", one[..., :length, :], other[..., :length, :], FORWARD * 10)


def next_turn(text: Tensor, said: Tensor, turn: int) -> Tensor:
    asks = TEXT[: len(text), NEW * turn : NEW * (turn + 1)]
    return torch.cat((text, said, asks), dim=1)


CASES = [  # captured rounds take whole texts, in caches whose layers are there before the prompt
    ("qwen3", "chain", "dynamic", "whole text", "eager"),
    ("qwen3", "tree", "static", "what is new", "eager"),
    ("qwen3", "tree", "without_config", "what is new", "eager"),
    ("qwen3", "tree", "dynamic", "whole text", "captured"),
    ("gemma3_window_8", "tree", "dynamic", "what is new", "eager"),
    ("gemma3_window_8", "chain", "without_config", "whole text", "eager"),
    ("gemma3_window_8", "chain", "static", "whole text", "captured"),
]


@pytest.mark.parametrize(("kind", "drafting", "cache", "given", "rounds"), CASES)
def test_every_turn_drafts_as_after_one_long_prompt(kind, drafting, cache, given, rounds):
    pair, knobs = pair_of(kind), CHAIN_OR_TREE[drafting]
    past, text = CACHES[cache](pair[0].config), TEXT[:1, :NEW]
    for turn in range(1, TURNS):
        fresh = CACHES[cache](pair[0].config)
        with ROUNDS[rounds]():
            expected = drafted(pair, text, fresh, **knobs)
            found = drafted(pair, text, past, given == "whole text" or turn == 1, **knobs)
        assert_close("said", found[0], expected[0])
        assert found[1:] == expected[1:]
        assert_same_reading(kept_with(past), kept_with(fresh))
        text = next_turn(text, found[0], turn)


@pytest.mark.parametrize("kind", ["Qwen3-Next", "Falcon-H1", "DeepSeek-V3.2 (sparse)"])
def test_caches_with_layers_of_other_kinds(kind):
    pair = pair_of(kind)
    past, text = DynamicCache(config=pair[0].config), TEXT[:1, :NEW]
    for turn in range(1, TURNS):
        fresh = DynamicCache(config=pair[0].config)
        found, expected = drafted(pair, text, past, **CHAIN), drafted(pair, text, fresh, **CHAIN)
        assert_close("said", found[0], expected[0])
        assert found[1:] == expected[1:]
        assert kept_with(past).counts == kept_with(fresh).counts
        text = next_turn(text, found[0], turn)


def test_batches_whose_prompts_are_padded():
    pair = pair_of("qwen3")
    past = DynamicCache(config=pair[0].config)
    text = TEXT[:2, :NEW].clone()
    text[1, :2] = -1
    for turn in range(1, TURNS):
        fresh = DynamicCache(config=pair[0].config)
        found, expected = drafted(pair, text, past, turn == 1, **CHAIN), drafted(pair, text, fresh, **CHAIN)
        assert_close("said", found[0], expected[0])
        assert found[1:] == expected[1:]
        assert_same_reading(kept_with(past), kept_with(fresh))
        assert kept_with(past).padding == [0, 2]
        text = next_turn(text, found[0], turn)


def test_a_first_turn_of_which_nothing_was_read_yet():
    """A prompt of one token: its state waits for the token after it, and then for a draft."""
    pair = pair_of("qwen3")
    past, fresh = DynamicCache(config=pair[0].config), DynamicCache(config=pair[0].config)
    said, *_ = drafted(pair, TEXT[:1, :1], past, max_new_tokens=1, num_assistant_tokens=4)
    assert (kept_with(past).lengths, kept_with(past).counts) == ([0], [1])
    text = torch.cat((TEXT[:1, :1], said, TEXT[:1, 5:12]), dim=1)
    found, expected = drafted(pair, text, past, **CHAIN), drafted(pair, text, fresh, **CHAIN)
    assert_close("said", found[0], expected[0])
    assert found[1:] == expected[1:]
    assert_same_reading(kept_with(past), kept_with(fresh))


def test_each_token_is_read_once():
    """By target and drafter, over all turns: drafts aside."""
    pair = target, _ = pair_of("qwen3")
    read_by_target, num_read = list[int](), 0

    def note(module, args, kwargs):
        nonlocal num_read
        if module is target:
            read_by_target.append(kwargs["input_ids"].shape[1])
        elif kwargs.get("target_hidden_states") is not None:
            num_read += kwargs["target_hidden_states"].shape[1]

    handles = [model.register_forward_pre_hook(note, with_kwargs=True) for model in pair]
    past, text = DynamicCache(config=target.config), TEXT[:1, :NEW]
    try:
        after_a_turn(pair)  # the first drafted call of a target tries its layers, too
        num_read = 0
        for turn in range(1, TURNS + 1):
            held = past.get_seq_length()
            read_by_target.clear()
            said, *_ = drafted(pair, text, past, **CHAIN)
            assert read_by_target[0] == text.shape[1] - held
            assert num_read == kept_with(past).lengths[0]
            assert kept_with(past).counts == [past.get_seq_length()]
            text = next_turn(text, said, turn)
    finally:
        for handle in handles:
            handle.remove()


# --- what callers do to a cache between two turns ---


def after_a_turn(pair, num_rows: int = 1) -> tuple[DynamicCache, Tensor]:
    """A cache that holds a text, and the text with its last token, which the cache lacks."""
    past, text = DynamicCache(config=pair[0].config), TEXT[:num_rows, :20]
    said, *_ = drafted(pair, text, past, **CHAIN)
    return past, torch.cat((text, said), dim=1)


def crop(pair, past, text):
    past.crop(15 - past.get_seq_length())
    return past, torch.cat((text[:, :15], TEXT[:1, 30:40]), dim=1), 15


def crop_and_go_on_alone(pair, past, text):
    """The cache holds as many tokens as before, but others."""
    past.crop(15 - past.get_seq_length())
    text = torch.cat((text[:, :15], TEXT[:1, 30:45]), dim=1)
    pair[0].generate(**asked(text, past, max_new_tokens=1))
    return past, torch.cat((text, TEXT[:1, 20:24]), dim=1), 15


def go_on_alone(pair, past, text):
    held = past.get_seq_length()
    text = torch.cat((text, TEXT[:1, 30:40]), dim=1)
    pair[0].generate(**asked(text, past, max_new_tokens=1))
    return past, torch.cat((text, TEXT[:1, 20:24]), dim=1), held


def deep_copy(pair, past, text):
    """Both go on, each with its own text."""
    other = copy.deepcopy(past)
    drafted(pair, torch.cat((text, TEXT[:1, 50:58]), dim=1), other, **CHAIN)
    return past, torch.cat((text, TEXT[:1, 30:40]), dim=1), past.get_seq_length()


def clear(pair, past, text):
    past = DynamicCache(config=pair[0].config)
    return past, text, 0


def write_a_key(pair, past, text):
    past.layers[-1].keys[:, :, 7] += 0.1
    return past, torch.cat((text, TEXT[:1, 30:40]), dim=1), 7


def pickle(pair, past, text):
    """What the drafter has read does not go into files."""
    file = io.BytesIO()
    torch.save(past, file)
    file.seek(0)
    past = torch.load(file, weights_only=False)
    return past, torch.cat((text, TEXT[:1, 30:40]), dim=1), 0


CHANGES = (crop, crop_and_go_on_alone, go_on_alone, deep_copy, clear, write_a_key, pickle)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_read_is_used_as_far_as_the_cache_is_the_same(change):
    pair = pair_of("qwen3")
    past, text, num_known = change(pair, *after_a_turn(pair))
    known = read_text_of(past, pair[1])
    assert (known.counts if known else [0]) == [num_known]
    held = int(past.get_seq_length())
    expected = pair[0].generate(**asked(text, copy.deepcopy(past)))
    said, *_ = drafted(pair, text, past, **CHAIN)
    assert_close("said", said, expected[:, text.shape[1] :])
    kept = kept_with(past)
    assert [first + count for first, count in zip(kept.first_slots, kept.counts, strict=True)] == [
        int(past.get_seq_length())
    ]
    assert kept.first_slots == [held - num_known]  # of a gap, what comes before it moves up to what comes after
    assert kept.padding == [0]


def test_rows_in_another_order():
    pair = pair_of("qwen3")
    past, text = after_a_turn(pair, 3)
    rows = torch.tensor([2, 0])
    before = kept_with(past)
    past.batch_select_indices(rows)
    known = read_text_of(past, pair[1])
    assert known.counts == [before.counts[2], before.counts[0]]
    assert_close("keys", known.layers[0][0], before.layers[0][0][rows])
    text = torch.cat((text[rows], TEXT[rows, 40:46]), dim=1)
    fresh = DynamicCache(config=pair[0].config)
    found, expected = drafted(pair, text, past, **CHAIN), drafted(pair, text, fresh, **CHAIN)
    assert_close("said", found[0], expected[0])
    assert found[1:] == expected[1:]


def test_another_drafter_reads_for_itself():
    target, drafter = pair_of("qwen3")
    past, text = after_a_turn((target, drafter))
    other = copy.deepcopy(drafter)
    assert read_text_of(past, other) is None
    drafted((target, other), torch.cat((text, TEXT[:1, 30:40]), dim=1), past, **CHAIN)
    assert kept_with(past).drafter() is other


def test_a_drafter_in_another_dtype_goes_on():
    target, drafter = pair_of("qwen3")
    drafter = copy.deepcopy(drafter)
    past, text = after_a_turn((target, drafter))
    drafter.to(torch.bfloat16)
    text = torch.cat((text, TEXT[:1, 30:40]), dim=1)
    expected = target.generate(**asked(text, copy.deepcopy(past)))
    said, *_ = drafted((target, drafter), text, past, **CHAIN)
    assert_close("said", said, expected[:, text.shape[1] :])
    assert kept_with(past).layers[0][0].dtype == torch.bfloat16


def test_a_cache_does_not_keep_a_drafter_alive():
    target, drafter = pair_of("qwen3")
    drafter = copy.deepcopy(drafter)
    past, _ = after_a_turn((target, drafter))
    alive = weakref.ref(drafter)
    del drafter
    gc.collect()
    assert alive() is None
    assert read_text_of(past, pair_of("qwen3")[1]) is None


def test_nothing_is_kept_with_a_cache_that_ends_with_its_call(monkeypatch):
    target, drafter = pair_of("qwen3")
    calls = []
    monkeypatch.setattr("eagle31_hf.generation.request.keep_read_text", lambda *args: calls.append(args))
    target.generate(**asked(TEXT[:1, :8]), assistant_model=drafter, **CHAIN)
    assert not calls
    found = target.generate(**asked(TEXT[:1, :8], return_dict_in_generate=True), assistant_model=drafter, **CHAIN)
    assert [args[0] for args in calls] == [found.past_key_values]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("call", [1, 2, 4])
def test_after_an_error_the_next_call_goes_on(call, rounds):
    """The streamer fails at the prompt, or later."""
    pair = pair_of("qwen3")
    past, text = DynamicCache(config=pair[0].config), TEXT[:1, :20]
    streamer = Puts()
    streamer.put = raise_at(call)
    with ROUNDS[rounds](), pytest.raises(InterruptError):
        drafted(pair, text, past, streamer=streamer, **CHAIN)
    held = int(past.get_seq_length())
    assert bool(held) == (call > 1)
    whole = pair[0].generate(**asked(text))
    text = torch.cat((whole[:, : held + 1] if held else text, TEXT[:1, 40:46]), dim=1)
    known = read_text_of(past, pair[1])
    # the token after a prompt is streamed before it is committed, and what the drafter reads last holds it
    is_before_it = call == 2
    assert (known.counts if known else [0]) == [held - is_before_it]
    fresh = DynamicCache(config=pair[0].config)
    with ROUNDS[rounds]():
        found, expected = drafted(pair, text, past, **CHAIN), drafted(pair, text, fresh, **CHAIN)
    assert_close("said", found[0], expected[0])
    if not is_before_it:
        assert found[1:] == expected[1:]
        assert_same_reading(kept_with(past), kept_with(fresh))


def test_a_drafter_with_a_window():
    """It has given up what the window has left, and reads anew where a cache was cut."""
    target = build_target("qwen3")
    drafter = build_drafter(target, sliding_window=6, layer_types=["sliding_attention"])
    pair = target, drafter
    past, text = after_a_turn(pair)
    more = torch.cat((text, TEXT[:1, 30:40]), dim=1)
    fresh = DynamicCache(config=target.config)
    found, expected = drafted(pair, more, past, **CHAIN), drafted(pair, more, fresh, **CHAIN)
    assert_close("said", found[0], expected[0])
    assert found[1:] == expected[1:]
    past.crop(15 - past.get_seq_length())
    assert read_text_of(past, drafter) is None
