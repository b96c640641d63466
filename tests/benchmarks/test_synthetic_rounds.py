"""Acceptance by decree in captured rounds: on the device, with no value read on the host."""

import pytest
import torch
from engine import build
from synthetic import Draws, SyntheticSampler, _draws_of, synthetic_decoding

from eagle31_hf import track_acceptance
from eagle31_hf.generation.captured.drafting import Drafts
from eagle31_hf.generation.captured.seam import Uncaptured, seams
from eagle31_hf.generation.rejection_sampler import RejectionSampler
from eagle31_hf.kernels.drafts import best_tree

SURVIVAL = (0.75, 0.55, 0.42, 0.31, 0.24)
CHAIN = {"num_assistant_tokens": 5}
TREE = {"num_assistant_tokens": 5, "draft_tree_top_k": 4, "draft_tree_total_tokens": 16}


@pytest.fixture(scope="module")
def pair():
    return build("tiny", torch.float32, "cpu")


def mean_length(pair, knobs, survival, num_sequences=1, seam=None, new_tokens=120) -> tuple[float, dict]:
    target, drafter = pair
    ids = torch.arange(num_sequences * 8).view(num_sequences, 8)
    decode = synthetic_decoding(drafter, knobs, survival)
    with seams(lambda device: seam), track_acceptance() as stats:
        target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, custom_generate=decode)
    return stats.mean_accepted_length, dict(stats.executions)


@pytest.mark.parametrize(("knobs", "num_sequences"), [(CHAIN, 1), (TREE, 1), (CHAIN, 3)], ids=str)
def test_captured_rounds_accept_as_many_as_eager_ones(pair, knobs, num_sequences):
    eager, _ = mean_length(pair, knobs, SURVIVAL, num_sequences)
    captured, executions = mean_length(pair, knobs, SURVIVAL, num_sequences, Uncaptured())
    assert [*executions] == [f"as {Uncaptured.name}"]
    assert captured == pytest.approx(eager, rel=0.05)
    assert captured == pytest.approx(1 + sum(SURVIVAL), rel=0.08)


def test_chances_of_a_later_call_hold_in_rounds_captured_before(pair):
    mean_length(pair, CHAIN, SURVIVAL, seam=Uncaptured(), new_tokens=8)
    found = _draws_of(pair[1], torch.device("cpu"))
    places = found.count.data_ptr(), found.survival.data_ptr()
    for survival, expected in (((1.0,) * 5, 6.0), ((0.0,), 1.0)):
        length, _ = mean_length(pair, CHAIN, survival, seam=Uncaptured(), new_tokens=31)
        assert length == pytest.approx(expected)
    assert _draws_of(pair[1], torch.device("cpu")) is found
    assert (found.count.data_ptr(), found.survival.data_ptr()) == places, "what graphs read has moved"


def drafted(ids, parents) -> Drafts:
    """A tree of which every draft is kept."""
    scores = -torch.arange(1.0, len(ids) + 1)[None]
    _, hangs_on, depths, bits = best_tree.reference(scores, torch.tensor([parents]), len(ids))
    return Drafts(torch.tensor([ids]), hangs_on, depths, bits, scores, is_chain=False)


@pytest.mark.parametrize(("count", "descends_to"), [(0, 3), (1, 1), (2, 2)])
def test_the_first_child_is_chosen_while_the_number_is_below_the_chance(count, descends_to):
    """The numbers 0.0, 0.618 and 0.236: below all chances, below one, below two."""
    draws = Draws(torch.device("cpu"))
    draws.start((0.7, 0.5, 0.2), count)
    sampler = SyntheticSampler(RejectionSampler(None, None), (), iter(()), draws)
    drafts = drafted(ids=[4, 0, 5, 1, 6], parents=[-1, -1, 0, 0, 2])  # 4 -> 5 -> 6; 0 and 1 are siblings
    logits = torch.zeros(1, 6, 9)
    logits[:, :, 0] = 1  # the target's choice, a draft
    chosen, lawful = sampler.choose_at_nodes(logits, drafts, None)
    assert lawful.tolist() == [[1] * 6]
    for depth, (node, first) in enumerate(((0, 4), (1, 5), (3, 6))):
        assert int(chosen[0, node]) == (first if depth < descends_to else 2), "2 is the smallest id that is no draft"
    assert [int(chosen[0, leaf]) for leaf in (2, 4, 5)] == [2] * 3
    assert float(draws.count) == count + 1


def test_what_the_target_chooses_stays_where_it_is_no_draft():
    draws = Draws(torch.device("cpu"))
    draws.start((0.0,), 0)
    sampler = SyntheticSampler(RejectionSampler(None, None), (), iter(()), draws)
    logits = torch.zeros(1, 3, 9)
    logits[:, :, 7] = 1
    chosen, _ = sampler.choose_at_nodes(logits, drafted([4, 5], [-1, 0]), None)
    assert chosen.tolist() == [[7, 7, 7]]
