"""The unroll computes, for all slots at once, what a drafter with a cache computes when it serves; and it can be trained by.

B batch, T tokens, S slots (T - 1), n captured states, ht target width, V target vocabulary, Vd draft vocabulary.
"""

import pytest
import torch
from close import FORWARD, assert_close
from factories import ATTENTIONS, NORMS, VARIANTS, VOCAB, build, chain, inputs, target
from torch.nn.functional import kl_div

from eagle31_hf.features import target_states
from eagle31_hf.training import unroll as unrolled
from eagle31_hf.training.unroll import drafting_loss

DEPTH, LENGTH = 4, 11
GRADIENT = 1e-4  # of sums over 60 logits and 4 depths, entries up to about 10
WINDOWS = {
    "full": ({}, None),
    "window_3": ({"layer_types": ["sliding_attention"], "sliding_window": 3}, 3),
    "window_5": ({"layer_types": ["sliding_attention"], "sliding_window": 5}, 5),
}


def unroll(drafter, *args, **kwargs):
    """By depth the logits and the fed-back states."""
    for normed, state in unrolled.unroll(drafter, *args, **kwargs):
        yield drafter.score(normed), state


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_every_slot_drafts_as_it_does_when_serving(fields, attention):
    drafter = build(attention, **fields)
    tokens, states = inputs(drafter, LENGTH)
    steps = list(unroll(drafter, tokens, states, DEPTH))
    for slot in range(LENGTH - 1):
        depth = min(DEPTH, LENGTH - 1 - slot)
        for k, (logits, state) in enumerate(chain(drafter, tokens, states, slot, depth)):
            assert_close(f"logits of slot {slot} at depth {k}", steps[k][0][:, slot], logits, FORWARD)
            assert_close(f"state of slot {slot} at depth {k}", steps[k][1][:, slot], state, FORWARD)


@pytest.mark.parametrize("depth", [1, 4, 10])
@torch.no_grad()
def test_a_slot_is_left_out_where_its_tokens_end(depth):
    drafter = build()
    tokens, states = inputs(drafter, LENGTH)
    steps = list(unroll(drafter, tokens, states, depth))
    assert [(logits.shape[1], state.shape[1]) for logits, state in steps] == [(LENGTH - 1 - k,) * 2 for k in range(depth)]


@pytest.mark.parametrize("depth", [0, LENGTH, LENGTH + 3])
def test_a_depth_without_slots_is_refused(depth):
    drafter = build()
    tokens, states = inputs(drafter, LENGTH)
    with pytest.raises(ValueError, match=f"depth is {depth}; expected 1 to 10"):
        list(unroll(drafter, tokens, states, depth))


@pytest.mark.parametrize("fields", [{}, VARIANTS["window_3_then_full"]], ids=["one_layer", "window_3_then_full"])
@torch.no_grad()
def test_a_chain_does_not_see_another(fields):
    drafter, changed = build(**fields), 4
    tokens, states = inputs(drafter, LENGTH)
    expected = list(unroll(drafter, tokens, states, DEPTH))
    for k, (logits, state) in enumerate(unroll(drafter, tokens, states, DEPTH)):
        others = [slot for slot in range(logits.shape[1]) if slot != changed]
        assert_close(f"other slots at depth {k}", logits[:, others], expected[k][0][:, others])
        assert ((logits - expected[k][0])[:, changed].abs().max() > 0.01) == (k > 0), f"slot {changed} at depth {k}"
        state[:, changed] += 1.0  # what depth k + 1 is fed for this slot: the yielded state is a view of it


@pytest.mark.parametrize("slot", [0, 3, 6])
@pytest.mark.parametrize(("fields", "window"), WINDOWS.values(), ids=WINDOWS)
def test_what_a_slot_depends_on(fields, window, slot):
    """By gradient: on the states at its slot and before, and on the tokens its chain has embedded; within the window of depth 0.

    Deeper windows start later, but their queries are made of what depth 0 read.
    """
    drafter, first = build(**fields), 0 if window is None else max(0, slot - window + 1)
    tokens, states = inputs(drafter, LENGTH, batch=1)
    states.requires_grad_()
    for k, (logits, _) in enumerate(unroll(drafter, tokens, states, DEPTH)):
        by_state, by_row = torch.autograd.grad(logits[:, slot].square().sum(), (states, drafter.embed_tokens.weight), retain_graph=True)
        assert by_state[0].any(-1).nonzero().flatten().tolist() == list(range(first, slot + 1)), f"states at depth {k}"
        embedded = by_row.any(-1).nonzero().flatten().tolist()
        assert embedded == sorted(tokens[0, first + 1 : slot + 2 + k].tolist()), f"tokens at depth {k}"


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_gradients_equal_those_of_the_chain(fields):
    """Also those that reach a depth through the states fed on: the chain here is an ordinary autograd graph."""
    drafter, slot = build(**fields), 5
    tokens, states = inputs(drafter, LENGTH)
    states.requires_grad_()
    weights = dict(drafter.named_parameters()) | {"states": states}

    def gradients(logits_by_depth) -> dict:
        total = sum(logits.square().sum() for logits in logits_by_depth)
        return dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))

    expected = gradients(logits for logits, _ in chain(drafter, tokens, states, slot, DEPTH))
    for name, gradient in gradients(logits[:, slot] for logits, _ in unroll(drafter, tokens, states, DEPTH)).items():
        assert_close(name, gradient, expected[name], GRADIENT * max(1.0, expected[name].abs().max().item()))
        assert gradient.any(), name


@pytest.mark.parametrize("fields", NORMS.values(), ids=NORMS)
def test_every_depth_reaches_fc_and_the_captured_states(fields):
    drafter = build(**fields)
    tokens, states = inputs(drafter, LENGTH)
    states.requires_grad_()
    for k, (logits, _) in enumerate(unroll(drafter, tokens, states, DEPTH)):
        by_fc, by_state = torch.autograd.grad(logits.square().sum(), (drafter.fc.weight, states), retain_graph=True)
        assert by_fc.norm() > 1e-3, f"fc at depth {k}"
        assert (by_state[:, : LENGTH - 1 - k].norm(dim=-1) > 1e-5).all(), f"states at depth {k}"


@pytest.mark.parametrize("fields", [{}, NORMS["eagle3"]], ids=["eagle31", "eagle3"])
@torch.no_grad()
def test_states_of_a_target_in_another_dtype(fields):
    drafter = build(**fields)
    tokens, states = inputs(drafter, LENGTH)
    got = list(unroll(drafter, tokens, states.bfloat16(), 3))
    assert_close("logits and states", got, list(unroll(drafter, tokens, states.bfloat16().float(), 3)))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # its new name is not in transformers 5.17
def test_gradient_checkpointing_is_refused():
    drafter = build().train()
    drafter.gradient_checkpointing_enable()
    tokens, states = inputs(drafter, LENGTH)
    with pytest.raises(ValueError, match="gradient checkpointing"):
        list(unroll(drafter, tokens, states, 2))
    assert len(list(unroll(drafter.eval(), tokens, states, 2))) == 2


# The loss.


@pytest.mark.parametrize("decay", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["eagle31", "full_vocabulary"])
@torch.no_grad()
def test_the_loss_is_its_definition(kind, decay):
    drafter = build(**VARIANTS[kind])
    tokens, states = inputs(drafter, LENGTH)
    target_logits = 2 * torch.randn(2, LENGTH, VOCAB, generator=torch.Generator().manual_seed(2))
    ids = range(VOCAB) if drafter.d2t is None else drafter.draft_to_target_ids().tolist()
    best, p = target_logits.argmax(-1), target_logits.softmax(-1)[..., list(ids)]
    kl, accuracy, accepted = ([[] for _ in range(DEPTH)] for _ in range(3))
    for slot in range(LENGTH - 2):  # the token predicted is in the text
        for k, (logits, _) in enumerate(chain(drafter, tokens, states, slot, min(DEPTH, LENGTH - 2 - slot))):
            wanted, q = p[:, slot + 1 + k], logits.softmax(-1)
            covered = wanted.sum(-1)
            kl[k].append(covered * kl_div(q.log(), wanted / covered[:, None], reduction="none").sum(-1))
            accuracy[k].append((torch.tensor(list(ids))[q.argmax(-1)] == best[:, slot + 1 + k]).float())
            accepted[k].append(q.minimum(wanted).sum(-1))
    result = drafting_loss(drafter, tokens, states, target_logits, DEPTH, decay)
    mean = [[torch.cat(rows).mean().item() for rows in depths] for depths in (kl, accuracy, accepted)]
    assert result.distance == pytest.approx(mean[0], abs=FORWARD)
    assert result.accuracy == pytest.approx(mean[1], abs=FORWARD)
    assert result.acceptance == pytest.approx(mean[2], abs=FORWARD)
    assert result.loss.item() == pytest.approx(sum(decay**k * value for k, value in enumerate(mean[0])), abs=10 * FORWARD)


@pytest.mark.parametrize("fields", NORMS.values(), ids=NORMS)
def test_thirty_steps_of_training_help_at_every_depth(fields):
    torch.manual_seed(0)
    theirs, ours = target(), build(**fields, draft_vocab_size=VOCAB).train()
    ours.embed_tokens.weight.requires_grad_(False)
    tokens = theirs.generate(torch.randint(VOCAB, (8, 2)), max_new_tokens=18, do_sample=True)
    states, logits = target_states(theirs, tokens, ours.config.resolve_layer_ids(4))
    optimizer = torch.optim.AdamW([weight for weight in ours.parameters() if weight.requires_grad], lr=1e-2)
    history = []
    for _ in range(30):
        history.append(drafting_loss(ours, tokens, states, logits, depth=3))
        optimizer.zero_grad()
        history[-1].loss.backward()
        optimizer.step()
    first, last = history[0], history[-1]
    assert last.loss < 0.5 * first.loss
    for k in range(3):
        assert last.distance[k] < 0.6 * first.distance[k], k
        assert last.accuracy[k] > first.accuracy[k] + 0.2, k
        assert last.acceptance[k] > first.acceptance[k] + 0.1, k
