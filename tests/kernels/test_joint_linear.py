"""`joint_linear` and `gated_linear`: their kernels, in Triton's interpreter where there is no GPU, beside their
references."""

import pytest
import torch
from close import assert_close
from kernel_close import assert_matches
from poison import Guarded, apart, turned

from eagle31_hf.kernels import joint_linear_triton
from eagle31_hf.kernels.joint_linear import gated_linear, joint_linear

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    """Random values, with NaN before and behind them."""
    return Guarded.holding((torch.randn(shape) * scale).to(DEVICE, dtype)).tensor


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product in fp32, rounded once: torch's own in 16 bits may round sums on the way."""
    out = x.float() @ weight.float().mT
    return (out if bias is None else out + bias.float()).to(x.dtype)


@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.bfloat16, False), (torch.float16, True)], ids=str)
@pytest.mark.parametrize("rows", [(1,), (2, 3), (60,)], ids=str)
@pytest.mark.parametrize("widths", [(7,), (70, 16, 35)], ids=str)
def test_joint_products_are_those_of_the_layers(widths, rows, has_bias, dtype):
    torch.manual_seed(0)
    x = drawn(*rows, 192, dtype=dtype)
    weights = [drawn(width, 192, dtype=dtype) for width in widths]
    biases = [drawn(width, dtype=dtype) for width in widths] if has_bias else []
    got = joint_linear.kernel()(x, weights, biases).split(widths, dim=-1)
    for i, (part, weight) in enumerate(zip(got, weights, strict=True)):
        assert_matches(f"product {i}", part, exact(x, weight, biases[i] if has_bias else None))


@LOW
@pytest.mark.parametrize("rows", [(1,), (2, 3), (60,)], ids=str)
def test_gated_products(rows, dtype):
    torch.manual_seed(0)
    x, gate, up = drawn(*rows, 128, dtype=dtype), *(drawn(70, 128, dtype=dtype, scale=0.1) for _ in range(2))
    g, u = exact(x, gate).float(), exact(x, up).float()
    got, expected = gated_linear.kernel()(x, gate, up), torch.nn.functional.silu(g) * u
    assert got.dtype == dtype
    # Each product may be rounded otherwise before they are multiplied: the interpreter cuts off what torch rounds.
    assert_close("out", got.float(), expected, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("rows", "outputs"), [(3, 4609), (33, 4609), (33, 16400)])
def test_every_tile(outputs, rows):
    torch.manual_seed(0)
    x, weight, other = drawn(rows, 64), drawn(outputs, 64), drawn(1, 64)
    got = joint_linear.kernel()(x, [weight, other], [])
    assert_matches("out", got, torch.cat((exact(x, weight), exact(x, other)), dim=-1))


def test_many_outputs_of_a_gate():
    torch.manual_seed(0)
    x, gate, up = drawn(3, 64), drawn(12300, 64, scale=0.1), drawn(12300, 64, scale=0.1)
    expected = torch.nn.functional.silu(exact(x, gate).float()) * exact(x, up).float()
    assert_close("out", gated_linear.kernel()(x, gate, up).float(), expected, 4 * torch.finfo(x.dtype).eps)


def test_rows_that_lie_apart():
    torch.manual_seed(0)
    x, weight = drawn(2, 3, 64), drawn(20, 64)
    for given in (apart(x), turned(x)):
        assert_matches("out", joint_linear.kernel()(given, [weight], []), exact(x, weight))


LEFT = {
    "many rows": lambda x, w: (x.repeat(33, 1), w),
    "more rows of one weight than cuBLAS is slower for": lambda x, w: (x.repeat(10, 1), w),
    "fp32": lambda x, w: (x.float(), w.float()),
    "inputs that no tile divides": lambda x, w: (x[:, :63].contiguous(), w[:, :63].contiguous()),
    "a weight that is turned": lambda x, w: (x, turned(w)),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_torch(monkeypatch, case):
    """No kernel is launched, and the product is torch's."""
    monkeypatch.setattr(joint_linear_triton, "joint_linear_kernel", None)
    monkeypatch.setattr(joint_linear_triton, "gated_linear_kernel", None)
    x, weight = LEFT[case](drawn(2, 64), drawn(20, 64))
    expected = torch.nn.functional.linear(x, weight)
    assert torch.equal(joint_linear.kernel()(x, [weight], []), expected)
    if 16 < len(x) <= 64:
        return  # two weights are taken
    gated = torch.nn.functional.silu(expected) * expected
    assert torch.equal(gated_linear.kernel()(x, weight, weight), gated)
    both = joint_linear.kernel()(x, [weight, weight], []).split(20, dim=-1)
    biased = joint_linear.kernel()(x, [weight, weight], [weight[:, 0].contiguous()] * 2)[..., 20:]
    four = joint_linear.kernel()(x, [weight] * 4, []).split(20, dim=-1)  # more weights than a launch takes
    for got in (*both, biased - weight[:, 0], *four):
        assert_close("product", got.float(), expected.float(), 2 * torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("shared", [65_536, 101_376, 166_912, 232_448])
@pytest.mark.parametrize("num_weights", [1, 2])
def test_stages_fit_in_shared_memory(num_weights, shared):
    for rows in (1, 17, 64):
        for outputs in (1024, 8192, 32000):
            cut = joint_linear_triton.tile(rows, outputs, num_weights == 2)
            cut = joint_linear_triton.fitted(cut, 4096, num_weights, shared)
            assert cut.num_stages >= 2
            assert 2 * (cut.rows + num_weights * cut.outputs) * cut.inputs * cut.num_stages <= shared
