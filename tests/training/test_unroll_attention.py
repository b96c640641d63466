"""Attention of the unroll against the dense mask over all keys of all depths."""

import pytest
import torch
from close import FORWARD, assert_close, scale_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from eagle31_hf.training import attention, attention_ways
from eagle31_hf.training.attention import JoinedAttention, UnrollAttention
from eagle31_hf.training.attention_ways import (
    DENSE,
    EFFICIENT_CUDA,
    FLASH_CPU,
    FLASH_CUDA,
    WAYS,
    FirstKeys,
    Seen,
    kernel_of,
    padded,
    way_of,
)

B = 2
H = 4
HKV = 2
S = 21
D = 8
DEPTH = 4


def dense_mask(depth, window):
    """Returns which of the (depth + 1) S keys of all depths the S positions see at this depth: (S, (depth + 1) S)."""
    positions, own = torch.arange(S), torch.eye(S, dtype=torch.bool)
    first = positions[None, :] <= positions[:, None]
    if window is not None:
        first &= positions[None, :] + window > positions[:, None] + depth
    later = [own if window is None or depth - d < window else torch.zeros_like(own) for d in range(1, depth + 1)]
    return torch.cat([first, *later], dim=1)


class Layer(nn.Module):
    def __init__(self, layer_idx=0, window=None):
        super().__init__()
        self.layer_idx = layer_idx
        self.sliding_window = window
        self.scaling = 0.3


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def depths(width=D):
    """Returns queries, keys and values of every depth."""
    return [
        (drawn(B, H, S, D, seed=k), drawn(B, HKV, S, D, seed=10 + k), drawn(B, HKV, S, width, seed=20 + k))
        for k in range(DEPTH)
    ]


def attended(attend, layer, all_depths):
    outs = []
    for attend.depth, depth in enumerate(all_depths):
        outs.append(attend(layer, *depth))
    return outs


def dense(all_depths, window=None, documents=None):
    outs = []
    for depth, (q, _, _) in enumerate(all_depths):
        mask = dense_mask(depth, window)[None, None]
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            mask = mask & torch.cat([same] * (depth + 1), dim=-1)
        k, v = (torch.cat([x[i] for x in all_depths[: depth + 1]], dim=2) for i in (1, 2))
        outs.append(scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True).transpose(1, 2))
    return outs


def gradients(outs, all_depths):
    total = sum((out * drawn(*out.shape, seed=30 + k).detach()).sum() for k, out in enumerate(outs))
    return torch.autograd.grad(total, [x for depth in all_depths for x in depth], allow_unused=True)


DOCUMENTS = torch.tensor([[0] * 8 + [1] * 13, [0] * 20 + [1]])


@pytest.mark.parametrize("at_once", [5, 512], ids="{}_at_once".format)
@pytest.mark.parametrize("width", [D, D + 3], ids=["same_width", "wider_values"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one_text", "packed"])
@pytest.mark.parametrize("window", [None, 1, 2, 6], ids="window_{}".format)
def test_as_the_dense_mask(monkeypatch, window, documents, width, at_once):
    monkeypatch.setattr(attention_ways, "QUERIES_AT_ONCE", at_once)
    all_depths, attend = depths(width), UnrollAttention(documents)
    layer = Layer(window=window)
    outs = attended(attend, layer, all_depths)
    expected = dense(all_depths, window, documents)
    for depth, (out, wanted) in enumerate(zip(outs, expected, strict=True)):
        assert_close(f"output at depth {depth}", out, wanted, FORWARD)
    for i, (found, wanted) in enumerate(zip(gradients(outs, all_depths), gradients(expected, all_depths), strict=True)):
        found, wanted = (torch.zeros(1) if x is None else x for x in (found, wanted))
        # A window of one token leaves nothing to choose between: the gradients of queries and keys are what rounding
        # leaves of such sums.
        scale = max(1.0, scale_of(wanted))
        assert_close(f"gradient {i}", found.expand_as(wanted) if found.numel() == 1 else found, wanted, FORWARD, scale)


def test_a_window_begins_where_the_query_s_own_token_sees():
    """At depth 2 the token of position 10 is the twelfth: it sees four of them, itself included."""
    seen = Seen(window=4, depth=2)
    assert seen.first_key(10) == 9
    assert seen.mask(slice(10, 11), slice(7, 11), torch.device("cpu"))[0, 0, 0].tolist() == [False, False, True, True]
    assert Seen(window=4).first_key(2) == 0


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest result of an operation has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x.numel() for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)]
        self.numbers = max(self.numbers, *made, 0)
        return out


@pytest.mark.parametrize("documents", [None, 1], ids=["one_text", "packed"])
def test_under_a_window_no_more_is_computed_than_it_holds(documents):
    """Neither forward nor back: at 32,768 positions a mask alone would be a gigabyte."""
    length, window = 4096, 32
    numbers = None if documents is None else torch.arange(length)[None] // 1000
    q, k, v = (torch.randn(1, 2, length, D, requires_grad=True) for _ in range(3))
    attend = UnrollAttention(numbers)
    with Largest() as largest:
        attend(Layer(window=window), q, k, v).sum().backward()
    assert largest.numbers <= 2 * attention_ways.QUERIES_AT_ONCE * (attention_ways.QUERIES_AT_ONCE + window)


def test_layers_keep_their_own_keys():
    attend, all_depths = UnrollAttention(), depths()
    alone = [[UnrollAttention()(Layer(), *all_depths[0])], [UnrollAttention()(Layer(), *all_depths[1])]]
    assert_close("layer 0", attend(Layer(0), *all_depths[0]), alone[0][0], 0.0)
    assert_close("layer 1", attend(Layer(1), *all_depths[1]), alone[1][0], 0.0)


def test_later_keys_of_other_chains_are_not_seen():
    """The drafts of a chain never show up in another."""
    first, second = depths()[:2]
    _, before = attended(UnrollAttention(), Layer(), (first, second))
    changed = tuple(x.detach().clone() for x in second)
    changed[1][:, :, 7], changed[2][:, :, 7] = 5.0, 5.0
    _, after = attended(UnrollAttention(), Layer(), (first, changed))
    differs = (before - after).abs().amax((0, 2, 3)) > 0
    assert differs.nonzero().flatten().tolist() == [7]


def test_in_bfloat16():
    all_depths = depths()
    half = [tuple(x.detach().bfloat16() for x in depth) for depth in all_depths]
    attend, layer = UnrollAttention(), Layer()
    outs = attended(attend, layer, half)
    for depth, (out, wanted) in enumerate(zip(outs, dense(all_depths), strict=True)):
        assert out.dtype == torch.bfloat16
        assert_close(f"depth {depth}", out.float(), wanted.detach(), 0.05)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "widths", "expected"),
    [
        ("cpu", None, FP32, (8, 8), FLASH_CPU),
        ("cpu", None, BF16, (7, 7), FLASH_CPU),
        ("cpu", None, FP32, (8, 11), DENSE),
        ("cuda", (9, 0), BF16, (128, 128), FLASH_CUDA),
        ("cuda", (8, 0), FP16, (256, 256), FLASH_CUDA),
        ("cuda", (8, 9), BF16, (192, 192), FLASH_CUDA),
        ("cuda", (8, 9), BF16, (256, 256), EFFICIENT_CUDA),
        ("cuda", (12, 0), BF16, (256, 256), EFFICIENT_CUDA),
        ("cuda", (9, 0), BF16, (264, 264), EFFICIENT_CUDA),
        ("cuda", (9, 0), BF16, (192, 128), EFFICIENT_CUDA),
        ("cuda", (9, 0), BF16, (60, 60), DENSE),
        ("cuda", (9, 0), FP32, (128, 128), EFFICIENT_CUDA),
        ("cuda", (9, 0), FP32, (60, 20), EFFICIENT_CUDA),
        ("cuda", (9, 0), FP32, (61, 61), DENSE),
        ("cuda", (9, 0), torch.float64, (64, 64), DENSE),
        ("cuda", (7, 5), FP16, (128, 128), EFFICIENT_CUDA),
        ("cuda", (7, 5), BF16, (128, 128), DENSE),
        ("cuda", (13, 0), BF16, (128, 128), DENSE),
        ("cuda", None, BF16, (128, 128), DENSE),
        ("mps", None, FP32, (128, 128), DENSE),
    ],
)
def test_the_way_that_is_chosen(device, capability, dtype, widths, expected):
    assert kernel_of(device, capability, dtype, *widths) == expected


def test_what_is_masked_has_no_kernel():
    q = torch.empty(1, 2, 3, 8)
    assert way_of(q, q, is_masked=False) == FLASH_CPU
    assert way_of(q, q, is_masked=True) == DENSE
    assert way_of(q.to("meta"), q.to("meta"), is_masked=False) == DENSE


@pytest.mark.parametrize("count", [1, 31, 32, 33], ids="{}_positions".format)
def test_padding_of_a_log_sum_exp(count):
    lse = torch.randn(2, 3, count)
    found = padded(lse)
    assert found.shape[2] % 32 == 0
    assert found.shape[2] - count < 32
    assert found[:, :, :count].equal(lse)
    assert bool((found[:, :, count:] == float("inf")).all())


@pytest.mark.parametrize(("way", "dtype", "width"), [(FLASH_CUDA, BF16, 8), (EFFICIENT_CUDA, FP32, 12)])
def test_kernels_of_a_gpu_take_what_they_are_given(way, dtype, width):
    """On the meta device, which has shapes and no numbers."""
    options = {"dtype": dtype, "device": "meta", "requires_grad": True}
    q, *keys = (torch.empty(B, S, H, D, **options).transpose(1, 2) for _ in range(3))
    values = [torch.empty(B, H, S, width, **options) for _ in range(2)]
    seen = UnrollAttention(DOCUMENTS).seen
    out, lse = JoinedAttention.apply(q, 0.3, seen, way, keys[0], values[0], keys[1], values[1])
    assert out.shape == (B, H, S, width)
    assert out.dtype == dtype
    assert lse.shape == (B, H, S)
    assert lse.dtype == FP32
    inputs = (q, *keys, *values)
    for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert grad.shape == x.shape
        assert grad.dtype == x.dtype


class OfCpu(TorchDispatchMode):
    """Answers the kernels of a GPU by that of a CPU, arguments by the names that torch gives them, and asserts what
    they read without asking."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, names = func._schema.name.removeprefix("aten::_scaled_dot_product_"), func._schema.arguments
        if not name.startswith(("flash_attention", "efficient_attention")) or "for_cpu" in name:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip((each.name for each in names), args, strict=False)), **kwargs}
        assert given["dropout_p"] == 0
        assert given["is_causal"]
        qkv, rest = [given[each] for each in ("query", "key", "value")], (0.0, True)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv, *rest, scale=given["scale"])
        if name == "flash_attention":
            return out, lse, None, None, S, S, None, None, None
        if name == "efficient_attention":
            assert given["compute_log_sumexp"]
            return out, padded(lse), None, None
        count = qkv[0].shape[2]
        lse = given["logsumexp"]
        if name == "flash_attention_backward":
            assert lse.is_contiguous()
            assert given["max_q"] == given["max_k"] == count
            assert given["cum_seq_q"] is given["cum_seq_k"] is None
        else:
            assert given["out"].transpose(1, 2).is_contiguous()
            assert lse.stride(1) % 32 == 0
            assert bool((lse[:, :, count:] == float("inf")).all())
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        joined = (given.get("grad_out", given.get("grad_out_")), *qkv, given["out"], lse[:, :, :count].contiguous())
        grads = backward(*joined, *rest, scale=given["scale"])
        return grads if name == "flash_attention_backward" else (*grads, None)  # of a bias


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one_text", "packed"])
@pytest.mark.parametrize("way", [FLASH_CUDA, EFFICIENT_CUDA])
def test_kernels_of_a_gpu_are_joined_as_that_of_a_cpu(monkeypatch, way, documents):
    monkeypatch.setattr(attention, "way_of", lambda *args, **kwargs: way)
    all_depths = depths()
    with OfCpu():
        outs = attended(UnrollAttention(documents), Layer(), all_depths)
        found = gradients(outs, all_depths)
    expected = dense(all_depths, None, documents)
    for depth, (out, wanted) in enumerate(zip(outs, expected, strict=True)):
        assert_close(f"output at depth {depth}", out, wanted, FORWARD)
    for i, (got, wanted) in enumerate(zip(found, gradients(expected, all_depths), strict=True)):
        if wanted is not None:
            assert_close(f"gradient {i}", got, wanted, FORWARD, max(1.0, scale_of(wanted)))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 61, 700], ids="{}_positions".format)
@pytest.mark.parametrize(
    ("dtype", "widths", "way"),
    [
        (BF16, (128, 128), FLASH_CUDA),
        (FP16, (80, 80), FLASH_CUDA),
        (BF16, (64, 64), EFFICIENT_CUDA),
        (BF16, (192, 128), EFFICIENT_CUDA),
        (FP32, (128, 128), EFFICIENT_CUDA),
        (FP32, (60, 20), EFFICIENT_CUDA),
    ],
    ids=str,
)
def test_ways_of_a_gpu_are_as_dense_chunks(dtype, widths, way, count):
    """Forward, and backward from an output and a log-sum-exp to which further keys have been joined."""
    width, value_width = widths
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(B, count, H, width), (B, count, H, width), (B, count, H, value_width), (B, count, H, value_width)]
    drawn = [torch.randn(shape, generator=generator, device="cuda").to(dtype).transpose(1, 2) for shape in shapes]
    q, k, v, grad = drawn
    parts = [slice(0, count // 2), slice(count // 2, count)] if count > 1 else [slice(None)]
    spans = [(slice(None), part) for part in parts]
    numbers = torch.zeros(count, dtype=torch.long, device="cuda")
    numbers[count // 2 :] = len(parts)
    seen = Seen(numbers.expand(B, -1), spans)
    exact = FirstKeys(q.float(), k.float(), v.float(), 0.3, seen)
    expected, expected_lse = WAYS[DENSE].forward(exact)
    first = FirstKeys(q, k, v, 0.3, seen)
    out, lse = WAYS[way].forward(first)
    close = 1e-3 if dtype == FP32 else 0.02
    assert_close("output", out.float(), expected, close)
    assert_close("log-sum-exp", lse, expected_lse, 1e-3)
    joined_lse = torch.logaddexp(expected_lse, torch.zeros_like(expected_lse))  # a later key of score 0 and value 0
    joined = (expected * (expected_lse - joined_lse).exp()[..., None]).to(dtype)  # both take it as rounded
    wanted = WAYS[DENSE].backward(exact, grad.float(), joined.float(), joined_lse)
    found = WAYS[way].backward(first, grad, joined, joined_lse)
    for name, got, grads in zip("qkv", found, wanted, strict=True):
        assert_close(f"gradient of {name}", got.float(), grads, close)
