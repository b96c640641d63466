"""Drafts from the text: the match and what follows it, the planner that weighs it, and the text, which stays the
target's own."""

import random

import pytest
import torch
from close import assert_close
from conftest import VOCAB
from draftings import CHAIN, TREE, steady_clock
from observers import speculate

from eagle31_hf.checkpoints.knobs import KNOBS
from eagle31_hf.clock import Clock
from eagle31_hf.generation import request
from eagle31_hf.generation.planning.auto import AutoPlanner
from eagle31_hf.generation.planning.knowledge import Knowledge
from eagle31_hf.generation.planning.plan import UNLIMITED, FixedPlanner
from eagle31_hf.generation.planning.prompt_lookup import (
    MAX_MATCH,
    MAX_PLACES,
    MIN_MATCH,
    PRIOR,
    Chances,
    LookupPlanner,
    PromptLookup,
)
from eagle31_hf.generation.rejection_sampler import Accepted
from eagle31_hf.generation.tree import HostDrafts

LOOKUP = {"prompt_lookup_num_tokens": 6}


def longest_match(text: list[int]) -> tuple[int, set[int]]:
    """The tokens at the end of a text that stood in it before, and the indices after such places; by comparing all."""
    found: dict[int, set[int]] = {}
    for place in range(MIN_MATCH, len(text)):
        length = 0
        while length < min(MAX_MATCH, place) and text[place - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        found.setdefault(length, set()).add(place)
    longest = max(found, default=0)
    return (longest, found[longest]) if longest >= MIN_MATCH else (0, set())


@pytest.mark.parametrize("seed", range(5))
def test_the_match_is_the_longest_one(seed):
    rng = random.Random(seed)
    text = [rng.randrange(12) for _ in range(60)]
    text += text[10:45] + [rng.randrange(12) for _ in range(9)]
    lookup = PromptLookup(text[:20], Chances())
    for i in range(20, len(text)):
        tokens, _ = lookup.drafts(3)
        length, places = longest_match(text[:i])
        followed = {tuple((text[place:i] * 3)[:3]) for place in places}
        assert lookup._length == length
        assert (tuple(tokens) in followed) if length else tokens == []
        lookup.add([text[i]])


def test_of_matches_as_long_the_last_counts_and_a_text_that_goes_round_goes_on():
    lookup = PromptLookup([1, 2, 3, 1, 2, 4, 1, 2], Chances())
    assert lookup.drafts(3)[0] == [4, 1, 2]
    assert lookup.drafts(5)[0] == [4, 1, 2, 4, 1]
    lookup.add([3])
    assert lookup.drafts(2)[0] == [1, 2]


def test_a_text_without_a_match_has_no_drafts():
    assert PromptLookup([], Chances()).drafts(4) == ([], [])
    assert PromptLookup([1, 2, 3], Chances()).drafts(4) == ([], [])


def test_chances_multiply_and_are_those_of_ever_longer_matches():
    chances = Chances()
    _, found = PromptLookup([1, 2, 3, 4, 5, 6, 7, 1, 2], chances).drafts(3)
    assert found == pytest.approx([PRIOR[2], PRIOR[2] * PRIOR[3], PRIOR[2] * PRIOR[3] * PRIOR[4]])


@pytest.mark.parametrize("is_right", [True, False])
def test_chances_become_what_was_seen_lately_of_matches_as_long(is_right):
    chances = Chances()
    for _ in range(200):
        chances.of(4).add(not is_right)
    for _ in range(100):
        chances.of(5).add(is_right)  # judged together with 4
    assert chances.of(4).per_round == pytest.approx(float(is_right), abs=0.01)
    assert chances.of(3).per_round == PRIOR[3]


def test_of_a_text_that_repeats_itself_the_last_places_are_compared():
    lookup = PromptLookup([7, 7, 7, 1, 2, 5] + [1, 2, 3] * (MAX_PLACES + 3) + [7, 7, 7, 1, 2], Chances())
    assert lookup.drafts(1)[0] == [3]


def test_tokens_are_learnt_from_that_were_not_drafted():
    chances = Chances()
    before = chances.of(2).per_round
    lookup = PromptLookup([1, 2, 3, 1, 2], chances)
    lookup.add([9, 1, 2])  # not 3
    assert chances.of(2).per_round < before


def outcome(tokens: list[list[int]], num_drafts: list[int | None]) -> Accepted:
    return Accepted(tokens, [], num_drafts, [], [False] * len(tokens), False, HostDrafts([[]] * len(tokens)))


def test_a_chain_of_the_text_takes_the_place_of_a_round_that_gives_less():
    planner = LookupPlanner(FixedPlanner(3), [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]], 3, 10)
    assert planner.plan(100, UNLIMITED, [0], 1).drafts == [[7, 8, 9]]
    planner.observe(4, outcome([[7, 8, 9, 1]], [3]), {})
    assert planner.choices == {"from the text": 1}
    for _ in range(60):  # a drafter that is always right
        planner.planner.observe(5, outcome([[0] * 3], [3]), {})
    assert planner.plan(100, UNLIMITED, [0], 1).drafts is None


def test_no_chain_is_longer_than_there_is_room_for():
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]]
    assert LookupPlanner(FixedPlanner(1), prompts, 8, 10).plan(2, UNLIMITED, [0], 1).drafts == [[7, 8]]
    assert LookupPlanner(FixedPlanner(1), prompts, 8, 10).plan(100, 3, [0], 1).drafts == [[7, 8]]
    assert LookupPlanner(FixedPlanner(1), prompts, 8, 10).plan(0, UNLIMITED, [0], 1).depth == 0


@pytest.mark.parametrize("image", [99, -200])
def test_ids_that_are_no_tokens_of_the_target_are_not_drafted(image):
    """Those of images may lie beyond its embedding."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, image, 9, 1, 2, 3, 4, 5, 6]]
    assert LookupPlanner(FixedPlanner(1), prompts, 8, 50).plan(100, UNLIMITED, [0], 1).drafts == [[7]]


def test_in_a_batch_sequences_without_a_match_are_filled():
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6], [4, 3, 2, 1]]
    planner = LookupPlanner(FixedPlanner(0), [*prompts, [0, 0, 0, 0, 0, 0]], 3, 10)
    assert planner.plan(100, UNLIMITED, [0, 1], 1).drafts == [[7, 8, 9], [1, 1, 1], [0, 0, 0]]
    assert planner._drafts(3, [0, 1])[1] == pytest.approx([gain / 2 for gain in planner._drafts(3, [0])[1]])


@pytest.mark.parametrize(("per_token", "expected"), [(0.0, 8), (0.05, 3), (2.0, 0)])
def test_auto_verifies_as_much_of_it_as_pays(per_token, expected):
    known = Knowledge()
    for size in (1, 2, 5, 9):
        known.costs["verify"].add(size, 1.0 + per_token * size)
    known.exploration.add("chains", 1.2, 1.0)
    planner = AutoPlanner(known, Clock(torch.device("cpu")))
    gains = [0.9, 1.6, 2.1, 2.15, 2.2, 2.22, 2.24, 2.26]
    assert planner.lookup_depth(gains) == expected
    assert AutoPlanner(Knowledge(), Clock(torch.device("cpu"))).lookup_depth(gains) == 0  # before anything is known


WAYS = {
    "chain": CHAIN | LOOKUP,
    "tree": TREE | LOOKUP,
    "auto": {"num_assistant_tokens": "auto"},
    "batch": CHAIN | LOOKUP,
    "scores": CHAIN | LOOKUP | {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
    "penalised": CHAIN | LOOKUP | {"repetition_penalty": 1.05, "eos_token_id": 3},
    "static": CHAIN | LOOKUP | {"cache_implementation": "static"},
}


@pytest.mark.parametrize("kind", ["llama", "gemma3_window_8"])
@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_stays_the_targets(make_target, make_drafter, prompt, kind, way):
    target = make_target(kind)
    drafter = make_drafter(target)
    options = {"max_new_tokens": 40, "do_sample": False, **WAYS[way]}
    prompt = prompt.repeat(1, 2)  # so that its end has stood before
    if way == "batch":
        prompt = torch.cat((prompt, prompt.flip(1), (prompt + 1) % VOCAB))
    alone = {name: value for name, value in options.items() if name not in KNOBS}
    expected = target.generate(prompt, **alone)
    with steady_clock(target, drafter):
        found, stats = speculate(target, drafter, prompt, **options)
    assert stats.choices["from the text"] > 0
    assert_close("text", getattr(found, "sequences", found), getattr(expected, "sequences", expected))
    if way == "scores":
        for name in ("scores", "hidden_states"):
            assert len(found[name]) == len(expected[name])
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-3, atol=1e-3)


def test_a_text_that_repeats_itself_needs_few_forwards(make_target, make_drafter, prompt):
    target = make_target("llama")
    drafter = make_drafter(target)
    options = {"max_new_tokens": 64, "do_sample": False, "num_assistant_tokens": 2}
    _, alone = speculate(target, drafter, prompt, **options)
    _, stats = speculate(target, drafter, prompt, **options, prompt_lookup_num_tokens=12)
    assert stats.target_forwards < alone.target_forwards


@pytest.mark.parametrize("knobs", [CHAIN, {"prompt_lookup_num_tokens": 0}], ids=["fixed_depth", "0"])
def test_text_is_not_looked_at_where_nobody_asks(target, drafter, prompt, knobs):
    with steady_clock(target, drafter):
        _, stats = speculate(target, drafter, prompt.repeat(1, 3), max_new_tokens=32, do_sample=False, **knobs)
    assert stats.choices["from the text"] == 0


@pytest.mark.parametrize("value", [-1, 4097, 1.5, True, "often"])
def test_what_is_no_number_of_tokens_is_refused(target, drafter, prompt, value):
    message = f"prompt_lookup_num_tokens is {value!r}; expected 'auto' or an integer from 0 to 4096"
    with pytest.raises(ValueError, match=message):
        target.generate(prompt, assistant_model=drafter, prompt_lookup_num_tokens=value, max_new_tokens=4)


def test_without_the_hook(target, drafter, prompt):
    prompt = prompt.repeat(1, 3)
    options = {"max_new_tokens": 32, "do_sample": False}
    expected = target.generate(prompt, **options)
    found = target.generate(prompt, **options, **CHAIN, **LOOKUP, custom_generate=drafter.decode)
    assert_close("text", found, expected)


def test_what_is_searched_is_the_text_and_nothing_else(target, drafter, prompt, monkeypatch):
    """Prompts without their padding, and every token that was committed, that of the prompts' forward, too."""
    made = []
    monkeypatch.setattr(request, "LookupPlanner", lambda *given: made.append(LookupPlanner(*given)) or made[-1])
    prompts = torch.cat((prompt, torch.tensor([[0, 0, 4, 9, 1]])))
    mask = (torch.arange(5) >= torch.tensor([[0], [2]])).long()
    options = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 20, "do_sample": False}
    found, _ = speculate(target, drafter, prompts, **options, **CHAIN, **LOOKUP)
    (planner,) = made
    assert [lookup.text for lookup in planner.lookups] == [found[0].tolist(), found[1, 2:].tolist()]
