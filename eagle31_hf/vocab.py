"""Draft and target ids: `target id = draft id + d2t[draft id]`. V target vocabulary, Vd draft vocabulary."""

import torch
from torch import Tensor

# Targets pad their embedding to a round number of rows; checkpoints of one model differ by that padding (Qwen: 151936
# and 152064).
PADDING_ROWS, PADDING_SHARE = 64, 0.005
# the maps of a draft vocabulary: the only tensors whose values are read before weights are loaded
MAPS = ("d2t", "t2d")
IGNORED = -100  # a label that does not count, in torch and transformers


def target_ids(d2t: Tensor) -> Tensor:
    """Offsets (Vd,) -> the target id of every draft id (Vd,)."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def offsets(ids: Tensor) -> Tensor:
    """Target ids in draft order (Vd,) -> `d2t` (Vd,) int64."""
    return ids.long() - torch.arange(len(ids), device=ids.device)


def membership(ids: Tensor, vocab_size: int) -> Tensor:
    """Target ids (Vd,) -> `t2d` (V,) bool, true where the drafter can propose the id."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    t2d[ids] = True
    return t2d


def draft_labels(labels: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Labels of any shape in target ids, -100 ignored -> the same in draft ids, -100 too where the drafter cannot
    propose the id.

    `ids` (Vd,) are the target ids of the draft ids. Raises IndexError for a label outside the target vocabulary.
    """
    draft_ids = ids.new_full((vocab_size,), IGNORED)
    draft_ids[ids] = torch.arange(len(ids), device=ids.device)
    return torch.where(labels < 0, labels, draft_ids[labels.clamp(min=0)])


def most_frequent_ids(counts: Tensor, draft_vocab_size: int) -> Tensor:
    """Counts by target id (V,) -> the `draft_vocab_size` most frequent ids, ascending; ties go to the smaller id."""
    return torch.sort(counts, descending=True, stable=True).indices[:draft_vocab_size].sort().values


def check_mapping(d2t: Tensor, vocab_size: int) -> None:
    """Raises ValueError unless `d2t` maps every draft id to a distinct id in [0, V)."""
    ids = target_ids(d2t)
    bad = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten()
    if len(bad):
        i = int(bad[0])
        are_ids = int(d2t.min()) >= 0 and int(d2t.max()) < vocab_size and len(d2t.unique()) == len(d2t)
        hint = " The values look like absolute ids; d2t holds offsets (target id - draft id)." if are_ids else ""
        raise ValueError(
            f"d2t[{i}] = {int(d2t[i])} maps draft id {i} to target id {int(ids[i])}; expected 0 to"
            f" {vocab_size - 1}.{hint}"
        )
    if len(ids.unique()) != len(ids):
        values, counts = ids.unique(return_counts=True)
        raise ValueError(
            f"d2t maps several draft ids to target id {int(values[counts > 1][0])}; expected one draft id each."
        )


def same_vocabulary(drafter_size: int, target_size: int) -> bool:
    """Returns whether two vocabulary sizes can belong to one tokenizer, padding rows aside."""
    return abs(drafter_size - target_size) <= max(PADDING_ROWS, PADDING_SHARE * max(drafter_size, target_size))


def scatter_logits(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Draft logits (..., Vd) -> target-sized logits (..., V) in fp32, `-inf` where the drafter cannot propose.

    `ids` (Vd,) are the target ids of the draft ids, `None` for a full draft vocabulary. Ids outside `vocab_size` are
    dropped.
    """
    logits = logits.float()
    if ids is None:
        ids = torch.arange(logits.shape[-1], device=logits.device)
    # One column more takes the ids outside: which they are is known to the device alone.
    full = logits.new_full((*logits.shape[:-1], vocab_size + 1), float("-inf"))
    return full.index_copy_(-1, ids.clamp(max=vocab_size), logits)[..., :vocab_size]
