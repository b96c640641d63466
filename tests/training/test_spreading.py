"""Skips that spread the positions of packed texts: where they begin, how far they go, and what draws them."""

import pytest
import torch
from factories import build
from training_runs import PLAIN, make_examples, make_trainer, run

from eagle31_hf.seeding import generator_of
from eagle31_hf.training.documents import position_skips, positions_of, reach_within

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


def test_skips_are_drawn_for_every_text_step_and_process():
    first, *others = (
        position_skips(DOCUMENTS, REACH, generator_of(*place)) for place in ((0, 0, 0), (0, 1, 0), (0, 0, 1))
    )
    assert torch.equal(first, position_skips(DOCUMENTS, REACH, generator_of(0, 0, 0)))
    assert not any(torch.equal(first, other) for other in others)
    sizes = [int(part.max()) for part in (first[0, :7], first[0, 7:27], first[1])]
    assert len(set(sizes)) == 3
    assert min(sizes) >= 0


def test_padding_skips_nothing():
    skips = torch.stack([position_skips(DOCUMENTS, REACH, generator_of(seed)) for seed in range(20)])
    assert skips[:, 0, 27:].eq(0).all()
    assert skips[:, 1].any()


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


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0] * 3, "long_factor": [8.0] * 3, "factor": 8.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "longest", "expected"),
    [({"rope_type": "default", "rope_theta": 1e4}, 256, 254), (LONG, 256, 30), (DYNAMIC, 32, 30), (DYNAMIC, 500, 300)],
)
def test_the_last_step_stays_where_the_rope_is_as_it_is_for_short_texts(rope, longest, expected):
    drafter = build(max_position_embeddings=longest, rope_parameters=rope)
    assert reach_within(drafter.config, 300, 3) == expected


@pytest.mark.parametrize(("rope", "longest"), [(LONG, 256), (DYNAMIC, 32)])
def test_a_rope_that_changes_with_length_is_trained_as_short_texts_are_served(tmp_path, rope, longest):
    drafter = build(max_position_embeddings=longest, rope_parameters=rope)
    served = drafter.rotary_emb.inv_freq.clone()
    seen = []
    drafter.rotary_emb.register_forward_hook(lambda module, *_: seen.append(module.inv_freq.clone()))
    examples = make_examples()
    trainer = make_trainer(tmp_path, examples, drafter, position_reach=4 * longest, **PLAIN)
    assert trainer.position_reach > max(len(example["input_ids"]) for example in examples)
    trainer.train()
    assert len(seen) >= len(examples)
    assert all(torch.equal(one, served) for one in seen)


def test_an_evaluation_on_the_way_changes_no_skip(tmp_path):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": make_examples(2, seed=1)}
    alone, watched = (
        run(make_trainer(tmp_path / name, position_reach=90, max_steps=3, **PLAIN, **more))
        for name, more in (("alone", {}), ("watched", evaluated))
    )
    assert torch.equal(alone.losses, watched.losses)
