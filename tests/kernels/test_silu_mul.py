"""`silu_mul`: its kernel, in Triton's interpreter where there is no GPU, beside its reference."""

import pytest
import torch
from kernel_close import assert_matches
from poison import Guarded, apart, turned

from eagle31_hf.kernels.silu_mul import silu_mul

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("on_the_gpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 5, 61), (2, 1, 1500)], ids=str)
def test_kernel_matches_reference(shape, dtype):
    torch.manual_seed(0)
    gate, up = (Guarded.holding((torch.randn(shape) * 4).to(dtype)).tensor for _ in range(2))
    assert_matches("out", silu_mul.kernel()(gate, up), silu_mul.reference(gate, up))


@pytest.mark.parametrize("make", [apart, turned], ids=["NaN between rows", "entries far apart"])
def test_inputs_that_are_parts_of_others(make):
    torch.manual_seed(0)
    gate, up = (make(torch.randn(2, 5, 61)) for _ in range(2))
    got = silu_mul.kernel()(gate, up)
    assert got.is_contiguous()
    assert_matches("out", got, silu_mul.reference(gate, up))
