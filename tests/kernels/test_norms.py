"""The norms: their kernels, in Triton's interpreter where there is no GPU, beside their references."""

import pytest
import torch
from kernel_close import assert_matches
from poison import Guarded, apart, turned
from torch import Tensor

from eagle31_hf.kernels.layer_parts import add_rms_norm, embed_norms

pytest.importorskip("triton")

EPS = 1e-5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, NaN before and behind them."""
    return Guarded.holding((torch.randn(shape) * 4).to(DEVICE, dtype)).tensor


def apart_in_time(x: Tensor) -> Tensor:
    """Returns a copy of x (B, T, h) with NaN between its rows and further tokens between its sequences."""
    return apart(torch.nn.functional.pad(x, (0, 0, 1, 2), value=float("nan")))[:, 1:-2]


def assert_sums(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """Asserts that the kernel's sum is the reference's, and its norm that of its own sum, which may be cut off where
    torch rounds."""
    normed, total = add_rms_norm.kernel()(x, residual, weight, EPS)
    assert normed.is_contiguous()
    assert total.is_contiguous()
    assert_matches("sum", total, add_rms_norm.reference(x, residual, weight, EPS)[1])
    assert_matches("normed", normed, add_rms_norm.reference(total, None, weight, EPS)[0])


@DTYPES
@pytest.mark.parametrize("shape", [(7,), (1, 1, 1), (3, 5, 61), (2, 1, 500), (1, 2, 4096)], ids=str)
def test_add_rms_norm_matches_reference(shape, dtype):
    torch.manual_seed(0)
    x, residual, weight = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)
    assert_sums(x, residual, weight)
    assert_sums(x, None, weight)


@pytest.mark.parametrize("other", [apart, apart_in_time, turned])
def test_add_rms_norm_of_strided_rows(other):
    torch.manual_seed(0)
    x, residual, weight = drawn(2, 3, 61), drawn(2, 3, 61), drawn(61)
    assert_sums(other(x), residual, weight)
    assert_sums(x, other(residual), weight)
    assert_sums(other(x), None, drawn(61, 2)[:, 1])


def test_add_rms_norm_of_a_residual_in_fp32():
    torch.manual_seed(0)
    assert_sums(drawn(1, 3, 60, dtype=torch.bfloat16), drawn(1, 3, 60), drawn(60))


def test_norm_is_that_of_the_rounded_sum():
    x, residual, weight = (torch.full((1, 1, 64), each, device=DEVICE).bfloat16() for each in (1.0, 1 / 1024, 1.0))
    x[..., 0] = 3.0
    normed, total = add_rms_norm.kernel()(x, residual, weight[0, 0].float(), 0.0)
    assert torch.equal(total, x)  # bf16 has 8 bits
    assert_matches("normed", normed, add_rms_norm.reference(x, None, weight[0, 0].float(), 0.0)[0])


def test_add_rms_norm_copies():
    x = drawn(1, 2, 8)
    total = add_rms_norm.kernel()(x, None, drawn(8), EPS)[1]
    assert total.data_ptr() != x.data_ptr()
    assert torch.equal(total, x)


@DTYPES
@pytest.mark.parametrize("table_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 5, 61), (2, 1, 500)], ids=str)
def test_embed_norms_match_reference(shape, table_dtype, dtype):
    torch.manual_seed(0)
    table = Guarded.holding(drawn(11, shape[-1], dtype=dtype).to(table_dtype or dtype)).tensor
    ids = Guarded.holding(torch.randint(11, shape[:2], device=DEVICE)).tensor
    args = ids, table, drawn(shape[-1]), drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype), EPS
    assert_matches("out", embed_norms.kernel()(*args), embed_norms.reference(*args))


@pytest.mark.parametrize("other", [apart, apart_in_time, turned])
def test_embed_norms_of_strided_rows(other):
    torch.manual_seed(0)
    state, weights = other(drawn(2, 3, 61)), (drawn(61), drawn(61, 2)[:, 0])
    for table in (drawn(11, 61), apart(drawn(11, 61)), turned(drawn(11, 61))):
        for ids in (torch.randint(11, (2, 9), device=DEVICE)[:, 1::3], torch.randint(11, (3, 2), device=DEVICE).T):
            args = ids, table, weights[0], state, weights[1], EPS
            assert_matches("out", embed_norms.kernel()(*args), embed_norms.reference(*args))


def test_embeddings_are_rounded_to_the_dtype_of_the_state():
    last = 2**-7  # a unit in the last place of bf16 at 1
    table, weight = torch.ones(2, 1, 64, device=DEVICE)
    table[0, :2] += 0.45 * last  # bf16 drops it: the norm is the weight, else it crosses to the next number
    weight[0, :2] += torch.tensor([0.6, 0.3], device=DEVICE) * last  # where one cuts off, and where one rounds
    state, ids = torch.ones(1, 1, 64, device=DEVICE).bfloat16(), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    out, of_rounded = (
        embed_norms.kernel()(ids, t, weight[0], state, weight[0], 0.0) for t in (table, table.bfloat16())
    )
    assert torch.equal(out, of_rounded)
