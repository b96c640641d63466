"""A layer with keys in slots, and states beside them."""

from typing import Any

from torch import Tensor

from .layer import Placement, SlotLayer
from .states import STATE_LAYER

STATES: Any = STATE_LAYER or object


class HybridSlotLayer(SlotLayer, STATES):
    """The keys are in slots; the states stay with the stock layer that it stands in for, whose attributes it shows."""

    def __init__(self, stock: Any, placement: Placement, limit: int):
        self.stock = stock
        SlotLayer.__init__(self, placement, limit)

    def __getattr__(self, name: str) -> Any:  # asked for what it has not itself: the states and what is said of them
        if name == "stock":
            raise AttributeError(name)
        return getattr(self.stock, name)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.stock.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.stock.update_recurrent_state(*args, **kwargs)
