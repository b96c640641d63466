"""`tree_attention`: its kernels, in Triton's interpreter where there is no GPU, beside its reference."""

from typing import NamedTuple

import pytest
import torch
from kernel_close import assert_matches
from poison import Guarded
from torch import Tensor

from eagle31_hf.kernels.tree_attention import BEGIN, BITS, MOST_NEW, START, seen_slots, tree_attention

pytest.importorskip("triton")

from eagle31_hf.kernels import tree_attention_triton
from eagle31_hf.kernels.tree_attention_triton import INTERPRETED, LONG, PROGRAMS, num_splits, parts, tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE_AND_NARROW = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # other tiles
NAN = float("nan")
FEW = 8  # programs, so that each takes several steps


@pytest.fixture(autouse=True)
def programs(monkeypatch, request) -> int:
    """Sets how many programs a GPU is assumed to run at once: few, or what `request.param` says."""
    wanted = getattr(request, "param", FEW)
    monkeypatch.setattr(tree_attention_triton, "PROGRAMS", wanted)
    return wanted


class Shape(NamedTuple):
    """Sequences, tokens, heads of queries and of keys, widths of keys and values, slots."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    capacity: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


SMALL = Shape(2, 5, 4, 2, 20, 12, 70)
SHAPES = [
    Shape(1, 1, 4, 1, 64, 64, 70),
    Shape(2, 7, 6, 2, 60, 60, 90),
    Shape(2, 5, 3, 3, 80, 96, 61),
    Shape(1, 40, 2, 1, 16, 7, 80),
    Shape(1, 9, 4, 1, 192, 112, 100),
    Shape(1, 35, 1, 1, 576, 512, 70),
]


class Inputs(NamedTuple):
    q: Tensor
    keys: Tensor
    values: Tensor
    spans: Tensor


def tree_spans(shape: Shape, begin: int = 0, window: int | None = None) -> Tensor:
    """Spans (B, T, 3) of random trees; the first sequence fills the buffer, each other one less."""
    spans = torch.zeros(shape.batch, shape.tokens, 3, dtype=torch.long)
    for b in range(shape.batch):
        depth, bits = [0], [1]
        for i in range(1, shape.tokens):
            parent = int(torch.randint(i, ()))
            depth.append(depth[parent] + 1)
            bits.append(bits[parent] | 1 << i)
        start = (shape.capacity - shape.tokens) // (b + 1)
        spans[b, :, START] = start
        spans[b, :, BITS] = torch.tensor(bits)
        spans[b, :, BEGIN] = begin if window is None else start + torch.tensor(depth) - (window - 1)
    return spans.to(DEVICE)


def drawn(shape: Shape, spans: Tensor, dtype: torch.dtype = torch.float32) -> Inputs:
    """Random queries, keys and values; NaN in every slot that no query of its sequence sees, and around the buffers."""
    batch, tokens, heads, kv_heads, width, value_width, capacity = shape
    q = torch.randn(batch, heads, tokens, width, device=DEVICE).to(dtype)
    keys = torch.randn(batch, kv_heads, capacity, width, device=DEVICE).to(dtype)
    values = torch.randn(batch, kv_heads, capacity, value_width, device=DEVICE).to(dtype)
    hidden = ~seen_slots(spans, capacity).any(dim=1)[:, None, :, None]
    return Inputs(
        Guarded.holding(q).tensor,
        Guarded.holding(keys.masked_fill(hidden, NAN)).tensor,
        Guarded.holding(values.masked_fill(hidden, NAN)).tensor,
        Guarded.holding(spans).tensor,
    )


def assert_attends(
    inputs: Inputs, scale: float | None = None, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Asserts that the kernels give what the reference gives. On a GPU, weights are rounded to the 16 bits of the
    values, which is more than rounding the sum once where its terms cancel."""
    args = *inputs[:3], inputs.spans[:, None], inputs.q.shape[-1] ** -0.5 if scale is None else scale, softcap, sinks
    got, expected = tree_attention.kernel()(*args), tree_attention.reference(*args)
    assert got.is_contiguous()
    assert not got.isnan().any()
    if INTERPRETED or got.dtype == torch.float32:
        assert_matches("out", got, expected)
    else:
        assert got.dtype == expected.dtype
        worst = (got.float() - expected.float()).abs().max()
        assert worst <= torch.finfo(got.dtype).eps * expected.float().abs().max()
    return got


@pytest.mark.parametrize(
    ("programs", "dtype"), [(1, torch.float32), (PROGRAMS, torch.bfloat16)], indirect=["programs"], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_matches_reference(shape, dtype):
    torch.manual_seed(0)
    assert_attends(drawn(shape, tree_spans(shape), dtype))


@pytest.mark.parametrize("begin", [1, 32, 50])
def test_slots_before_the_beginning_are_not_seen(begin):
    torch.manual_seed(0)
    assert_attends(drawn(SMALL, tree_spans(SMALL, begin)))


@pytest.mark.parametrize(("window", "dtype"), [(4, torch.float32), (50, torch.float16)], ids=str)
def test_every_query_has_its_own_window(window, dtype):
    torch.manual_seed(0)
    assert_attends(drawn(SMALL, tree_spans(SMALL, window=window), dtype))


@pytest.mark.parametrize("length", [0, 1, 16, 17, 63])
def test_any_length(length):
    torch.manual_seed(0)
    spans = tree_spans(SMALL)
    spans[..., START] = torch.tensor([length, 65 - length])[:, None]
    assert_attends(drawn(SMALL, spans, torch.float32 if length % 16 else torch.bfloat16))


@WIDE_AND_NARROW
@pytest.mark.parametrize(("softcap", "scale"), [(0.5, 1.0), (2000.0, 0.01)])
def test_softcap(softcap, scale, dtype):
    torch.manual_seed(0)
    assert_attends(drawn(SMALL, tree_spans(SMALL), dtype), scale=scale, softcap=softcap)


def test_sinks():
    torch.manual_seed(0)
    sinks = torch.randn(SMALL.heads, device=DEVICE) * 4
    low, strided = sinks.bfloat16(), torch.stack((sinks, sinks + 1), dim=1)[:, 0]
    assert_attends(drawn(SMALL, tree_spans(SMALL, window=20), torch.bfloat16), sinks=low)
    assert_attends(drawn(SMALL, tree_spans(SMALL)), softcap=5.0, sinks=strided)


@pytest.mark.parametrize(("nobody_sees", "with_sinks"), [(False, False), (True, True)])
def test_a_query_that_sees_nothing_gives_0(nobody_sees, with_sinks):
    torch.manual_seed(0)
    spans = tree_spans(SMALL)
    blind = slice(None) if nobody_sees else slice(2, 4)
    spans[1, blind, BITS] = 0
    spans[1, blind, BEGIN] = spans[1, blind, START]
    out = assert_attends(drawn(SMALL, spans), sinks=torch.randn(SMALL.heads, device=DEVICE) if with_sinks else None)
    assert (out[1, blind] == 0).all()
    assert (out[0] != 0).all()


def test_new_slots_between_others_may_be_unseen():
    torch.manual_seed(0)
    spans = tree_spans(SMALL)
    spans[..., BITS] = torch.tensor([0b1, 0b10000, 0b10001, 0b1000, 0b1001])
    assert drawn(SMALL, spans).keys[0, 0, 66].isnan().all()
    assert_attends(drawn(SMALL, spans))


def test_bits_beyond_the_new_tokens_and_slots_beyond_the_buffer_are_not_seen():
    torch.manual_seed(0)
    spans = tree_spans(SMALL)
    spans[..., BITS] |= 1 << 62 | 1 << 40 | 1 << 7
    assert_attends(drawn(SMALL, spans))
    spans[..., BITS] |= -(2**63)
    spans[:, :, START] = torch.tensor([SMALL.capacity, SMALL.capacity + 9])[:, None]
    assert_attends(drawn(SMALL, spans))


def test_as_many_new_tokens_as_bits():
    torch.manual_seed(0)
    shape = Shape(1, MOST_NEW, 1, 1, 16, 16, 80)
    assert_attends(drawn(shape, tree_spans(shape), torch.bfloat16))


def test_what_nobody_sees_does_not_change_a_bit():
    torch.manual_seed(0)
    inputs = drawn(SMALL, tree_spans(SMALL, begin=3), torch.bfloat16)
    zeros = inputs._replace(keys=inputs.keys.nan_to_num(0.0), values=inputs.values.nan_to_num(9.0))
    assert torch.equal(assert_attends(inputs), assert_attends(zeros))


def test_nothing_is_written_but_the_output():
    torch.manual_seed(0)
    inputs = drawn(SMALL, tree_spans(SMALL))
    guarded = [Guarded.holding(each) for each in inputs]
    assert_attends(Inputs(*(each.tensor for each in guarded)))
    for each, before in zip(guarded, inputs, strict=True):
        assert each.is_intact()
        torch.testing.assert_close(each.tensor, before, rtol=0, atol=0, equal_nan=True)


def test_strided_inputs():
    torch.manual_seed(0)
    q, keys, values, spans = drawn(SMALL, tree_spans(SMALL))
    expected = assert_attends(Inputs(q, keys, values, spans))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, keys, values)]  # tokens before heads
    mask = torch.nn.functional.pad(spans, (2, 1), value=-9)[:, None][..., 2:5][:, 0]
    assert torch.equal(assert_attends(Inputs(*turned, mask)), expected)
    wide = torch.nn.functional.pad(torch.cat((keys, values), dim=-1), (3, 2, 4, 1, 1, 0), value=NAN)  # NaN all round
    keys, values = wide[:, 1:, 4:-1, 3:23], wide[:, 1:, 4:-1, 23:-2]
    assert torch.equal(assert_attends(Inputs(q.mT.contiguous().mT, keys, values, spans)), expected)


def test_spans_of_all_sequences_and_tokens_in_one():
    torch.manual_seed(0)
    spans = tree_spans(SMALL)[:1, :1].expand(SMALL.batch, SMALL.tokens, 3)
    inputs = drawn(SMALL, spans)
    assert torch.equal(assert_attends(inputs._replace(spans=spans)), assert_attends(inputs))


def test_queries_of_another_dtype():
    torch.manual_seed(0)
    inputs = drawn(SMALL, tree_spans(SMALL), torch.bfloat16)
    assert assert_attends(inputs._replace(q=inputs.q.float())).dtype == torch.float32


def test_a_nan_that_is_seen_shows():
    q, keys, values, spans = drawn(SMALL, tree_spans(SMALL))
    values[0, 0, 3] = NAN
    assert tree_attention.kernel()(q, keys, values, spans[:, None], 1.0)[0, :, :2].isnan().all()
    keys[1, 1, 3] = NAN
    assert tree_attention.kernel()(q, keys, values, spans[:, None], 1.0)[1, :, 2:].isnan().all()


def test_two_parts_hold_a_width():
    for width in range(1, 577):
        first, second = parts(width)
        assert first + second >= width
        assert first % 16 == second % 16 == 0
        assert second == 0 or first < width
    assert parts(576) == (512, 64)
    assert parts(112) == (128, 0)


@pytest.mark.parametrize("programs", [PROGRAMS], indirect=True)
def test_programs_suffice_for_one_sequence():
    for rows in (4, 32, 64, 240):
        cut = tile(rows, 128, is_widened=False)
        unshared = 8 * -(-rows // cut.rows)
        assert PROGRAMS // 2 < unshared * num_splits(2048, unshared, cut.slots) <= PROGRAMS
        assert PROGRAMS < unshared * num_splits(LONG, unshared, cut.slots) <= 2 * PROGRAMS
        assert num_splits(2048, 64 * unshared, cut.slots) == 1
        assert num_splits(1, unshared, cut.slots) == 1


def test_what_is_not_a_number_in_a_seen_slot_shows():
    """In the reference: 0 in its place would be taken for an answer."""
    q, keys, values = (torch.randn(1, 1, count, 4) for count in (2, 6, 6))
    spans = torch.zeros(1, 1, 2, 3, dtype=torch.long)
    spans[..., START], spans[..., BEGIN] = 3, 0
    spans[0, 0, 1, BEGIN] = 3  # the second query sees nothing
    keys[0, 0, 1] = float("nan")
    for sinks in (None, torch.zeros(1)):
        out = tree_attention.reference(q, keys, values, spans, 1.0, 0.0, sinks)
        assert out[0, 0].isnan().all()
        assert not out[0, 1].any()
