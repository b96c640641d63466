"""Errors that callers tell apart: generate() refuses to draft, or something else is wrong."""

import pytest
import torch

from eagle31_hf.errors import is_refusal


def test_a_refusal_of_generate_is_told_from_other_errors(target, drafter):
    empty = torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(ValueError, match="the prompt is empty") as caught:
        target.generate(empty, attention_mask=torch.ones_like(empty), custom_generate=drafter.decode)
    assert is_refusal(caught.value)
    with pytest.raises(ValueError, match="states") as caught:
        drafter(torch.zeros(1, 2, dtype=torch.long))
    assert not is_refusal(caught.value)
