"""The generator of drafts, also in transformers' own assisted loop: a second opinion on this library's."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from close import FORWARD, assert_close
from conftest import TARGETS, VOCAB
from draftings import CHAIN_OR_TREE
from observers import num_hooks, speculate
from proposers import build_proposer, states_for, unread
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from eagle31_hf import Eagle31CandidateGenerator
from eagle31_hf.generation.proposer import Proposer
from eagle31_hf.generation.rejection_sampler import RejectionSampler
from eagle31_hf.reports.acceptance_study import in_their_loop
from eagle31_hf.targets.layers import target_states

LENGTH = 20


class Watched(Eagle31CandidateGenerator):
    """Notes what it drafted after which text, and how many of the drafts the loop tells it were accepted."""

    def get_candidates(self, input_ids, *args, is_first_iteration=False, **kwargs):
        ids, logits = super().get_candidates(input_ids, *args, is_first_iteration=is_first_iteration, **kwargs)
        self.__dict__.setdefault("rounds", []).append([ids.shape[1] - input_ids.shape[1]])
        return ids, logits

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.rounds[-1].append(int(num_matches))


@contextmanager
def drafting_by(target, generator):
    """A context in which transformers' loop drafts with a candidate generator of ours."""
    target._get_candidate_generator = lambda **arguments: generator
    try:
        with generator:
            yield
    finally:
        del target._get_candidate_generator


OWN_LOOP = [*((kind, "eagle31") for kind in TARGETS), *(("llama", name) for name in ("eagle3", "pruned", "window_4"))]


@pytest.mark.parametrize(("kind", "name"), OWN_LOOP)
def test_transformers_own_loop_agrees(make_target, make_drafter, prompt, kind, name):
    target = make_target(kind)
    drafter, ordinary = make_drafter(target, name), make_target("qwen3")
    output, stats = speculate(target, drafter, prompt, num_assistant_tokens=3, max_new_tokens=LENGTH, do_sample=False)
    generator = Watched(drafter, target, num_assistant_tokens=3, max_length=prompt.shape[1] + LENGTH)
    with drafting_by(target, generator):
        stock = target.generate(prompt, assistant_model=ordinary, max_new_tokens=LENGTH, do_sample=False)
    assert_close("text", output, stock)
    prefill, *rounds = generator.rounds
    assert prefill == [0, 0]
    assert [accepted for _, accepted in rounds] == stats.accepted_per_round
    assert sum(drafted for drafted, _ in rounds) == sum(stats.drafted_per_position)
    assert num_hooks(target) == 0


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_transformers_own_loop_with_processors(target, drafter, make_target, prompt, do_sample):
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)])
    length = prompt.shape[1] + LENGTH
    generator = Watched(drafter, target, 3, length, logits_processor=processors, do_sample=do_sample)
    kwargs = {"max_length": length, "repetition_penalty": 1.4, "do_sample": do_sample, "top_k": 0}
    with drafting_by(target, generator):
        stock = target.generate(prompt, assistant_model=make_target("qwen3"), **kwargs)
    assert stock.shape[1] == length
    if not do_sample:
        output, stats = speculate(target, drafter, prompt, num_assistant_tokens=3, **kwargs)
        assert_close("text", output, stock)
        assert [accepted for _, accepted in generator.rounds[1:]] == stats.accepted_per_round


def cached_by(target, prompt):
    return {"past_key_values": target(prompt[:, :3]).past_key_values}


def padded_by_two(target, prompt):
    return {"attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}


STARTS = {"plain": (lambda target, prompt: {}, 0), "cached": (cached_by, 3), "padded": (padded_by_two, 2)}


@pytest.fixture
def proposals(monkeypatch) -> list[tuple]:
    """The first sequence's text, the plan, and the drafts after it, of every round."""
    noted, original = [], Proposer.propose

    def propose(self, unread, prefixes, plan):
        drafts = original(self, unread, prefixes, plan)
        noted.append((prefixes[0], plan, drafts))
        return drafts

    monkeypatch.setattr(Proposer, "propose", propose)
    return noted


FOLLOWED = [
    ("plain", "two_layers", "tree"),
    ("cached", "window_4", "tree"),
    ("cached", "eagle31", "chain"),
    ("padded", "window_4", "chain"),
    ("padded", "eagle31", "tree"),
]


@pytest.mark.parametrize(("begins", "name", "drafting"), FOLLOWED)
@torch.no_grad()
def test_drafts_follow_from_the_committed_text_alone(target, make_drafter, prompt, proposals, begins, name, drafting):
    """Round by round the same drafts as from a fresh proposer that reads the states of the whole text at once,
    whichever nodes of the verifying forwards held them."""
    start, first = STARTS[begins]
    drafter, kwargs, moved = make_drafter(target, name), start(target, prompt), []
    accept = RejectionSampler.accept

    def noted(*args):
        accepted = accept(*args)
        moved.append(accepted.paths[0] != list(range(len(accepted.paths[0]))))
        return accepted

    with patch.object(RejectionSampler, "accept", noted):
        greedy = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
        speculate(target, drafter, prompt, **CHAIN_OR_TREE[drafting], **greedy, **kwargs)
    assert len(proposals) > 3
    assert any(moved) == (drafting == "tree"), "the path always led: nothing was to be moved"
    num_padding = first if "attention_mask" in kwargs else 0
    for text, plan, drafts in list(proposals):
        unpadded = text[:, num_padding:]
        states = states_for(target, drafter, unpadded[:, :-1])
        fresh = build_proposer(drafter, first_position=first - num_padding)
        whole = unread(unpadded, states, first - num_padding, unpadded.shape[1] - 1)
        expected = fresh.propose(whole, [text], plan)
        for part in ("ids", "parents"):
            found = getattr(drafts, part)
            assert_close(f"{part} of drafts after {text.tolist()}", found, getattr(expected, part))


def test_the_first_call_drafts_nothing_and_no_draft_reaches_past_the_end(target, drafter, prompt):
    length = prompt.shape[1]
    with Eagle31CandidateGenerator(drafter, target, num_assistant_tokens=4, max_length=length + 4) as generator:
        ids, logits = generator.get_candidates(prompt, is_first_iteration=True)
        assert_close("candidates before the prefill", ids, prompt)
        assert logits is None
        target(prompt)
        for committed, drafted in ((length + 1, 2), (length + 3, 0), (length + 4, 0)):
            text = torch.nn.functional.pad(prompt, (0, committed - length), value=7)
            if committed > length + 1:
                target(text[:, length:])
            ids, _ = generator.get_candidates(text)
            assert ids.shape[1] == committed + drafted
            assert_close("committed part", ids[:, :committed], text)


def test_sampled_drafts_come_with_the_logits_they_were_drawn_from(target, make_drafter, prompt):
    drafter = make_drafter(target, "pruned")
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    text = torch.nn.functional.pad(prompt, (0, 1), value=7)
    with Eagle31CandidateGenerator(
        drafter, target, 3, max_length=64, logits_processor=processors, do_sample=True
    ) as generator:
        target(prompt)
        ids, logits = generator.get_candidates(text)
    drafted = ids[0, text.shape[1] :]
    assert logits.shape == (1, 3, VOCAB)
    assert logits.dtype == torch.float32
    states, _ = target_states(target, prompt, drafter.config.resolve_layer_ids(target.config.num_hidden_layers))
    out = drafter(text[:, 1:], target_hidden_states=states)
    expected = torch.full((VOCAB,), float("-inf"))
    expected[drafter.draft_to_target_ids()] = out.logits[0, -1] / 0.7
    assert_close("logits of the first draft", logits[0, 0], expected, FORWARD)
    assert (logits[0].gather(1, drafted[:, None]) > float("-inf")).all(), "drafted outside its own distribution"


def test_needs_no_context_manager_to_be_built_but_refuses_a_foreign_target(make_target, drafter):
    with pytest.raises(ValueError, match=r"width is 24, the drafter expects 36"):
        Eagle31CandidateGenerator(drafter, make_target("llama", hidden_size=24), num_assistant_tokens=3, max_length=64)


def test_a_loop_that_finds_its_assistant_in_another_way_is_told(target, drafter, prompt):
    other = {"custom_generate": lambda model, input_ids, **kwargs: input_ids, "max_new_tokens": 4}
    with pytest.raises(RuntimeError, match="did not draft with the drafter"):
        in_their_loop(target, drafter, 3, prompt, **other)
    assert "_get_candidate_generator" not in vars(target)
