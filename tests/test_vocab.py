"""Draft ids and target ids: the offsets, their check, and target-sized logits."""

import pytest
import torch
from close import assert_close

from eagle31_hf import vocab

V = 13
MAPS = {"sorted": [0, 2, 5, 6, 12], "unsorted": [12, 0, 6, 2, 5], "full": list(range(V)), "one_id": [7]}
BAD_MAPS = {
    "past_the_end": ([0, 11, 0], r"d2t\[1\] = 11 maps draft id 1 to target id 12; expected 0 to 11\.$"),
    "negative": ([0, -2, 3], r"d2t\[1\] = -2 maps draft id 1 to target id -1; expected 0 to 11\.$"),
    "duplicate": ([3, 2, 0], r"several draft ids to target id 3; expected one draft id each"),
    "absolute_ids": ([1, 4, 7, 10, 11], r"draft id 3 to target id 13.*look like absolute ids; d2t holds offsets"),
}
SIZES = {
    "qwen_tokenizer_and_padded": (151669, 151936, True),
    "qwen_two_paddings": (151936, 152064, True),
    "qwen_tokenizer_and_most_padded": (151669, 152064, True),
    "padded_to_64_rows": (50257, 50304, True),
    "same": (32000, 32000, True),
    "llama2_and_llama3": (32000, 128256, False),
    "llama3_and_qwen": (128256, 151936, False),
    "tiny": (61, 200, False),
}


@pytest.mark.parametrize("ids", MAPS.values(), ids=MAPS)
def test_offsets_and_target_ids_are_inverse(ids):
    ids = torch.tensor(ids)
    d2t = vocab.offsets(ids)
    vocab.check_mapping(d2t, V)
    assert_close("ids", vocab.target_ids(d2t), ids)
    assert_close("offsets of int32 ids", vocab.offsets(ids.int()), d2t)


@pytest.mark.parametrize("ids", MAPS.values(), ids=MAPS)
def test_membership_marks_the_ids_that_can_be_proposed(ids):
    t2d = vocab.membership(torch.tensor(ids), V)
    assert t2d.dtype == torch.bool
    assert t2d.nonzero().flatten().tolist() == sorted(ids)


@pytest.mark.parametrize(("d2t", "message"), BAD_MAPS.values(), ids=BAD_MAPS)
def test_faulty_maps_are_refused(d2t, message):
    with pytest.raises(ValueError, match=message):
        vocab.check_mapping(torch.tensor(d2t), 12)


def test_most_frequent_ids_ascend_and_ties_go_to_the_smaller_id():
    counts = torch.tensor([3, 0, 9, 3, 9, 1, 3])
    assert vocab.most_frequent_ids(counts, 4).tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize("vocab_size", [V, V + 3, V - 4])
@pytest.mark.parametrize("ids", MAPS.values(), ids=MAPS)
def test_scatter_logits_to_a_target_of(vocab_size, ids):
    logits = torch.randn(2, 3, len(ids), generator=torch.Generator().manual_seed(0))
    full = vocab.scatter_logits(logits, torch.tensor(ids), vocab_size)
    for target_id in range(vocab_size):
        wanted = logits[..., ids.index(target_id)] if target_id in ids else torch.full((2, 3), -torch.inf)
        assert_close(f"target id {target_id}", full[..., target_id], wanted)


@pytest.mark.parametrize("vocab_size", [V, V + 3, V - 4])
def test_scatter_logits_of_a_full_vocabulary_to_a_target_of(vocab_size):
    logits = torch.randn(2, V).bfloat16()
    full = vocab.scatter_logits(logits, None, vocab_size)
    kept = min(V, vocab_size)
    assert full.shape == (2, vocab_size)
    assert_close("shared ids", full[:, :kept], logits[:, :kept].float())
    assert (full[:, kept:] == -torch.inf).all()


@pytest.mark.parametrize(("one", "other", "same"), SIZES.values(), ids=SIZES)
def test_same_vocabulary(one, other, same):
    assert vocab.same_vocabulary(one, other) is same
    assert vocab.same_vocabulary(other, one) is same
