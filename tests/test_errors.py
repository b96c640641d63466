"""Errors that callers tell apart: generate() refuses to draft, or something else is wrong."""

import pytest
import torch

from eagle31_hf.errors import DraftingRefusedError


def test_a_refusal_of_generate_is_told_from_other_errors(target, drafter):
    empty = torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(DraftingRefusedError, match="the prompt is empty"):
        target.generate(empty, attention_mask=torch.ones_like(empty), custom_generate=drafter.decode)
    with pytest.raises(ValueError, match="states") as caught:
        drafter(torch.zeros(1, 2, dtype=torch.long))
    assert not isinstance(caught.value, DraftingRefusedError)
