"""A draft session: what it has read is the target's states only, and what it proposes follows from them."""

import pytest
import torch
from close import FORWARD, assert_close
from conftest import KNOWN_TOKENS, VOCAB, greedy_text
from eagle31_hf.generation.drafting import DraftSession, Reading
from transformers import LogitsProcessorList, NoBadWordsLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation import SuppressTokensLogitsProcessor

from eagle31_hf.targets.layers import target_states

NAMES = ["eagle31", "eagle3", "pruned", "two_layers", "window_4", "own_embedding", "padded_vocabulary"]


def start(drafter, processors=(), do_sample=False, threshold=0.0, num_rows=1):
    draws = Draws(num_rows, VOCAB, torch.device("cpu"), is_coupled=False) if do_sample else None
    return DraftSession(drafter, VOCAB, LogitsProcessorList(processors), draws, threshold, [0] * num_rows)


@pytest.fixture
def text(target):
    return greedy_text(target)


@pytest.fixture
def states(target, drafter, text):
    """Of every token of the text, for drafters that read the default layers."""
    return target_states(target, text, drafter.config.resolve_layer_ids(target.config.num_hidden_layers))[0]


def reading(text, states, start, stop):
    return Reading(states[:, start:stop], text[:, start + 1 : stop + 1], [stop - start])


@torch.no_grad()
def propose(session, text, states, start, stop, depth):
    """The session reads positions `start` to `stop`; the token after them has been chosen."""
    return session.propose_chain(reading(text, states, start, stop), [text[:, : stop + 1]], depth)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [1, 4])
def test_its_own_speculation_is_forgotten(target, make_drafter, text, states, name, depth):
    drafter = make_drafter(target, name)
    session, position = start(drafter), 0
    for rows in (5, 1, 3, 1, 2):
        proposal = propose(session, text, states, position, position + rows, depth)
        position += rows
        assert session.past_key_values.get_seq_length() == position, (
            "rows that are not the target's stayed in the cache"
        )
        fresh = start(drafter)
        assert_close(f"drafts at {position}", proposal.ids, propose(fresh, text, states, 0, position, depth).ids)
    for layer, fresh_layer in zip(session.past_key_values.layers, fresh.past_key_values.layers, strict=True):
        seen = min(position, (layer.window or position) - 1) or 1
        assert_close("keys and values", layer.held(seen), fresh_layer.held(seen), FORWARD)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [1, 6])
def test_rows_are_drafted_for_as_if_alone(target, make_drafter, text, states, name, attention, depth):
    """Rows that have read different numbers of tokens, round after round; chains that are longer than the window, too."""
    drafter = make_drafter(target, name, attention)
    together, alone, ends = start(drafter, num_rows=3), [start(drafter) for _ in range(3)], [0, 0, 0]
    for counts in ([9, 5, 2], [1, 4, 1], [2, 2, 2], [3, 1, 2]):
        begins, ends = ends, [end + count for end, count in zip(ends, counts, strict=True)]
        readings = [reading(text, states, *span) for span in zip(begins, ends, strict=True)]
        proposal = together.propose_chain(padded(readings), [text[:, : end + 1] for end in ends], depth)
        expected = [
            one.propose_chain(part, [text[:, : e + 1]], depth).ids
            for one, part, e in zip(alone, readings, ends, strict=True)
        ]
        assert_close(f"drafts after {ends}", proposal.ids, torch.cat(expected))
        assert together.lengths == ends


def padded(readings: list[Reading]) -> Reading:
    """Of several rows, made one: what is beyond a row's count is anything."""
    longest = max(part.tokens.shape[1] for part in readings)
    fill = [(part, longest - part.tokens.shape[1]) for part in readings]
    states = torch.cat([torch.nn.functional.pad(part.states, (0, 0, 0, n), value=9.0) for part, n in fill])
    tokens = torch.cat([torch.nn.functional.pad(part.tokens, (0, n), value=7) for part, n in fill])
    return Reading(states, tokens, [count for part in readings for count in part.counts])


def test_readings_are_joined_split_and_selected_row_by_row():
    """Entries are numbered, so that each must come out in the place its row has for it."""
    states, tokens = torch.arange(24.0).reshape(2, 6, 2), torch.arange(12).reshape(2, 6)

    def entries(one: Reading) -> list[list[int]]:
        assert one.states[..., 0].equal(2.0 * one.tokens), "states and tokens came apart"
        return [row[:count] for row, count in zip(one.tokens.tolist(), one.counts, strict=True)]

    first, second = Reading(states[:, :3], tokens[:, :3], [3, 1]), Reading(states[:, 3:], tokens[:, 3:], [1, 3])
    joined = Reading.joined([first, second])
    assert entries(joined) == [[0, 1, 2, 3], [6, 9, 10, 11]]
    assert [entries(part) for part in joined.split(3)] == [[[0, 1, 2], [6, 9, 10]], [[3], [11]]]
    assert [entries(part) for part in first.split(2)] == [[[0, 1], [6]], [[2], []]]
    assert entries(joined.selected([[0, 2], [1, 2, 3]])) == [[0, 2], [9, 10, 11]]
    assert entries(joined.selected([[0, 1], []])) == [[0, 1], []]
    assert entries(Reading.joined([second])) == [[3], [9, 10, 11]]


@pytest.mark.parametrize("name", NAMES)
def test_proposes_what_the_model_says_without_a_cache(target, make_drafter, text, states, name):
    drafter = make_drafter(target, name)
    ids = propose(start(drafter), text, states, 0, 9, depth=3).ids
    out = drafter(text[:, 1:10], target_hidden_states=states[:, :9], use_cache=True)
    for i in range(3):
        logits = out.logits[:, -1, : drafter.config.draft_vocab_size if drafter.d2t is not None else VOCAB]
        choice = logits.argmax(-1, keepdim=True)
        choice = choice if drafter.d2t is None else drafter.draft_to_target_ids()[choice]
        assert_close(f"draft {i}", ids[:, i : i + 1], choice)
        out = drafter(
            choice,
            hidden_states=out.last_hidden_state[:, -1:],
            position_ids=torch.tensor([[9 + i]]),
            past_key_values=out.past_key_values,
        )


def test_keeps_the_cache_clean_when_the_drafter_fails(target, drafter, text, states, monkeypatch):
    session, calls = start(drafter), []
    pick = session._pick

    def fail_at_the_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return pick(*args)

    monkeypatch.setattr(session, "_pick", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        propose(session, text, states, 0, 9, depth=5)
    assert session.past_key_values.get_seq_length() == 9


@pytest.mark.parametrize("name", ["eagle31", "pruned", "padded_vocabulary"])
@pytest.mark.parametrize(
    "processors", [[], [TemperatureLogitsWarper(0.6), TopKLogitsWarper(3)]], ids=["plain", "processed"]
)
def test_the_logits_are_those_the_ids_were_drawn_from(target, make_drafter, text, states, name, processors):
    session = start(make_drafter(target, name), processors, do_sample=True)
    torch.manual_seed(0)
    drawn = torch.zeros(VOCAB)
    for _ in range(300):
        proposal = propose(session, text, states, 0, 9, depth=1)
        drawn[proposal.ids] += 1
        session.past_key_values.crop(-9)
        session.lengths = [0]
    q = proposal.logits[0, 0].softmax(-1)
    assert not drawn[q == 0].any(), "drew an id of no probability"
    deviation = (drawn - 300 * q).abs() / (300 * q * (1 - q)).sqrt().clamp(min=1)
    assert deviation.max() < 4.5, "standard deviations from the stated distribution"


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle31", "pruned"])
def test_a_coupled_chain_is_guessed_with_the_noise_of_its_slots(target, make_drafter, text, states, name):
    """With the noise the target will draw with, slot by slot; then nothing is to be verified but the tokens themselves."""
    drafter, depth = make_drafter(target, name), 4
    draws = Draws(1, VOCAB, torch.device("cpu"), is_coupled=True)
    draws.start(10)
    session = DraftSession(drafter, VOCAB, LogitsProcessorList([TemperatureLogitsWarper(0.8)]), draws, 0.0, [0])
    proposal = propose(session, text, states, 0, 9, depth)
    assert proposal.logits is None
    out = drafter(text[:, 1:10], target_hidden_states=states[:, :9], use_cache=True)
    ids = torch.arange(VOCAB) if drafter.d2t is None else drafter.draft_to_target_ids()
    for i in range(depth):
        choice = ids[(out.logits[0, -1] / 0.8 + draws.noise(0, 10 + i)[ids]).argmax()]
        assert_close(f"draft {i}", proposal.ids[0, i], choice)
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
    session = start(make_drafter(target, "pruned"), processors, do_sample)
    for position in range(1, KNOWN_TOKENS, 4):
        proposal = propose(session, text, states, max(0, position - 4), position, depth=4)
        assert not set(proposal.ids[0].tolist()) & set(banned)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_proposes_nothing_where_nothing_is_left(target, make_drafter, text, states, do_sample):
    drafter = make_drafter(target, "pruned")
    session = start(drafter, [SuppressTokensLogitsProcessor(drafter.draft_to_target_ids().tolist())], do_sample)
    proposal = propose(session, text, states, 0, 9, depth=4)
    assert proposal.ids.shape == (1, 0)
    assert proposal.logits is None
    assert session.past_key_values.get_seq_length() == 9


@torch.no_grad()
def test_a_chain_ends_after_a_token_it_does_not_trust(target, drafter, text, states):
    out = drafter(text[:, 1:10], target_hidden_states=states[:, :9])
    confidence = float(out.logits[0, -1].softmax(-1).max())
    full = propose(start(drafter), text, states, 0, 9, depth=4)
    for threshold, length in ((confidence * 0.999, None), (min(confidence * 1.001, 0.9999), 1)):
        ids = propose(start(drafter, threshold=threshold), text, states, 0, 9, depth=4).ids
        assert_close("drafts", ids, full.ids[:, : ids.shape[1]])
        assert ids.shape[1] == length if length else ids.shape[1] > 1
