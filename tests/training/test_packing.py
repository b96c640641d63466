"""Packing loses no token and mixes no texts; batches mark what is padding."""

import random

import pytest
import torch

from eagle31_hf.training.packing import Collator, PackedExamples, pack

WIDTH = 3


def example(length: int, seed: int = 0, **states) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, 90, (length,), generator=generator),
        "answers": torch.rand(length, generator=generator) > 0.3,
    } | states


def with_states(length: int, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    return example(
        length, states=torch.randn(length, 2 * WIDTH, dtype=dtype), last_states=torch.randn(length, WIDTH, dtype=dtype)
    )


@pytest.mark.parametrize("seed", range(5))
def test_packs_hold_every_example_once_and_fit(seed):
    draw = random.Random(seed)
    lengths = [draw.choice((1, 3, 17, draw.randint(1, 64))) for _ in range(500)]
    packs = pack(lengths, 64)
    assert sorted(index for indices in packs for index in indices) == [*range(500)]
    totals = [sum(lengths[index] for index in indices) for indices in packs]
    assert max(totals) <= 64
    # No two packs could be one: best fit opens a pack only for what fits into none.
    assert sum(sorted(totals)[:2]) > 64
    assert packs == pack(lengths, 64) == sorted(packs)


@pytest.mark.parametrize(
    ("lengths", "packs"),
    [
        ([], []),
        ([8], [[0]]),
        ([8, 1], [[0], [1]]),
        ([5, 6, 2, 3], [[0, 3], [1, 2]]),
        ([2, 4, 4, 2, 4], [[0, 3, 4], [1, 2]]),
    ],
)
def test_packs(lengths, packs):
    assert pack(lengths, 8) == packs


def test_long_examples_are_refused():
    with pytest.raises(ValueError, match="row 1 has 9 tokens; expected at most 8"):
        pack([3, 9], 8)


class Measured(list):
    """Examples that know their lengths, as a store does."""

    lengths = (5, 6, 2, 3)


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths measured"])
def test_packed_examples(known):
    given = Measured(example(length, length) for length in (5, 6, 2, 3))
    packed = PackedExamples(given if known else [*given], 8)
    assert (len(packed), packed.lengths) == (2, [8, 8])
    torch.testing.assert_close(packed[1], [given[1], given[2]])


def test_a_batch_spelt_out():
    batch = Collator()(
        [
            [{"input_ids": [5, 6, 7], "answers": [0, 1, 1]}, {"input_ids": [8, 9], "labels": [-100, 9]}],
            {"input_ids": torch.tensor([4]), "loss_mask": torch.tensor([1])},
        ]
    )
    expected = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9], [4, 0, 0, 0, 0]]),
        "answers": torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0]]).bool(),
        "documents": torch.tensor([[1, 1, 1, 2, 2], [1, 0, 0, 0, 0]]),
    }
    torch.testing.assert_close(batch, expected)


def test_states_are_padded_with_zeros():
    items = [[with_states(2), with_states(4)], with_states(7), with_states(3)]
    batch = Collator()(items)
    for name, width in (("states", 2 * WIDTH), ("last_states", WIDTH)):
        assert batch[name].shape == (3, 7, width)
        torch.testing.assert_close(batch[name][0, :6], torch.cat([part[name] for part in items[0]]))
        torch.testing.assert_close(batch[name][1, :7], items[1][name])
        assert not batch[name][batch["documents"] == 0].any()
    assert {name: part.dtype for name, part in batch.items()} == {
        "input_ids": torch.int64,
        "answers": torch.bool,
        "documents": torch.int64,
        "states": torch.bfloat16,
        "last_states": torch.bfloat16,
    }


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        ([{"input_ids": [1, 2]}], "a row has input_ids; expected input_ids and one of"),
        ([{"answers": [1, 1]}], "a row has answers; expected input_ids"),
        ([with_states(3), example(3)], "rows have .*; expected the same in all of a batch"),
        ([[with_states(3), example(2)]], r"rows of \[3, 2\] tokens have states of \[3, 0\]"),
        ([example(4, states=torch.zeros(3, 6))], r"rows of \[4\] tokens have states of \[3\]"),
    ],
)
def test_bad_examples(items, problem):
    with pytest.raises(ValueError, match=problem):
        Collator()(items)
