"""Sampling with a drafter is sampling from the target alone: chi-square over whole sequences, since errors hide in
marginals.

V target vocabulary, K drafted tokens.
"""

import functools
import itertools

import pytest
import torch
from chi_square import critical_value, statistic
from close import assert_close
from conftest import build_target
from observers import Diary, speculate
from proposers import build_proposer, propose
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle31_hf import Eagle31Config, Eagle31DrafterModel, Eagle31DrafterOutput
from eagle31_hf.generation.draft_sampler import DraftSampler
from eagle31_hf.generation.noise import Noise
from eagle31_hf.generation.planning.plan import Plan
from eagle31_hf.generation.rejection_sampler import RejectionSampler
from eagle31_hf.generation.sequences import Sequences
from eagle31_hf.generation.stopping import Ends, Stopping
from eagle31_hf.targets.layers import target_states

V, LENGTH, DRAWS = 4, 3, 3000
PROMPT = torch.tensor([[0, 2, 1]])


@pytest.fixture(scope="module")
def target():
    return build_target(vocab_size=V, num_hidden_layers=2, initializer_range=0.3)


@pytest.fixture(scope="module")
def drafters(target):
    """Full and pruned draft vocabularies, with random weights: q is far from p, so that many drafts are rejected."""
    fields = {
        "vocab_size": V, "hidden_size": 36, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1,
        "aux_hidden_state_layer_ids": [0, 2], "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    full, pruned = (Eagle31DrafterModel(Eagle31Config(**fields, draft_vocab_size=size)).eval() for size in (V, V - 1))
    pruned.set_draft_vocabulary(torch.tensor([3, 0, 1]))
    for drafter in (full, pruned):
        drafter.load_target_embeddings(target)
    return {"full": full, "pruned": pruned}


def texts_after(length: int) -> Tensor:
    """PROMPT and every continuation of `length` tokens, in the order of their numbers in base V: (V ** length, ...)."""
    continuations = torch.tensor(list(itertools.product(range(V), repeat=length)), dtype=torch.long)
    return torch.cat((PROMPT.expand(V**length, -1), continuations), dim=1)


def number(tokens: list[int]) -> int:
    """The index of a continuation in `texts_after`."""
    return functools.reduce(lambda index, token: index * V + token, tokens, 0)


@torch.no_grad()
def exact(target, processors) -> list[Tensor]:
    """The target alone: at [n] the distributions (V ** n, V) of the token after every continuation of n tokens."""
    return [processors(texts_after(n), target(texts_after(n)).logits[:, -1]).softmax(-1) for n in range(LENGTH)]


class Remembered:
    """The forward of a drafter after PROMPT, remembered by the tokens drafted so far: a draw costs a look-up."""

    def __init__(self, drafter: Eagle31DrafterModel):
        self.forward, self.known, self.path, self.first = drafter.forward, {}, (), {}

    def __call__(self, tokens, past_key_values=None, **inputs):
        if "target_hidden_states" in inputs:
            self.path, self.first = (), {"input_ids": tokens} | inputs
        else:
            self.path = (*self.path, int(tokens))
        if self.path not in self.known:
            self.known[self.path] = self.run(self.path)
        return self.known[self.path]

    def run(self, path) -> Eagle31DrafterOutput:
        out = self.forward(**self.first, use_cache=True)
        for i, token in enumerate(path):
            position = torch.tensor([[PROMPT.shape[1] - 1 + i]])
            state = out.last_hidden_state[:, -1:]
            out = self.forward(
                torch.tensor([[token]]), hidden_states=state, position_ids=position, past_key_values=out.past_key_values
            )
        return Eagle31DrafterOutput(logits=out.logits[:, -1:], last_hidden_state=out.last_hidden_state[:, -1:])


@torch.inference_mode()
def drawn(target, drafter, processors, depth: int, monkeypatch, threshold: float = 0.0, draws: int = DRAWS) -> Tensor:
    """Counts by continuation of LENGTH tokens: one round of drafting and verifying, completed by the target alone."""
    states, _ = target_states(target, PROMPT, drafter.config.aux_hidden_state_layer_ids)
    target_logits = target(texts_after(depth)).logits[:, PROMPT.shape[1] - 1 :]
    monkeypatch.setattr(drafter, "forward", Remembered(drafter), raising=False)
    next_token, counts = exact(target, processors), torch.zeros(V**LENGTH)
    torch.manual_seed(0)
    noise = Noise(1, V, torch.device("cpu"), is_coupled=False)
    sampler = RejectionSampler(processors, noise)
    for _ in range(draws):
        proposer = build_proposer(drafter, processors, noise, threshold, vocab_size=V)
        drafts = propose(proposer, PROMPT, states, 0, PROMPT.shape[1] - 1, Plan(depth))
        assert drafts.logits is not None, "drafts were not verified by rejection sampling"
        drafted, sequences = drafts.ids[0].tolist(), Sequences(PROMPT, 0)
        text = number(drafted + [0] * (depth - len(drafted)))
        logits = target_logits[text : text + 1, : drafts.num_nodes].clone()
        ends = Ends(Stopping(StoppingCriteriaList(), max_length=99), sequences)
        tokens = sampler.accept(sequences, drafts, logits, ends).tokens[0]
        while len(tokens) < LENGTH:
            tokens.append(int(torch.multinomial(next_token[len(tokens)][number(tokens)], 1)))
        counts[number(tokens[:LENGTH])] += 1
    return counts


def joint(next_token: list[Tensor]) -> Tensor:
    """The distribution (V ** LENGTH,) of whole continuations."""
    probabilities = torch.ones(1)
    for p in next_token:
        probabilities = (probabilities[:, None] * p).flatten()
    return probabilities


class Follows:
    """A processor no drafter follows: what it favours depends on the last token and the length."""

    def __call__(self, input_ids, scores):
        favoured = (input_ids[:, -1:] + input_ids.shape[1]) % V
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 1.5))


CASES = {  # processors, depth, drafter, confidence threshold
    "plain-1": ([], 1, "full", 0.0),
    "temperature-4": ([TemperatureLogitsWarper(0.6)], 4, "full", 0.0),
    "top_k-2": ([TopKLogitsWarper(2)], 2, "full", 0.0),
    "top_p-2": ([TopPLogitsWarper(0.8)], 2, "full", 0.0),
    "min_p-2": ([MinPLogitsWarper(0.3)], 2, "full", 0.0),
    "repetition_penalty-3": ([RepetitionPenaltyLogitsProcessor(1.8)], 3, "full", 0.0),
    "bad_words-2": ([NoBadWordsLogitsProcessor([[1], [2, 3]], eos_token_id=None)], 2, "full", 0.0),
    "unknown_processor-confidence-3": ([Follows()], 3, "full", 0.3),
    "pruned-3": ([], 3, "pruned", 0.0),
}


@pytest.mark.parametrize(("processors", "depth", "name", "threshold"), CASES.values(), ids=CASES)
def test_sequences_are_distributed_as_the_target_alone_would(
    target, drafters, monkeypatch, processors, depth, name, threshold
):
    processors = LogitsProcessorList(processors)
    counts = drawn(target, drafters[name], processors, depth, monkeypatch, threshold)
    value, df = statistic(counts, joint(exact(target, processors)))
    assert df >= 4, "too few continuations are likely for a test"
    assert value < critical_value(df, len(CASES) + 1)


def argmax_with_softmax_logits(sampler, *args):
    """Drafts by argmax, but says it sampled."""
    _, logits, is_trusted = DRAW(sampler, *args)
    return logits.argmax(-1, keepdim=True), logits, is_trusted


def other_temperature(sampler, *args):
    tokens, logits, is_trusted = DRAW(sampler, *args)
    return tokens, logits / 0.7, is_trusted


def without_processors(sampler, draft_logits, *args):
    """Draws through the processors, but reports the logits they were given."""
    tokens, _, is_trusted = DRAW(sampler, draft_logits, *args)
    return tokens, draft_logits, is_trusted


DRAW = DraftSampler.draw
MUTATIONS = {
    "argmax": (DraftSampler, "draw", argmax_with_softmax_logits, []),
    "other_temperature": (DraftSampler, "draw", other_temperature, []),
    "unprocessed": (DraftSampler, "draw", without_processors, [TemperatureLogitsWarper(0.6)]),
    "always_accepts": (Noise, "uniforms", lambda noise, b, count: torch.zeros(count), []),
}


@pytest.mark.parametrize(("owner", "name", "replacement", "processors"), MUTATIONS.values(), ids=MUTATIONS)
def test_the_test_sees_drafts_that_are_not_drawn_or_rejected_as_they_should(
    target, drafters, monkeypatch, owner, name, replacement, processors
):
    monkeypatch.setattr(owner, name, replacement)
    processors = LogitsProcessorList(processors)
    value, df = statistic(drawn(target, drafters["full"], processors, 2, monkeypatch), joint(exact(target, processors)))
    assert value > critical_value(df, len(CASES) + 1)


def test_generate_itself(target, drafters):
    """The same through the whole loop: the last two of three tokens come from one chain or two."""
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.95)]
    )
    kwargs = {"do_sample": True, "repetition_penalty": 1.2, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
    counts = torch.zeros(V**LENGTH)
    torch.manual_seed(0)
    for _ in range(400):
        output, _ = speculate(
            target, drafters["pruned"], PROMPT, max_new_tokens=LENGTH + 1, num_assistant_tokens=2, **kwargs
        )
        counts[number(output[0, PROMPT.shape[1] :].tolist()[:LENGTH])] += 1
    value, df = statistic(counts, joint(exact(target, processors)))
    assert value < critical_value(df, len(CASES) + 1)


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=["plain", "warpers"])
def test_judging_all_drafts_at_once_does_not_matter(target, drafters, monkeypatch, kwargs):
    """As where it saves waits for a GPU."""
    asked = {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "eos_token_id": 3, "num_assistant_tokens": 4} | kwargs
    texts, accepted = [], []
    for at_once in (False, True):
        monkeypatch.setattr(RejectionSampler, "saves_waits", lambda self, logits, at_once=at_once: at_once)
        torch.manual_seed(0)
        outputs = [speculate(target, drafters["full"], PROMPT, **asked) for _ in range(12)]
        texts.append([output for output, _ in outputs])
        accepted.append([stats.accepted_per_round for _, stats in outputs])
    assert_close("texts", *texts)
    assert accepted[0] == accepted[1]
    assert {0, 1, 2} <= {count for counts in accepted[0] for count in counts}


def test_a_processor_with_state_is_sampled_from_too(target, drafters):
    """Not in distribution but call by call: every token has a chance under the scores its own prefix was given."""
    torch.manual_seed(0)
    output, stats = speculate(
        target,
        drafters["full"],
        PROMPT,
        max_new_tokens=40,
        do_sample=True,
        top_k=2,
        logits_processor=LogitsProcessorList([Diary(V)]),
        num_assistant_tokens=5,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = output.sequences[0, PROMPT.shape[1] :]
    assert all(scores[0, token] > float("-inf") for scores, token in zip(output.scores, tokens, strict=True))
    assert sum(stats.accepted_per_round) > 0


@pytest.mark.parametrize(("df", "alpha", "expected"), [(1, 0.05, 3.841), (10, 1e-3, 29.588), (63, 1e-4, 111.0)])
def test_critical_value(df, alpha, expected):
    assert critical_value(df, alpha=alpha) == pytest.approx(expected, rel=0.03)
