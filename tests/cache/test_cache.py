"""The target's cache: exactly the committed tokens but the last are in it, and it can be handed on."""

import pytest
import torch
from close import TARGET_FORWARD, assert_close
from conftest import TARGETS
from draftings import CHAIN_OR_TREE
from observers import speculate
from torch.nn.functional import pad

from eagle31_hf.cache.adopt import crop, recording_past

TURN = {"max_new_tokens": 13, "do_sample": False, "return_dict_in_generate": True}


def two_turns(target, prompt, first: dict, second: dict, **kwargs):
    """A turn, a few more user tokens, and a turn that goes on from the cache of the first."""
    one = target.generate(prompt, **TURN, **first, **kwargs)
    more = torch.cat((one.sequences, torch.tensor([[4, 9, 1]])), dim=1)
    kwargs["attention_mask"] = pad(kwargs["attention_mask"], (0, more.shape[1] - prompt.shape[1]), value=1)
    length = one.past_key_values.get_seq_length()
    two = target.generate(more, past_key_values=one.past_key_values, **TURN, **second, **kwargs)
    return one.sequences, length, two.sequences, two.past_key_values


@pytest.mark.parametrize(
    ("drafting", "turns", "padding"), [("chain", "both", 3), ("tree", "first", 0), ("tree", "second", 3)]
)
@pytest.mark.parametrize("kind", TARGETS)
def test_a_second_turn_goes_on_from_the_cache_of_the_first(
    make_target, make_drafter, prompt, kind, drafting, turns, padding
):
    target = make_target(kind)
    with_drafter = {"assistant_model": make_drafter(target), **CHAIN_OR_TREE[drafting]}
    given = [with_drafter if turns in ("both", turn) else {} for turn in ("first", "second")]
    padded, mask = pad(prompt, (padding, 0), value=6), pad(torch.ones_like(prompt), (padding, 0))
    *got, _ = two_turns(target, padded, *given, attention_mask=mask, pad_token_id=6)
    *expected, _ = two_turns(target, padded, {}, {}, attention_mask=mask, pad_token_id=6)
    for name, ours, theirs in zip(("first turn", "cached tokens", "second turn"), got, expected, strict=True):
        assert_close(name, ours, theirs)
    assert got[1] == got[0].shape[1] - 1


def test_all_but_one_token_of_the_prompt_may_be_cached(target, drafter, prompt):
    past = target(prompt[:, :-1]).past_key_values
    output, _ = speculate(
        target, drafter, prompt, past_key_values=past, max_new_tokens=9, do_sample=False, num_assistant_tokens=5
    )
    assert_close("text", output, target.generate(prompt, max_new_tokens=9, do_sample=False))


@pytest.mark.parametrize("removed", [0, 1, 3])
@pytest.mark.parametrize("kind", ["llama", "mistral_window_8"])
def test_crop(make_target, prompt, kind, removed):
    target, ids = make_target(kind), torch.arange(15)[None] % 11
    past = target(ids[:, :11]).past_key_values
    with recording_past(past):
        target(ids[:, 11:], past_key_values=past)
        crop(past, removed)
    assert past.get_seq_length() == 15 - removed
    after = target(torch.tensor([[3]]), past_key_values=past).logits
    whole = torch.cat((ids[:, : 15 - removed], torch.tensor([[3]])), dim=1)
    assert_close("logits of the next token", after, target(whole).logits[:, -1:], TARGET_FORWARD)


def test_recording_ends_with_its_block_also_on_error(make_target, prompt):
    past = make_target("mistral_window_8")(prompt).past_key_values
    past.layers[1].record_past = True
    found = [layer.record_past for layer in past.layers]
    with recording_past(past):
        assert all(layer.record_past for layer in past.layers)
    assert [layer.record_past for layer in past.layers] == found
    with pytest.raises(KeyError), recording_past(past):
        raise KeyError
    assert [layer.record_past for layer in past.layers] == found
