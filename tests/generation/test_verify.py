"""Acceptance of drafted tokens, given p and q."""

import pytest
import torch
from chi_square import critical_value, statistic
from close import assert_close
from observers import Diary
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from eagle31_hf.generation.rejection_sampler import likeliest

PREFIX = torch.tensor([[4, 2]])
NONE = LogitsProcessorList()
CPU = torch.device("cpu")


def judge(
    processors=NONE,
    do_sample: bool = False,
    is_coupled: bool = False,
    vocab_size: int = 6,
    eos=(),
    num_rows: int = 1,
    keeps_scores=True,
) -> Judge:
    draws = Draws(num_rows, vocab_size, CPU, is_coupled) if do_sample else None
    if draws is not None:
        draws.start(PREFIX.shape[1])
    return Judge(processors, draws, set(eos), keeps_scores)


def accept(judge: Judge, drafted: Tensor, draft_logits: Tensor | None, logits: Tensor) -> Verdict:
    """What one row after PREFIX accepts of drafts (1, K), by target logits (1, K + 1, V)."""
    return judge.row_by_row(Texts(PREFIX, 0, [0]), Proposal(drafted, draft_logits), logits.clone())


def logits_choosing(*ids: int, vocab_size: int = 6) -> torch.Tensor:
    """Target logits (1, K + 1, V) whose argmax is `ids`."""
    return torch.nn.functional.one_hot(torch.tensor([ids]), vocab_size).float()


GREEDY = {  # drafted, what the target chooses, what is committed
    "none_drafted": ([], [3], [3]),
    "first_wrong": ([1, 2, 3], [5, 2, 3, 0], [5]),
    "second_wrong": ([1, 2, 3], [1, 5, 3, 0], [1, 5]),
    "last_wrong": ([1, 2, 3], [1, 2, 5, 0], [1, 2, 5]),
    "right_again_after_a_wrong_one": ([1, 2, 3], [1, 0, 3, 0], [1, 0]),
    "all_right": ([1, 2, 3], [1, 2, 3, 0], [1, 2, 3, 0]),
}


@pytest.mark.parametrize(
    "processors", [NONE, LogitsProcessorList([TemperatureLogitsWarper(0.5)])], ids=["plain", "processed"]
)
@pytest.mark.parametrize(("drafted", "chosen", "tokens"), GREEDY.values(), ids=GREEDY)
def test_greedy(drafted, chosen, tokens, processors):
    logits = logits_choosing(*chosen)
    verdict = accept(judge(processors), torch.tensor([drafted], dtype=torch.long), None, logits)
    assert verdict.tokens == [tokens]
    assert verdict.paths == [list(range(len(tokens)))]
    scale = 2.0 if processors else 1.0
    assert_close("scores", verdict.scores, [[scale * logits[:, i] for i in range(len(tokens))]])


@pytest.mark.parametrize(("eos", "tokens"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (0, [1, 2, 3, 0])])
def test_nothing_follows_an_accepted_draft_that_ends_the_text(eos, tokens):
    """The row whose token ended it is kept all the same: the next turn reads it."""
    verdict = accept(judge(eos=[eos]), torch.tensor([[1, 2, 3]]), None, logits_choosing(1, 2, 3, 0))
    assert verdict.tokens == [tokens]
    assert verdict.paths == [[0, 1, 2, 3][: len(tokens) + (eos != 0)]]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_processors_see_the_committed_prefixes_only(do_sample):
    torch.manual_seed(0)
    for _ in range(20):
        diary, drafted = Diary(6), torch.randint(0, 6, (1, 4))
        verdict = accept(judge(LogitsProcessorList([diary]), do_sample), drafted, None, torch.randn(1, 5, 6))
        text = PREFIX[0].tolist() + verdict.tokens[0]
        assert diary.prefixes == [text[:i] for i in range(2, len(text))]


def test_scores_are_processed_with_their_own_prefix():
    logits, drafted = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(3)), torch.tensor([[1, 2, 3]])
    logits[0, range(3), drafted[0]] = 50.0  # all accepted
    verdict = accept(judge(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])), drafted, None, logits)
    for i in range(4):
        prefix = torch.cat((PREFIX, drafted[:, :i]), dim=1)
        assert_close(f"score {i}", verdict.scores[0][i], RepetitionPenaltyLogitsProcessor(2.0)(prefix, logits[:, i]))


@pytest.mark.parametrize(
    "processors", [NONE, LogitsProcessorList([TemperatureLogitsWarper(0.5)])], ids=["plain", "processed"]
)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_scores_nobody_asked_for_are_not_kept(do_sample, processors):
    """A score is as long as the vocabulary; and where none is read, the target's logits need not be copied."""
    logits, drafted, verdicts, judges = 30 * logits_choosing(1, 2, 3), torch.tensor([[1, 2]]), [], []
    for keeps_scores in (False, True):
        torch.manual_seed(0)
        judges.append(judge(processors, do_sample, keeps_scores=keeps_scores))
        verdicts.append(accept(judges[-1], drafted, None, logits))
    assert [len(verdict.scores[0]) for verdict in verdicts] == [0, 3]
    assert verdicts[0].tokens == verdicts[1].tokens == [[1, 2, 3]]
    assert [one.only_compares for one in judges] == [not do_sample and not processors, False]


def test_the_first_of_the_largest_in_every_type():
    """bf16 ties often; plain generate compares in fp32, where the first of equals wins."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.tensor([[[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -1.0, -1.0]]], dtype=dtype)
        assert likeliest(logits).tolist() == [[1, 0, 0]]
        random = torch.randn(2, 40, 999, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert likeliest(random).tolist() == random.float().argmax(-1).tolist()


TREE = DraftTree.from_parents(torch.tensor([[2, 3, 1, 5, 4]]), torch.tensor([[-1, 0, 0, 2, 2]]), max_depth=2)
WALKS = {  # what the target chooses at every node, what is committed, the nodes it leads through
    "no_child": ([0, 3, 3, 3, 3], [0], [0]),
    "first_child": ([3, 0, 0, 0, 0], [3, 0], [0, 1]),
    "second_child_then_none": ([1, 0, 3, 0, 0], [1, 3], [0, 2]),
    "to_a_leaf": ([1, 0, 4, 0, 2], [1, 4, 2], [0, 2, 4]),
}


@pytest.mark.parametrize(
    "processors", [NONE, LogitsProcessorList([TemperatureLogitsWarper(0.5)])], ids=["plain", "processed"]
)
@pytest.mark.parametrize(("chosen", "tokens", "path"), WALKS.values(), ids=WALKS)
def test_a_tree_is_walked_while_the_targets_token_is_a_child(chosen, tokens, path, processors):
    logits = logits_choosing(*chosen)
    verdict = judge(processors).row_by_row(Texts(PREFIX, 0, [0]), Proposal(TREE.ids[:, 1:], tree=TREE), logits.clone())
    assert (verdict.tokens, verdict.paths) == ([tokens], [path])
    assert_close("scores", verdict.scores, [[(2.0 if processors else 1.0) * logits[:, node] for node in path]])


def test_rows_are_judged_one_by_one():
    """Each by its own drafts, text and end; one that has ended gets nothing."""
    texts, drafted = Texts(torch.tensor([[4, 2], [1, 5], [3, 3]]), 0, [0, 0, 0]), torch.tensor([[1, 2], [1, 2], [1, 2]])
    texts.append([[], [3], []])
    texts.finished[2] = True
    logits = torch.cat([logits_choosing(1, 2, 4), logits_choosing(1, 5, 4), logits_choosing(1, 2, 4)])
    diaries: list[list[int]] = []
    processors = LogitsProcessorList([lambda ids, scores: diaries.append(ids[0].tolist()) or scores])
    for judge_of in (judge(), judge(processors)):
        verdict = judge_of.row_by_row(texts, Proposal(drafted), logits.clone())
        assert verdict.tokens == [[1, 2, 4], [1, 5], []]
        assert verdict.paths == [[0, 1, 2], [0, 1], []]
        assert [len(row) for row in verdict.scores] == [3, 2, 0]
    assert diaries == [[4, 2], [4, 2, 1], [4, 2, 1, 2], [1, 5, 3], [1, 5, 3, 1]]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_rows_in_step_go_as_far_as_all_of_them(do_sample):
    """A row that has ended says padding and stops nobody."""
    texts, seen = Texts(torch.tensor([[4, 2], [1, 5], [3, 3]]), 0, [0, 0, 0]), list[list[list[int]]]()
    texts.finished[2] = True
    logits = torch.cat([logits_choosing(1, 2, 4), logits_choosing(1, 5, 4), logits_choosing(4, 4, 4)])
    processors = LogitsProcessorList([lambda ids, scores: seen.append(ids.tolist()) or 1000 * scores])
    drafted = torch.tensor([[1, 2], [1, 2], [5, 5]])
    verdict, finished = judge(processors, do_sample, eos=[3], num_rows=3).together(
        texts, Proposal(drafted), logits.clone(), lambda rows, scores: texts.finished
    )
    assert finished == [False, False, True]
    assert verdict.tokens == [[1, 2], [1, 5], [0, 0]]
    assert verdict.paths == [[0, 1]] * 3
    assert seen == [[[4, 2], [1, 5], [3, 3]], [[4, 2, 1], [1, 5, 1], [3, 3, 0]]]
    assert_close("scores", verdict.scores, [[1000 * logits[b : b + 1, i] for i in range(2)] for b in range(3)])


def test_rows_in_step_stop_where_one_ends():
    """Though the drafts go on to be right; and a criterion is shown every length once, with the scores up to there."""
    texts, shown = Texts(torch.tensor([[4, 2], [1, 5]]), 0, [0, 0]), list[tuple[list[list[int]], int]]()

    def ended(rows: Tensor, scores: list[Tensor]) -> list[bool]:
        shown.append((rows.tolist(), len(scores)))
        return [False, rows.shape[1] == 4]

    logits = logits_choosing(1, 2, 3, 0).repeat(2, 1, 1)
    verdict, finished = judge(num_rows=2).together(texts, Proposal(torch.tensor([[1, 2, 3]] * 2)), logits, ended)
    assert (verdict.tokens, verdict.paths, finished) == ([[1, 2]] * 2, [[0, 1]] * 2, [False, True])
    assert [len(row) for row in verdict.scores] == [2, 2]
    assert shown == [([[4, 2, 1], [1, 5, 1]], 1), ([[4, 2, 1, 2], [1, 5, 1, 2]], 2)]


def test_a_cut_verdict_keeps_what_comes_first():
    verdict = Verdict([[5, 6, 7], [8]], [[0, 2, 4], [0]], [[torch.ones(1, 2)] * 3, [torch.zeros(1, 2)]]).cut([2, 1])
    assert (verdict.tokens, verdict.paths) == ([[5, 6], [8]], [[0, 2], [0]])
    assert [len(row) for row in verdict.scores] == [2, 1]


P = torch.tensor([0.35, 0.30, 0.20, 0.15, 0.0])
Q = torch.tensor([0.10, 0.30, 0.55, 0.0, 0.05])  # too little, just right, too much, never drafted, never right
DRAWS = 12_000


def emitted(draft_of, q_logits, draws: int, is_coupled: bool = False) -> torch.Tensor:
    """Counts of the first token committed, with the draft `draft_of()`."""
    torch.manual_seed(0)
    counts, p = torch.zeros(len(P)), P.log().expand(1, 2, -1)
    q = None if q_logits is None else q_logits[None, None]
    judge_of = judge(do_sample=True, is_coupled=is_coupled, vocab_size=len(P))
    for _ in range(draws):
        verdict = accept(judge_of, draft_of(), q, p)
        counts[verdict.tokens[0][0]] += 1
        if is_coupled:  # the same slot again, with other noise
            judge_of.draws.forget([PREFIX.shape[1] + 9])
            judge_of.draws.start(PREFIX.shape[1])
    return counts


def sampled():
    return torch.multinomial(Q, 1)[None]


def test_sampled_drafts_leave_the_distribution_as_it_is():
    value, df = statistic(emitted(sampled, Q.log(), DRAWS), P)
    assert value < critical_value(df, cases=3)


@pytest.mark.parametrize("is_coupled", [False, True], ids=["fresh", "coupled"])
def test_drafts_without_a_distribution_leave_it_as_it_is(is_coupled):
    value, df = statistic(emitted(lambda: torch.tensor([[2]]), None, DRAWS // 4, is_coupled), P)
    assert value < critical_value(df, cases=3)


BIASED = {
    "argmax_draft": (lambda: torch.tensor([[2]]), Q.log()),
    "sharper_than_drawn": (sampled, Q.log() / 0.7),
    "flatter_than_drawn": (sampled, Q.log() * 0.7),
}


@pytest.mark.parametrize(("draft_of", "q_logits"), BIASED.values(), ids=BIASED)
def test_the_test_sees_a_wrong_q(draft_of, q_logits):
    value, df = statistic(emitted(draft_of, q_logits, DRAWS // 2), P)
    assert value > critical_value(df, cases=3)


def test_a_drafter_that_equals_the_target_is_always_right():
    torch.manual_seed(0)
    p = torch.randn(1, 4, 6)
    for _ in range(50):
        drafted = torch.multinomial(p[0, :3].softmax(-1), 1).T
        assert accept(judge(do_sample=True), drafted, p[:, :3], p).paths == [[0, 1, 2, 3]]


def test_nothing_left_to_draw_from_is_not_an_error(monkeypatch):
    """p equals q to the last bit, but the coin says no: rounding can do that."""
    p = torch.randn(1, 2, 6)
    monkeypatch.setattr(Draws, "uniform", lambda self, row: torch.tensor(1.0))
    verdict = accept(judge(do_sample=True), torch.tensor([[3]]), p[:, :1], p)
    assert 0 <= verdict.tokens[0][0] < 6
