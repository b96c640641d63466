"""Intervals by bootstrap over prompts: where they must lie, and how often they hold the truth."""

import pytest
import torch

from eagle31_hf.diagnostics.bootstrap import DRAWS, drawn_prompts, drawn_ratios, ratio_interval


def test_every_draw_is_as_large_as_the_set():
    draws = drawn_prompts(7, 0)
    assert draws.shape == (DRAWS, 7)
    assert draws.sum(1).tolist() == [7.0] * DRAWS
    assert draws.mean(0).tolist() == pytest.approx([1.0] * 7, abs=0.2)


def test_prompts_that_are_all_alike_leave_no_doubt():
    low, high = ratio_interval(torch.full((5, 2), 6.0), torch.full((5,), 3.0))
    assert low.tolist() == high.tolist() == [2.0, 2.0]


def test_nothing_to_divide_by_is_not_a_number():
    low, high = ratio_interval(torch.zeros(3), torch.zeros(3))
    assert low.isnan()
    assert high.isnan()


def test_denominators_of_each_depth_are_its_own():
    numerators, denominators = torch.tensor([[2.0, 1.0], [2.0, 1.0]]), torch.tensor([[4.0, 1.0], [4.0, 1.0]])
    assert drawn_ratios(numerators, denominators).unique(dim=0).tolist() == [[0.5, 1.0]]


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """Of 200 sets of 40 prompts, whose rounds accept 0 to 4 of 5 drafts each, the true mean is 2."""
    generator = torch.Generator().manual_seed(0)
    sets = torch.randint(0, 5, (200, 40, 10), generator=generator).double().sum(-1)
    ends = [ratio_interval(one, torch.full((40,), 10.0)) for one in sets]
    held = sum(bool(low <= 2 <= high) for low, high in ends)
    assert 178 <= held <= 198  # 190 expected; bootstrap over so few prompts is a little narrow
