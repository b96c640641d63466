"""A proposer of chains: what it has read is the target's states only, and what it drafts follows from them."""

import pytest
import torch
from close import FORWARD, TARGET_FORWARD, assert_close
from conftest import KNOWN_TOKENS, VOCAB, greedy_text
from proposers import build_proposer, propose, states_for, unread
from transformers import NoBadWordsLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation import SuppressTokensLogitsProcessor

from eagle31_hf.generation.drafter_runner import DrafterRunner
from eagle31_hf.generation.noise import Noise
from eagle31_hf.generation.planning.plan import Plan
from eagle31_hf.generation.proposer import Proposer
from eagle31_hf.generation.unread_states import AuxStates

NAMES = ["eagle31", "eagle3", "pruned", "two_layers", "window_4", "own_embedding", "padded_vocabulary"]


def start(drafter, processors=(), do_sample=False, threshold=0.0, num_sequences=1) -> Proposer:
    noise = Noise(num_sequences, VOCAB, torch.device("cpu"), is_coupled=False) if do_sample else None
    return build_proposer(drafter, processors, noise, threshold, num_sequences)


@pytest.fixture
def text(target):
    return greedy_text(target)


@pytest.fixture
def states(target, drafter, text):
    """Of every token of the text, for drafters that read the default layers."""
    return states_for(target, drafter, text)


@pytest.mark.parametrize("name", NAMES)
def test_its_own_speculation_is_forgotten(target, make_drafter, text, states, name):
    drafter = make_drafter(target, name)
    proposer, position = start(drafter), 0
    for count in (5, 1, 3, 1, 2):
        drafts = propose(proposer, text, states, position, position + count, Plan(4))
        position += count
        past = proposer.runner.past_key_values
        assert past.get_seq_length() == position, "tokens that are not the target's stayed in the cache"
        fresh = start(drafter)
        assert_close(f"drafts at {position}", drafts.ids, propose(fresh, text, states, 0, position, Plan(4)).ids)
    for layer, fresh_layer in zip(past.layers, fresh.runner.past_key_values.layers, strict=True):
        seen = min(position, (layer.window or position) - 1) or 1
        assert_close("keys and values", layer.held(seen), fresh_layer.held(seen), FORWARD)


CHAIN, TREE = Plan(6), Plan(6, 3, 3, 20)
TOGETHER = [
    *((name, "sdpa", TREE) for name in (*NAMES, "norm_before_fc", "mla")),
    *((name, "eager", CHAIN) for name in ("window_4", "pruned", "mla")),
    ("window_4", "eager", TREE),
    ("eagle31", "sdpa", Plan(1)),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "attention", "plan"), TOGETHER)
def test_sequences_are_drafted_for_as_if_alone(target, make_drafter, text, states, name, attention, plan):
    """Sequences of which different numbers of tokens have been read, round after round; drafts that are longer than the
    window, too."""
    drafter = make_drafter(target, name, attention)
    together, alone, ends = start(drafter, num_sequences=3), [start(drafter) for _ in range(3)], [0, 0, 0]
    for counts in ([9, 5, 2], [1, 4, 1], [2, 2, 2], [3, 1, 2]):
        begins, ends = ends, [end + count for end, count in zip(ends, counts, strict=True)]
        parts = [unread(text, states, *span) for span in zip(begins, ends, strict=True)]
        drafts = together.propose(padded(parts), [text[:, : end + 1] for end in ends], plan)
        expected = [propose(one, text, states, *span, plan) for one, *span in zip(alone, begins, ends, strict=True)]
        for b, each in enumerate(expected):
            for part in ("ids", "parents", "log_probs") if plan.is_scored else ("ids",):
                found, tolerance = getattr(drafts, part)[b : b + 1], TARGET_FORWARD if part == "log_probs" else 0.0
                assert_close(f"{part} of sequence {b} after {ends}", found, getattr(each, part), tolerance)
        assert together.runner.lengths.host == ends


def padded(parts: list[AuxStates]) -> AuxStates:
    """Several sequences' states as one batch's: what is beyond a sequence's count is anything."""
    fill = [(part, max(map(len, parts)) - len(part)) for part in parts]
    states = torch.cat([torch.nn.functional.pad(part.states, (0, 0, 0, n), value=9.0) for part, n in fill])
    tokens = torch.cat([torch.nn.functional.pad(part.tokens, (0, n), value=7) for part, n in fill])
    return AuxStates(states, tokens, [count for part in parts for count in part.counts.host])


def test_states_are_joined_and_shortened_sequence_by_sequence():
    """Entries are numbered, so that each must come out in the place its sequence has for it."""
    states, tokens = torch.arange(24.0).reshape(2, 6, 2), torch.arange(12).reshape(2, 6)

    def entries(one: AuxStates) -> list[list[int]]:
        assert one.states[..., 0].equal(2.0 * one.tokens), "states and tokens came apart"
        assert len(one) >= max(one.counts.host)
        return [ids[:count] for ids, count in zip(one.tokens.tolist(), one.counts.host, strict=True)]

    first, second = AuxStates(states[:, :3], tokens[:, :3], [3, 1]), AuxStates(states[:, 3:], tokens[:, 3:], [1, 3])
    joined = AuxStates.joined([first, second])
    assert entries(joined) == [[0, 1, 2, 3], [6, 9, 10, 11]]
    assert entries(joined.without_first([0, 0])) == entries(joined)
    assert entries(joined.without_first([2, 1])) == [[2, 3], [9, 10, 11]]
    assert entries(joined.without_first([3, 3])) == [[3], [11]]
    assert entries(joined.without_first([2, 4])) == [[2, 3], []]
    assert entries(AuxStates.joined([second])) == [[3], [9, 10, 11]]
    whole = AuxStates(states[:, :3], tokens[:, :3], [3, 3])
    assert entries(AuxStates.joined([whole, second])) == [[0, 1, 2, 3], [6, 7, 8, 9, 10, 11]]


PROCESSED = [TemperatureLogitsWarper(0.6), TopKLogitsWarper(3)]


@pytest.mark.parametrize(
    ("name", "processors"), [("eagle31", PROCESSED), ("pruned", PROCESSED), ("padded_vocabulary", [])]
)
def test_the_logits_are_those_the_ids_were_drawn_from(target, make_drafter, text, states, name, processors):
    drafter = make_drafter(target, name)
    torch.manual_seed(0)
    sampler = start(drafter, processors, do_sample=True).sampler
    drawn = torch.zeros(VOCAB)
    for _ in range(300):
        drafts = propose(Proposer(DrafterRunner(drafter, [0]), sampler), text, states, 0, 9, Plan(1))
        drawn[drafts.ids] += 1
    q = drafts.logits[0, 0].softmax(-1)
    assert not drawn[q == 0].any(), "drew an id of no probability"
    deviation = (drawn - 300 * q).abs() / (300 * q * (1 - q)).sqrt().clamp(min=1)
    assert deviation.max() < 4.5, "standard deviations from the stated distribution"


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle31", "pruned"])
def test_a_coupled_chain_is_guessed_with_the_noise_of_its_slots(target, make_drafter, text, states, name):
    """With the noise the target will draw with, slot by slot; then nothing but the tokens themselves is to be
    verified."""
    drafter, depth, temperature = make_drafter(target, name), 4, 8.0  # so hot that noise decides
    noise = Noise(1, VOCAB, torch.device("cpu"), is_coupled=True, first_slot=10)
    proposer = build_proposer(drafter, [TemperatureLogitsWarper(temperature)], noise)
    drafts = propose(proposer, text, states, 0, 9, Plan(depth))
    greedy = propose(build_proposer(drafter), text, states, 0, 9, Plan(depth))
    assert not torch.equal(drafts.ids, greedy.ids)
    assert drafts.logits is None
    out = drafter(text[:, 1:10], target_hidden_states=states[:, :9], use_cache=True)
    ids = torch.arange(VOCAB) if drafter.d2t is None else drafter.draft_to_target_ids()
    for i in range(depth):
        choice = ids[(out.logits[0, -1] / temperature + noise.of_slot(0, 10 + i)[ids]).argmax()]
        assert_close(f"draft {i}", drafts.ids[0, i], choice)
        out = drafter(
            choice[None, None],
            hidden_states=out.last_hidden_state[:, -1:],
            position_ids=torch.tensor([[9 + i]]),
            past_key_values=out.past_key_values,
        )


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_never_proposes_what_the_processors_ban(target, make_drafter, text, states, do_sample):
    banned = [2, 10, 8]
    processors = [
        NoBadWordsLogitsProcessor([[i] for i in banned[:2]], eos_token_id=None),
        SuppressTokensLogitsProcessor([8]),
    ]
    proposer = start(make_drafter(target, "pruned"), processors, do_sample)
    for position in range(1, KNOWN_TOKENS, 4):
        drafts = propose(proposer, text, states, max(0, position - 4), position, Plan(4))
        assert not set(drafts.ids[0].tolist()) & set(banned)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_proposes_nothing_where_nothing_is_left(target, make_drafter, text, states, do_sample):
    drafter = make_drafter(target, "pruned")
    proposer = start(drafter, [SuppressTokensLogitsProcessor(drafter.draft_to_target_ids().tolist())], do_sample)
    drafts = propose(proposer, text, states, 0, 9, Plan(4))
    assert drafts.ids.shape == (1, 0)
    assert drafts.logits is None
    assert proposer.runner.past_key_values.get_seq_length() == 9


@torch.no_grad()
def test_a_chain_ends_after_a_token_it_does_not_trust(target, drafter, text, states):
    out = drafter(text[:, 1:10], target_hidden_states=states[:, :9])
    confidence = float(out.logits[0, -1].softmax(-1).max())
    full = propose(start(drafter), text, states, 0, 9, Plan(4))
    for threshold, length in ((confidence * 0.999, None), (min(confidence * 1.001, 0.9999), 1)):
        ids = propose(start(drafter, threshold=threshold), text, states, 0, 9, Plan(4)).ids
        assert_close("drafts", ids, full.ids[:, : ids.shape[1]])
        assert ids.shape[1] == length if length else ids.shape[1] > 1


@pytest.mark.parametrize("drafting", [{}, {"num_assistant_tokens": 3, "draft_tree_top_k": 5}], ids=["auto", "tree"])
def test_processors_that_leave_few_ids_propose_no_padding_of_the_vocabulary(target, make_drafter, drafting):
    """Fewer ids than a node may have children: the rest must be ids that the drafter can embed."""
    drafter, prompt = make_drafter(target, "padded_vocabulary"), torch.tensor([[1, 2, 3, 5, 8]])
    texts = []
    for knobs in (drafting, {"num_assistant_tokens": "auto", "draft_tree_top_k": 1}):
        torch.manual_seed(0)
        texts.append(
            target.generate(prompt, assistant_model=drafter, do_sample=True, top_k=2, max_new_tokens=20, **knobs)
        )
    assert_close("texts", texts[0], texts[1])
