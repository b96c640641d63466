"""Attention of few rows on a CPU: what a position gives is the same to the last bit, whatever stands beside it."""

import pytest
import torch
from close import assert_close
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eagle31_hf.targets import tree_attention
from eagle31_hf.targets.few_rows import in_drafted_call
from eagle31_hf.targets.tree_attention import BLOCK, are_rows_alike, attend_by_position

SHAPES = [(1, 16), (2, 64), (3, 64), (4, 128), (7, 32)]  # heads that share keys, their width
KV_HEADS = 2


def attend(query: Tensor, held: tuple[Tensor, Tensor], num_before: int) -> Tensor:
    with in_drafted_call(num_before):
        return attend_by_position(query, *held, None)


def drawn(
    group: int, width: int, num_new: int, num_keys: int, dtype: torch.dtype, num_kv_heads: int = KV_HEADS
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(num_new + num_keys)
    query = torch.randn(1, num_kv_heads * group, num_new, width, generator=draw)
    keys, values = torch.randn(2, 1, num_kv_heads, num_keys, width, generator=draw)
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def one_by_one(query: Tensor, held: tuple[Tensor, Tensor], num_before: int) -> Tensor:
    """Each position in a round of its own, which the keys after it are not there for."""
    count = query.shape[2]
    ends = [num_before + t + 1 for t in range(count)]
    seen = [(held[0][:, :, :end], held[1][:, :, :end]) for end in ends]
    alone = [attend(query[:, :, t : t + 1], seen[t], ends[t] - 1) for t in range(count)]
    return torch.cat(alone, dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "width"), SHAPES)
def test_a_position_is_the_same_alone_and_beside_others(group, width, dtype):
    """Across the ends of blocks, too, and where slots after the last position hold anything."""
    for num_new in (1, 2, 5, 9, 20, 70):
        for num_before in (0, 3, BLOCK - 4, 2 * BLOCK - 1, 300, 512 - 2, 700):
            num_slots = num_before + num_new + (17 if num_before % 2 else 200)
            query, keys, values = drawn(group, width, num_new, num_slots, dtype)
            together = attend(query, (keys, values), num_before)
            assert torch.equal(together, one_by_one(query, (keys, values), num_before)), (num_new, num_before)


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_it_is_so_with_one_head_of_keys_and_with_many(num_kv_heads):
    for num_new, num_before in ((3, 0), (5, BLOCK - 2), (13, 500)):
        query, keys, values = drawn(4, 64, num_new, num_before + num_new, torch.bfloat16, num_kv_heads)
        together = attend(query, (keys, values), num_before)
        assert torch.equal(together, one_by_one(query, (keys, values), num_before)), (num_new, num_before)


def test_keys_in_a_buffer_are_not_copied(monkeypatch):
    """What stands after them fills their last block."""
    query, *buffers = drawn(4, 16, 3, 2 * BLOCK, torch.bfloat16)
    whole = [buffer[:, :, :90] for buffer in buffers]
    expected = attend(query, tuple(states.clone() for states in whole), 87)
    monkeypatch.setattr(tree_attention, "pad", None)  # twelve rows, and keys: none is to be filled up
    assert torch.equal(attend(query, tuple(whole), 87), expected)


def test_keys_that_do_not_begin_their_buffer_are_not_taken_for_its_first():
    query, *buffers = drawn(4, 16, 3, 2 * BLOCK, torch.bfloat16)
    later = [buffer[:, :, 5:95] for buffer in buffers]
    expected = attend(query, tuple(states.clone() for states in later), 87)
    assert torch.equal(attend(query, tuple(later), 87), expected)


@pytest.mark.parametrize("is_alike", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "width"), SHAPES)
def test_it_is_the_attention_of_the_positions_before(group, width, dtype, is_alike, monkeypatch):
    monkeypatch.setattr(tree_attention, "are_rows_alike", lambda *_: is_alike)
    for num_new, num_before in ((1, 0), (3, 70), (6, 2 * BLOCK - 3)):
        num_keys = num_before + num_new
        query, keys, values = drawn(group, width, num_new, num_keys, dtype)
        seen = torch.ones(num_new, num_keys, dtype=torch.bool).tril(num_before)
        shared = [states.float().repeat_interleave(group, dim=1) for states in (keys, values)]
        expected = scaled_dot_product_attention(query.float(), *shared, attn_mask=seen).transpose(1, 2)
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        assert_close("attended", attend(query, (keys, values), num_before).float(), expected, tolerance)


def test_where_a_kernel_tells_rows_apart_positions_run_one_by_one(monkeypatch):
    """A kernel whose sums depend on the number of rows is found, and each position is given a call."""
    own, shapes = tree_attention.scaled_dot_product_attention, list[int]()

    def telling(rows, *args, **kwargs):
        shapes.append(rows.shape[2])
        return own(rows, *args, **kwargs) + rows.shape[2]

    monkeypatch.setattr(tree_attention, "scaled_dot_product_attention", telling)
    monkeypatch.setattr(tree_attention, "are_rows_alike", are_rows_alike.__wrapped__)
    query, keys, values = drawn(3, 16, 5, 40, torch.bfloat16)
    together = attend(query, (keys, values), 35)
    assert set(shapes[-5:]) == {4}
    assert torch.equal(together, one_by_one(query, (keys, values), 35))
