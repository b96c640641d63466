"""Sampling with noise that belongs to the slots of a text, as all batches and trees do: the text is, token for token,
the one that the target alone draws with that noise, which is independent from sequence to sequence and slot to slot. So
it is distributed as the target's own, and depends on the seed, the target and its own text only.

B sequences, V target vocabulary.
"""

from itertools import combinations

import pytest
import torch
from batches import FOREIGN, Idle, alone, keeps_step, known_prompts, left_padded, mixed_prompts, together
from chi_square import follows
from close import assert_close
from conftest import VOCAB
from draftings import CHAIN, TREE, tree_of
from sequences import V, likelihoods, numbers, small_drafter, small_target
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle31_hf.generation.noise import Noise

LENGTH, SEED = 20, 5
SAMPLED = {"max_new_tokens": LENGTH, "do_sample": True, "top_k": 0}
DRAFTINGS = {
    "chain": CHAIN,
    "chain_1": {"num_assistant_tokens": 1},
    "confidence": {"num_assistant_tokens": 6, "assistant_confidence_threshold": 0.3},
    "tree": TREE,
    "auto": {},
}
chain_or_tree = pytest.mark.parametrize("drafting", [CHAIN, TREE], ids=["chain", "tree"])


# --- what a text depends on ---


class AddsNoise(LogitsProcessor):
    """Makes the argmax a draw, with the noise of the slot."""

    def __init__(self, num_sequences: int, prompt_length: int):
        self.noise = Noise(num_sequences, VOCAB, torch.device("cpu"), is_coupled=True, first_slot=prompt_length)

    def __call__(self, input_ids, scores):
        return scores + torch.stack([self.noise.of_slot(b, input_ids.shape[1]) for b in range(len(input_ids))])


def drawn_alone(target, prompts, processors=(), seed=SEED, **kwargs):
    """The text the target alone draws, one token at a time: transformers' greedy search over noisy scores."""
    torch.manual_seed(seed)
    return alone(
        target,
        prompts,
        max_new_tokens=LENGTH,
        logits_processor=LogitsProcessorList([*processors, AddsNoise(len(prompts), max(map(len, prompts)))]),
        **kwargs,
    )


def drawn(target, drafter, prompts, seed=SEED, **kwargs):
    torch.manual_seed(seed)
    return together(target, drafter, prompts, **SAMPLED | kwargs)


PROCESSORS = {
    "none": ([], {}),
    "temperature": ([TemperatureLogitsWarper(0.6)], {"temperature": 0.6}),
    "warpers": (
        [TemperatureLogitsWarper(1.4), TopKLogitsWarper(5), TopPLogitsWarper(0.9)],
        {"temperature": 1.4, "top_k": 5, "top_p": 0.9},
    ),
    "penalty": (
        [RepetitionPenaltyLogitsProcessor(1.5)],
        {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])},
    ),
}


DECIDED = [
    ("none", "chain_1"),
    ("none", "auto"),
    ("temperature", "confidence"),
    ("warpers", "chain"),
    ("warpers", "tree"),
    ("penalty", "tree"),
]


@pytest.mark.parametrize(("processing", "drafting"), DECIDED)
def test_the_seed_and_the_target_decide(target, drafter, processing, drafting):
    """Whatever is drafted, and however it is verified."""
    prompts, (processors, kwargs), drafting = mixed_prompts(target), PROCESSORS[processing], DRAFTINGS[drafting]
    output, stats = drawn(target, drafter, prompts, eos_token_id=[3], **kwargs, **drafting)
    assert_close("text", output, drawn_alone(target, prompts, processors, eos_token_id=[3]))
    assert not drafting or not keeps_step(stats)


OTHERS = [
    ("mistral_window_8", "pruned", "tree"),
    ("gemma3_window_8", "padded_vocabulary", "chain"),
    ("gpt2", "eagle3", "tree"),
]


@pytest.mark.parametrize(("kind", "name", "drafting"), OTHERS)
def test_other_targets_and_drafters(make_target, make_drafter, kind, name, drafting):
    target = make_target(kind)
    prompts = mixed_prompts(target)
    output, _ = drawn(target, make_drafter(target, name), prompts, **DRAFTINGS[drafting])
    assert_close("text", output, drawn_alone(target, prompts))


@pytest.mark.parametrize("eos", [{}, {"eos_token_id": [3, 1]}], ids=["length", "eos"])
@chain_or_tree
def test_keeping_step_does_not_matter(target, drafter, eos, drafting):
    prompts = known_prompts(target, 5, 9)  # few and likely, so that both accept at once
    criteria = StoppingCriteriaList([Idle()])
    output, stats = drawn(target, drafter, prompts, temperature=0.5, stopping_criteria=criteria, **eos, **drafting)
    assert_close("text", output, drawn_alone(target, prompts, [TemperatureLogitsWarper(0.5)], **eos))
    assert keeps_step(stats)
    assert max(stats.accepted_per_round) >= 1


class Follows(LogitsProcessor):
    """A processor no drafter follows: what it favours depends on the last token and the length."""

    def __call__(self, input_ids, scores):
        favoured = (input_ids[:, -1:] + input_ids.shape[1]) % VOCAB
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 1.5))


UNKNOWN = {"unknown": ([Follows()], {"logits_processor": LogitsProcessorList([Follows()])})}
OF_ONE = [  # for one sequence, chains of a given length are sampled by rejection
    ("none", tree_of(11, 60, 3)),
    ("warpers", {}),
    ("penalty", TREE),
    ("unknown", TREE),
]


@pytest.mark.parametrize(("processing", "drafting"), OF_ONE)
def test_one_sequence(target, drafter, processing, drafting):
    processors, kwargs = (PROCESSORS | UNKNOWN)[processing]
    accepted = 0
    for prompts in (known_prompts(target, 9), [FOREIGN[1]]):
        output, stats = drawn(target, drafter, prompts, **kwargs, **drafting)
        assert_close("text", output, drawn_alone(target, prompts, processors))
        accepted += sum(stats.accepted_per_round)
    assert accepted > 0 or not drafting


@pytest.mark.parametrize("place", [0, 2])
@chain_or_tree
def test_neighbours_do_not_matter(target, drafter, place, drafting):
    """The text of a sequence depends on its place, and on nothing in the others: not even on how long they are or when
    they end."""
    (prompt,) = known_prompts(target, 9)
    neighbours = [
        [*known_prompts(target, 5, 7), FOREIGN[1]],
        [FOREIGN[0], FOREIGN[2], FOREIGN[0]],
        known_prompts(target, 16, 9, 3),
    ]
    texts = []
    for others in neighbours:
        prompts = [*others[:place], prompt, *others[place:]]
        output, _ = drawn(target, drafter, prompts, eos_token_id=0, pad_token_id=0, **drafting)
        texts.append(output[place, left_padded(prompts)[0].shape[1] :].tolist())
    ends = [text.index(0) + 1 if 0 in text else LENGTH for text in texts]
    assert [text[:end] for text, end in zip(texts, ends, strict=True)] == [texts[0][: ends[0]]] * 3
    assert ends[0] > 5


@chain_or_tree
def test_repeated_prompts(target, drafter, drafting):
    """`num_return_sequences` is a batch of the same prompt, each with a text of its own."""
    prompts = [*known_prompts(target, 9), FOREIGN[1]]
    output, stats = drawn(target, drafter, prompts, num_return_sequences=3, **drafting)
    repeated = [prompt for prompt in prompts for _ in range(3)]
    assert_close("text", output, drawn_alone(target, repeated))
    assert len({tuple(text) for text in output.tolist()}) == 6
    assert len(stats.sequences) == 6


def test_other_seeds_and_later_calls_give_other_texts(target, drafter):
    prompts = mixed_prompts(target)
    texts = [drawn(target, drafter, prompts, seed, **CHAIN)[0].tolist() for seed in (1, 2)]
    texts.append(together(target, drafter, prompts, **SAMPLED, **CHAIN)[0].tolist())
    for one, other in combinations(texts, 2):
        assert all(mine != theirs for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_a_call_takes_as_much_from_the_global_generator_whatever_is_drafted(target, make_drafter, num_sequences):
    """So what the caller draws afterwards does not depend on the drafter, nor on whether its tokens were accepted."""
    states = []
    step = {"stopping_criteria": StoppingCriteriaList([Idle()])}
    for name, kwargs in (*(("eagle31", one) for one in ({}, TREE, {"max_new_tokens": 3}, step)), ("pruned", CHAIN)):
        drawn(target, make_drafter(target, name), mixed_prompts(target)[:num_sequences], **kwargs)
        states.append(torch.get_rng_state())
    assert all(state.equal(states[0]) for state in states)
    torch.manual_seed(SEED)
    assert not torch.get_rng_state().equal(states[0])


def test_greedy_takes_nothing_from_the_global_generator(target, drafter):
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    together(target, drafter, mixed_prompts(target), max_new_tokens=LENGTH, **CHAIN)
    assert torch.get_rng_state().equal(before)


# --- how the noise is distributed ---

# of different lengths, so that prompts are padded; the first has no token that can be drafted
PROMPTS = ([2, 2, 2], [3, 3, 1, 0, 2], [1])
COPIES, COUNTED = 800, 3  # texts a prompt; tokens counted of each, of which all but the first were drafted


@pytest.fixture(scope="module")
def small():
    target = small_target()
    return target, small_drafter(target)


def sampled(small, copies=COPIES, prompts=PROMPTS[:1], **kwargs):
    """Counts (prompts, V ** COUNTED) of the continuations drawn in one batch, their numbers (prompts, copies), and the
    statistics."""
    repeated = [prompt for prompt in prompts for _ in range(copies)]
    torch.manual_seed(0)
    output, stats = together(*small, repeated, 0, pad_token_id=0, **SAMPLED | {"max_new_tokens": COUNTED + 2} | kwargs)
    start = max(map(len, prompts))
    found = numbers(output[:, start : start + COUNTED]).unflatten(0, (len(prompts), copies))
    return torch.stack([torch.bincount(one, minlength=V**COUNTED) for one in found]), found, stats


SMALL_CHAIN = {"num_assistant_tokens": 3}
SMALL_TREE = tree_of(2, 7, 3)
WARPERS = [
    RepetitionPenaltyLogitsProcessor(1.8),
    TemperatureLogitsWarper(0.7),
    TopKLogitsWarper(3),
    TopPLogitsWarper(0.9),
]
WARPED = {"logits_processor": LogitsProcessorList(WARPERS[:1]), "temperature": 0.7, "top_k": 3, "top_p": 0.9}
CASES = {  # what the target alone would do, how generate is asked for it
    "chain": ([], SMALL_CHAIN),
    "warpers-tree": (WARPERS, WARPED | SMALL_TREE),
}
NUM_TESTS = len(CASES) + 4  # comparisons with chance


@pytest.mark.parametrize(("processors", "kwargs"), CASES.values(), ids=CASES)
def test_sequences_are_distributed_as_the_target_alone_would(small, processors, kwargs):
    counts, _, stats = sampled(small, **kwargs)
    assert follows(counts[0], likelihoods(small[0], PROMPTS[0], processors, COUNTED), NUM_TESTS)
    assert sum(stats.accepted_per_round) > COPIES / 2


def test_different_prompts(small):
    for counts, prompt in zip(sampled(small, 600, PROMPTS, **SMALL_TREE)[0], PROMPTS, strict=True):
        assert follows(counts, likelihoods(small[0], prompt, [], COUNTED), NUM_TESTS)


def neighbours_are_independent(small) -> bool:
    """Whether sequences 2i and 2i + 1, as many pairs as there are copies, follow the product of their distributions; by
    two tokens of each."""
    found = sampled(small, 2 * COPIES, **SMALL_CHAIN)[1]
    p = likelihoods(small[0], PROMPTS[0], [], 2)
    pairs = found[0].div(V ** (COUNTED - 2), rounding_mode="floor").unflatten(0, (-1, 2))
    counts = torch.bincount(pairs[:, 0] * V**2 + pairs[:, 1], minlength=V**4)
    return follows(counts, (p[:, None] * p).flatten(), NUM_TESTS)


def test_sequences_are_independent(small):
    assert neighbours_are_independent(small)


def shared_between_two(self, *args, original=Noise.__init__, **kwargs):
    """Odd sequences draw with the noise of the one before them: each text by itself is right."""
    original(self, *args, **kwargs)
    for even, odd in zip(self.generators[::2], self.generators[1::2], strict=False):
        odd.set_state(even.get_state())


def reused(self, b, original=Noise.gumbel):
    """Every noise serves two slots."""
    held = self.__dict__.setdefault("held", {})
    if b in held:
        return held.pop(b)
    held[b] = original(self, b)
    return held[b]


def test_the_test_sees_noise_that_serves_twice(small, monkeypatch):
    monkeypatch.setattr(Noise, "gumbel", reused)
    assert not follows(sampled(small, **SMALL_CHAIN)[0][0], likelihoods(small[0], PROMPTS[0], [], COUNTED), NUM_TESTS)


def test_the_test_of_independence_sees_shared_noise(small, monkeypatch):
    monkeypatch.setattr(Noise, "__init__", shared_between_two)
    assert not neighbours_are_independent(small)
