"""Caches with recurrent states, compared; and a family of targets of each kind that keeps them."""

import torch
from close import TARGET_FORWARD, assert_close
from transformers import DynamicCache

# states beside attention layers; keys and states in one layer; no keys; tokens one by one; convolutions alone
KINDS = ("Qwen3-Next", "Falcon-H1", "Mamba2", "Jamba", "LFM2", "ZAYA")


def held(cache: DynamicCache) -> dict[str, torch.Tensor]:
    """All tensors of a cache, by layer and name."""
    found = {}
    for number, layer in enumerate(cache.layers):
        for name, value in vars(layer).items():
            if name in ("keys", "values") and isinstance(value, torch.Tensor):
                found[f"{number}.{name}"] = value
            elif name in ("conv_states", "recurrent_states"):
                found |= {f"{number}.{name}.{key}": one for key, one in value.items() if one is not None}
    return found


def is_same(found: DynamicCache, expected: DynamicCache) -> bool:
    try:
        assert_same_states(found, expected)
    except AssertionError:
        return False
    return True


def assert_same_states(found: DynamicCache, expected: DynamicCache) -> None:
    ours, theirs = held(found), held(expected)
    assert ours.keys() == theirs.keys()
    for name, states in theirs.items():
        assert_close(name, ours[name], states, TARGET_FORWARD)
