"""Intervals by bootstrap over prompts: where they must lie, and how often they hold the truth."""

import math

import pytest
import torch

from eagle31_hf.reports.figures import DRAWS, drawn_ratios, interval_of


def interval(numerators, denominators):
    return interval_of(drawn_ratios(numerators, denominators))


def test_every_draw_is_as_large_as_the_set():
    """Of 7 prompts, of which one alone counts for anything, it is drawn 0 to 7 times, on average once."""
    draws = drawn_ratios(torch.tensor([7.0] + [0.0] * 6), torch.ones(7))
    assert draws.shape == (DRAWS,)
    assert set(draws.tolist()) <= set(map(float, range(8)))
    assert float(draws.mean()) == pytest.approx(1.0, abs=0.2)


def test_figures_of_the_same_prompts_are_drawn_together_and_those_of_others_apart():
    counts = torch.arange(5.0)
    assert drawn_ratios(counts, torch.ones(5)).equal(drawn_ratios(counts, torch.ones(5)))
    assert not drawn_ratios(counts, torch.ones(5)).equal(drawn_ratios(counts, torch.ones(5), seed=1))


def test_prompts_that_are_all_alike_leave_no_doubt():
    assert interval(torch.full((5,), 6.0), torch.full((5,), 3.0)) == (2.0, 2.0)


def test_nothing_to_divide_by_is_not_a_number():
    assert all(map(math.isnan, interval(torch.zeros(3), torch.zeros(3))))


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """Of 200 sets of 40 prompts, whose rounds accept 0 to 4 of 5 drafts each, the true mean is 2."""
    generator = torch.Generator().manual_seed(0)
    sets = torch.randint(0, 5, (200, 40, 10), generator=generator).double().sum(-1)
    ends = [interval(one, torch.full((40,), 10.0)) for one in sets]
    held = sum(low <= 2 <= high for low, high in ends)
    assert 178 <= held <= 198  # 190 expected; bootstrap over so few prompts is a little narrow
