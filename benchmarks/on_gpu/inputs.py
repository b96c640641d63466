"""Inputs of every operation of `kernels`, random, and the bytes that it has to move for them.

B sequences, T tokens, h width, C slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle31_hf.kernels.distillation_loss import TargetDistribution
from eagle31_hf.kernels.drafts import best_tree
from eagle31_hf.kernels.tree_attention import MOST_NEW
from eagle31_hf.quantized import quantized

DRAFTS_OF_LEVEL = 10  # children of a node, and nodes of a level
PREDICTIONS_OF_STATE = 4  # in training, one at each depth
HARD = 0.1  # the cross-entropy's share of the default loss


@dataclass(frozen=True)
class Size:
    """The sizes that operations know: B, T, h, heads, KV heads and their width D, the MLP's width, ids that a head
    scores, tokens of the context, and slots of the cache."""

    sequences: int
    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    capacity: int


@dataclass
class Inputs:
    """The arguments of one call, and the bytes it moves at least."""

    args: tuple[Any, ...]
    num_bytes: int


class Maker:
    """Makes random inputs of a size and a dtype."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device, seed: int = 0):
        self.size = size
        self.dtype = dtype
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(max(1, high), shape, generator=self.generator, device=self.device)

    def starts(self) -> Tensor:
        return torch.full((self.size.sequences, 1), self.size.context, device=self.device)

    def states(self) -> Tensor:
        return self.floats(self.size.sequences, self.size.tokens, self.size.hidden)

    def heads(self, count: int) -> Tensor:
        return self.floats(self.size.sequences, self.size.tokens, count, self.size.head_dim)

    def buffers(self) -> list[Tensor]:
        """Keys and values of the context (B, Hkv, C, D); what no token has been written to is NaN."""
        made = []
        for _ in range(2):
            shape = self.size.sequences, self.size.kv_heads, self.size.capacity, self.size.head_dim
            buffer = torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)
            end = self.size.context + self.size.tokens
            buffer[:, :, :end] = self.floats(*shape[:2], end, shape[3])
            made.append(buffer)
        return made

    def tree(self, count: int) -> tuple[Tensor, Tensor]:
        """Candidates (B, count) of a tree as levels give them: scores, none above its parent's, and parents."""
        sequences = self.size.sequences
        steps = torch.rand(sequences, count, generator=self.generator, device=self.device)
        above = [self.integers(i, sequences, 1) - (i <= DRAFTS_OF_LEVEL) * (i + 1) for i in range(count)]
        parents = torch.cat([each.clamp(min=-1) for each in above], dim=1)
        scores: list[Tensor] = []
        for i in range(count):
            stacked = torch.stack([torch.zeros(sequences, device=self.device), *scores], dim=1)
            scores.append(stacked.gather(1, parents[:, i : i + 1] + 1)[:, 0] - steps[:, i])
        return torch.stack(scores, dim=1), parents


def num_bytes(*values: Any) -> int:
    """Bytes of tensors, however deep in lists."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, list | tuple):
            total += num_bytes(*value)
    return total


def _add_rms_norm(make: Maker) -> Inputs:
    x, residual = make.states(), make.states()
    weight = make.floats(make.size.hidden)
    return Inputs((x, residual, weight, 1e-6), num_bytes(x, residual, weight, x, x))


def _embed_norms(make: Maker) -> Inputs:
    size = make.size
    ids = make.integers(size.vocab, size.sequences, size.tokens)
    table, state = make.floats(size.vocab, size.hidden), make.states()
    weights = [make.floats(size.hidden) for _ in range(2)]
    return Inputs((ids, table, weights[0], state, weights[1], 1e-6), num_bytes(ids, weights, [state] * 4))


def _rope_append(make: Maker) -> Inputs:
    size = make.size
    counts = size.heads, size.kv_heads, size.kv_heads
    qkv = list(make.heads(sum(counts)).split(counts, dim=2))
    angles = make.floats(1, size.tokens, size.head_dim // 2).float()
    rope = [part.repeat(1, 1, 2).to(make.dtype) for part in (angles.cos(), angles.sin())]
    norms = [make.floats(size.head_dim) for _ in range(2)]
    return Inputs((qkv, rope, norms, 1e-6, make.buffers(), make.starts()), 2 * num_bytes(qkv) + num_bytes(rope))


def _joint_linear(make: Maker) -> Inputs:
    size = make.size
    widths = (size.heads * size.head_dim, *[size.kv_heads * size.head_dim] * 2)
    x, weights = make.states(), [make.floats(width, size.hidden) for width in widths]
    out = num_bytes(x) * sum(widths) // size.hidden
    return Inputs((x, weights, []), num_bytes(x, weights) + out)


def _gated_linear(make: Maker) -> Inputs:
    size = make.size
    x, weights = make.states(), [make.floats(size.intermediate, size.hidden) for _ in range(2)]
    return Inputs((x, *weights), num_bytes(x, weights) + num_bytes(x) * size.intermediate // size.hidden)


def _tree_attention(make: Maker) -> Inputs:
    size = make.size
    q = make.heads(size.heads).transpose(1, 2)
    keys, values = make.buffers()
    bits = (2 << torch.arange(size.tokens, device=make.device)) - 1
    begin, start = torch.zeros_like(bits), torch.full_like(bits, size.context)
    spans = torch.stack((start, begin, bits), dim=-1).expand(size.sequences, -1, -1).contiguous()
    seen = 2 * size.sequences * size.kv_heads * (size.context + size.tokens) * size.head_dim * keys.element_size()
    return Inputs((q, keys, values, spans[:, None], size.head_dim**-0.5), seen + num_bytes(q, q))


def _likeliest_tokens(make: Maker) -> Inputs:
    size = make.size
    logits = make.floats(size.sequences, min(size.tokens, DRAFTS_OF_LEVEL), size.vocab)
    target_ids = torch.arange(size.vocab, device=make.device) * 2
    return Inputs((logits, min(size.vocab, DRAFTS_OF_LEVEL), 1.0, target_ids), num_bytes(logits))


def _next_level(make: Maker) -> Inputs:
    count = min(make.size.tokens, DRAFTS_OF_LEVEL)
    log_probs = make.floats(make.size.sequences, count, DRAFTS_OF_LEVEL).float()
    scores = make.floats(make.size.sequences, count).float()
    bits = make.integers(2**20, make.size.sequences, count)
    return Inputs((log_probs, scores, bits, DRAFTS_OF_LEVEL, 20), num_bytes(log_probs, log_probs, scores, bits))


def _best_tree(make: Maker) -> Inputs:
    scores, parents = make.tree(6 * make.size.tokens + 4)
    return Inputs((scores, parents, min(make.size.tokens + 3, MOST_NEW)), num_bytes(scores, parents))


def _drafted(make: Maker) -> tuple[Tensor, ...]:
    """Parents (B, K), and depths and bits (B, N), of a tree with as many drafts as there are tokens."""
    return best_tree.reference(*make.tree(2 * make.size.tokens + 2), make.size.tokens)[1:]


def _accepted_path(make: Maker) -> Inputs:
    sequences = make.size.sequences
    parents, depths, bits = _drafted(make)
    ids = torch.arange(parents.shape[1], device=make.device).repeat(sequences, 1)
    is_child = parents[:, None] == torch.arange(depths.shape[1], device=make.device)[:, None]
    chosen = is_child.int().argmax(-1)  # the first child, whose id is its place; of leaves an id that may be no child
    spoiled = torch.zeros_like(chosen, dtype=torch.bool)
    going = torch.ones(sequences, 1, dtype=torch.long, device=make.device)
    width = MOST_NEW
    args = (ids, parents, depths, bits, chosen, spoiled, going, width)
    return Inputs(args, num_bytes(ids, parents, depths, bits, chosen, spoiled))


def _distillation_loss(make: Maker) -> Inputs:
    count = make.size.sequences * make.size.tokens
    num_states = -(-count // PREDICTIONS_OF_STATE)
    target = TargetDistribution.from_logits(make.floats(num_states, make.size.vocab), None)
    of_target = target.p * 0.9, target.coverage * 0.9, target.negentropy * 0.9, target.best  # a tenth is not drafted
    logits = make.floats(count, make.size.vocab)
    which = torch.arange(count, device=make.device) // PREDICTIONS_OF_STATE
    weights = torch.rand(count, generator=make.generator, device=make.device)
    args = (logits, *of_target, which, weights)
    return Inputs((*args, HARD), num_bytes(args, logits))


def _quantized_linear(make: Maker) -> Inputs:
    weight, scale = quantized(make.floats(make.size.intermediate, make.size.hidden), "int8")
    x, bias = make.states(), make.floats(make.size.intermediate)
    out = num_bytes(bias) * make.size.sequences * make.size.tokens
    return Inputs((x, weight, scale, bias), num_bytes(x, weight, scale, bias) + out)


MAKERS: dict[str, Callable[[Maker], Inputs]] = {
    "add_rms_norm": _add_rms_norm,
    "embed_norms": _embed_norms,
    "rope_append": _rope_append,
    "joint_linear": _joint_linear,
    "gated_linear": _gated_linear,
    "tree_attention": _tree_attention,
    "likeliest_tokens": _likeliest_tokens,
    "next_level": _next_level,
    "best_tree": _best_tree,
    "accepted_path": _accepted_path,
    "distillation_loss": _distillation_loss,
    "quantized_linear": _quantized_linear,
}
