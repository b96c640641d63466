"""Acceptance of drafted tokens, given p and q."""

import pytest
import torch
from chi_square import critical_value, statistic
from close import assert_close
from observers import Diary
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from eagle31_hf.generation.verify import accept

PREFIX = torch.tensor([[4, 2]])
NONE = LogitsProcessorList()


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


@pytest.mark.parametrize("processors", [NONE, LogitsProcessorList([TemperatureLogitsWarper(0.5)])], ids=["plain", "processed"])
@pytest.mark.parametrize(("drafted", "chosen", "tokens"), GREEDY.values(), ids=GREEDY)
def test_greedy(drafted, chosen, tokens, processors):
    logits = logits_choosing(*chosen)
    verdict = accept(PREFIX, torch.tensor([drafted], dtype=torch.long), None, logits.clone(), processors, do_sample=False)
    assert_close("tokens", verdict.tokens, torch.tensor([tokens]))
    assert verdict.accepted_len == len(tokens) - 1
    scale = 2.0 if processors else 1.0
    assert_close("scores", verdict.scores, [scale * logits[:, i] for i in range(len(tokens))])


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_processors_see_the_committed_prefixes_only(do_sample):
    torch.manual_seed(0)
    for _ in range(20):
        diary, drafted = Diary(6), torch.randint(0, 6, (1, 4))
        verdict = accept(PREFIX, drafted, None, torch.randn(1, 5, 6), LogitsProcessorList([diary]), do_sample)
        text = torch.cat((PREFIX, verdict.tokens), dim=1)[0].tolist()
        assert diary.prefixes == [text[:i] for i in range(2, len(text))]


def test_scores_are_processed_with_their_own_prefix():
    logits, drafted = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(3)), torch.tensor([[1, 2, 3]])
    logits[0, range(3), drafted[0]] = 50.0  # all accepted
    verdict = accept(PREFIX, drafted, None, logits.clone(), LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)]), do_sample=False)
    for i in range(4):
        prefix = torch.cat((PREFIX, drafted[:, :i]), dim=1)
        assert_close(f"score {i}", verdict.scores[i], RepetitionPenaltyLogitsProcessor(2.0)(prefix, logits[:, i]))


P = torch.tensor([0.35, 0.30, 0.20, 0.15, 0.0])
Q = torch.tensor([0.10, 0.30, 0.55, 0.0, 0.05])  # too little, just right, too much, never drafted, never right
DRAWS = 20_000


def emitted(draft_of, q_logits, draws: int) -> torch.Tensor:
    """Counts of the first token committed, with the draft `draft_of()`."""
    torch.manual_seed(0)
    counts, p = torch.zeros(len(P)), P.log().expand(1, 2, -1)
    q = None if q_logits is None else q_logits[None, None]
    for _ in range(draws):
        verdict = accept(PREFIX, draft_of(), q, p.clone(), NONE, do_sample=True)
        counts[verdict.tokens[0, 0]] += 1
    return counts


def sampled():
    return torch.multinomial(Q, 1)[None]


def test_sampled_drafts_leave_the_distribution_as_it_is():
    value, df = statistic(emitted(sampled, Q.log(), DRAWS), P)
    assert value < critical_value(df, cases=2)


def test_argmax_drafts_leave_the_distribution_as_it_is():
    value, df = statistic(emitted(lambda: torch.tensor([[2]]), None, DRAWS // 4), P)
    assert value < critical_value(df, cases=2)


BIASED = {
    "argmax_draft": (lambda: torch.tensor([[2]]), Q.log()),
    "sharper_than_drawn": (sampled, Q.log() / 0.7),
    "flatter_than_drawn": (sampled, Q.log() * 0.7),
}


@pytest.mark.parametrize(("draft_of", "q_logits"), BIASED.values(), ids=BIASED)
def test_the_test_sees_a_wrong_q(draft_of, q_logits):
    value, df = statistic(emitted(draft_of, q_logits, DRAWS // 4), P)
    assert value > critical_value(df, cases=2)


def test_a_drafter_that_equals_the_target_is_always_right():
    torch.manual_seed(0)
    p = torch.randn(1, 4, 6)
    for _ in range(50):
        drafted = torch.multinomial(p[0, :3].softmax(-1), 1).T
        assert accept(PREFIX, drafted, p[:, :3], p.clone(), NONE, do_sample=True).accepted_len == 3


def test_nothing_left_to_draw_from_is_not_an_error(monkeypatch):
    """p equals q to the last bit, but the coin says no: rounding can do that."""
    p = torch.randn(1, 2, 6)
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.tensor(1.0))
    verdict = accept(PREFIX, torch.tensor([[3]]), p[:, :1], p.clone(), NONE, do_sample=True)
    assert 0 <= int(verdict.tokens[0, 0]) < 6
