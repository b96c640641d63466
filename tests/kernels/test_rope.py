"""Rotary embedding and appending: the kernel, in Triton's interpreter where there is no GPU, beside its reference."""

from dataclasses import dataclass

import pytest
import torch
from kernel_close import assert_matches
from poison import Guarded, turned
from torch import Tensor

from eagle31_hf.kernels.layer_parts import rope_append

pytest.importorskip("triton")

EPS = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, NaN before and behind them."""
    return Guarded.holding((torch.randn(shape) * 4).to(DEVICE, dtype)).tensor


class Arena:
    """NaN in which a buffer lies: `buffer` is (B, Hkv, C, D), and all about it must stay NaN."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        batch, heads, slots, width = shape
        self.guarded = Guarded((slots + 5, batch, heads + 1, width + 3), dtype, DEVICE)
        self.buffer = self.guarded.tensor[2:-3, :, 1:, 1:-2].permute(1, 2, 0, 3)

    def assert_matches(self, expected: "Arena") -> None:
        """Asserts that all that was written is as in another arena, and that nothing else was."""
        got, wanted = self.guarded.whole, expected.guarded.whole
        assert torch.equal(got.isnan(), wanted.isnan())
        assert_matches("buffer", got.nan_to_num(), wanted.nan_to_num())


def arenas(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> tuple[list[Arena], list[Arena]]:
    """Twice the same, for the kernel and for the reference."""
    return [Arena(each, dtype) for each in shapes], [Arena(each, dtype) for each in shapes]


def assert_same(got: list[Arena], expected: list[Arena]) -> None:
    for one, other in zip(got, expected, strict=True):
        one.assert_matches(other)


def at(*starts: int) -> Tensor:
    """Each sequence's first slot, (B, 1)."""
    return Guarded.holding(torch.tensor(starts, device=DEVICE)[:, None]).tensor


def buffers(of: list[Arena]) -> list[Tensor]:
    return [arena.buffer for arena in of]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of what it is given."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    part: int
    value_width: int

    def __str__(self) -> str:
        return (
            f"{self.batch}x{self.tokens} tokens, {self.heads} and {self.kv_heads} heads of {self.width}, {self.part} of"
            f" it rotated, values of {self.value_width}"
        )

    def qkv(self, dtype: torch.dtype) -> list[Tensor]:
        """Views of one projection, NaN between the tokens."""
        sizes = [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.value_width]
        whole = Guarded((self.batch, self.tokens, sum(sizes) + 5), dtype, DEVICE).tensor
        whole[..., :-5] = drawn(self.batch, self.tokens, sum(sizes), dtype=dtype)
        parts = whole[..., :-5].split(sizes, dim=-1)
        widths = self.width, self.width, self.value_width
        return [part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True)]

    def rope(self, dtype: torch.dtype, batch: int | None = None) -> list[Tensor]:
        """Cos and sin, each angle twice."""
        angles = torch.rand(batch or self.batch, self.tokens, self.part // 2, device=DEVICE) * 7
        angles = torch.cat((angles, angles), dim=-1)
        return [Guarded.holding(each.to(dtype)).tensor for each in (angles.cos(), angles.sin())]

    def arenas(self, dtype: torch.dtype) -> tuple[list[Arena], list[Arena]]:
        return arenas([(self.batch, self.kv_heads, 19, each) for each in (self.width, self.value_width)], dtype)


SHAPES = [Shape(1, 1, 1, 1, 8, 8, 8), Shape(2, 3, 5, 1, 80, 80, 80), Shape(3, 2, 4, 2, 60, 36, 60)]
SHAPES += [Shape(1, 5, 9, 5, 96, 24, 61), Shape(1, 2, 32, 8, 128, 128, 128)]


def assert_rotates(qkv: list[Tensor], rope: list[Tensor], norms: list[Tensor], starts: Tensor, both: tuple) -> None:
    got, expected = both
    out = rope_append.kernel()(qkv, rope, norms, EPS, buffers(got), starts)
    assert out.is_contiguous()
    assert_matches("queries", out, rope_append.reference(qkv, rope, norms, EPS, buffers(expected), starts))
    assert_same(got, expected)


@pytest.mark.parametrize(("dtype", "is_normed"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_append_matches_reference(shape, is_normed, dtype):
    torch.manual_seed(0)
    norms = [drawn(shape.width, dtype=dtype) for _ in range(2 * is_normed)]
    starts = at(*(3, 0, 11)[: shape.batch])
    assert_rotates(shape.qkv(dtype), shape.rope(dtype), norms, starts, shape.arenas(dtype))


@pytest.mark.parametrize("rope_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_append_of_other_strides_and_dtypes(rope_dtype):
    torch.manual_seed(0)
    shape = Shape(2, 3, 3, 2, 20, 12, 14)
    qkv, norms = shape.qkv(torch.float32), [drawn(20, 2)[:, 1], drawn(20, dtype=torch.float16)]
    one = shape.rope(rope_dtype, batch=1)
    each = [rope.mT.contiguous().mT for rope in shape.rope(rope_dtype)]
    later = [torch.nn.functional.pad(rope, (0, 4, 1, 1), value=float("nan"))[:, 1:-1, :-4] for rope in each]
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    for inputs, rope in ((qkv, one), (by_head, each), ([turned(x) for x in qkv], later)):
        assert_rotates(inputs, rope, norms, at(2, 7), shape.arenas(torch.float32))
    starts = torch.tensor(7, device=DEVICE).expand(2, 1)
    assert_rotates(qkv, [one[0], each[1]], [], starts, shape.arenas(torch.bfloat16))


@pytest.mark.parametrize("start", [17, 19, -1])
def test_rope_append_leaves_out_what_does_not_fit(start):
    torch.manual_seed(0)
    shape = Shape(1, 4, 2, 1, 8, 8, 8)
    qkv, rope = shape.qkv(torch.float32), shape.rope(torch.float32)
    got, expected = shape.arenas(torch.float32)
    out = rope_append.kernel()(qkv, rope, [], EPS, buffers(got), at(start))
    inside = [t for t in range(4) if 0 <= start + t < 19]
    _, within = shape.arenas(torch.float32)
    assert_matches("queries", out, rope_append.reference(qkv, rope, [], EPS, buffers(within), at(0)))
    for arena, whole in zip(expected, within, strict=True):
        for t in inside:
            arena.buffer[:, :, start + t] = whole.buffer[:, :, t]
    assert_same(got, expected)


def test_buffers_written_elsewhere_are_refused():
    shape = Shape(1, 2, 1, 1, 8, 8, 8)
    bad = [turned(torch.zeros(1, 1, 9, 8, device=DEVICE))] * 2
    with pytest.raises(ValueError, match="last dimension"):
        rope_append.kernel()(shape.qkv(torch.float32), shape.rope(torch.float32), [], EPS, bad, at(0))
