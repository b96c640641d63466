"""Ways to attend to the keys of depth 0: torch's kernels, one for each kind of device and dtype, and dense chunks.

The kernels are those that return the log-sum-exp of the scores, and take another one back. Of later depths they are
told the joined output and log-sum-exp alone: their backward passes take the probabilities exp(score - lse) and the mean
grad @ out from these, and so find their share of the joint softmax (FlashAttention-2, arXiv 2307.08691, section 3.1).
B sequences, H heads, S positions, D and V the widths of keys and values.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

QUERIES_AT_ONCE = 512  # of dense chunks
LSE_ALIGNMENT = 32  # torch's memory-efficient kernel reads its log-sum-exp in blocks of so many positions
OLDEST, NEWEST = (5, 0), (12, 1)  # compute capabilities that torch's kernels are built for
OLDEST_OF_FLASH = (8, 0)  # and of bf16
Span = tuple[slice, slice]  # of sequences and of positions


class Seen(NamedTuple):
    """A rule of which keys of depth 0 the positions see: those up to themselves, within their text. `documents` (B, S)
    has the numbers of packed texts, `spans` their places: kernels attend causally within each. A `window` counts tokens
    back from the query's own, which stands `depth` tokens after its position; dense chunks alone can have one."""

    documents: Tensor | None = None
    spans: Sequence[Span] = ((slice(None), slice(None)),)
    window: int | None = None
    depth: int = 0

    def first_key(self, query: int) -> int:
        """Returns the first key that any query from this position on sees."""
        return 0 if self.window is None else max(0, query + self.depth - self.window + 1)

    def in_window(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns whether queries see the keys at these positions, if they are of the same text."""
        up_to = keys <= queries
        return up_to if self.window is None else up_to & (keys > queries + self.depth - self.window)

    def mask(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """Returns which of some keys some queries see: (1 or B, 1, queries, keys) bool."""
        of_queries, of_keys = (torch.arange(span.start, span.stop, device=device) for span in (queries, keys))
        mask = self.in_window(of_queries[:, None], of_keys)[None, None]
        if self.documents is None:
            return mask
        return mask & (self.documents[:, None, queries, None] == self.documents[:, None, None, keys])


class FirstKeys(NamedTuple):
    """Queries (B, H, S, D) with the keys (B, H, S, D) and values (B, H, S, V) of depth 0, and what of them is seen."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    seen: Seen


class Way(NamedTuple):
    """A way to attend. `forward`: returns the output (B, H, S, V) and the log-sum-exp (B, H, S) in fp32. `backward`:
    returns the gradients of queries, keys and values from that of the output, the output and the log-sum-exp."""

    forward: Callable[[FirstKeys], tuple[Tensor, Tensor]]
    backward: Callable[[FirstKeys, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def way_of(q: Tensor, v: Tensor, is_masked: bool) -> str:
    """Returns which of WAYS attends with these queries (B, H, S, D) and values (B, H, S, V)."""
    capability = None
    if q.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(q.device)
    return DENSE if is_masked else kernel_of(q.device.type, capability, q.dtype, q.shape[-1], v.shape[-1])


def kernel_of(device: str, capability: tuple[int, int] | None, dtype: torch.dtype, width: int, value_width: int) -> str:
    """Returns which of WAYS attends causally. `capability`: of an NVIDIA GPU, otherwise None. The limits are those of
    torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; that D is a multiple of 8 is flash attention's own, for
    which `scaled_dot_product_attention` pads."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    if device == "cpu":
        return FLASH_CPU if width == value_width and dtype != torch.float64 else DENSE
    if capability is None or not OLDEST <= capability <= NEWEST:
        return DENSE
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)  # too little shared memory to go back from more
    most = 192 if is_small else 256
    if is_half and capability >= OLDEST_OF_FLASH and width == value_width <= most and width % 8 == 0:
        return FLASH_CUDA
    has_dtype = dtype in (torch.float32, torch.float16) or (is_half and capability >= OLDEST_OF_FLASH)
    aligned = all(each % (8 if is_half else 4) == 0 for each in (width, value_width))
    return EFFICIENT_CUDA if has_dtype and aligned else DENSE


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)


def _flash_cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, out, lse, 0.0, True, scale=scale)


def _flash_cuda(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[:2]


def _flash_cuda_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float):
    # Without dropout the state of its random numbers is not read. It asks for no strides of the log-sum-exp.
    unused, count = q.new_empty(0), q.shape[2]
    given = grad, q, k, v, out, lse.contiguous(), None, None, count, count, 0.0, True, unused, unused
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, scale=scale)


def _efficient_cuda(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True, scale=scale)
    return out, lse[:, :, : q.shape[2]]


def _efficient_cuda_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float):
    # It takes the heads of a position to lie side by side, and asks for strides of sequences and heads only.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    given = grad, q, k, v, None, out, padded(lse), q.new_empty(0), q.new_empty(0), 0.0, [True, True, True, False], True
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward(*given, scale=scale)[:3]


def padded(lse: Tensor) -> Tensor:
    """Returns a log-sum-exp (B, H, S) as the memory-efficient kernel reads it: further positions, which it rounds S up
    to, have infinite ones, with which every probability is 0."""
    return torch.nn.functional.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=inf)


def by_text(forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., tuple[Tensor, ...]]) -> Way:
    """Makes a way of a kernel for one text: `forward` of q, k, v and scale, `backward` of grad, q, k, v, out, lse and
    scale. Packed texts cost a launch each, which a GPU feels where they are many and short."""

    def of_texts(first: FirstKeys) -> tuple[Tensor, Tensor]:
        q, v = first.q, first.v
        out = torch.empty_like(q if q.shape == v.shape else v)  # as the queries lie: heads of a position side by side
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        for sequences, positions in first.seen.spans:
            part = (x[sequences, :, positions] for x in first[:3])
            out[sequences, :, positions], lse[sequences, :, positions] = forward(*part, first.scale)
        return out, lse

    def grads_of_texts(first: FirstKeys, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        grads = tuple(torch.empty_like(x) for x in first[:3])
        for sequences, positions in first.seen.spans:
            part = (x[sequences, :, positions] for x in (grad, *first[:3], out, lse))
            for whole, new in zip(grads, backward(*part, first.scale), strict=True):
                whole[sequences, :, positions] = new
        return grads

    return Way(of_texts, grads_of_texts)


def _dense(first: FirstKeys) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for queries, keys in _chunks(first):
        scores = _scores(first, queries, keys)
        lses.append(scores.logsumexp(-1).clamp(min=-1e30))  # a window may have left no key of depth 0
        outs.append((scores - lses[-1][..., None]).exp().to(first.v.dtype) @ first.v[:, :, keys])
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _dense_backward(first: FirstKeys, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    q, k, v = first[:3]
    grad_q = torch.zeros_like(q)
    grad_k = torch.zeros_like(k, dtype=torch.float32)
    grad_v = torch.zeros_like(v, dtype=torch.float32)
    mean = (grad.float() * out.float()).sum(-1, keepdim=True)
    for queries, keys in _chunks(first):
        weights = (_scores(first, queries, keys) - lse[:, :, queries, None]).exp()
        grad_v[:, :, keys] += weights.to(v.dtype).mT @ grad[:, :, queries]
        by_score = (grad[:, :, queries] @ v[:, :, keys].mT).float() - mean[:, :, queries]
        by_score = (weights * by_score * first.scale).to(q.dtype)
        grad_q[:, :, queries] = by_score @ k[:, :, keys]
        grad_k[:, :, keys] += by_score.mT @ q[:, :, queries]
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _chunks(first: FirstKeys) -> Iterator[tuple[slice, slice]]:
    """Yields QUERIES_AT_ONCE queries after the other, each with the keys that any of them sees."""
    count = first.q.shape[2]
    for start in range(0, count, QUERIES_AT_ONCE):
        end = min(count, start + QUERIES_AT_ONCE)
        # at depths past the window no key is seen: then any will do
        yield slice(start, end), slice(min(start, first.seen.first_key(start)), end)


def _scores(first: FirstKeys, queries: slice, keys: slice) -> Tensor:
    """Returns the scores of queries with keys, multiplied in the queries' dtype, scaled in fp32: (B, H, queries,
    keys)."""
    scores = (first.q[:, :, queries] @ first.k[:, :, keys].mT).float() * first.scale
    return scores.masked_fill(~first.seen.mask(queries, keys, scores.device), float("-inf"))


FLASH_CPU, FLASH_CUDA = "flash, on a CPU", "flash, on a GPU"
EFFICIENT_CUDA, DENSE = "memory-efficient, on a GPU", "dense chunks"
WAYS = {
    FLASH_CPU: by_text(_flash_cpu, _flash_cpu_backward),
    FLASH_CUDA: by_text(_flash_cuda, _flash_cuda_backward),
    EFFICIENT_CUDA: by_text(_efficient_cuda, _efficient_cuda_backward),
    DENSE: Way(_dense, _dense_backward),
}
