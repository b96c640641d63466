"""The chunked loss against the same loss of all rows at once; what it holds at once; its figures."""

import pytest
import torch
from close import assert_close
from torch import nn

from eagle31_hf.training.chunked import chunked_loss
from eagle31_hf.training.losses import Drafts, Goal, mixed, overlap

N, PLACES, H, HT, V, VD = 40, 13, 6, 5, 31, 11
DRAFT_IDS = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:VD]
MIXTURES = [{"kl": 1.0}, {"kl": 0.5, "tv": 0.25, "jsd": 2.0}, {"lk_lambda": 1.0}, {"ce": 1.0}]


class Setting:
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.head = nn.Linear(H, VD, bias=False)
        self.head.weight.data = torch.randn(VD, H, generator=generator)
        self.target_head = torch.randn(V, HT, generator=generator)
        self.target_states = torch.randn(PLACES, HT, generator=generator)
        self.states = torch.randn(N, H, generator=generator).requires_grad_()
        self.weights = torch.rand(N, generator=generator)
        self.places = torch.randint(PLACES, (N,), generator=generator)  # in no order
        self.largest = {"score": 0, "goal": 0}

    def goal_of(self, places):
        self.largest["goal"] = max(self.largest["goal"], len(places))
        return Goal.of(self.target_states[places] @ self.target_head.T, DRAFT_IDS)

    def score(self, states):
        self.largest["score"] = max(self.largest["score"], len(states))
        return self.head(states)

    def chunked(self, mixture, rows_at_once):
        return chunked_loss(
            mixture,
            self.states,
            self.weights,
            self.places,
            self.goal_of,
            self.score,
            list(self.head.parameters()),
            VD,
            bytes_at_once=4 * VD * rows_at_once,
        )

    def whole(self, mixture):
        """The same without chunks: gradients by hand, from pulls on the logits of all rows."""
        logits = self.head(self.states)
        goal, drafts = self.goal_of(self.places), Drafts(logits)
        losses, pull = mixed(mixture, goal, drafts)
        gradients = torch.autograd.grad(logits, (self.states, self.head.weight), -pull * self.weights[:, None])
        return (self.weights * losses).sum(), losses, gradients, goal, drafts


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: "+".join(mixture))
@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
def test_loss_and_gradients_are_those_of_all_rows_at_once(mixture, rows_at_once):
    setting = Setting()
    wanted, losses, expected, *_ = setting.whole(mixture)
    loss, figures = setting.chunked(mixture, rows_at_once)
    found = torch.autograd.grad(3 * loss, (setting.states, setting.head.weight))
    assert_close("loss", loss, wanted, 1e-5)
    assert_close("loss by row", figures.loss, losses, 1e-5)
    assert_close("gradient of the states", found[0], 3 * expected[0], 1e-5)
    assert_close("gradient of the head", found[1], 3 * expected[1], 2e-5)


def test_no_more_rows_than_asked_for_are_scored_at_once():
    setting = Setting()
    setting.chunked({"kl": 1.0}, 7)
    assert setting.largest["score"] == 7
    assert setting.largest["goal"] <= 4, "the goal of a place is computed for each of its rows"


def test_figures():
    setting = Setting()
    *_, goal, drafts = setting.whole({"kl": 1.0})
    _, figures = setting.chunked({"kl": 1.0}, 7)
    guess = drafts.logits.argmax(-1)
    assert_close("acceptance", figures.acceptance, overlap(goal, drafts), 1e-6)
    assert_close("coverage", figures.coverage, goal.coverage, 1e-6)
    assert_close("greedy acceptance", figures.greedy_acceptance, goal.p[torch.arange(N), guess], 1e-6)
    assert figures.guess.equal(guess)
    assert figures.is_right.tolist() == [int(g) == int(b) for g, b in zip(guess, goal.best, strict=True)]


def test_a_frozen_head_gets_no_gradient():
    setting = Setting()
    setting.head.requires_grad_(False)
    loss, _ = setting.chunked({"kl": 1.0}, 7)
    loss.backward()
    assert setting.head.weight.grad is None
    assert setting.states.grad.abs().sum() > 0


def test_without_gradients_none_are_taken():
    setting = Setting()
    with torch.no_grad():
        loss, figures = setting.chunked({"kl": 1.0}, 7)
    assert not loss.requires_grad
    assert_close("loss", loss, (setting.weights * figures.loss).sum(), 1e-6)


def test_nothing_supervised_is_a_loss_of_nothing_that_still_reaches_the_parameters():
    """Where one process of several has no row, its backward pass must not be left out."""
    setting = Setting()
    setting.states, setting.weights, setting.places = setting.states[:0], setting.weights[:0], setting.places[:0]
    loss, figures = setting.chunked({"kl": 1.0}, 7)
    loss.backward()
    assert loss.item() == 0.0
    assert figures.loss.shape == (0,)
    assert setting.head.weight.grad.abs().sum() == 0
