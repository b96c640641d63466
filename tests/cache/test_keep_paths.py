"""Of a round's nodes a cache keeps the accepted paths: moved together, and in their order."""

import pytest
import torch
from close import assert_close
from committed import keep
from other_targets import build_other
from transformers import DynamicCache

from eagle31_hf.cache.adopt import slots


def fill(past: DynamicCache, width: int, num_tokens: int, num_sequences: int = 1) -> None:
    """Slots are numbers: token t is t in keys and -t in values."""
    for layer in range(len(past.layers)):
        keys = torch.arange(float(num_tokens)).reshape(1, 1, -1, 1).expand(num_sequences, 2, num_tokens, width)
        past.update(keys, -keys, layer)


ONE_PATH = {
    "first": [0],
    "all": [0, 1, 2, 3, 4, 5],
    "prefix": [0, 1, 2],
    "gap": [0, 2, 3, 5],
    "last": [0, 5],
    "chained_moves": [0, 3, 4, 5],
}


@pytest.mark.parametrize("path", ONE_PATH.values(), ids=ONE_PATH)
@pytest.mark.parametrize("kind", ["llama", "mistral_window_8", "gemma3_window_8"])
def test_keep_paths(make_target, kind, path):
    target, num_tokens, num_nodes = make_target(kind), 13, 6
    past = DynamicCache(config=target.config)
    found = [type(layer) for layer in past.layers]
    start = num_tokens - num_nodes
    expected = [float(t) for t in range(start)] + [float(start + node) for node in path]
    with slots(past, 64):
        fill(past, 5, num_tokens)
        keep(past, [start], [path])
        assert past.get_seq_length() == len(expected)
    assert [type(layer) for layer in past.layers] == found, "the cache is not as it was handed in"
    for i, layer in enumerate(past.layers):
        held = layer.keys.shape[-2]
        assert layer.get_seq_length() == len(expected), f"layer {i}"
        assert held >= min(len(expected), 7), f"layer {i} lost what its window sees"
        assert layer.keys[0, 0, :, 0].tolist() == expected[-held:]
        assert (-layer.values[0, 1, :, 4]).tolist() == expected[-held:]


PATHS = [  # in sequences whose nodes begin at different slots
    ([7, 5], [[0, 2, 3, 5], [0]]),
    ([5, 7], [[0, 1], [0, 5]]),
    ([7, 7], [[0, 1, 2, 3], [0, 3, 4]]),
    ([4, 6], [[], [0, 2]]),
]


@pytest.mark.parametrize(("starts", "paths"), PATHS, ids=str)
def test_keep_paths_of_two_sequences(make_target, starts, paths):
    """Within the cache's slots: a sequence's tokens are those before its start and its path; what comes after is the
    mask's to hide."""
    past = DynamicCache(config=make_target("llama").config)
    with slots(past, 64):
        fill(past, 5, 13, num_sequences=2)
        keep(past, starts, paths)
        for layer in past.layers:
            assert layer.get_seq_length() == max(start + len(path) for start, path in zip(starts, paths, strict=True))
            for b, (start, path) in enumerate(zip(starts, paths, strict=True)):
                expected = [float(t) for t in range(start)] + [float(start + node) for node in path]
                assert layer.keys[b, 0, : len(expected), 0].tolist() == expected
                assert (-layer.values[b, 1, : len(expected), 4]).tolist() == expected


@torch.no_grad()
def test_keep_paths_of_a_latent_cache():
    """DeepSeek's keys and values differ in width."""
    target = build_other("deepseek")
    past = target(torch.arange(10)[None], use_cache=True).past_key_values
    before = [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    with slots(past, 64):
        keep(past, [4], [[0, 2, 3]])
    for layer, (keys, values) in zip(past.layers, before, strict=True):
        kept = [0, 1, 2, 3, 4, 6, 7]
        assert keys.shape[-1] != values.shape[-1]
        assert_close("keys", layer.keys, keys[..., kept, :])
        assert_close("values", layer.values, values[..., kept, :])
