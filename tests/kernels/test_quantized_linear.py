"""`quantized_linear`: its kernel, in Triton's interpreter where there is no GPU, beside its reference."""

import pytest
import torch
from kernel_close import assert_matches
from poison import Guarded, apart, turned

from eagle31_hf.kernels import joint_linear_triton
from eagle31_hf.kernels.joint_linear import quantized_linear
from eagle31_hf.quantized import KINDS, quantized

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with NaN, or with a great number, before and behind it."""
    if tensor.dtype.is_floating_point:
        return Guarded.holding(tensor.to(DEVICE)).tensor
    # The largest int8; of fp8, which has NaN there, the kernel makes 480.
    whole = torch.full((tensor.numel() + 128,), 0x7F, dtype=tensor.dtype, device=DEVICE)
    whole[64:-64] = tensor.flatten()
    return whole[64:-64].view(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 7), (3, 61, 300), (17, 130, 128), (70, 33, 129)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_matches_reference(kind, shape, dtype):
    torch.manual_seed(0)
    rows, outputs, inputs = shape
    weight, scale = map(guarded, quantized(torch.randn(outputs, inputs), kind))
    x = guarded(torch.randn(rows, inputs).to(dtype))
    bias = guarded(torch.randn(outputs).to(dtype)) if rows % 2 else None
    args = (x, weight, scale, bias)
    assert_matches("out", quantized_linear.kernel()(*args), quantized_linear.reference(*args))


@pytest.mark.parametrize("outputs", [2049, 8193])
def test_many_outputs(outputs):
    torch.manual_seed(0)
    args = (torch.randn(17, 16, device=DEVICE), *quantized(torch.randn(outputs, 16, device=DEVICE), "int8"), None)
    assert_matches("out", quantized_linear.kernel()(*args), quantized_linear.reference(*args))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_lie_apart(kind):
    torch.manual_seed(0)
    weight, scale = quantized(torch.randn(20, 33, device=DEVICE), kind)
    x = torch.randn(2, 3, 33, device=DEVICE)
    expected = quantized_linear.reference(x, weight, scale, None)
    args = (apart(x), turned(weight), scale[:, None].expand(-1, 2).contiguous()[:, 0], None)
    assert_matches("out", quantized_linear.kernel()(*args), expected)


def test_every_value_of_fp8():
    bits = torch.tensor([i for i in range(256) if i & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)[:, None]
    args = (torch.ones(1, 1, device=DEVICE), bits, torch.ones(len(bits), device=DEVICE), None)
    assert torch.equal(quantized_linear.kernel()(*args), bits.view(torch.float8_e4m3fn).float().mT)


@pytest.mark.parametrize(("place", "dtype"), [("OF_BF16", torch.bfloat16), ("OF_FP16", torch.float16)])
def test_every_value_of_fp8_has_its_place_in_16_bits(place, dtype):
    """What the instructions for NVIDIA's GPUs do, which the interpreter does not run, on all values but NaN."""
    place = getattr(joint_linear_triton, place)
    code = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F])
    upper = code << 8
    bits = ((upper >> place.shift) & place.mask) | (upper & 0x8000)
    of_factor = torch.tensor([place.factor]).to(torch.uint16).view(dtype)
    got = bits.to(torch.uint16).view(dtype).double() * of_factor.double()
    assert got.tolist() == code.to(torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    text = joint_linear_triton.ptx(place)
    assert f"shr.b32 bits, bits, {place.shift};" in text
    assert f"0x{place.mask:04X}{place.mask:04X}" in text
    assert f"0x{place.factor:04X}{place.factor:04X}" in text
