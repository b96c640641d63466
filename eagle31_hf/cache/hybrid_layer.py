"""Layers with keys in slots, and states beside them."""

from typing import Any

from torch import Tensor
from transformers import cache_utils

from .layer import Placement, SlotLayer

# transformers takes a layer with states for one without keys, unless it is of this class; older versions have none.
BOTH: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", object)


class StatesBeside(BOTH):
    """The states of a layer whose keys are in slots: they stay with the stock layer that it stands in for, whose
    attributes it shows."""

    stock: Any

    def __getattr__(self, name: str) -> Any:  # asked for what it has not itself: the states and what is said of them
        if name == "stock":
            raise AttributeError(name)
        return getattr(self.stock, name)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.stock.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.stock.update_recurrent_state(*args, **kwargs)


class HybridSlotLayer(SlotLayer, StatesBeside):
    """A slot layer with states beside its keys."""

    def __init__(self, stock: Any, placement: Placement, limit: int, window: int | None = None):
        self.stock = stock
        SlotLayer.__init__(self, placement, limit, window)
