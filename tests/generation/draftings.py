"""Ways to draft, caches to draft with, and a clock by which auto does the same on every machine."""

from contextlib import contextmanager
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
from transformers import DynamicCache, StaticCache

from eagle31_hf import clock
from eagle31_hf.generation.planning import exploration, knowledge

DRAFTINGS = {
    "chain": {"num_assistant_tokens": 4},
    "tree": {"num_assistant_tokens": 4, "draft_tree_top_k": 3, "draft_tree_total_tokens": 12},
    "auto": {"num_assistant_tokens": "auto"},
}
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "without_config": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=80),
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
