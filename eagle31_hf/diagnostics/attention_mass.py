"""Attention mass: the share of a drafter's attention that falls on each kind of key, averaged over heads.

`sink` is the one of the text's first keys that gets the most attention; in training, the first. `prompt` are the other
keys read from the target's states before the position at which the chain begins, `own` is the key at that position, and
`self` are the keys that the chain made itself. The four masses of a query add up to 1. Source: Attention Drift (arXiv
2605.09992). Beside it the size of a state.

B sequences, H heads, Q queries, S keys, D width of a head, h of a state.
"""

import torch
from torch import Tensor

KINDS = ("sink", "prompt", "own", "self")


def key_weights(queries: Tensor, keys: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Returns the attention weights (B, H, Q) that queries (B, H, Q, D) give to one key each, `keys` (B, H, Q, D).

    `lse` (B, H, Q): the log-sum-exp of each query's scores over all its keys.
    """
    return ((queries.float() * keys.float()).sum(-1) * scale - lse).exp()


def attention_mass(sink: Tensor, own: Tensor, made: Tensor) -> Tensor:
    """Returns the masses (B, Q, 4), in the order of `KINDS`.

    `sink`, `own` and `made` are the weights (B, H, Q) of the text's first key, of the key at which the chain begins (0
    where that is the first one), and of all keys the chain made together. The prompt has what they leave of 1.
    """
    return torch.stack((sink, 1 - sink - own - made, own, made), dim=-1).mean(1)


def attention_entropy(weights: Tensor) -> Tensor:
    """Returns the entropy (B, Q) in nats of attention weights (B, H, Q, S), averaged over heads."""
    return -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean(1)


def state_norm(states: Tensor) -> Tensor:
    """Returns the root mean squares (...) of states (..., h), in fp32."""
    return states.float().square().mean(-1).sqrt()
