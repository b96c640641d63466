"""Attention functions registered with transformers that replace a target's own during rounds, and otherwise call it:
`kernels.tree_attention` where a mask of spans is passed (caches in an arena, on a GPU), and attention that
gives each position what it gives it alone, where a round asks for it (on a CPU, in 16 bits).

B sequences, T query tokens, H heads, D width.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels.tree_attention import is_spans, tree_attention
from .rows_attention import attend_by_position, takes_positions
from .users import Users

PREFIX = "eagle31_"
STANDS_IN_FOR = ("eager", "sdpa")  # implementations whose models hand a mask of four dimensions to attention as it is


def own_attention(model: PreTrainedModel) -> str:
    """The attention implementation of a model, as its user has set it."""
    config = model.config.get_text_config(decoder=True)
    return str(config._attn_implementation).removeprefix(PREFIX)


def _attention(implementation: str):
    """The attention function that stands in for an implementation: with any other mask it is that implementation, so
    a forward of another thread meanwhile is what it always was."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if takes_positions(query, key, value, kwargs):
            return attend_by_position(query, key, value, kwargs.get("scaling")), None
        if not is_spans(attention_mask):
            original = _original(implementation, module)
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        softcap = kwargs.get("softcap") or 0.0
        return tree_attention(query, key, value, attention_mask, scale, softcap, kwargs.get("s_aux")), None

    return attention


def _original(implementation: str, module: nn.Module) -> Any:
    if implementation == "eager":  # which every file of models has its own of
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[implementation]


for name in STANDS_IN_FOR:
    AttentionInterface.register(PREFIX + name, _attention(name))
    AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])


_users = Users()  # of configs


@contextmanager
def attention_of_rounds(target: PreTrainedModel) -> Iterator[None]:
    """A context in which the target's attention takes masks of spans, and gives each position what it gives it alone
    where a round asks for it; else it is the target's own. Contexts of several threads may overlap: the last one to end
    puts the target's own back."""
    config = target.config.get_text_config(decoder=True)
    with _users.lock:
        if config not in _users:
            own = config._attn_implementation_internal.removeprefix(PREFIX)  # a copy made meanwhile has it already
            config._attn_implementation_internal = PREFIX + own
        _users.enter(config)
    try:
        yield
    finally:
        with _users.lock:
            if _users.leave(config):
                config._attn_implementation_internal = config._attn_implementation_internal.removeprefix(PREFIX)
