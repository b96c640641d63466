"""The size of a state. h its width."""

from torch import Tensor


def state_norm(states: Tensor) -> Tensor:
    """Returns the root mean squares (...) of states (..., h), in fp32."""
    return states.float().square().mean(-1).sqrt()
