"""Interventions: what is done to a drafter while it serves, to learn what it depends on.

An intervention puts hooks on the drafter or changes how it attends, on weights that stay as they are. Source: Attention
Drift (arXiv 2605.09992), whose noise and pinned magnitudes these are. B sequences, T tokens, h drafter width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..modeling import Eagle31DrafterModel
from .attention_mass import state_norm

Install = Callable[[Eagle31DrafterModel], list[Any]]  # puts hooks on a drafter, and returns their handles
NOISE = (0.1, 0.5, 1.0)
STATE, EMBEDDING = 0, 1  # what layer 0 reads, by the position of the argument


def untouched(drafter: Eagle31DrafterModel) -> list[Any]:
    """Does nothing."""
    return []


def noisy(part: int, scale: float) -> Install:
    """Adds Gaussian noise to what layer 0 reads at every depth and in the prompt, STATE or EMBEDDING, `scale` times its
    root mean square."""

    def install(drafter: Eagle31DrafterModel) -> list[Any]:
        generator = torch.Generator().manual_seed(0)

        def add(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*args[:part], _with_noise(args[part], scale, generator), *args[part + 1 :])

        return [drafter.layers[0].register_forward_pre_hook(add)]

    return install


def noisy_feedback(scale: float) -> Install:
    """Adds the same noise to nothing but the state fed back: the first drafted token never meets it."""

    def install(drafter: Eagle31DrafterModel) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        hook = _fed_back(lambda state: _with_noise(state, scale, generator))
        return [drafter.register_forward_pre_hook(hook, with_kwargs=True)]

    return install


def pinned(drafter: Eagle31DrafterModel) -> list[Any]:
    """Scales every state fed back to the norm of the fused state where its chain began. One text at a time."""
    norm = dict[str, Tensor]()

    def note(module: nn.Module, args: Any, fused: Tensor) -> None:
        norm["fused"] = state_norm(fused[:, -1:])[..., None]

    def pin(state: Tensor) -> Tensor:
        return (state * (norm["fused"] / state_norm(state)[..., None])).to(state.dtype)

    hook = _fed_back(pin)
    return [drafter.fc.register_forward_hook(note), drafter.register_forward_pre_hook(hook, with_kwargs=True)]


def _with_noise(x: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=generator).to(x.device)  # drawn on the CPU: the same on every device
    return (x + scale * state_norm(x)[..., None] * noise).to(x.dtype)


def _fed_back(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Returns a hook that changes the states that a drafter is fed of its own, but not those of the target."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        state = kwargs.get("hidden_states")
        return args, kwargs if state is None else kwargs | {"hidden_states": change(state)}

    return hook


def window_fields(window: int, num_layers: int) -> dict[str, Any]:
    """Returns the fields of an Eagle31Config whose drafter attends to its last `window` keys only."""
    return {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": window}


def rope_fields(rope: dict[str, Any], factor: float) -> dict[str, Any]:
    """Returns the fields of an Eagle31Config whose rope turns `factor` times as slowly: positions lie that much closer
    together (position interpolation, arXiv 2306.15595). `rope`: its `rope_parameters`, of rope type "default"."""
    return {"rope_parameters": {**rope, "rope_type": "linear", "factor": factor}}


# The interventions that fit every drafter, by their names.
INTERVENTIONS: dict[str, Install] = {
    **{f"noise {scale:g} on the state": noisy(STATE, scale) for scale in NOISE},
    **{f"noise {scale:g} on the embedding": noisy(EMBEDDING, scale) for scale in NOISE},
    "state pinned to the norm of the fused one": pinned,
}


@contextmanager
def applied(drafter: Eagle31DrafterModel, install: Install) -> Iterator[None]:
    """Does something to the drafter for the time of the block."""
    handles = install(drafter)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
