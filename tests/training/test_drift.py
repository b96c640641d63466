"""Attention masses, and the losses that hold attention, against attention computed in full.

B sequences, H heads, S positions, K depths.
"""

import threading
from functools import partial

import pytest
import torch
from close import FORWARD, assert_close
from factories import VARIANTS, build, inputs, target
from torch.nn.functional import kl_div

from eagle31_hf.training.alignment import Alignment, observed_attention
from eagle31_hf.training.drift import MassObserver, growth_penalty
from eagle31_hf.training.objective import Batch, DraftingObjective, Settings
from eagle31_hf.training.target import TargetReader
from eagle31_hf.training.unroll import unroll

DEPTH, LENGTH = 3, 11
PACKED = torch.tensor([[1] * 5 + [2] * 6, [1] * 11])


def seen_by(drafter, documents):
    """Returns every depth of layer 0, as observers are shown it."""
    tokens, states = inputs(drafter, LENGTH)
    found = []
    list(unroll(drafter, tokens, states, DEPTH, documents, observers=[found.append]))
    return found


def full_attention(seen, documents, window):
    """Returns the attention weights (B, H, S, S + k) over the keys of depth 0 and the position's own later ones."""
    positions = torch.arange(LENGTH - 1)
    mask = positions[None, :] <= positions[:, None]
    if window is not None:
        mask = mask & (positions[None, :] > positions[:, None] + seen.depth - window)
    mask = mask & (documents[:, None, :-1, None] == documents[:, None, None, :-1])
    first = (seen.queries @ seen.first_keys.mT * seen.scale).masked_fill(~mask, float("-inf"))
    later = [(seen.queries * keys).sum(-1, keepdim=True) * seen.scale for keys in seen.later_keys]
    return torch.cat([first, *later], dim=-1).softmax(-1)


@pytest.mark.parametrize("documents", [torch.ones(2, LENGTH, dtype=torch.long), PACKED], ids=["one_text", "packed"])
@pytest.mark.parametrize(("kind", "window"), [("eagle31", None), ("window_3", 3)])
@torch.no_grad()
def test_masses_are_those_of_the_full_attention(kind, window, documents):
    drafter = build(**VARIANTS[kind])
    mass = MassObserver(documents[:, :-1])
    for seen in seen_by(drafter, documents):
        mass.observe(seen)
        full = full_attention(seen, documents, window).mean(1)
        for b in range(2):
            for t in range(LENGTH - 1 - seen.depth):
                start = 5 if documents[b, t] == 2 else 0
                sink, made = full[b, t, start], full[b, t, LENGTH - 1 :].sum()
                own = full[b, t, t] if t > start else torch.tensor(0.0)
                wanted = torch.stack([sink, 1 - sink - own - made, own, made])
                found = mass.of(seen.depth, torch.tensor([b]), torch.tensor([t]))[0]
                assert_close(f"depth {seen.depth}, sequence {b}, position {t}", found, wanted, FORWARD)


def test_only_growth_is_penalised():
    first, norms = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[2.0, 1.0]])
    assert_close(
        "growth", growth_penalty(norms, first), torch.tensor([[torch.log(torch.tensor(2.0)) ** 2, 0.0]]), FORWARD
    )


def test_the_regulariser_pulls_states_back():
    """The states of an EAGLE 3 drafter may grow; the weighted penalty is the difference between two losses."""
    drafter = build(**VARIANTS["eagle3"])
    tokens, states = inputs(drafter, LENGTH)
    batch = Batch(tokens, torch.ones_like(tokens).bool(), torch.ones_like(tokens), states, states[..., :5])
    head = torch.randn(drafter.config.vocab_size, 5, generator=torch.Generator().manual_seed(0))

    def growth(weight):
        objective = DraftingObjective(
            drafter, Settings(DEPTH, (1.0,) * DEPTH, drift_regulariser=weight), lambda x: x @ head.T
        )
        outputs = objective(batch)
        return outputs["loss"], outputs["record"].growth

    loss, grown = growth(0.5)
    assert grown > 0.01
    assert_close("loss", loss, growth(0.0)[0] + 0.5 * grown, FORWARD)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        growth(1.0)[1].backward()
        optimizer.step()
    assert growth(1.0)[1] < 0.3 * grown


def alignment_of(theirs, tokens, documents, num_chosen=4, answers=None):
    answers = torch.ones_like(tokens).bool() if answers is None else answers
    torch.manual_seed(0)
    alignment = Alignment(answers, documents, "serving", DEPTH, num_chosen)
    watch = partial(alignment.watch, theirs, [1, 2, 4])
    states, last = TargetReader(theirs, [1, 2, 4]).read(tokens, documents, watch)
    return alignment, states, last


@pytest.mark.parametrize("documents", [torch.ones(2, LENGTH, dtype=torch.long), PACKED], ids=["one_text", "packed"])
def test_what_is_read_is_the_attention_of_the_target(documents):
    theirs, (tokens, _) = target(), inputs(build(), LENGTH)
    alignment, *_ = alignment_of(theirs, tokens, documents)
    eager = target()
    eager.set_attn_implementation("eager")
    for b in range(2):
        for i, t in enumerate(alignment.positions[b].tolist()):
            start = 5 if documents[b, t] == 2 else 0
            end = 5 if documents[b, t] == 1 and documents[b, -1] == 2 else LENGTH
            attentions = eager(tokens[b : b + 1, start:end], output_attentions=True).attentions
            mean = torch.stack([attentions[layer][0] for layer in (0, 1, 3)]).mean((0, 1))
            for k in range(DEPTH):
                wanted = torch.zeros(LENGTH - 1)
                if t + 2 + k < end:  # there is a token to predict
                    wanted[start : t + 1] = mean[t + 1 + k - start, : t + 1 - start]
                name = f"sequence {b}, position {t}, depth {k}"
                assert_close(name, alignment.target_attention[b, i, k], wanted, FORWARD)


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
        for b in range(2):
            for i, t in enumerate(alignment.positions[b].tolist()):
                wanted = alignment.target_attention[b, i, seen.depth]
                if wanted.any():
                    wanted = torch.cat([wanted, 1 - wanted.sum()[None]])
                    wanted = torch.where(full[b, :, t].sum(0) > 0, wanted, 0.0)  # what the drafter can see
                    counts = wanted > 0
                    ours = full[b, :, t].mean(0)[counts].log()
                    losses.append(kl_div(ours, (wanted / wanted.sum())[counts], reduction="sum"))
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


def test_positions_are_supervised_ones_and_a_sequence_without_any_has_no_loss():
    theirs, (tokens, _) = target(), inputs(build(), LENGTH)
    answers = torch.zeros_like(tokens).bool()
    answers[0, 4:8] = True
    alignment, *_ = alignment_of(theirs, tokens, torch.ones_like(tokens), answers=answers)
    assert set(alignment.positions[0].tolist()) <= {3, 4, 5}
    assert alignment.target_attention[0, :, 0].any()
    assert not alignment.target_attention[1].any()


def test_a_target_not_run_with_sdpa_is_refused():
    theirs = target()
    theirs.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="run with eager"), observed_attention(theirs, {0}, lambda *args: None):
        pass


def test_only_this_threads_forwards_are_seen_and_the_target_stays_as_it_is():
    theirs, calls = target(), []
    tokens = torch.arange(6)[None]
    alone = theirs(tokens).logits

    def elsewhere(results):
        results.append((theirs.config._attn_implementation, theirs(tokens).logits))

    def see(query, key, *args, **options):
        calls.append(query.shape[2])

    with observed_attention(theirs, {1, 3}, see):
        results = []
        other = threading.Thread(target=elsewhere, args=(results,))
        other.start()
        other.join()
        assert calls == []
        theirs(tokens)
    assert calls == [6, 6], "two layers are watched"
    theirs(tokens)
    assert calls == [6, 6]
    assert results[0][0] == "sdpa"
    assert_close("the other thread's logits", results[0][1], alone)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in theirs.model.layers)
