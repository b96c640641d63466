"""FLOP of what runs: products as torch counts them, attention without what a causal one leaves out."""

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from eagle31_hf.training.flop import FlopCounter, flop_of

B, H, S, D = 2, 3, 8, 16


def test_products_are_two_flop_for_each_pair():
    x, weight = torch.randn(5, 7), torch.randn(11, 7, requires_grad=True)
    with FlopCounter() as counter:
        linear(x, weight).sum().backward()
    assert counter.total == 2 * (2 * 5 * 7 * 11)  # forward, and the gradient of the weight


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_a_cpu_counts_what_is_seen(is_causal):
    q, k, v = (torch.randn(B, H, S, D, requires_grad=True) for _ in range(3))
    forward = B * H * S * S * 2 * (D + D) // (2 if is_causal else 1)
    with FlopCounter() as counter:
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert counter.total == forward
    with FlopCounter() as counter:
        out.sum().backward()
    assert counter.total == 2.5 * forward


def test_attention_of_a_gpu_counts_what_is_seen():
    q, k, v = (torch.empty(B, H, S, D, device="meta", dtype=torch.bfloat16) for _ in range(3))
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    for is_causal in (False, True):
        given = q, k, v, 0.0, is_causal
        wanted = B * H * S * S * 4 * D // (1 + is_causal)
        assert flop_of(attend.default, given, {}, attend(*given)) == wanted


def test_counting_changes_no_number():
    x, weight = torch.randn(40, 64), torch.randn(64, 64)
    with FlopCounter():
        found = scaled_dot_product_attention(*(linear(x, weight).view(1, 1, 40, 64) for _ in range(3)))
    assert found.equal(scaled_dot_product_attention(*(linear(x, weight).view(1, 1, 40, 64) for _ in range(3))))
