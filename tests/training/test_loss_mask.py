"""The loss mask, spelt out for one conversation."""

import pytest
import torch

from eagle31_hf.training.loss_mask import CONVENTIONS, loss_mask

# An answer of five tokens, the last of them the end of the turn, between two questions.
#        0  1  2  3  4  5  6  7  8  9 10
ANSWER = [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
MASK = torch.tensor([ANSWER])


def positions(depth: int, convention: str, mask=MASK, **options) -> list[int]:
    return loss_mask(mask, depth, convention, **options)[0].nonzero().flatten().tolist()


def test_the_first_chain_predicts_the_second_token_of_the_answer_and_the_last_its_end():
    """The first token of an answer is the target's, from its prompt: no drafter is ever asked for it."""
    predicted = [t + 2 for t in positions(0, "serving")]
    assert predicted == [4, 5, 6, 7]


@pytest.mark.parametrize("depth", range(4))
def test_chains_begin_and_end_within_the_answer(depth):
    expected = [t for t in range(len(ANSWER) - 2 - depth) if all(ANSWER[t + 1 : t + 3 + depth])]
    assert positions(depth, "serving") == expected
    assert bool(expected) == (depth < 4)


def test_no_chain_crosses_a_question():
    two = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0]])
    assert positions(1, "serving", two) == [3]
    assert positions(3, "serving", two) == []


@pytest.mark.parametrize("depth", range(3))
def test_conventions_of_others(depth):
    count = len(ANSWER) - 2 - depth
    assert positions(depth, "embedded") == [t for t in range(count) if ANSWER[t + 1 + depth]]
    assert positions(depth, "unshifted") == [t for t in range(count) if ANSWER[t + depth]]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("depth", range(3))
def test_documents_are_not_crossed(convention, depth):
    """Two packed texts are supervised as they are one by one."""
    generator = torch.Generator().manual_seed(depth)
    texts = [(torch.rand(1, length, generator=generator) > 0.3).long() for length in (7, 9)]
    packed, documents = torch.cat(texts, dim=1), torch.tensor([[0] * 7 + [1] * 9])
    expected = positions(depth, convention, texts[0]) + [7 + t for t in positions(depth, convention, texts[1])]
    assert positions(depth, convention, packed, documents=documents) == expected


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_text_without_an_answer_supervises_nothing(convention):
    assert not loss_mask(torch.zeros(2, 6), 0, convention).any()


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_text_too_short_for_the_depth_has_no_chains(convention):
    assert loss_mask(torch.ones(1, 4), 2, convention).shape == (1, 0)
