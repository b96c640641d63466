"""The chunked loss against the same loss of all predictions at once; what it holds at once; its figures."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from close import assert_close
from torch import nn

from eagle31_hf.training import chunked
from eagle31_hf.training.chunked import Predictions, chunked_loss
from eagle31_hf.training.losses import DraftDistribution, TargetDistribution, mixed, overlap

N, NUM_STATES = 40, 13  # predictions, and the target states they are compared with
H, HT = 6, 5
V, VD = 31, 11
DRAFT_IDS = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:VD]
MIXTURES = [
    {"kl": 1.0},
    {"kl": 0.9, "ce": 0.1},
    {"kl": 0.9, "ce": 0.2},
    {"kl": 0.5, "tv": 0.25, "jsd": 2.0},
    {"lk_lambda": 1.0},
    {"ce": 1.0},
]


def sizes(draft: int, whole: int) -> SimpleNamespace:
    return SimpleNamespace(draft_vocab_size=draft, vocab_size=whole)


class Setting:
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.head = nn.Linear(H, VD, bias=False)
        self.head.weight.data = torch.randn(VD, H, generator=generator)
        self.target_head = torch.randn(V, HT, generator=generator)
        self.target_states = torch.randn(NUM_STATES, HT, generator=generator)
        self.states = torch.randn(N, H, generator=generator).requires_grad_()
        self.weights = torch.rand(N, generator=generator)
        self.at = torch.randint(NUM_STATES, (N,), generator=generator)  # in no order
        self.largest = {"score": 0, "target": 0}

    def target_at(self, at):
        self.largest["target"] = max(self.largest["target"], len(at))
        return TargetDistribution.from_logits(self.target_states[at] @ self.target_head.T, DRAFT_IDS)

    def score(self, states):
        self.largest["score"] = max(self.largest["score"], len(states))
        return self.head(states)

    def chunked(self, mixture, chunk_size):
        predictions = Predictions(self.states, self.weights, self.at)
        drafter = SimpleNamespace(score=self.score, get_output_embeddings=lambda: self.head, config=sizes(VD, V))
        return chunked_loss(mixture, predictions, drafter, self.target_at, at_once=chunk_size)

    def whole(self, mixture):
        """The same without chunks: gradients by hand, from those by the logits of all predictions."""
        logits = self.head(self.states)
        target, draft = self.target_at(self.at), DraftDistribution(logits)
        losses, neg_grad = mixed(mixture, target, draft)
        gradients = torch.autograd.grad(logits, (self.states, self.head.weight), -neg_grad * self.weights[:, None])
        return (self.weights * losses).sum(), losses, gradients, target, draft


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_loss_and_gradients_are_those_of_all_predictions_at_once(mixture, chunk_size):
    setting = Setting()
    wanted, losses, expected, *_ = setting.whole(mixture)
    loss, figures = setting.chunked(mixture, chunk_size)
    found = torch.autograd.grad(3 * loss, (setting.states, setting.head.weight))
    assert_close("loss", loss, wanted, 1e-5)
    assert_close("loss by prediction", figures.loss, losses, 1e-5)
    assert_close("gradient of the states", found[0], 3 * expected[0], 1e-5)
    assert_close("gradient of the head", found[1], 3 * expected[1], 2e-5)


def test_gradients_in_fp16():
    """Weights of a mean over thousands of predictions, and the scale that a GradScaler begins with: neither is too
    small or too large for fp16."""
    setting, scale = Setting(), 2.0**16
    setting.weights = setting.weights / 2**20
    *_, expected, _, _ = setting.whole({"kl": 1.0})
    setting.head.half()
    setting.states = setting.states.detach().half().requires_grad_()
    loss, _ = setting.chunked({"kl": 1.0}, 7)
    found = torch.autograd.grad(scale * loss, (setting.states, setting.head.weight))
    assert_close("states", found[0].float() / scale, expected[0], 0.01)
    assert_close("head", found[1].float() / scale, expected[1], 0.01)


def test_no_more_than_asked_for_are_scored_at_once():
    setting = Setting()
    setting.chunked({"kl": 1.0}, 7)
    assert setting.largest["score"] == 7
    assert setting.largest["target"] <= 4 + 1, "a target distribution is computed for each prediction compared with it"


def test_under_autocast_no_chunk_outlives_its_turn():
    """Autocast keeps what it casts of leaves until its context ends, and with it the states of the chunk."""
    setting, parts = Setting(), []
    score = setting.score
    setting.score = lambda states: (
        parts.append(weakref.ref(states if states._base is None else states._base)) or score(states)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        setting.chunked({"kl": 1.0}, 7)
        assert len(parts) == 6
        assert not [part for part in parts if part() is not None]


def test_figures():
    setting = Setting()
    *_, target, draft = setting.whole({"kl": 1.0})
    _, figures = setting.chunked({"kl": 1.0}, 7)
    guess = draft.logits.argmax(-1)
    assert_close("acceptance", figures.acceptance, overlap(target, draft), 1e-6)
    assert_close("coverage", figures.coverage, target.coverage, 1e-6)
    assert_close("greedy acceptance", figures.greedy_acceptance, target.p[torch.arange(N), guess], 1e-6)
    assert figures.guess.equal(guess)
    assert figures.is_right.tolist() == [int(g) == int(b) for g, b in zip(guess, target.best, strict=True)]


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
    """Where one process of several has no prediction, its backward pass must not be left out."""
    setting = Setting()
    setting.states = setting.states[:0]
    setting.weights = setting.weights[:0]
    setting.at = setting.at[:0]
    loss, figures = setting.chunked({"kl": 1.0}, 7)
    loss.backward()
    assert loss.item() == 0.0
    assert figures.loss.shape == (0,)
    assert setting.head.weight.grad.abs().sum() == 0


@pytest.mark.parametrize(("draft", "whole"), [(4_000, 150_000), (32_000, 150_000), (50_000, 50_000)])
def test_a_chunk_on_a_gpu_has_room_for_the_target_s_logits_too(draft, whole):
    """A small draft vocabulary would otherwise have chunks of so many predictions that the target's fill the GPU."""
    states = torch.empty(16384, 4096, device="meta")  # no CPU
    for num_targets in (16384, 4096):
        num = chunked.predictions_at_once(sizes(draft, whole), states, num_targets)
        assert num > 100
        filled = 4 * num * (draft + whole * num_targets / 16384) / chunked.BYTES_AT_ONCE
        assert 0.9 < filled <= 1
