"""Acceptance without the host: its kernel, in Triton's interpreter where there is no GPU, beside its reference."""

import pytest
import torch
from kernel_close import assert_all_match
from poison import Guarded

from eagle31_hf.kernels.drafts import accepted_path, best_tree, move_path

pytest.importorskip("eagle31_hf.kernels.drafts_triton")
pytestmark = pytest.mark.usefixtures("on_the_gpu")
OUTPUTS = ("path", "tokens", "counts")


def tree(b, num_drafts, branches):
    """Random trees: ids, parents, depths and bits; the children of a node have ids from 0 on."""
    parents = torch.stack([(torch.rand(b) * min(i + 1, branches)).long() for i in range(num_drafts)], dim=1)
    parents = (torch.arange(num_drafts) - 1 - parents).clamp(min=-1)
    _, hangs_on, depths, bits = best_tree.reference(torch.zeros(b, num_drafts), parents, num_drafts)
    is_sibling = (hangs_on[:, :, None] == hangs_on[:, None]) & torch.ones(num_drafts, num_drafts).tril(-1).bool()
    return is_sibling.sum(-1), hangs_on, depths, bits


def ascending(b, num_places, slots):
    """Paths (b, num_places) below `slots`: they begin at 0 and ascend."""
    rest = torch.stack([torch.randperm(slots - 1)[: num_places - 1].sort().values + 1 for _ in range(b)])
    return torch.cat((torch.zeros(b, 1, dtype=torch.long), rest), dim=1)


@pytest.mark.parametrize(
    ("b", "num_drafts", "branches", "width"),
    [(1, 1, 1, 2), (9, 7, 3, 8), (40, 59, 3, 61), (20, 63, 2, 64), (3, 30, 1, 31), (9, 10, 10, 11)],
    ids=str,
)
def test_accepted_path(b, num_drafts, branches, width):
    torch.manual_seed(0)
    ids, parents, depths, bits = tree(b, num_drafts, branches)
    chosen = (torch.rand(b, num_drafts + 1) * 1.3).long()
    spoiled = torch.rand(b, num_drafts + 1) < 0.05
    going = (torch.rand(b, 1) < 0.9).long()
    inputs = [Guarded.holding(each) for each in (ids, parents, depths, bits, chosen, going)]
    ids, parents, depths, bits, chosen, going = (each.tensor for each in inputs)
    args = ids, parents, depths, bits, chosen, spoiled, going, width
    got, expected = accepted_path.kernel()(*args), accepted_path.reference(*args)
    assert b < 9 or expected[2].max() > 2
    assert_all_match(OUTPUTS, got, expected)


@pytest.mark.parametrize("count", [0, 1, 6])
def test_accepted_path_of_a_chain_without_memory_of_its_own(count):
    order = torch.arange(count + 1).expand(3, -1)
    bits = ((2 << torch.arange(62))[None] - 1)[:, : count + 1].expand(3, -1)
    ids = torch.ones(3, count, dtype=torch.long)
    chosen = torch.ones(count + 1, 3, dtype=torch.long).T
    chosen[1, 1:3] = 5
    args = ids, order[:, :count], order, bits, chosen, torch.zeros_like(chosen).bool(), torch.tensor([[1], [1], [0]]), 8
    assert_all_match(OUTPUTS, accepted_path.kernel()(*args), accepted_path.reference(*args))


@pytest.mark.parametrize(("b", "num_places", "slots"), [(1, 2, 5), (4, 8, 30), (2, 20, 64), (2, 9, 9)], ids=str)
def test_move_path(b, num_places, slots):
    """What is moved may not be finite; places past a path are not looked at."""
    torch.manual_seed(0)
    stacks = [torch.randn(3, b, 2, 100, 6), torch.full((1, b, 1, 90, 7), float("nan")).bfloat16()]
    starts, path = torch.randint(0, 26, (b, 1)), ascending(b, num_places, slots)
    counts = torch.randint(0, num_places + 1, (b, 1))
    counts[0], path[0, -1] = num_places - 1, 10**6
    expected = [each.clone() for each in stacks]
    for stack, each in zip(stacks, expected, strict=True):
        for row, (start, count) in enumerate(zip(starts[:, 0].tolist(), counts[:, 0].tolist(), strict=True)):
            each[:, row, :, start : start + count] = stack[:, row, :, start + path[row, :count]]
    move_path(stacks, starts, path, counts)
    for stack, each in zip(stacks, expected, strict=True):
        assert torch.equal(stack.nan_to_num(9.0), each.nan_to_num(9.0))
