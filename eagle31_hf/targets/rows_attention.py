"""Attention of few rows on a CPU, those of rounds: the heads that share keys are rows of one call of torch's, so that
no keys are copied for each of them.

T new positions, H heads of queries, Hkv of keys, D head width, S keys.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .few_rows import keys_before


def takes_positions(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> bool:
    """Returns whether attention is to run position by position: in rounds that ask for it, where every key of one
    sequence is seen by the position that it stands at and those after it."""
    num_before = keys_before()
    if num_before is None or key.shape[2] != num_before + query.shape[2] or len(query) > 1:
        return False
    is_usual = kwargs.get("softcap") is None and kwargs.get("s_aux") is None and kwargs.get("position_bias") is None
    return is_usual and key.shape[3] == value.shape[3] and query.shape[1] % key.shape[1] == 0


def attend_by_position(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention of new positions, query (1, H, T, D), over key and value (1, Hkv, S, D), each position in a call of its
    own over the keys up to it -> (1, T, H, D).

    A call has two rows where there would be one: torch's kernel for one row takes three times as long in bf16.
    """
    num_heads, num_new, width = query.shape[1:]
    num_kv_heads, num_before = key.shape[1], key.shape[2] - num_new
    group = num_heads // num_kv_heads
    attended = list[Tensor]()
    for t in range(num_new):
        rows = query[:, :, t].view(1, num_kv_heads, group, width)
        if group == 1:
            rows = rows.expand(-1, -1, 2, -1)
        seen = num_before + t + 1
        out = scaled_dot_product_attention(rows, key[:, :, :seen], value[:, :, :seen], scale=scale)
        attended.append(out[:, :, :group].reshape(1, 1, num_heads, width))
    return attended[0] if num_new == 1 else torch.cat(attended, dim=1)


def attend_by_group(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of new positions, query (B, H, T, D), over key and value (B, Hkv, S, D) -> (B, T, H, D). `mask`: for
    the rows of a group, see `mask_of_group`."""
    size, num_heads, num_new, width = query.shape
    num_kv_heads = key.shape[1]
    rows = query.reshape(size, num_kv_heads, -1, width)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(size, num_heads, num_new, -1).transpose(1, 2)


def mask_of_group(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Makes of the mask (B, 1, T, S) of one head's rows the additive mask (B, 1, group * T, S) of a group's."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return mask.repeat(1, 1, group, 1)
