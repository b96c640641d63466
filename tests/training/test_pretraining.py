"""The small targets of the demo and of the search: training that goes on where it was stopped, and teaches them not to
repeat themselves."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import pretraining

IDS = torch.randint(2, 63, (40_000,), generator=torch.Generator().manual_seed(0))


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=1024, **sizes))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The weights of a run that is never stopped; runs save often, and come to what is repeated early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "SAVE_STEPS", 2)
        patch.setattr(pretraining, "UNREPEATED_FROM", 0.8)
        whole = tiny_model()
        pretraining.train(whole, IDS, 10, tmp_path_factory.mktemp("whole") / "whole.state")
        yield whole.state_dict()


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("stop", [3, 7, 9])  # before long sequences, among them, among what is repeated
def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path, monkeypatch, weights, stop):
    plain = pretraining.loss_of

    def stopping(model, ids, step, steps):
        if step == stop:
            raise StoppedError
        return plain(model, ids, step, steps)

    monkeypatch.setattr(pretraining, "loss_of", stopping)
    with pytest.raises(StoppedError):
        pretraining.train(tiny_model(), IDS, 10, tmp_path / "stopped.state")
    monkeypatch.setattr(pretraining, "loss_of", plain)
    resumed = tiny_model()
    pretraining.train(resumed, IDS, 10, tmp_path / "stopped.state")
    for name, weight in weights.items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_batches_of_an_epoch_are_all_sequences_once():
    steps = 10_000  # all of them short
    num_batches = len(IDS) // pretraining.SHORT // (pretraining.TOKENS // pretraining.SHORT)
    seen = torch.cat([pretraining.batch_of(IDS, step, steps) for step in range(num_batches)])
    assert seen.shape == (num_batches * pretraining.TOKENS // pretraining.SHORT, pretraining.SHORT)
    assert len(seen.unique(dim=0)) == len(seen)
    assert pretraining.batch_of(IDS, steps - 1, steps).shape[1] == pretraining.LONG


def test_what_was_there_before_is_repeated():
    ids = torch.tensor([[5, 1, 2, 3, 4, 9, 1, 2, 3, 4, 7, 2, 3, 4]])
    assert pretraining.repeated(ids).tolist() == [[False] * 6 + [True] * 4 + [False] * 4]
    assert pretraining.repeated(ids[:, :6]).sum() == 0


def test_a_model_learns_not_to_repeat_itself():
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop = IDS[:4].repeat(32)[None]

    def taught(loss_of, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    taught(lambda: model(input_ids=loop, labels=loop).loss, 40)
    losses = taught(lambda: pretraining.loss_of_repeating(model, loop[0], step=0), 10)
    assert losses[-1] < 0.2 * losses[0]


def test_gradients_of_the_last_steps_are_those_without_autocasts_cache():
    """A pass without gradients in between leaves nothing behind."""
    found = []
    for cache in (True, False):
        model = tiny_model()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = pretraining.loss_of_repeating(model, IDS, step=0)
        loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 5
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
