"""Attention of the unroll against the dense mask over all keys of all depths."""

import pytest
import torch
from close import FORWARD, assert_close, scale_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from eagle31_hf.training import attention
from eagle31_hf.training.attention import UnrollAttention

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
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", at_once)
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
