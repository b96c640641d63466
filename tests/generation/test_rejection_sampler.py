"""Acceptance of drafted tokens, given p and q, with tokens chosen node by node and at all nodes at once."""

import math
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from chi_square import follows
from close import FORWARD, assert_close
from observers import Diary
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from eagle31_hf.cache.transfer import Commit
from eagle31_hf.generation.noise import Noise
from eagle31_hf.generation.rejection_sampler import (
    Accepted,
    AtAllNodes,
    LockStepSampler,
    RejectionSampler,
    Walk,
    block_chances,
    drawn_block,
    likeliest,
    residual,
)
from eagle31_hf.generation.sequences import Ends, Sequences, Stopping
from eagle31_hf.generation.tree import DraftTokens, HostDrafts

PREFIX = torch.tensor([[4, 2]])
NONE = LogitsProcessorList()
CPU = torch.device("cpu")
ENOUGH = 99  # tokens, which no text here reaches


@pytest.fixture(params=[False, True], ids=["node_by_node", "at_once"])
def chooses_at_once(request, monkeypatch) -> bool:
    """Whether all nodes are looked at before the first token, as where the sampler saves waits for a GPU."""
    monkeypatch.setattr(RejectionSampler, "saves_waits", lambda self, logits: request.param)
    return request.param


def sampler(
    processors=NONE,
    do_sample: bool = False,
    is_coupled: bool = False,
    vocab_size: int = 6,
    num_sequences: int = 1,
    keeps_scores: bool = True,
    kind: type[RejectionSampler] = RejectionSampler,
) -> RejectionSampler:
    noise = Noise(num_sequences, vocab_size, CPU, is_coupled, PREFIX.shape[1]) if do_sample else None
    return kind(processors, noise, keeps_scores)


def ends_of(sequences: Sequences, *criteria: StoppingCriteria) -> Ends:
    return Ends(Stopping(StoppingCriteriaList(criteria), ENOUGH), sequences)


def accept(
    sampler: RejectionSampler, drafted: Tensor, draft_logits: Tensor | None, logits: Tensor, *criteria: StoppingCriteria
) -> Accepted:
    """The outcome for one sequence after PREFIX, drafts (1, K) and target logits (1, K + 1, V)."""
    sequences, drafts = Sequences(PREFIX, 0), DraftTokens(drafted, drafted.shape[1], logits=draft_logits)
    return sampler.accept(sequences, drafts, logits.clone(), ends_of(sequences, *criteria))


def three_sequences() -> Sequences:
    """The second one token longer than the others, the last at its end."""
    sequences = Sequences(torch.tensor([[4, 2], [1, 5], [3, 3]]), 0)
    finished = [False, False, True]
    sequences.append(Commit(CPU, [[], [3], []], [[], [0], []], finished), finished)
    return sequences


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


PROCESSORS = pytest.mark.parametrize(
    "processors", [NONE, LogitsProcessorList([TemperatureLogitsWarper(0.5)])], ids=["plain", "processed"]
)


@PROCESSORS
@pytest.mark.usefixtures("chooses_at_once")
@pytest.mark.parametrize(("drafted", "chosen", "tokens"), GREEDY.values(), ids=GREEDY)
def test_greedy(drafted, chosen, tokens, processors):
    logits = logits_choosing(*chosen)
    accepted = accept(sampler(processors), torch.tensor([drafted], dtype=torch.long), None, logits)
    assert accepted.tokens == [tokens]
    assert accepted.paths == [list(range(len(tokens)))]
    assert accepted.num_drafts == [len(tokens) - 1]
    assert (accepted.finished, accepted.is_short, accepted.drafts.ids) == ([False], False, [drafted])
    scale = 2.0 if processors else 1.0
    assert_close("scores", accepted.scores, [[scale * logits[:, i] for i in range(len(tokens))]])


@PROCESSORS
@pytest.mark.usefixtures("chooses_at_once")
@pytest.mark.parametrize(("eos", "tokens"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (0, [1, 2, 3, 0])])
def test_nothing_follows_an_accepted_draft_that_ends_the_text(eos, tokens, processors):
    """It is committed at the node before it: as many nodes are kept as there are tokens. It counts as accepted."""
    criterion = EosTokenCriteria(torch.tensor([eos]))
    drafted, logits = torch.tensor([[1, 2, 3]]), logits_choosing(1, 2, 3, 0)
    accepted = accept(sampler(processors), drafted, None, logits, criterion)
    assert accepted.tokens == [tokens]
    assert accepted.paths == [[0, 1, 2, 3][: len(tokens)]]
    assert accepted.num_drafts == [min(3, len(tokens))]
    assert (accepted.finished, accepted.is_short) == ([True], False)


@PROCESSORS
@pytest.mark.usefixtures("chooses_at_once")
@pytest.mark.parametrize(("spoiled", "tokens"), [(0, []), (1, [1]), (3, [1, 2, 3])])
def test_a_node_that_drafts_may_have_spoiled_gives_no_token(spoiled, tokens, processors):
    """Its logits are those of a draft that was accepted, so the draft counts; the next round starts from there."""
    logits = logits_choosing(1, 2, 3, 0)
    logits[:, spoiled] = torch.nan
    accepted = accept(sampler(processors), torch.tensor([[1, 2, 3]]), None, logits)
    assert (accepted.tokens, accepted.paths) == ([tokens], [list(range(len(tokens)))])
    assert (accepted.num_drafts, accepted.finished, accepted.is_short) == ([len(tokens)], [False], True)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_processors_see_the_committed_prefixes_only(do_sample):
    torch.manual_seed(0)
    for _ in range(20):
        diary, drafted = Diary(6), torch.randint(0, 6, (1, 4))
        accepted = accept(sampler(LogitsProcessorList([diary]), do_sample), drafted, None, torch.randn(1, 5, 6))
        text = PREFIX[0].tolist() + accepted.tokens[0]
        assert diary.prefixes == [text[:i] for i in range(2, len(text))]


def test_scores_are_processed_with_their_own_prefix():
    logits, drafted = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(3)), torch.tensor([[1, 2, 3]])
    logits[0, range(3), drafted[0]] = 50.0  # all accepted
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    accepted = accept(sampler(processors), drafted, None, logits)
    for i in range(4):
        prefix = torch.cat((PREFIX, drafted[:, :i]), dim=1)
        assert_close(f"score {i}", accepted.scores[0][i], RepetitionPenaltyLogitsProcessor(2.0)(prefix, logits[:, i]))


@PROCESSORS
@pytest.mark.usefixtures("chooses_at_once")
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_scores_nobody_asked_for_are_not_kept(do_sample, processors):
    """A score is as long as the vocabulary; and where none is read, the target's logits need not be copied."""
    logits, drafted, outcomes, samplers = 30 * logits_choosing(1, 2, 3), torch.tensor([[1, 2]]), [], []
    draft_logits = logits[:, :2] if do_sample else None
    for keeps_scores in (False, True):
        torch.manual_seed(0)
        samplers.append(sampler(processors, do_sample, keeps_scores=keeps_scores))
        outcomes.append(accept(samplers[-1], drafted, draft_logits, logits))
    assert [len(accepted.scores[0]) for accepted in outcomes] == [0, 3]
    assert outcomes[0].tokens == outcomes[1].tokens == [[1, 2, 3]]
    assert [one.only_compares for one in samplers] == [not do_sample and not processors, False]


def test_the_first_of_the_largest_in_every_type():
    """bf16 ties often; plain generate compares in fp32, where the first of equals wins."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.tensor([[[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -1.0, -1.0]]], dtype=dtype)
        assert likeliest(logits).tolist() == [[1, 0, 0]]
        random = torch.randn(2, 40, 999, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert likeliest(random).tolist() == random.float().argmax(-1).tolist()
        for slices in (1, 3, 27):  # as on a GPU
            assert likeliest(random, slices).tolist() == random.float().argmax(-1).tolist()
            random[:, :, 5::111] = random[:, :, 5:6]  # ties within slices, and across them


# Over the text's last token: 3 and 1; over 1: 5 and 4.
TREE = DraftTokens.tree(torch.tensor([[3, 1, 5, 4]]), torch.tensor([[0, 0, 2, 2]]), depth=2)
WALKS = {  # what the target chooses at every node, what is committed, the nodes it leads through
    "no_child": ([0, 3, 3, 3, 3], [0], [0]),
    "first_child": ([3, 0, 0, 0, 0], [3, 0], [0, 1]),
    "second_child_then_none": ([1, 0, 3, 0, 0], [1, 3], [0, 2]),
    "to_a_leaf": ([1, 0, 4, 0, 2], [1, 4, 2], [0, 2, 4]),
}


@PROCESSORS
@pytest.mark.usefixtures("chooses_at_once")
@pytest.mark.parametrize(("chosen", "tokens", "path"), WALKS.values(), ids=WALKS)
def test_a_tree_is_walked_while_the_targets_token_is_a_child(chosen, tokens, path, processors):
    logits, sequences = logits_choosing(*chosen), Sequences(PREFIX, 0)
    accepted = sampler(processors).accept(sequences, TREE, logits.clone(), ends_of(sequences))
    assert (accepted.tokens, accepted.paths) == ([tokens], [path])
    assert_close("scores", accepted.scores, [[(2.0 if processors else 1.0) * logits[:, node] for node in path]])


@PROCESSORS
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_coupled_noise_chooses_the_same_at_once_as_node_by_node(kind, processors, monkeypatch):
    """Each node's token is drawn with the noise of its depth in its own sequence, whatever else is drafted. The tree of
    the sequence that has ended is deeper than the round says."""
    parents = torch.tensor([[0, 0, 2, 3]] * 2 + [[0, 1, 2, 3]])
    ways, outcomes = (False, True), []
    for at_once in ways:
        monkeypatch.setattr(RejectionSampler, "saves_waits", lambda self, logits, at_once=at_once: at_once)
        torch.manual_seed(0)
        found = []
        for _ in range(20):
            sequences, ids, logits = three_sequences(), torch.randint(0, 6, (3, 4)), 2 * torch.randn(3, 5, 6)
            drafts = DraftTokens.tree(ids, parents, 3) if kind == "tree" else DraftTokens(ids, 4)
            one = sampler(processors, do_sample=True, is_coupled=True, num_sequences=3)
            accepted = one.accept(sequences, drafts, logits, ends_of(sequences))
            found.append((accepted.tokens, accepted.paths, accepted.num_drafts))
            assert isinstance(one._choices(sequences, drafts, logits), AtAllNodes) == at_once
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    assert max(count for _, _, counts in outcomes[0] for count in counts[:2]) >= 2


def texts_of(length: int) -> list[tuple[int, ...]]:
    return [text for n in range(length + 1) for text in product(range(3), repeat=n)]


def chance(law: dict[tuple[int, ...], Tensor], text: tuple[int, ...]) -> float:
    """That of a text, by the logits of the token after each beginning."""
    return math.prod(float(law[text[:i]].softmax(-1)[token]) for i, token in enumerate(text))


@pytest.mark.parametrize("seed", range(3))
def test_blocks_say_what_the_target_says_and_accept_more_than_tokens_do(seed):
    """The chances of all texts of three tokens of three ids and one after them, worked out draft by draft."""
    generator = torch.Generator().manual_seed(seed)
    drawn = partial(torch.randn, 3, generator=generator, dtype=torch.double)
    p = {text: 1.5 * drawn() for text in texts_of(3)}
    q = {text: logits + drawn() for text, logits in p.items()}
    found, of_blocks, of_tokens = Counter[tuple[int, ...]](), 0.0, 0.0
    for drafts in product(range(3), repeat=3):
        p_logits = torch.stack([p[drafts[:i]] for i in range(4)])
        q_logits = torch.stack([q[drafts[:i]] for i in range(3)])
        accepted, shares = block_chances(torch.tensor(drafts), p_logits, q_logits)
        left = chance(q, drafts)
        ratios = [chance(p, drafts[: i + 1]) * chance(q, drafts[:i]) for i in range(3)]
        ratios = [each / (chance(q, drafts[: i + 1]) * chance(p, drafts[:i])) for i, each in enumerate(ratios)]
        of_tokens += left * sum(math.prod(min(1.0, ratio) for ratio in ratios[: i + 1]) for i in range(3))
        for count in (3, 2, 1, 0):
            here = left * (float(accepted[count - 1]) if count else 1.0)
            left -= here
            of_blocks += here * count
            weights = p_logits[3:] if count == 3 else residual(p_logits[[count]], q_logits[[count]], shares[count])
            for token, weight in enumerate(weights.softmax(-1)[0].tolist()):
                begun = (*drafts[:count], token)
                for rest in product(range(3), repeat=4 - len(begun)):
                    found[begun + rest] += here * weight * chance(p, begun + rest) / chance(p, begun)
    expected = torch.tensor([chance(p, text) for text in found], dtype=torch.double)
    assert_close("chances", torch.tensor([*found.values()], dtype=torch.double), expected, FORWARD)
    assert of_blocks > 1.01 * of_tokens


def test_a_chain_that_was_drawn_is_verified_as_a_block():
    """Where processors read no text; a draft that ends the text ends the walk, what is no distribution the block."""
    torch.manual_seed(0)
    lengths, one = set(), sampler(do_sample=True)
    for _ in range(60):
        sequences, q_logits = Sequences(PREFIX, 0), torch.randn(1, 4, 6)
        logits = torch.cat((q_logits, torch.randn(1, 1, 6)), dim=1) + 0.5 * torch.randn(1, 5, 6)
        drafts = DraftTokens(torch.multinomial(q_logits[0].softmax(-1), 1).T, 4, logits=q_logits)
        assert isinstance(one._choices(sequences, drafts, logits.clone()), AtAllNodes)
        accepted = one.accept(sequences, drafts, logits, ends_of(sequences, EosTokenCriteria(torch.tensor([0]))))
        (tokens,), (count,) = accepted.tokens, accepted.num_drafts
        assert tokens[:count] == drafts.ids[0, :count].tolist()
        lengths.add((len(tokens), accepted.finished[0]))
    assert lengths >= {(1, False), (3, False), (5, False), (1, True), (3, True)}
    chances, _ = block_chances(
        torch.zeros(2, dtype=torch.long), torch.tensor([[0.0, 1], [torch.nan] * 2, [0, 1]]), torch.zeros(2, 2)
    )
    assert chances[1] == 0
    assert 0 < chances[0] < 1


@pytest.mark.parametrize("count", range(4))
def test_a_block_ends_with_a_token_of_what_is_left_of_p(count, monkeypatch):
    """Of the share of p at the node that the drafts are accepted up to; after all of them, of p itself."""
    kept, one_share, generator = torch.full((3,), 2.0), 0, torch.Generator().manual_seed(0)
    kept[count - 1 : count] = -1.0  # below any chance
    monkeypatch.setattr(Noise, "uniforms", lambda self, b, size: kept)
    for _ in range(50):
        p, q, gumbel = (torch.randn(size, 6, generator=generator) for size in (4, 3, 1))
        monkeypatch.setattr(Noise, "gumbel", lambda self, b, gumbel=gumbel: gumbel[0])
        drafts = torch.multinomial(q.softmax(-1), 1, generator=generator)[:, 0]
        shares = block_chances(drafts, p, q)[1]
        block = drawn_block(Noise(1, 6, CPU, False), DraftTokens(drafts[None], 3, logits=q[None]), p[None])
        assert block.wanted[0][0, :count].tolist() == drafts[:count].tolist()
        left = [p[3:]] * 2
        if count < 3:
            left = [residual(p[[count]], q[[count]], share) for share in (shares[count], 1.0)]
        expected, of_all = ((weights + gumbel).argmax(-1) for weights in left)
        assert block.wanted[0][0, count] == expected
        one_share += int(expected != of_all)
    assert one_share > 0 or count in (0, 3), "shares made no difference"


@pytest.mark.parametrize("at_once", [False, True], ids=["node_by_node", "at_once"])
@pytest.mark.parametrize("is_coupled", [False, True], ids=["fresh", "coupled"])
def test_scores_that_are_no_distribution_are_an_error_where_a_token_is_drawn(is_coupled, at_once, monkeypatch):
    """As plain generate raises it; where no token is drawn, nothing is wrong."""
    monkeypatch.setattr(RejectionSampler, "saves_waits", lambda self, logits: at_once)
    logits = 30 * logits_choosing(1, 2, 3, 0)
    logits[:, 2] = -torch.inf
    for drafted, fails in (([1, 2, 3], True), ([1, 0, 3], False)):
        one = sampler(do_sample=True, is_coupled=is_coupled)
        draft_logits = None if is_coupled else 30 * logits_choosing(*drafted)
        with pytest.raises(RuntimeError, match="probability") if fails else nullcontext():
            assert accept(one, torch.tensor([drafted]), draft_logits, logits).tokens == [[1, 2]]


def test_sequences_accept_each_for_itself():
    """Each by its own drafts, text and end; one that has ended gets nothing."""
    logits = torch.cat([logits_choosing(1, 2, 4), logits_choosing(1, 5, 4), logits_choosing(1, 2, 4)])
    diaries: list[list[int]] = []
    processors = LogitsProcessorList([lambda ids, scores: diaries.append(ids[0].tolist()) or scores])
    for one in (sampler(), sampler(processors)):
        sequences = three_sequences()
        drafts = DraftTokens(torch.tensor([[1, 2]] * 3), 2)
        accepted = one.accept(sequences, drafts, logits.clone(), ends_of(sequences))
        assert accepted.tokens == [[1, 2, 4], [1, 5], []]
        assert accepted.paths == [[0, 1, 2], [0, 1], []]
        assert accepted.num_drafts == [2, 1, None]
        assert accepted.finished == [False, False, True]
        assert [len(each) for each in accepted.scores] == [3, 2, 0]
    assert diaries == [[4, 2], [4, 2, 1], [4, 2, 1, 2], [1, 5, 3], [1, 5, 3, 1]]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_in_lock_step_sequences_go_as_far_as_all_of_them(do_sample):
    """A sequence that has ended says padding and stops nobody."""
    sequences, seen = Sequences(torch.tensor([[4, 2], [1, 5], [3, 3]]), 0), list[list[list[int]]]()
    sequences.finished[2] = True
    logits = torch.cat([logits_choosing(1, 2, 4), logits_choosing(1, 5, 4), logits_choosing(4, 4, 4)])
    processors = LogitsProcessorList([lambda ids, scores: seen.append(ids.tolist()) or 1000 * scores])
    drafts = DraftTokens(torch.tensor([[1, 2], [1, 2], [5, 5]]), 2)
    one = sampler(processors, do_sample, num_sequences=3, kind=LockStepSampler)
    ends = ends_of(sequences, EosTokenCriteria(torch.tensor([3])))
    accepted = one.accept(sequences, drafts, logits.clone(), ends)
    assert accepted.finished == [False, False, True]
    assert accepted.tokens == [[1, 2], [1, 5], [0, 0]]
    assert accepted.paths == [[0, 1]] * 3
    assert accepted.num_drafts == [1, 1, None]
    assert seen == [[[4, 2], [1, 5], [3, 3]], [[4, 2, 1], [1, 5, 1], [3, 3, 0]]]
    assert_close("scores", accepted.scores, [[1000 * logits[b : b + 1, i] for i in range(2)] for b in range(3)])


class SecondAtFour(StoppingCriteria):
    """Ends the second sequence when it has four tokens. Notes what it is shown."""

    def __init__(self):
        self.shown: list[tuple[list[list[int]], int]] = []

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...], **kwargs) -> Tensor:
        self.shown.append((input_ids.tolist(), len(scores)))
        return torch.tensor([False, input_ids.shape[1] == 4])


def test_in_lock_step_sequences_stop_where_one_ends():
    """Though the drafts go on to be right; and a criterion is shown every length once, with the scores up to there."""
    sequences, criterion = Sequences(torch.tensor([[4, 2], [1, 5]]), 0), SecondAtFour()
    logits = logits_choosing(1, 2, 3, 0).repeat(2, 1, 1)
    ends = Ends(Stopping(StoppingCriteriaList([criterion]), ENOUGH), sequences, scores=())
    drafts = DraftTokens(torch.tensor([[1, 2, 3]] * 2), 3)
    accepted = sampler(num_sequences=2, kind=LockStepSampler).accept(sequences, drafts, logits, ends)
    assert (accepted.tokens, accepted.paths) == ([[1, 2]] * 2, [[0, 1]] * 2)
    assert (accepted.num_drafts, accepted.finished) == ([2, 2], [False, True])
    assert [len(each) for each in accepted.scores] == [2, 2]
    assert criterion.shown == [([[4, 2, 1], [1, 5, 1]], 1), ([[4, 2, 1, 2], [1, 5, 1, 2]], 2)]


def test_paths_are_cut_to_the_tokens():
    """A draft that ended its text, or a last node that is spoiled, has no token after it, and its keys are not kept."""
    walks = [Walk([5, 6, 7], [0, 2, 4], []), Walk([8], [0, 3], []), Walk([9], [0, 3], []), None]
    drafts = HostDrafts([[1, 2, 3, 4]] * 4)
    accepted = Accepted.of(walks, [False, True, False, True], drafts)
    assert accepted.tokens == [[5, 6, 7], [8], [9], []]
    assert accepted.paths == [[0, 2, 4], [0], [0], []]
    assert accepted.num_drafts == [2, 1, 1, None]
    assert accepted.is_short  # the third's: it has not ended
    assert not Accepted.of(walks[:2], [False, True], drafts).is_short


P = torch.tensor([0.35, 0.30, 0.20, 0.15, 0.0])
Q = torch.tensor([0.10, 0.30, 0.55, 0.0, 0.05])  # too little, just right, too much, never drafted, never right
DRAWS = 6_000


def emitted(draft_of, q_logits, draws: int, is_coupled: bool = False) -> torch.Tensor:
    """Counts of the first token committed, with the draft `draft_of()`."""
    torch.manual_seed(0)
    counts, p = torch.zeros(len(P)), P.log().expand(1, 2, -1)
    q = None if q_logits is None else q_logits[None, None]
    one = sampler(do_sample=True, is_coupled=is_coupled, vocab_size=len(P))
    for _ in range(draws):
        accepted = accept(one, draft_of(), q, p)
        counts[accepted.tokens[0][0]] += 1
        if is_coupled:  # the same slot again, with other noise
            one.noise = Noise(1, len(P), CPU, is_coupled, PREFIX.shape[1])
    return counts


def sampled():
    return torch.multinomial(Q, 1)[None]


def test_sampled_drafts_leave_the_distribution_as_it_is():
    assert follows(emitted(sampled, Q.log(), DRAWS), P, cases=6)


@pytest.mark.usefixtures("chooses_at_once")
@pytest.mark.parametrize("is_coupled", [False, True], ids=["fresh", "coupled"])
def test_drafts_without_a_distribution_leave_it_as_it_is(is_coupled):
    assert follows(emitted(lambda: torch.tensor([[2]]), None, DRAWS // 2, is_coupled), P, cases=6)


@pytest.mark.parametrize("times", [1 / 0.7, 0.7], ids=["sharper_than_drawn", "flatter_than_drawn"])
def test_the_test_sees_a_wrong_q(times):
    assert not follows(emitted(sampled, Q.log() * times, DRAWS), P, cases=6)


@pytest.mark.usefixtures("chooses_at_once")
def test_a_drafter_that_equals_the_target_is_always_right():
    torch.manual_seed(0)
    p = torch.randn(1, 4, 6)
    for _ in range(50):
        drafted = torch.multinomial(p[0, :3].softmax(-1), 1).T
        assert accept(sampler(do_sample=True), drafted, p[:, :3], p).paths == [[0, 1, 2, 3]]


@pytest.mark.usefixtures("chooses_at_once")
def test_nothing_left_to_draw_from_is_not_an_error(monkeypatch):
    """p equals q to the last bit, but the coin says no: rounding can do that."""
    p = torch.randn(1, 2, 6)
    p[..., 0] = -torch.inf
    monkeypatch.setattr(Noise, "uniforms", lambda self, b, count: torch.ones(count))
    accepted = accept(sampler(do_sample=True), torch.tensor([[3]]), p[:, :1], p)
    assert 0 < accepted.tokens[0][0] < 6
