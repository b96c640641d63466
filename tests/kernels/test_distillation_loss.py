"""`distillation_loss`: its kernel, in Triton's interpreter where there is no GPU, beside its reference."""

import pytest
import torch
from close import assert_close
from kernel_close import assert_matches
from poison import Guarded, apart, turned

from eagle31_hf.kernels.distillation_loss import TargetDistribution, distillation_loss

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("distance", "overlap", "is_right", "by_logits")


def arguments(
    num_predictions: int,
    num_targets: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    spread: float = 3,
    hard: float = 0.1,
):
    """Arguments of the operation; of a target's vocabulary of twice as many tokens the draft's has every other."""
    generator = torch.Generator().manual_seed(vocab)
    target_logits = spread * torch.randn(num_targets, 2 * vocab, generator=generator)
    target = TargetDistribution.from_logits(target_logits, torch.arange(vocab) * 2)
    logits = (spread * torch.randn(num_predictions, vocab, generator=generator)).to(dtype)
    which = torch.randint(num_targets, (num_predictions,), generator=generator)
    weights = torch.rand(num_predictions, generator=generator)
    args = [logits, target.p, target.coverage, target.negentropy, target.best, which, weights]
    return [*(arg.to(DEVICE) for arg in args), hard]


def assert_same(args) -> None:
    """Asserts that the kernel returns what the reference does, and that it writes to none of its arguments."""
    before = [arg.clone() for arg in args[:-1]]
    expected, got = distillation_loss.reference(*args), distillation_loss.kernel()(*args)
    for name, one, other in zip(NAMES, got, expected, strict=True):
        assert one.dtype == other.dtype
        assert_matches(name, one, other)
    for arg, old in zip(args[:-1], before, strict=True):
        assert_close("argument", arg, old, 0.0)


@pytest.mark.parametrize("hard", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 7), (5, 3, 500), (7, 4, 1031), (3, 2, 5000)], ids=str)
def test_kernel_matches_reference(shape, dtype, hard):
    *tensors, hard = arguments(*shape, dtype=dtype, hard=hard)
    guarded = [Guarded.holding(arg) for arg in tensors]
    assert_same([*(each.tensor for each in guarded), hard])
    assert all(each.is_intact() for each in guarded)


@pytest.mark.parametrize("block", [16, 128])
def test_a_row_of_many_blocks(monkeypatch, block):
    """Its largest logit in the first, a middle and the last block, or in all of them the same."""
    monkeypatch.setattr("eagle31_hf.kernels.distillation_loss_triton.BLOCK", block)
    args = arguments(4, 2, 403)
    for prediction, token in enumerate((0, 200, 402)):
        args[0][prediction, token] = 30.0
    args[0][3] = 1.5
    assert_same(args)


def test_rows_that_lie_apart_and_are_turned():
    args = arguments(5, 3, 61)
    for layout in (apart, turned):
        assert_same([layout(args[0]), layout(args[1]), *args[2:]])


def test_indices_and_weights_that_lie_apart():
    args = arguments(5, 3, 61)
    args[5] = torch.stack((args[5], (args[5] + 1) % 3), dim=1)[:, 0]
    for i in (2, 3, 6):
        args[i] = torch.stack((args[i], torch.full_like(args[i], float("nan"))), dim=1)[:, 0]
    assert_same(args)


def test_a_target_without_mass_on_the_draft_vocabulary():
    args = arguments(3, 2, 61)
    target_logits = torch.full((2, 122), -1e4)
    target_logits[:, 1] = 1e4
    target = TargetDistribution.from_logits(target_logits, torch.arange(61) * 2)
    assert not target.coverage.any()
    args[1:5] = (each.to(DEVICE) for each in (target.p, target.coverage, target.negentropy, target.best))
    assert_same(args)
    assert not distillation_loss.kernel()(*args)[2].any()


def test_which_token_is_likeliest():
    """The best one, one as good, a worse one, and one that the draft vocabulary lacks."""
    args = arguments(4, 4, 61)
    logits, best = args[0], args[4]
    args[5] = torch.arange(4, device=DEVICE)
    best.copy_(logits.argmax(-1))
    logits[1, (best[1] + 1) % 61] = logits[1, best[1]]
    best[1] = (best[1] + 1) % 61
    best[2] = logits[2].argmin()
    logits[3, 0], best[3] = 50.0, -1
    assert distillation_loss.reference(*args)[2].tolist() == [True, True, False, False]
    assert distillation_loss.kernel()(*args)[2].tolist() == [True, True, False, False]


def test_certain_of_different_tokens():
    """p and q have all their mass on one token each; nothing overflows."""
    args = arguments(2, 1, 61, spread=0.0, hard=0.0)
    args[0].fill_(-1e4)
    args[0][0, 3] = args[0][1, 5] = 1e4
    args[1].zero_()
    args[1][0, 5] = 1.0
    args[2].fill_(1.0)
    args[3].fill_(0.0)
    assert_same(args)
    distance, overlap, *_ = distillation_loss.kernel()(*args)
    assert distance.tolist() == [2e4, 0.0]
    assert overlap.tolist() == [0.0, 1.0]


def test_logits_of_minus_infinity():
    """Where p has mass and q has none the distance is infinite; the other tokens keep their gradient."""
    args = arguments(2, 2, 61)
    args[0][:, 10:20] = float("-inf")
    args[0][1, :10] = float("-inf")
    expected, got = distillation_loss.reference(*args), distillation_loss.kernel()(*args)
    assert bool((expected[0] == float("inf")).all())
    assert got[0].equal(expected[0])
    for i in (1, 2, 3):
        assert_matches(NAMES[i], got[i], expected[i])


@pytest.mark.parametrize(("hard", "finite"), [(0.0, False), (1.0, True)])
def test_a_share_of_nothing_has_no_part_in_the_distance(hard, finite):
    """Not even where it is infinite: 0 times that is no number."""
    args = arguments(1, 1, 61, hard=hard)
    missed = args[1].argmin() if finite else args[1].argmax()  # of the KL, or of both
    args[0][0, missed], args[4][0] = float("-inf"), args[1].argmax()
    expected, got = distillation_loss.reference(*args)[0], distillation_loss.kernel()(*args)[0]
    assert bool(expected.isfinite().all()) == finite
    assert not expected.isnan().any()
    assert_matches("distance", got, expected)


def test_the_vocabulary_lacks_the_likeliest_token():
    """Then the cross-entropy is 0, whatever the first token, which is read in its place, has for a logit."""
    args = arguments(1, 1, 61, hard=0.5)
    args[4][0] = -1
    distance, *_, by_logits = distillation_loss.kernel()(*args)
    kl, *_, by_logits_of_kl = distillation_loss.reference(*args[:-1], 0.0)
    assert_matches("distance", distance, kl / 2)
    assert_matches("by_logits", by_logits, by_logits_of_kl / 2)
    assert_same(args)
    args[0][0, 0] = float("-inf")
    assert distillation_loss.kernel()(*args)[0].equal(distillation_loss.reference(*args)[0])


def test_what_is_not_a_number_shows():
    args = arguments(2, 2, 61)
    args[0][0, 17] = float("nan")
    args[4][0] = int(args[0][0].nan_to_num(-100.0).argmax())  # the likeliest of those that are numbers
    distance, overlap, is_right, by_logits = distillation_loss.kernel()(*args)
    assert is_right.equal(distillation_loss.reference(*args)[2])
    assert distance.isnan().tolist() == overlap.isnan().tolist() == [True, False]
    assert by_logits.isnan().all(-1).tolist() == [True, False]


def test_no_prediction():
    args = arguments(1, 1, 61)
    args[0], args[5], args[6] = args[0][:0], args[5][:0], args[6][:0]
    assert [tuple(each.shape) for each in distillation_loss.kernel()(*args)] == [(0,), (0,), (0,), (0, 61)]
