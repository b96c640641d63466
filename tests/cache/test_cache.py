"""The target's cache: exactly the committed tokens but the last are in it, and it can be handed on."""

import pytest
import torch
from close import TARGET_FORWARD, assert_close
from conftest import TARGETS, greedy_text
from observers import speculate
from torch.nn.functional import pad
from transformers import DynamicCache

from eagle31_hf.cache.adopt import crop, recording_past

TURN = {"max_new_tokens": 13, "do_sample": False, "return_dict_in_generate": True}


def two_turns(target, prompt, first: dict, second: dict, **kwargs):
    """A turn, a few more user tokens, and a turn that goes on from the cache of the first."""
    one = target.generate(prompt, **TURN, **first, **kwargs)
    more = torch.cat((one.sequences, torch.tensor([[4, 9, 1]])), dim=1)
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = pad(kwargs["attention_mask"], (0, more.shape[1] - prompt.shape[1]), value=1)
    length = one.past_key_values.get_seq_length()
    two = target.generate(more, past_key_values=one.past_key_values, **TURN, **second, **kwargs)
    return one.sequences, length, two.sequences, two.past_key_values


@pytest.mark.parametrize("turns", ["both", "first", "second"])
@pytest.mark.parametrize("kind", TARGETS)
def test_a_second_turn_goes_on_from_the_cache_of_the_first(make_target, make_drafter, prompt, kind, turns):
    target = make_target(kind)
    with_drafter = {"assistant_model": make_drafter(target), "num_assistant_tokens": 4}
    given = [with_drafter if turns in ("both", turn) else {} for turn in ("first", "second")]
    one, length, two, _ = two_turns(target, prompt, *given)
    expected_one, _, expected_two, _ = two_turns(target, prompt, {}, {})
    assert_close("first turn", one, expected_one)
    assert length == one.shape[1] - 1
    assert_close("second turn", two, expected_two)


def test_a_second_turn_of_a_padded_prompt(make_target, make_drafter, prompt):
    target = make_target("qwen3")
    padded, mask = pad(prompt, (3, 0), value=6), pad(torch.ones_like(prompt), (3, 0))
    with_drafter = {"assistant_model": make_drafter(target), "num_assistant_tokens": 5}
    *got, _ = two_turns(target, padded, with_drafter, with_drafter, attention_mask=mask, pad_token_id=6)
    *expected, _ = two_turns(target, padded, {}, {}, attention_mask=mask, pad_token_id=6)
    for name, ours, theirs in zip(("first turn", "cached tokens", "second turn"), got, expected, strict=True):
        assert_close(name, ours, theirs)


@pytest.mark.parametrize("kind", ["llama", "mistral_window_8"])
def test_only_the_new_tokens_may_be_passed_with_the_cache(make_target, make_drafter, prompt, kind):
    """The attention mask then tells how long the whole text is."""
    target, new = make_target(kind), torch.tensor([[4, 9, 1]])
    texts = []
    for assistant in ({"assistant_model": make_drafter(target), "num_assistant_tokens": 5}, {}):
        past = target(greedy_text(target)[:, :10]).past_key_values
        mask = torch.ones((1, 13), dtype=torch.long)
        texts.append(target.generate(new, past_key_values=past, attention_mask=mask, **assistant, **TURN).sequences)
    assert_close("second turn", *texts)


@pytest.mark.parametrize("kind", TARGETS)
def test_the_cache_equals_that_of_the_target_alone(make_target, make_drafter, prompt, kind):
    target = make_target(kind)
    output, stats = speculate(target, make_drafter(target), prompt, num_assistant_tokens=5, **TURN)
    alone = target.generate(prompt, **TURN)
    assert sum(stats.accepted_per_round) > 0
    for i, (ours, theirs) in enumerate(zip(output.past_key_values.layers, alone.past_key_values.layers, strict=True)):
        assert type(ours) is type(theirs)
        assert ours.get_seq_length() == theirs.get_seq_length() == output.sequences.shape[1] - 1
        # of a window, a layer may keep more than it will look at
        shared = min(ours.keys.shape[-2], theirs.keys.shape[-2])
        assert_close(f"keys of layer {i}", ours.keys[:, :, -shared:], theirs.keys[:, :, -shared:], TARGET_FORWARD)
        assert_close(f"values of layer {i}", ours.values[:, :, -shared:], theirs.values[:, :, -shared:], TARGET_FORWARD)


@pytest.mark.parametrize("eos", [2, 10, 6, 8])
def test_the_cache_ends_before_the_token_at_which_generation_stopped(target, drafter, prompt, eos):
    output, _ = speculate(target, drafter, prompt, num_assistant_tokens=5, eos_token_id=eos, **TURN)
    assert output.sequences[0, -1] == eos
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1


def test_a_cache_of_the_callers_own_is_filled(target, drafter, prompt):
    past = DynamicCache(config=target.config)
    speculate(target, drafter, prompt, past_key_values=past, max_new_tokens=9, do_sample=False, num_assistant_tokens=5)
    assert past.get_seq_length() == prompt.shape[1] + 8


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
