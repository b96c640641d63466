"""Drafters to begin with, and draft vocabularies."""

import pytest
import torch
from close import assert_close
from conftest import VOCAB, build_target

from eagle31_hf.training.fresh import choose_vocabulary, count_answers, new_drafter

KINDS = ("llama", "qwen3", "gpt2", "gemma3_window_8", "mistral_window_8")
SOME = torch.tensor([9, 2, 5, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_of_any_targets_shape_drafts_for_it(kind):
    target = build_target(kind)
    drafter = new_drafter(target)
    assert drafter.config.is_eagle31
    assert drafter.dtype == torch.float32
    prompt = torch.arange(5)[None]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    assert target.generate(prompt, assistant_model=drafter.eval(), **options).equal(target.generate(prompt, **options))


def test_its_head_begins_as_the_targets():
    target = build_target()
    head = target.get_output_embeddings().weight
    assert_close("all", new_drafter(target).lm_head.weight, head, 0.0)
    pruned = new_drafter(target, SOME)
    assert pruned.draft_to_target_ids().tolist() == SOME.tolist()
    assert_close("some", pruned.lm_head.weight, head[SOME], 0.0)
    scratch = new_drafter(target, SOME, head="scratch")
    assert (scratch.lm_head.weight - head[SOME]).abs().max() > 0.01


def test_the_same_seed_gives_the_same_drafter():
    target = build_target()
    one, same, other = (new_drafter(target, seed=seed).fc.weight for seed in (0, 0, 1))
    assert one.equal(same)
    assert not one.equal(other)


def test_what_is_drawn_afterwards_is_not_of_its_seed():
    target = build_target("llama")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    new_drafter(target, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_an_unknown_head_is_refused():
    with pytest.raises(ValueError, match="head is 'random'; expected one of target, scratch"):
        new_drafter(build_target(), head="random")


def test_a_misspelt_field_is_refused():
    with pytest.raises(ValueError, match="got norm_ouput; expected fields of Eagle31Config: did you mean norm_output"):
        new_drafter(build_target(), norm_ouput=False)


def test_the_vocabulary_is_the_most_frequent_answers_and_what_ends_a_text():
    examples = [
        {"input_ids": torch.tensor([7, 3, 3, 4]), "answers": torch.tensor([False, True, True, True])},
        {"input_ids": [7, 7, 5, 3], "answers": [False, False, True, True]},
    ]
    counts = count_answers(examples, VOCAB)
    assert counts.tolist() == [0, 0, 0, 3, 1, 1, 0, 0, 0, 0, 0]
    ids, share = choose_vocabulary(counts, 3, always=[9])
    assert ids.tolist() == [3, 4, 9]
    assert share == pytest.approx(4 / 5)


@pytest.mark.parametrize("size", [1, VOCAB + 1])
def test_a_size_that_cannot_be_is_refused(size):
    with pytest.raises(ValueError, match=f"to have {size} ids; expected 2 to {VOCAB}"):
        choose_vocabulary(torch.ones(VOCAB), size, always=[1, 2])
