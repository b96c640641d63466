"""Ways to draft, processors to ask for, caches to draft with, and a clock by which auto does the same on every
machine."""

from contextlib import contextmanager
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
from conftest import VOCAB
from transformers import DynamicCache, StaticCache

from eagle31_hf import clock
from eagle31_hf.generation.planning import exploration, knowledge


def tree_of(top_k: int, total: int, depth: int) -> dict[str, int]:
    """The knobs of trees with so many children a node, nodes and levels."""
    return {"num_assistant_tokens": depth, "draft_tree_top_k": top_k, "draft_tree_total_tokens": total}


CHAIN = {"num_assistant_tokens": 4}
TREE = tree_of(3, 12, 4)
DRAFTINGS = {"chain": CHAIN, "tree": TREE, "auto": {"num_assistant_tokens": "auto"}}
CHAIN_OR_TREE = {"chain": CHAIN, "tree": TREE}
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "without_config": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=80),
}
# Processors that see each sequence of a batch by itself,
PER_SEQUENCE = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[10], [2, 7], [8, 8]]},
    "min_new_tokens": {"eos_token_id": 10, "min_new_tokens": 9},
    "min_length": {"eos_token_id": 10, "min_length": 16},
    "sequence_bias": {"sequence_bias": [[[2], -1.5], [[7, 10], 4.0]]},
    "suppress": {"suppress_tokens": [2], "begin_suppress_tokens": [7]},
    "forced_eos": {"forced_eos_token_id": 4, "eos_token_id": 4},
    "exponential_decay_to_eos": {"eos_token_id": 3, "exponential_decay_length_penalty": (4, 1.3)},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[7]],
        "eos_token_id": 4,
        "min_new_tokens": 12,
        "renormalize_logits": True,
    },
}
# and those that see the whole batch.
TOGETHER = {
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "classifier_free_guidance": {"guidance_scale": 1.7},  # runs the target itself, and keeps a cache of its own
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: [int(ids[-1] + len(ids)) % VOCAB, 2, 8]},
}


@contextmanager
def steady_clock(target, drafter):
    """A context in which time goes on with forwards only, the target's thirty times as dear, nothing is known of
    earlier calls, and no exploration is given up early: auto then drafts, trees too, and the same on every machine."""
    seconds = [0.0]

    def passing(duration: float):
        return lambda *_: seconds.__setitem__(0, seconds[0] + duration)

    handles = [target.register_forward_hook(passing(0.3)), drafter.register_forward_hook(passing(0.01))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
        patch.setattr(knowledge, "_known", WeakKeyDictionary())
        patch.setattr(exploration, "HOPELESS", 0.0)
        patch.setattr(exploration, "ALLOWED_LOSS", float("inf"))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
