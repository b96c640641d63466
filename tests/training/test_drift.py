"""Attention masses against attention computed in full.

B sequences, H heads, S positions, K depths.
"""

import pytest
import torch
from close import FORWARD, assert_close
from factories import VARIANTS, build, inputs

from eagle31_hf.training.attention import MassObserver
from eagle31_hf.training.unroll import unroll

DEPTH, LENGTH = 3, 11
PACKED = torch.tensor([[1] * 5 + [2] * 6, [1] * 11])


def seen_by(drafter, documents):
    """Returns every depth of layer 0, as an observer is shown it."""
    tokens, states = inputs(drafter, LENGTH)
    found = []
    list(unroll(drafter, tokens, states, DEPTH, documents, observe=found.append))
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
@pytest.mark.parametrize(("kind", "window"), [("eagle31", None), ("window_3", 3), ("window_3", 2)])
@torch.no_grad()
def test_masses_are_those_of_the_full_attention(kind, window, documents):
    drafter = build(**VARIANTS[kind] | ({"sliding_window": window} if window else {}))
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
                found = mass.masses[seen.depth][b, t]
                assert_close(f"depth {seen.depth}, sequence {b}, position {t}", found, wanted, FORWARD)
