"""The bookkeeping of drafting: its kernels, in Triton's interpreter where there is no GPU, beside their references."""

import pytest
import torch
from close import assert_close
from kernel_close import assert_all_match, assert_matches
from poison import Guarded

from eagle31_hf.kernels.drafts import best_tree, likeliest_tokens, next_level

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("on_the_gpu")

INF = float("inf")
LIKELIEST = ("values", "ids")
LEVEL_OUTPUTS = ("totals", "scores", "best", "bits")
TREE_OUTPUTS = ("kept", "hangs_on", "depths", "bits")


def guarded(values):
    return Guarded.holding(values).tensor


def level(b, f, k, seed=0):
    """Children of nodes, many of them equal, some impossible, and what the nodes see."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    log_probs = -torch.randint(0, 5, (b, f, k), generator=generator).float() / 2
    log_probs[torch.rand(b, f, k, generator=generator) < 0.1] = -INF
    scores = -torch.randint(0, 3, (b, f), generator=generator).float()
    return log_probs.sort(-1, descending=True).values, scores, torch.randint(0, 2**62, (b, f), generator=generator)


def candidates(b, k, width, depth):
    """The scores and parents of all candidates of trees."""
    scores, parents, first = torch.zeros(b, 1), torch.full((b, 1), -1), 0
    found = []
    for i in range(depth):
        log_probs, _, bits = level(b, scores.shape[1], k, seed=i)
        totals, scores, best, _ = next_level.reference(log_probs, scores, bits, min(width, bits.shape[1] * k), 0)
        found.append((totals, parents.repeat_interleave(k, dim=1)))
        parents = best + first
        first += totals.shape[1]
    return tuple(torch.cat(parts, dim=1) for parts in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "k", "temperature", "has_ids"),
    [((1, 1, 7), 7, 1.0, False), ((2, 3, 2061), 10, 0.25, True), ((1, 2, 70001), 3, 0.7, True), ((2, 1, 500), 1, 1, 0)],
    ids=str,
)
def test_likeliest_tokens(dtype, shape, k, temperature, has_ids):
    torch.manual_seed(0)
    logits = guarded((torch.randn(shape) * 4).to(dtype))
    target_ids = guarded(torch.randperm(2 * shape[-1])[: shape[-1]]) if has_ids else None
    values, ids = likeliest_tokens.kernel()(logits, k, temperature, target_ids)
    expected_values, expected_ids = likeliest_tokens.reference(logits, k, temperature, target_ids)
    assert_matches("ids", ids, expected_ids)
    assert_close("values", values, expected_values, 1e-6, scale=float(logits.float().abs().max()) / temperature)


def test_likeliest_tokens_of_equal_logits_has_the_smaller_columns():
    torch.manual_seed(0)
    logits = torch.randint(-1, 2, (2, 2, 2500)).float()
    logits[0, 0] = -0.0
    logits[0, 0, 1::2] = 0.0
    logits[1, 1] = -INF  # but for three columns, in two slices
    logits[1, 1, [3, 1030, 1031]] = torch.tensor([-7.0, -7.0, 2.0])
    found = likeliest_tokens.kernel()(guarded(logits), 6, 0.5, None)
    assert found[1][0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found[1][1, 1].tolist() == [1031, 3, 1030, 0, 1, 2]
    assert_all_match(LIKELIEST, found, likeliest_tokens.reference(logits, 6, 0.5, None))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")  # on purpose
@pytest.mark.parametrize("column", [0, 1500])
def test_likeliest_tokens_without_a_distribution(column):
    logits = torch.randn(1, 5, 1501)
    logits[0, 0] = -INF
    logits[0, 1, column] = float("nan")
    logits[0, 2, column] = INF
    logits[0, 3, column] = 3e38  # over the temperature
    values, ids = likeliest_tokens.kernel()(guarded(logits), 4, 0.25, None)
    assert values[0, :4].eq(-INF).all()
    assert ids[0, :4].eq(torch.arange(4)).all()
    assert_all_match(LIKELIEST, (values, ids), likeliest_tokens.reference(logits, 4, 0.25, None))


@pytest.mark.parametrize("order", ["nodes, columns", "columns, nodes", "nodes of all sequences side by side"])
def test_likeliest_tokens_reads_strides_and_nothing_behind_them(order):
    torch.manual_seed(0)
    shape = {"nodes, columns": (3, 4, 80), "columns, nodes": (3, 80, 4)}.get(order, (4, 3, 80))
    logits = Guarded(shape, torch.float32).tensor
    logits = {"nodes, columns": logits, "columns, nodes": logits.transpose(1, 2)}.get(order, logits.transpose(0, 1))
    logits = logits[..., :61]
    logits.copy_(torch.randn(3, 4, 61))
    args = logits, 3, 1.0, None
    assert_all_match(LIKELIEST, likeliest_tokens.kernel()(*args), likeliest_tokens.reference(*args))


@pytest.mark.parametrize(
    ("b", "f", "k", "width", "num_run"),
    [(1, 1, 7, 7, 0), (2, 10, 10, 10, 30), (1, 64, 16, 64, 0), (3, 5, 3, 4, 60), (2, 4, 1, 2, 5), (1, 1, 1, 1, 63)],
    ids=str,
)
def test_next_level(b, f, k, width, num_run):
    args = *(guarded(each) for each in level(b, f, k)), width, num_run
    assert_all_match(LEVEL_OUTPUTS, next_level.kernel()(*args), next_level.reference(*args))


@pytest.mark.parametrize(
    ("b", "k", "width", "depth", "count"),
    [(1, 3, 2, 2, 1), (3, 3, 4, 3, 7), (2, 10, 10, 7, 59), (1, 10, 10, 7, 63), (1, 5, 1, 1, 5), (2, 4, 2, 9, 31)],
    ids=str,
)
def test_best_tree(b, k, width, depth, count):
    args = *(guarded(each) for each in candidates(b, k, width, depth)), count
    assert_all_match(TREE_OUTPUTS, best_tree.kernel()(*args), best_tree.reference(*args))


@pytest.mark.parametrize("score", [0.0, -1.5, -INF])
@pytest.mark.parametrize(("num_candidates", "count"), [(1, 1), (63, 63), (100, 62)])
def test_best_tree_of_a_chain_whose_scores_are_equal(score, num_candidates, count):
    scores = guarded(torch.full((2, num_candidates), score))
    parents = guarded((torch.arange(num_candidates) - 1).repeat(2, 1))
    kept, hangs_on, depths, bits = best_tree.kernel()(scores, parents, count)
    assert kept.eq(torch.arange(count)).all()
    assert hangs_on.eq(torch.arange(count)).all()
    assert depths.eq(torch.arange(count + 1)).all()
    assert bits.eq((2 << torch.arange(count + 1)) - 1).all()


def test_best_tree_keeps_scores_of_all_magnitudes():
    torch.manual_seed(0)
    scores = -torch.cat((torch.rand(20) * 1e-40, 10 ** torch.linspace(-38, 38, 70), torch.zeros(9), torch.rand(30)))
    scores = scores[torch.randperm(len(scores))].repeat(2, 1)
    scores[1, ::3] = -INF
    scores[1, ::7] = 1 - scores[1, ::7].clamp(min=-50)
    parents = torch.full_like(scores, -1, dtype=torch.long)
    for count in (1, 8, 40, 63):
        args = scores, parents, count
        assert_all_match(TREE_OUTPUTS, best_tree.kernel()(*args), best_tree.reference(*args))
