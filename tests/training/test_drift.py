"""Where attention goes, and the losses that hold it, against attention computed in full.

B rows, H heads, S slots, K depths.
"""

import pytest
import torch
from close import FORWARD, assert_close
from factories import VARIANTS, build, inputs, target
from torch.nn.functional import kl_div

from eagle31_hf.training.alignment import AlignmentReader, observing
from eagle31_hf.training.drift import MassObserver, growth_penalty
from eagle31_hf.training.objective import Batch, DraftingObjective, Settings
from eagle31_hf.training.target import TargetReader
from eagle31_hf.training.unroll import unroll

DEPTH, LENGTH = 3, 11
PACKED = torch.tensor([[1] * 5 + [2] * 6, [1] * 11])


def seen_by(drafter, documents):
    """Every depth of layer 0, as observers are shown it."""
    tokens, states = inputs(drafter, LENGTH)
    found = []
    list(unroll(drafter, tokens, states, DEPTH, documents, observers=[found.append]))
    return found


def full_attention(seen, documents, window):
    """Probabilities (B, H, S, S + k) over the keys of depth 0 and the slot's own later ones."""
    slots = torch.arange(LENGTH - 1)
    mask = slots[None, :] <= slots[:, None]
    if window is not None:
        mask = mask & (slots[None, :] > slots[:, None] + seen.depth - window)
    mask = mask & (documents[:, None, :-1, None] == documents[:, None, None, :-1])
    first = (seen.queries @ seen.first_keys.mT * seen.scale).masked_fill(~mask, float("-inf"))
    later = [(seen.queries * keys).sum(-1, keepdim=True) * seen.scale for keys in seen.later_keys]
    return torch.cat([first, *later], dim=-1).softmax(-1)


@pytest.mark.parametrize("documents", [torch.ones(2, LENGTH, dtype=torch.long), PACKED], ids=["one_text", "packed"])
@pytest.mark.parametrize(("kind", "window"), [("eagle31", None), ("window_3", 3)])
@torch.no_grad()
def test_shares_are_those_of_the_full_attention(kind, window, documents):
    drafter = build(**VARIANTS[kind])
    mass = MassObserver(documents[:, :-1])
    for seen in seen_by(drafter, documents):
        mass.observe(seen)
        full = full_attention(seen, documents, window).mean(1)
        for row in range(2):
            for slot in range(LENGTH - 1 - seen.depth):
                start = 5 if documents[row, slot] == 2 else 0
                sink, later = full[row, slot, start], full[row, slot, LENGTH - 1 :].sum()
                own = full[row, slot, slot] if slot > start else torch.tensor(0.0)
                wanted = torch.stack([sink, 1 - sink - own - later, own, later])
                found = mass.of(seen.depth, torch.tensor([row]), torch.tensor([slot]))[0]
                assert_close(f"depth {seen.depth}, row {row}, slot {slot}", found, wanted, FORWARD)


def test_only_growth_is_penalised():
    first, norms = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[2.0, 1.0]])
    assert_close(
        "growth", growth_penalty(norms, first), torch.tensor([[torch.log(torch.tensor(2.0)) ** 2, 0.0]]), FORWARD
    )


def test_the_regulariser_pulls_states_back():
    """Of an EAGLE 3 drafter, whose states may grow; weighted it makes up the difference between two losses."""
    drafter = build(**VARIANTS["eagle3"])
    tokens, states = inputs(drafter, LENGTH)
    batch = Batch(tokens, torch.ones_like(tokens).bool(), torch.ones_like(tokens), states, states[..., :5])
    head = torch.randn(drafter.config.vocab_size, 5, generator=torch.Generator().manual_seed(0))

    def growth(weight):
        objective = DraftingObjective(
            drafter, Settings(DEPTH, (1.0,) * DEPTH, drift_regulariser=weight), lambda x: x @ head.T
        )
        outputs = objective(batch)
        return outputs["loss"], outputs["found"].growth

    loss, grown = growth(0.5)
    assert grown > 0.01
    assert_close("loss", loss, growth(0.0)[0] + 0.5 * grown, FORWARD)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        growth(1.0)[1].backward()
        optimizer.step()
    assert growth(1.0)[1] < 0.3 * grown


def alignment_of(theirs, tokens, documents, slots_a_row=4, answers=None):
    reader = AlignmentReader(theirs, [1, 2, 4], DEPTH, slots_a_row)
    torch.manual_seed(0)
    alignment = reader.choose(torch.ones_like(tokens).bool() if answers is None else answers, documents, "serving")
    states, last = TargetReader(theirs, [1, 2, 4]).read(tokens, documents, reader.watch)
    return alignment, states, last


@pytest.mark.parametrize("documents", [torch.ones(2, LENGTH, dtype=torch.long), PACKED], ids=["one_text", "packed"])
def test_goals_are_the_attention_of_the_target(documents):
    theirs, (tokens, _) = target(), inputs(build(), LENGTH)
    alignment, *_ = alignment_of(theirs, tokens, documents)
    eager = target()
    eager.set_attn_implementation("eager")
    for row in range(2):
        for i, slot in enumerate(alignment.slots[row].tolist()):
            start = 5 if documents[row, slot] == 2 else 0
            end = 5 if documents[row, slot] == 1 and documents[row, -1] == 2 else LENGTH
            attentions = eager(tokens[row : row + 1, start:end], output_attentions=True).attentions
            mean = torch.stack([attentions[layer][0] for layer in (0, 1, 3)]).mean((0, 1))
            for k in range(DEPTH):
                goal = torch.zeros(LENGTH - 1)
                if slot + 2 + k < end:  # there is a token to guess
                    goal[start : slot + 1] = mean[slot + 1 + k - start, : slot + 1 - start]
                assert_close(f"row {row}, slot {slot}, depth {k}", alignment.goal[row, i, k], goal, FORWARD)


@pytest.mark.parametrize(("kind", "window"), [("eagle31", None), ("window_5", 5)])
def test_the_alignment_loss_is_its_definition(kind, window):
    fields = {"layer_types": ["sliding_attention"], "sliding_window": window} if window else {}
    drafter, theirs = build(**fields), target()
    tokens, _ = inputs(drafter, LENGTH)
    documents = torch.ones_like(tokens)
    alignment, states, _ = alignment_of(theirs, tokens, documents)
    found = []
    list(unroll(drafter, tokens, states, DEPTH, observers=[found.append, alignment.observe]))
    for seen in found:
        first, made = full_attention(seen, documents, window).split([LENGTH - 1, seen.depth], dim=-1)
        full = torch.cat([first, made.sum(-1, keepdim=True)], dim=-1)
        losses = []
        for row in range(2):
            for i, slot in enumerate(alignment.slots[row].tolist()):
                goal = alignment.goal[row, i, seen.depth]
                if goal.any():
                    goal = torch.cat([goal, 1 - goal.sum()[None]])
                    goal = torch.where(full[row, :, slot].sum(0) > 0, goal, 0.0)  # what the drafter can see
                    losses.append(
                        kl_div(
                            full[row, :, slot].mean(0)[goal > 0].log(), (goal / goal.sum())[goal > 0], reduction="sum"
                        )
                    )
        assert_close(f"depth {seen.depth}", alignment.loss(seen.depth), torch.stack(losses).mean(), FORWARD)


def test_training_on_it_alone_aligns_attention():
    drafter, theirs = build(), target()
    tokens, _ = inputs(drafter, LENGTH)
    one = torch.ones_like(tokens)
    settings = Settings(DEPTH, (1.0,) * DEPTH, {"kl": 0.0}, attention_alignment=1.0)
    objective = DraftingObjective(drafter, settings, TargetReader(theirs, [1, 2, 4]).logits)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    history = []
    for _ in range(40):
        alignment, states, last = alignment_of(theirs, tokens, one)
        outputs = objective(Batch(tokens, one.bool(), one, states, last, alignment))
        optimizer.zero_grad()
        outputs["loss"].backward()
        optimizer.step()
        history.append(outputs["loss"].item())
    assert history[-1] < 0.2 * history[0]


def test_slots_come_from_supervised_rows_and_a_row_without_any_has_no_loss():
    theirs, (tokens, _) = target(), inputs(build(), LENGTH)
    answers = torch.zeros_like(tokens).bool()
    answers[0, 4:8] = True
    alignment, *_ = alignment_of(theirs, tokens, torch.ones_like(tokens), answers=answers)
    assert set(alignment.slots[0].tolist()) <= {3, 4, 5}
    assert alignment.goal[0, :, 0].any()
    assert not alignment.goal[1].any()


def test_a_target_not_run_with_sdpa_is_refused_and_every_target_is_left_as_it_was():
    theirs = target()
    with observing(theirs, lambda *args: None):
        pass
    assert theirs.config._attn_implementation == "sdpa"
    theirs.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="run with eager"), observing(theirs, lambda *args: None):
        pass
