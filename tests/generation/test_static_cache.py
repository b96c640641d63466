"""A static cache: its tensors stay where they are, attention always sees all of them, and none is too short for a text.

B sequences, R tokens of a forward.
"""

import pytest
from close import assert_close
from conftest import greedy_text
from draftings import DRAFTINGS, steady_clock
from observers import noting, speculate
from torch import Tensor
from transformers import StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LENGTH = 24
GREEDY = {"max_new_tokens": LENGTH, "do_sample": False}


def decode(target, drafter, prompt: Tensor, drafting: str, past: StaticCache) -> Tensor:
    """The text by a way of drafting, with a cache of the caller's."""
    knobs = {"assistant_model": drafter, "past_key_values": past, **DRAFTINGS[drafting]}
    with steady_clock(target, drafter):
        return target.generate(prompt, **knobs, **GREEDY)


# --- addresses and shapes ---


@pytest.fixture
def attended(monkeypatch) -> list:
    """Notes of every call of attention: the layer, where its keys are, how many, and how many its mask is for."""
    calls, original = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watching(module, query, key, value, attention_mask, *args, **kwargs):
        calls.append(
            (module, key.data_ptr(), key.shape[2], None if attention_mask is None else attention_mask.shape[3])
        )
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", watching)
    return calls


@pytest.mark.parametrize(
    ("kind", "drafting"),
    [("llama", "tree"), ("mistral_window_8", "chain"), ("gemma3_window_8", "tree"), ("gpt2", "auto")],
)
def test_addresses_and_shapes_never_change(make_target, make_drafter, attended, prompt, kind, drafting):
    """A captured graph of the forward relies on it. An earlier turn has filled the cache and so decided where it is."""
    target = make_target(kind)
    drafter, caches = make_drafter(target), [StaticCache(config=target.config, max_cache_len=60) for _ in range(2)]
    decode(target, drafter, prompt, drafting, caches[0])  # the first call tries the target, too
    past = caches[1]
    target(prompt[:, :3], past_key_values=past)
    homes = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in past.layers]
    attended.clear()
    decode(target, drafter, prompt, drafting, past)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in past.layers] == homes
    target_modules = set(target.modules())
    of_target = [call for call in attended if call[0] in target_modules]
    for module, home in zip(dict.fromkeys(call[0] for call in of_target), homes, strict=True):
        own = [call[1:] for call in of_target if call[0] is module]
        assert len(own) > 5
        assert len({address for address, _, _ in own}) == 1, "keys moved between forwards"
        assert len({length for _, length, _ in own}) == 1, "attention saw different numbers of keys"
        assert {size for _, length, size in own} <= {None, own[0][1]}, "masks are not for all of the keys"
        if "window" not in kind:  # the ring of a windowed layer cannot take drafts, they go to a buffer beside it
            assert own[0][0] == home[0]


# --- caches of the caller's own ---


@pytest.mark.parametrize(
    ("kind", "drafting"), [("qwen3", "chain"), ("mistral_window_8", "chain"), ("gemma3_window_8", "tree")]
)
def test_any_cache_that_is_long_enough(make_target, make_drafter, prompt, kind, drafting):
    """The last token of a text is never read: 28 slots are enough for 29 tokens."""
    target = make_target(kind)
    past = StaticCache(config=target.config, max_cache_len=28)
    got = decode(target, make_drafter(target), prompt, drafting, past)
    assert_close("text", got, greedy_text(target)[:, : 5 + LENGTH])
    assert int(past.get_seq_length()) == 28


def test_trees_are_cut_to_the_slots_that_are_left(target, drafter, prompt):
    """A tree has more nodes than the text will have tokens, and none of them may be written past the end."""
    past = StaticCache(config=target.config, max_cache_len=28)
    knobs = {"num_assistant_tokens": 6, "draft_tree_top_k": 4, "draft_tree_total_tokens": 40}
    with noting(lambda sequences, drafts, logits: 0 if drafts.is_chain else drafts.num_nodes) as nodes:
        got, _ = speculate(target, drafter, prompt, past_key_values=past, **GREEDY, **knobs)
    assert_close("text", got, greedy_text(target)[:, : 5 + LENGTH])
    sizes = [size for size in nodes if size]
    assert len(sizes) > 3
    assert sizes[0] == 28 - 5
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]
