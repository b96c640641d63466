"""Walking an answer against drafting it step by step."""

import pytest
import torch

from eagle31_hf.training.evaluation import answers_of, walk, walk_metrics


def drafted(hits, stops):
    """The same, token by token as a decoder goes: accept hits one after the other, then the bonus token, until the text
    ends."""
    depth, left = hits.shape
    rounds = 0
    tokens = 0
    accepted = 0
    at = 0
    while at < left:
        rounds, number = rounds + 1, 0
        while number < depth and at + number < left - (not stops) and hits[number, at]:
            number += 1
        accepted += number
        made = number + (at + number < left)  # nothing comes after the end of the text
        tokens, at = tokens + made, at + made
    return rounds, tokens, accepted


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize(("depth", "left"), [(1, 1), (3, 1), (3, 7), (5, 23)])
def test_as_drafted_step_by_step(depth, left, stops):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        hits = torch.rand(depth, left, generator=generator) < 0.8
        rounds, tokens, *accepted = walk(hits, stops).tolist()
        assert (rounds, tokens, sum(accepted)) == drafted(hits, stops)
        assert tokens == left
        assert accepted == sorted(accepted, reverse=True)


def test_walks_add_up():
    walks = [walk(torch.rand(3, n) < 0.5) for n in (5, 9)]
    found = walk_metrics(sum(walks))
    rounds = sum(float(counts[0]) for counts in walks)
    assert found["accepted_length"] == 14 / rounds
    for k in (1, 2, 3):
        accepted = sum(walk_metrics(counts)[f"walked_acceptance_{k}"] * float(counts[0]) for counts in walks)
        assert found[f"walked_acceptance_{k}"] == pytest.approx(accepted / rounds)
    assert {*walk_metrics(torch.zeros(5)).values()} == {0.0}


def test_where_answers_are():
    """Those of one token have nothing to draft; a text without a prompt is drafted from its second token on."""
    answers = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]]).bool()
    documents = torch.tensor([[1] * 10, [1, 1, 1, 2, 2, 2, 2, 0, 0, 0]])
    assert list(answers_of(answers, documents)) == [(0, 2, 5), (0, 8, 10), (1, 1, 3), (1, 4, 6)]
