"""Acceptance without the host: its kernels, in Triton's interpreter where there is no GPU, beside their references."""

import pytest
import torch
from close import assert_close
from kernel_close import assert_all_match, assert_matches
from poison import Guarded

from eagle31_hf.kernels.acceptance import accepted_path, move_path
from eagle31_hf.kernels.drafts import best_tree

acceptance_triton = pytest.importorskip("eagle31_hf.kernels.acceptance_triton")
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


@pytest.mark.parametrize(
    ("b", "num_places", "slots", "dtype"),
    [(1, 2, 5, torch.float32), (4, 8, 30, torch.bfloat16), (2, 20, 64, torch.float32), (2, 9, 9, torch.bfloat16)],
    ids=str,
)
def test_move_path(dtype, b, num_places, slots):
    torch.manual_seed(0)
    shapes = [(b, 3, 100, 60), (b, 1, 90, 64), (b, 2, 100, 8), (b, 1, 70, 7), (b, 1, 70, 300)]
    buffers = [Guarded.holding(torch.randn(shape).to(dtype)) for shape in shapes]
    starts = torch.randint(0, 70 - slots, (b, 1))
    path = ascending(b, num_places, slots)
    counts = torch.randint(0, num_places + 1, (b, 1))
    counts[0] = num_places
    expected = [each.tensor.clone() for each in buffers]
    move_path.reference(expected, starts, path, counts)
    move_path.kernel()([each.tensor for each in buffers], starts, path, counts)
    for guarded, each in zip(buffers, expected, strict=True):
        assert guarded.is_intact()
        assert_matches("buffer", guarded.tensor, each)


def test_move_path_reads_no_slot_that_is_not_moved():
    buffer, path = torch.full((1, 2, 12, 4), float("nan")), torch.tensor([[0, 2, 5, 10**6]])
    buffer[:, :, [4, 6, 9]] = torch.tensor([1.0, 2.0, 3.0])[:, None]
    move_path.kernel()([buffer], torch.tensor([[4]]), path, torch.tensor([[3]]))
    assert buffer[0, 0, 4:7, 0].tolist() == [1.0, 2.0, 3.0]
    assert buffer[0, 0, [0, 1, 2, 3, 7, 8, 10, 11]].isnan().all()


def test_move_path_follows_strides():
    torch.manual_seed(0)
    whole = torch.randn(2, 40, 3, 10)
    buffers = [whole[..., :6].transpose(1, 2), torch.randn(2, 3, 40, 6)]
    before, beside = [each.clone() for each in buffers], whole[..., 6:].clone()
    starts, path, counts = torch.tensor([[3, 9], [5, 9]])[:, :1], ascending(2, 5, 20), torch.tensor([[5], [4]])
    move_path.kernel()(buffers, starts, path, counts)
    move_path.reference(before, starts, path, counts)
    assert_close("buffers", buffers, before)
    assert_close("beside", whole[..., 6:], beside)


def test_move_path_refuses_rows_in_pieces():
    args = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="last dimension"):
        move_path.kernel()([torch.zeros(1, 1, 4, 8)[..., ::2]], *args)


def test_a_table_is_made_once_for_the_same_buffers(monkeypatch):
    prepare = acceptance_triton.prepare
    monkeypatch.setattr(acceptance_triton, "_tables", {})
    monkeypatch.setattr(acceptance_triton, "MAX_TABLES", 2)
    buffers = [torch.zeros(1, 2, 4, 8) for _ in range(3)]
    first, second = prepare(buffers[:2]), prepare(buffers[1:])
    assert prepare(list(buffers[:2])) is first
    assert prepare([buffers[0][:, :1], buffers[1]]) is not first  # takes the place of the second
    assert prepare(buffers[:2]) is first
    assert prepare(buffers[1:]) is not second


def test_no_table_is_made_while_a_graph_is_captured(monkeypatch):
    buffers = [torch.zeros(1, 2, 4, 8)]
    monkeypatch.setattr(acceptance_triton, "_tables", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before the capture"):
        acceptance_triton.prepare(buffers)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    table = acceptance_triton.prepare(buffers)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert acceptance_triton.prepare(buffers) is table


@pytest.mark.parametrize(("width", "cut", "word"), [(8, 8, 8), (6, 6, 4), (7, 7, 2), (8, 7, 2)], ids=str)
def test_words_are_as_long_as_rows_allow(width, cut, word):
    assert acceptance_triton.prepare([torch.zeros(1, 2, 4, width, dtype=torch.bfloat16)[..., :cut]]).word == word


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        (
            accepted_path,
            (*tree(2, 5, 2), torch.zeros(2, 6).long(), torch.zeros(2, 6).bool(), torch.ones(2, 1).long(), 6),
        ),
        (
            move_path,
            (
                [torch.randn(2, 1, 9, 4), torch.randn(2, 2, 8, 3)],
                torch.ones(2, 1).long(),
                torch.tensor([[0, 2, 3], [0, 1, 4]]),
                torch.tensor([[3], [2]]),
            ),
        ),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_operation_is_as_it_is_declared(operation, args):
    torch.library.opcheck(operation._op, args)
