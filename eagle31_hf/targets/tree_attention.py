"""Attention functions registered with transformers that replace a target's own during rounds, and otherwise call it:
`kernels.tree_attention` where a mask of spans is passed (caches in an arena, on a GPU), and attention that
gives each position what it gives it alone, where a round asks for it (on a CPU, in 16 bits).

The attention of few rows on a CPU makes the heads that share keys rows of one call of torch's, so that no keys are
copied for each of them. B sequences, T new positions, H heads of queries, Hkv of keys, D head width, S keys.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.layer import BLOCK
from ..kernels.tree_attention import is_spans, tree_attention
from .few_rows import keys_before
from .users import Users

PREFIX = "eagle31_"
STANDS_IN_FOR = ("eager", "sdpa")  # implementations whose models hand a mask of four dimensions to attention as it is
ROWS = 4  # the rows of a call are a multiple of it
TRIED_NEW = range(2, 14)  # positions in a call of the trial; in others there are no more
TRIED_BLOCKS = (1, 2, 5, 8, 9, 15)  # of keys


def own_attention(model: PreTrainedModel) -> str:
    """The attention implementation of a model, as its user has set it."""
    config = model.config.get_text_config(decoder=True)
    return str(config._attn_implementation).removeprefix(PREFIX)


def _attention(implementation: str):
    """The attention function that stands in for an implementation: with any other mask it is that implementation, so
    a forward of another thread meanwhile is what it always was."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if takes_positions(query, key, value, kwargs):
            return attend_by_position(query, key, value, kwargs.get("scaling")), None
        if not is_spans(attention_mask):
            if implementation == "eager":  # which every file of models has its own of
                original = sys.modules[type(module).__module__].eager_attention_forward
            else:
                original = ALL_ATTENTION_FUNCTIONS[implementation]
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        softcap = kwargs.get("softcap") or 0.0
        return tree_attention(query, key, value, attention_mask, scale, softcap, kwargs.get("s_aux")), None

    return attention


for name in STANDS_IN_FOR:
    AttentionInterface.register(PREFIX + name, _attention(name))
    AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])


_users = Users()  # of configs


@contextmanager
def attention_of_rounds(target: PreTrainedModel) -> Iterator[None]:
    """A context in which the target's attention takes masks of spans, and gives each position what it gives it alone
    where a round asks for it; else it is the target's own. Contexts of several threads may overlap: the last one to end
    puts the target's own back."""
    config = target.config.get_text_config(decoder=True)

    def attend(prefix: str) -> None:
        own = config._attn_implementation_internal.removeprefix(PREFIX)  # a copy made meanwhile has it already
        config._attn_implementation_internal = prefix + own

    with _users.using(config, functools.partial(attend, PREFIX), functools.partial(attend, "")):
        yield


# -- few rows on a CPU


def takes_positions(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> bool:
    """Returns whether attention is to give each position what it gives it alone: in rounds that ask for it,
    where every key of one sequence is seen by the position that it stands at and those after it."""
    num_before = keys_before()
    if num_before is None or key.shape[2] != num_before + query.shape[2] or len(query) > 1:
        return False
    is_usual = kwargs.get("softcap") is None and kwargs.get("s_aux") is None and kwargs.get("position_bias") is None
    return is_usual and key.shape[3] == value.shape[3] and query.shape[1] % key.shape[1] == 0


def attend_by_position(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention of new positions, query (1, H, T, D), over key and value (1, Hkv, S, D) -> (1, T, H, D): what a
    position gives is the same to the last bit, whatever stands beside it. `key` and `value` may have more slots than
    `keys_before` and T: finite ones are not seen.

    A kernel adds up in an order that depends on how many rows and keys it gets. So rows come by fours, keys by blocks
    of BLOCK, the last one filled up, and positions that end in the same block are one call, as many as were tried at
    most.
    """
    num_before, num_new = keys_before() or 0, query.shape[2]
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    is_alike = are_rows_alike(num_heads, num_kv_heads, query.shape[3], query.dtype, torch.get_num_threads())
    most = TRIED_NEW[-1] if is_alike else 1
    attended = list[Tensor]()
    begin = 0
    while begin < num_new:
        seen = num_before + begin + 1
        num_keys = -(-seen // BLOCK) * BLOCK
        end = min(num_new, begin + most, num_keys - num_before)
        mask = _mask(seen, end - begin, num_heads // num_kv_heads, num_keys, query.dtype)
        keys, values = _first(key, num_keys), _first(value, num_keys)
        attended.append(attend_by_group(query[:, :, begin:end], keys, values, mask, scale))
        begin = end
    return attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)


def attend_by_group(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention of new positions, query (B, H, T, D), over key and value (B, Hkv, S, D) -> (B, T, H, D). `mask`
    (B, 1, R, S): of R rows for each head of keys, the first of which are the positions of its heads of queries, see
    `mask_of_group`; None: they see all keys."""
    size, num_heads, num_new, width = query.shape
    rows = query.reshape(size, key.shape[1], -1, width)
    num_rows = rows.shape[2]
    num_spare = 0 if mask is None else mask.shape[2] - num_rows
    if num_spare:
        rows = pad(rows, (0, 0, 0, num_spare))
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    out = out[:, :, :num_rows] if num_spare else out
    return out.reshape(size, num_heads, num_new, -1).transpose(1, 2)


def _first(states: Tensor, num_keys: int) -> Tensor:
    """The first keys or values (1, Hkv, num_keys, D). Where there are fewer, those after them are what stands in the
    buffer of which `states` are the first slots, or zeros."""
    buffer = states if states._base is None else states._base
    begins_alike = (buffer.stride(), buffer.storage_offset()) == (states.stride(), states.storage_offset())
    if begins_alike and buffer.shape[1] == states.shape[1] and states.shape[2] < num_keys <= buffer.shape[2]:
        states = buffer
    num_missing = num_keys - states.shape[2]
    return pad(states, (0, 0, 0, num_missing)) if num_missing > 0 else states[:, :, :num_keys]


@functools.lru_cache(maxsize=4)  # a round asks for two at most, where its positions end in two blocks
def _mask(seen: int, num_new: int, group: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    """The additive mask (1, 1, R, num_keys) of `group` heads of new positions, the first of which sees `seen` keys and
    each of the others one more; rows by fours."""
    ends = torch.arange(seen, seen + num_new, device="cpu")[:, None]
    hidden = (torch.arange(num_keys, device="cpu") >= ends).repeat(group, 1)
    mask = torch.zeros(1, 1, -(-len(hidden) // ROWS) * ROWS, num_keys, dtype=dtype, device="cpu")
    mask[0, 0, : len(hidden)].masked_fill_(hidden, float("-inf"))
    return mask


@functools.cache
def are_rows_alike(num_heads: int, num_kv_heads: int, width: int, dtype: torch.dtype, num_threads: int) -> bool:
    """Returns whether the attention of several positions gives each what it gives it alone, by the numbers that are
    tried, on this processor with as many threads."""
    generator = torch.Generator().manual_seed(0)
    group, most = num_heads // num_kv_heads, TRIED_BLOCKS[-1] * BLOCK
    held = torch.randn(2, 1, num_kv_heads, most, width, generator=generator, device="cpu").to(dtype)
    query = torch.randn(1, num_heads, TRIED_NEW[-1], width, generator=generator, device="cpu").to(dtype)
    for num_keys in (blocks * BLOCK for blocks in TRIED_BLOCKS):
        keys, values = held[:, :, :, :num_keys]
        least = num_keys - query.shape[2] + 1  # keys that the first position sees
        alone = [
            attend_by_group(query[:, :, t : t + 1], keys, values, _mask(least + t, 1, group, num_keys, dtype), None)
            for t in range(query.shape[2])
        ]
        for num_new in TRIED_NEW:
            mask = _mask(least, num_new, group, num_keys, dtype)
            together = attend_by_group(query[:, :, :num_new], keys, values, mask, None)
            if not torch.equal(torch.cat(alone[:num_new], dim=1), together):
                return False
    return True


def mask_of_group(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Makes of the mask (B, 1, T, S) of one head's rows the additive mask (B, 1, group * T, S) of a group's."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return mask.repeat(1, 1, group, 1)
