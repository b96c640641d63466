"""The small targets of the demo and of the search: training that goes on where it was stopped, and repetitions."""

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


@pytest.fixture
def saved_often(monkeypatch):
    monkeypatch.setattr(pretraining, "SAVE_STEPS", 2)


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("stop", [3, 7, 9])  # before long sequences, among them, among repetitions
def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path, monkeypatch, saved_often, stop):
    whole = tiny_model()
    pretraining.train(whole, IDS, 10, tmp_path / "whole.state")

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
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_batches_of_an_epoch_are_all_sequences_once():
    steps = 10_000  # all of them short
    num_batches = len(IDS) // pretraining.SHORT // (pretraining.TOKENS // pretraining.SHORT)
    seen = torch.cat([pretraining.batch_of(IDS, step, steps) for step in range(num_batches)])
    assert seen.shape == (num_batches * pretraining.TOKENS // pretraining.SHORT, pretraining.SHORT)
    assert len(seen.unique(dim=0)) == len(seen)
    assert pretraining.batch_of(IDS, steps - 1, steps).shape[1] == pretraining.LONG


def test_repetitions_repeat_a_piece_of_the_text():
    made = pretraining.Repetitions(IDS, 6, 256, seed=1)
    for sequence, (context, size) in zip(made.sequences, made.spans, strict=True):
        pieces = sequence[context:]
        assert torch.equal(pieces[size:], pieces[:-size])


def test_the_loss_of_repetitions_wants_them_ever_less_likely():
    made = pretraining.Repetitions(IDS, 2, 128, seed=1)

    def logits_of(factor: float) -> torch.Tensor:
        """Logits by which every repetition has `factor` times the probability of the one before."""
        logits = torch.zeros(2, 128, 64)
        for b, (context, size) in enumerate(made.spans):
            for t in range(context - 1, 127):
                repetition = (t - context + 1) // size
                p = torch.tensor(0.9 * factor**repetition)
                others = ((1 - p) / 63).log()
                logits[b, t] = others
                logits[b, t, made.sequences[b, t + 1]] = p.log()
        return logits

    assert made.loss(logits_of(0.5)) < 0.01 < made.loss(logits_of(0.9)) < made.loss(logits_of(1.0))
