"""The unroll computes, for all positions at once, what a drafter with a cache computes when it serves; and gradients
flow as they would.

B batch, T tokens, S positions (T - 1), n aux hidden states, ht target width, V target vocabulary, Vd draft vocabulary.
"""

import pytest
import torch
from close import FORWARD, assert_close
from factories import ATTENTIONS, NORMS, VARIANTS, build, chain, inputs

from eagle31_hf.training import unroll as unrolled
from eagle31_hf.training.documents import positions_of

DEPTH, LENGTH = 4, 11
TRAINED = {name: fields for name, fields in VARIANTS.items() if name != "parallel"}
WINDOWS = {
    "full": ({}, None),
    "window_3": ({"layer_types": ["sliding_attention"], "sliding_window": 3}, 3),
    "window_5": ({"layer_types": ["sliding_attention"], "sliding_window": 5}, 5),
}


def unroll(drafter, *args, **kwargs):
    """Yields the logits and the fed-back states of each depth."""
    for normed, state in unrolled.unroll(drafter, *args, **kwargs):
        yield drafter.score(normed), state


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("fields", TRAINED.values(), ids=TRAINED)
@torch.no_grad()
def test_every_position_drafts_as_it_does_when_serving(fields, attention):
    drafter = build(attention, **fields)
    tokens, states = inputs(drafter, LENGTH)
    steps = list(unroll(drafter, tokens, states, DEPTH))
    for t in range(LENGTH - 1):
        depth = min(DEPTH, LENGTH - 1 - t)
        for k, (logits, state) in enumerate(chain(drafter, tokens, states, t, depth)):
            assert_close(f"logits of position {t} at depth {k}", steps[k][0][:, t], logits, FORWARD)
            assert_close(f"state of position {t} at depth {k}", steps[k][1][:, t], state, FORWARD)


@pytest.mark.parametrize("depth", [1, 4, 10])
@torch.no_grad()
def test_a_chain_is_left_out_where_its_tokens_end(depth):
    drafter = build()
    tokens, states = inputs(drafter, LENGTH)
    steps = list(unroll(drafter, tokens, states, depth))
    assert [(logits.shape[1], state.shape[1]) for logits, state in steps] == [
        (LENGTH - 1 - k,) * 2 for k in range(depth)
    ]


@pytest.mark.parametrize("depth", [0, LENGTH, LENGTH + 3])
def test_a_depth_without_chains_is_refused(depth):
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
        others = [t for t in range(logits.shape[1]) if t != changed]
        assert_close(f"other chains at depth {k}", logits[:, others], expected[k][0][:, others])
        assert ((logits - expected[k][0])[:, changed].abs().max() > 0.01) == (k > 0), f"chain {changed} at depth {k}"
        state[:, changed] += 1.0  # what depth k + 1 is fed in this chain: the yielded state is a view of it


@pytest.mark.parametrize("position", [0, 3, 6])
@pytest.mark.parametrize(("fields", "window"), WINDOWS.values(), ids=WINDOWS)
def test_what_a_chain_depends_on(fields, window, position):
    """By gradient, a chain depends on the states up to its position and on the tokens it has embedded, within the
    window of depth 0.

    Deeper windows start later, but their queries are made of what depth 0 read.
    """
    drafter, first = build(**fields), 0 if window is None else max(0, position - window + 1)
    tokens, states = inputs(drafter, LENGTH, batch=1)
    states.requires_grad_()
    for k, (logits, _) in enumerate(unroll(drafter, tokens, states, DEPTH)):
        by_state, by_embedding = torch.autograd.grad(
            logits[:, position].square().sum(), (states, drafter.embed_tokens.weight), retain_graph=True
        )
        assert by_state[0].any(-1).nonzero().flatten().tolist() == list(range(first, position + 1)), (
            f"states at depth {k}"
        )
        embedded = by_embedding.any(-1).nonzero().flatten().tolist()
        assert embedded == sorted(tokens[0, first + 1 : position + 2 + k].tolist()), f"tokens at depth {k}"


@pytest.mark.parametrize("fields", TRAINED.values(), ids=TRAINED)
def test_gradients_equal_those_of_the_chain(fields):
    """Gradients that reach a depth through the states fed on count, too: the chain is an ordinary autograd graph."""
    drafter, position = build(**fields), 5
    tokens, states = inputs(drafter, LENGTH)
    states.requires_grad_()
    weights = dict(drafter.named_parameters()) | {"states": states}

    def gradients(logits_by_depth) -> dict:
        total = sum(logits.square().sum() for logits in logits_by_depth)
        return dict(zip(weights, torch.autograd.grad(total, list(weights.values())), strict=True))

    expected = gradients(logits for logits, _ in chain(drafter, tokens, states, position, DEPTH))
    for name, gradient in gradients(
        logits[:, position] for logits, _ in unroll(drafter, tokens, states, DEPTH)
    ).items():
        assert_close(name, gradient, expected[name], FORWARD)
        assert gradient.any(), name


@pytest.mark.parametrize("fields", NORMS.values(), ids=NORMS)
def test_every_depth_reaches_fc_and_the_aux_hidden_states(fields):
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


@pytest.mark.parametrize("fields", TRAINED.values(), ids=TRAINED)
def test_recomputed_depths_have_the_same_gradients(fields):
    drafter = build(**fields)
    tokens, states = inputs(drafter, LENGTH)

    def gradients(**options) -> list:
        total = sum(logits.square().sum() for logits, _ in unroll(drafter, tokens, states, DEPTH, **options))
        return torch.autograd.grad(total, list(drafter.parameters()))

    for (name, _), ours, theirs in zip(drafter.named_parameters(), gradients(recompute=True), gradients(), strict=True):
        assert_close(name, ours, theirs, 0.0)


def test_recomputing_keeps_less():
    drafter = build(intermediate_size=600)
    tokens, states = inputs(drafter, LENGTH)

    def kept(**options) -> int:
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.setdefault(id(x), x), lambda x: x):
            steps = list(unroll(drafter, tokens, states, DEPTH, **options))
        assert steps
        return sum(x.numel() for x in saved.values())

    assert kept(recompute=True) < 0.3 * kept()


@pytest.mark.parametrize("fields", TRAINED.values(), ids=TRAINED)
def test_packed_texts_do_as_they_do_alone(fields):
    drafter = build(**fields)
    tokens, states = inputs(drafter, LENGTH)
    documents = torch.arange(1, 3).repeat_interleave(LENGTH)[None]
    packed = list(unroll(drafter, tokens.reshape(1, -1), states.reshape(1, 2 * LENGTH, -1), DEPTH, documents))
    for k, (logits, state) in enumerate(unroll(drafter, tokens, states, DEPTH)):
        for text, start in enumerate((0, LENGTH)):
            positions = slice(start, start + LENGTH - 1 - k)
            assert_close(f"logits of text {text} at depth {k}", packed[k][0][0, positions], logits[text], FORWARD)
            assert_close(f"states of text {text} at depth {k}", packed[k][1][0, positions], state[text], FORWARD)


def test_positions_begin_anew_with_each_text():
    documents = torch.tensor([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    assert positions_of(documents, 8, documents.device).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [*range(8)]]


def test_dropout_in_attention_is_refused():
    drafter = build(attention_dropout=0.1).train()
    tokens, states = inputs(drafter, LENGTH)
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1; expected 0"):
        list(unroll(drafter, tokens, states, 2))
