"""Positions of packed texts, and skips that spread them."""

import pytest
import torch
from training_runs import PLAIN, InterruptAfter, LostMachineError, make_examples, make_trainer, run

from eagle31_hf.training.documents import position_skips, positions_of

DOCUMENTS = torch.tensor([[1] * 7 + [2] * 20 + [0] * 3, [1] * 30])
REACH = 100


@pytest.mark.parametrize("seed", range(20))
def test_each_text_skips_once_and_stays_within_reach(seed):
    torch.manual_seed(seed)
    skips = position_skips(DOCUMENTS, REACH)
    positions = positions_of(DOCUMENTS, 30, DOCUMENTS.device) + skips
    assert int(positions.max()) < REACH
    for sequence, start, end in ((0, 0, 7), (0, 7, 27), (1, 0, 30)):
        found = positions[sequence, start:end]
        steps = found.diff()
        assert int(found[0]) >= 0
        assert (steps >= 1).all()
        assert int((steps > 1).sum()) <= 1


def test_skips_are_drawn_for_every_text_and_from_torchs_generator():
    torch.manual_seed(0)
    first, second = position_skips(DOCUMENTS, REACH), position_skips(DOCUMENTS, REACH)
    torch.manual_seed(0)
    assert torch.equal(first, position_skips(DOCUMENTS, REACH))
    assert not torch.equal(first, second)
    sizes = [int(part.max()) for part in (first[0, :7], first[0, 7:27], first[1])]
    assert len(set(sizes)) == 3
    assert min(sizes) >= 0


def test_a_text_as_long_as_the_reach_is_left_as_it_is():
    assert position_skips(DOCUMENTS[1:], 30).eq(0).all()
    assert position_skips(DOCUMENTS[1:], 10).eq(0).all()


def test_positions_seen_in_training_are_spread_and_those_of_an_evaluation_are_not(tmp_path):
    trainer = make_trainer(
        tmp_path, position_reach=90, eval_strategy="epoch", eval_dataset=make_examples(2, seed=1), **PLAIN
    )
    seen = {True: 0, False: 0}

    def look(drafter, args, kwargs):
        seen[drafter.training] = max(seen[drafter.training], int(kwargs["position_ids"].max()))

    trainer.drafter.register_forward_pre_hook(look, with_kwargs=True)
    trainer.train()
    assert 24 + 3 < seen[True] < 90 + 3
    assert seen[False] < 24 + 3


def test_a_resumed_run_draws_the_skips_it_would_have_drawn(tmp_path):
    options = PLAIN | {"position_reach": 90, "save_strategy": "steps", "save_steps": 1}
    whole = run(make_trainer(tmp_path / "whole", **options))
    with pytest.raises(LostMachineError):
        make_trainer(tmp_path / "parts", callbacks=[InterruptAfter(2)], **options).train()
    resumed = run(make_trainer(tmp_path / "parts", **options), resume=True)
    assert resumed.logs == whole.logs
    plain = run(make_trainer(tmp_path / "plain", **PLAIN))
    assert not torch.equal(plain.losses, whole.losses)
