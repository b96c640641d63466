"""Sampling a chain by rejection is sampling from the target alone: chi-square over whole sequences, since errors hide
in marginals. Where noise belongs to the slots of a text, `test_batch_sampling.py` shows it token by token.

V target vocabulary.
"""

import pytest
import torch
from chi_square import critical_value, follows
from observers import speculate
from proposers import build_proposer, propose
from sequences import V, likelihoods, next_tokens, numbers, small_drafter, small_target, texts_after
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from eagle31_hf import Eagle31DrafterModel, Eagle31DrafterOutput
from eagle31_hf.generation.draft_sampler import DraftSampler
from eagle31_hf.generation.noise import Noise
from eagle31_hf.generation.planning.plan import Plan
from eagle31_hf.generation.rejection_sampler import RejectionSampler
from eagle31_hf.generation.sequences import Ends, Sequences, Stopping
from eagle31_hf.generation.tree import DraftTokens
from eagle31_hf.targets.layers import target_states

LENGTH, DRAWS = 3, 2500
PROMPT = [0, 2, 1]
IDS = torch.tensor([PROMPT])


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def drafters(target):
    """Full and pruned draft vocabularies."""
    return {"full": small_drafter(target, V), "pruned": small_drafter(target)}


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
            position = torch.tensor([[len(PROMPT) - 1 + i]])
            state = out.last_hidden_state[:, -1:]
            out = self.forward(
                torch.tensor([[token]]), hidden_states=state, position_ids=position, past_key_values=out.past_key_values
            )
        return Eagle31DrafterOutput(logits=out.logits[:, -1:], last_hidden_state=out.last_hidden_state[:, -1:])


@torch.inference_mode()
def drawn(
    target,
    drafter,
    processors: list,
    depth: int,
    monkeypatch,
    threshold: float = 0.0,
    given: tuple[int, ...] = (),
    draws: int = DRAWS,
) -> Tensor:
    """Counts by continuation of LENGTH tokens: one round of drafting and verifying, completed by the target alone.
    `given`: drafts that are not drawn, but known."""
    states, _ = target_states(target, IDS, drafter.config.aux_hidden_state_layer_ids)
    target_logits = target(texts_after(PROMPT, depth)).logits[:, len(PROMPT) - 1 :]
    monkeypatch.setattr(drafter, "forward", Remembered(drafter), raising=False)
    next_token, counts = next_tokens(target, PROMPT, processors, LENGTH), torch.zeros(V**LENGTH)
    torch.manual_seed(0)
    noise = Noise(1, V, torch.device("cpu"), is_coupled=False)
    sampler = RejectionSampler(LogitsProcessorList(processors), noise)
    for _ in range(draws):
        drafts = DraftTokens(torch.tensor([given]), depth)
        if not given:
            proposer = build_proposer(drafter, processors, noise, threshold, vocab_size=V)
            drafts = propose(proposer, IDS, states, 0, len(PROMPT) - 1, Plan(depth))
            assert drafts.logits is not None, "drafts were not verified by rejection sampling"
        drafted, sequences = drafts.ids[0].tolist(), Sequences(IDS, 0)
        text = numbers(torch.tensor([drafted + [0] * (depth - len(drafted))]))
        ends = Ends(Stopping(StoppingCriteriaList(), max_length=99), sequences)
        tokens = sampler.accept(sequences, drafts, target_logits[text, : drafts.num_nodes].clone(), ends).tokens[0]
        while len(tokens) < LENGTH:
            p = next_token[len(tokens)][numbers(torch.tensor([tokens]))]
            tokens.append(int(torch.multinomial(p, 1)))
        counts[numbers(torch.tensor([tokens[:LENGTH]]))] += 1
    return counts


class Follows:
    """A processor no drafter follows: what it favours depends on the last token and the length."""

    def __call__(self, input_ids, scores):
        favoured = (input_ids[:, -1:] + input_ids.shape[1]) % V
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 1.5))


CASES = {  # processors, depth, drafter, confidence threshold, drafts that are not drawn
    "warpers-pruned-2": ([TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.9)], 2, "pruned", 0.0),
    "of_the_text-2": (
        [RepetitionPenaltyLogitsProcessor(1.8), NoBadWordsLogitsProcessor([[1], [2, 3]], eos_token_id=None)],
        2,
        "full",
        0.0,
    ),
    "unknown_processor-confidence-3": ([Follows()], 3, "full", 0.3),
    "known_drafts-2": ([TemperatureLogitsWarper(1.3)], 2, "full", 0.0, (3, 1)),
}
NUM_TESTS = len(CASES) + 1


@pytest.mark.parametrize("case", CASES)
def test_sequences_are_distributed_as_the_target_alone_would(target, drafters, monkeypatch, case):
    processors, depth, name, *options = CASES[case]
    counts = drawn(target, drafters[name], processors, depth, monkeypatch, *options)
    assert follows(counts, likelihoods(target, PROMPT, processors, LENGTH), NUM_TESTS)


def other_temperature(sampler, *args):
    tokens, logits, is_trusted = DRAW(sampler, *args)
    return tokens, logits / 0.7, is_trusted


def without_processors(sampler, draft_logits, *args):
    """Draws through the processors, but reports the logits they were given."""
    tokens, _, is_trusted = DRAW(sampler, draft_logits, *args)
    return tokens, draft_logits, is_trusted


DRAW = DraftSampler.draw
MUTATIONS = {  # with draws that are enough to see them
    "other_temperature": (DraftSampler, "draw", other_temperature, [], DRAWS),
    "unprocessed": (DraftSampler, "draw", without_processors, [TemperatureLogitsWarper(0.6)], 1500),
    "always_accepts": (Noise, "uniforms", lambda noise, b, count: torch.zeros(count), [], 250),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_test_sees_drafts_that_are_not_drawn_or_rejected_as_they_should(target, drafters, monkeypatch, mutation):
    *replaced, processors, draws = MUTATIONS[mutation]
    monkeypatch.setattr(*replaced)
    counts = drawn(target, drafters["full"], processors, 2, monkeypatch, draws=draws)
    assert not follows(counts, likelihoods(target, PROMPT, processors, LENGTH), NUM_TESTS)


def test_generate_itself(target, drafters):
    """The same through the whole loop: the last two of three tokens come from one chain or two."""
    processors = [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.95)]
    kwargs = {"do_sample": True, "repetition_penalty": 1.2, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
    counts = torch.zeros(V**LENGTH)
    torch.manual_seed(0)
    for _ in range(200):
        output, _ = speculate(
            target, drafters["pruned"], IDS, max_new_tokens=LENGTH + 1, num_assistant_tokens=2, **kwargs
        )
        counts[numbers(output[:, len(PROMPT) :][:, :LENGTH])] += 1
    assert follows(counts, likelihoods(target, PROMPT, processors, LENGTH), NUM_TESTS)


@pytest.mark.parametrize(("df", "alpha", "expected"), [(1, 0.05, 3.841), (10, 1e-3, 29.588), (63, 1e-4, 111.0)])
def test_critical_value(df, alpha, expected):
    assert critical_value(df, alpha=alpha) == pytest.approx(expected, rel=0.03)
