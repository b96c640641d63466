"""`assert_close` itself: tolerances go by the scale of what is compared, and no value hides another's error."""

import pytest
import torch
from close import FORWARD, TARGET_FORWARD, assert_close, scale_of

LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("size", [1e-6, 1.0, 21.467348, 1e6])
def test_the_tolerance_is_a_share_of_the_scale(size):
    expected = torch.tensor([0.0, -size, size / 2])
    assert_close("within", expected + 0.9 * FORWARD * size, expected, FORWARD)
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_close("beyond", expected + 1.2 * FORWARD * size, expected, FORWARD)


def test_what_one_processor_rounds_differently_is_within_the_tolerance():
    assert_close("logits", torch.tensor([21.466820, 0.5]), torch.tensor([21.467348, 0.5]), TARGET_FORWARD)


@pytest.mark.parametrize("filling", [LEAST, -torch.inf], ids=["least", "infinite"])
def test_filled_positions_do_not_count_as_scale(filling):
    expected = torch.tensor([filling, 2.0])
    assert scale_of(expected) == 2.0
    with pytest.raises(AssertionError, match="1 of 2 differ"):
        assert_close("masked", torch.tensor([filling, 2.1]), expected, FORWARD)


def test_a_stated_scale_is_used():
    assert_close("loss", torch.tensor([1e-7]), torch.zeros(1), 1e-6, scale=1.0)
    with pytest.raises(AssertionError):
        assert_close("loss", torch.tensor([1e-7]), torch.zeros(1), 1e-6)


@pytest.mark.parametrize("got", [torch.nan, torch.inf], ids=str)
def test_nan_and_infinity_are_close_to_no_number(got):
    with pytest.raises(AssertionError):
        assert_close("value", torch.tensor([got]), torch.tensor([1.0]), 0.5)
