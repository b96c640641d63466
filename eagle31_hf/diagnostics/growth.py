"""The size of a state, and how it grows with depth. h width of a state."""

from torch import Tensor


def state_norm(states: Tensor) -> Tensor:
    """Returns the root mean squares (...) of states (..., h), in fp32."""
    return states.float().square().mean(-1).sqrt()


def log_growth(norms: Tensor, first: Tensor) -> Tensor:
    """Returns the logarithm of the factor by which norms have grown since the first depth; both of one shape."""
    return norms.clamp(min=1e-12).log() - first.clamp(min=1e-12).log()
