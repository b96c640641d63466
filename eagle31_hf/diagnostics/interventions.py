"""Interventions: what is done to a drafter while it serves, to learn what it depends on.

An intervention puts hooks on the drafter or changes how it attends, on weights that stay as they are. Source: Attention
Drift (arXiv 2605.09992), whose noise and pinned magnitudes these are. B sequences, T tokens, h drafter width.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..modeling import Eagle31DrafterModel
from .attention_mass import state_norm

Install = Callable[[Eagle31DrafterModel], list[Any]]  # puts hooks on a drafter, and returns their handles
NOISE = (0.1, 0.5, 1.0)
STATE, EMBEDDING = 0, 1  # what layer 0 reads, by the position of the argument


def noisy(part: int, scale: float) -> Install:
    """Adds Gaussian noise to what layer 0 reads at every depth and in the prompt, STATE or EMBEDDING, `scale` times its
    root mean square."""

    def install(drafter: Eagle31DrafterModel) -> list[Any]:
        generator = torch.Generator().manual_seed(0)

        def add(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*args[:part], with_noise(args[part], scale, generator), *args[part + 1 :])

        return [drafter.layers[0].register_forward_pre_hook(add)]

    return install


def pinned(drafter: Eagle31DrafterModel) -> list[Any]:
    """Scales every state fed back to the norm of the fused state where its chain began. One text at a time."""
    norm = dict[str, Tensor]()

    def note(module: nn.Module, args: Any, fused: Tensor) -> None:
        norm["fused"] = state_norm(fused[:, -1:])[..., None]

    def pin(state: Tensor) -> Tensor:
        return (state * (norm["fused"] / state_norm(state)[..., None])).to(state.dtype)

    hook = fed_back(pin)
    return [drafter.fc.register_forward_hook(note), drafter.register_forward_pre_hook(hook, with_kwargs=True)]


def with_noise(x: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Returns states (..., h) with Gaussian noise, `scale` times the root mean square of each."""
    noise = torch.randn(x.shape, generator=generator).to(x.device)  # drawn on the CPU: the same on every device
    return (x + scale * state_norm(x)[..., None] * noise).to(x.dtype)


def fed_back(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Returns a hook that changes the states that a drafter is fed of its own, but not those of the target."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        state = kwargs.get("hidden_states")
        return args, kwargs if state is None else kwargs | {"hidden_states": change(state)}

    return hook


# The interventions that fit every drafter, by their names.
INTERVENTIONS: dict[str, Install] = {
    **{f"noise {scale:g} on the state": noisy(STATE, scale) for scale in NOISE},
    **{f"noise {scale:g} on the embedding": noisy(EMBEDDING, scale) for scale in NOISE},
    "state pinned to the norm of the fused one": pinned,
}


@contextmanager
def applied(drafter: Eagle31DrafterModel, install: Install | None) -> Iterator[None]:
    """Does something to the drafter, or nothing, for the time of the block."""
    with ExitStack() as stack:
        for handle in [] if install is None else install(drafter):
            stack.enter_context(handle)
        yield
