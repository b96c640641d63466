"""Attention drift: states that grow and attention that turns to the drafter's own keys, the deeper a chain is.

K depths, h width of a state. Source: Attention Drift (arXiv 2605.09992).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..modeling import Eagle31DrafterModel
from .attention_mass import attention_entropy, mass_of_chain


def state_norm(states: Tensor) -> Tensor:
    """Returns the root mean squares (...) of states (..., h), in fp32."""
    return states.float().square().mean(-1).sqrt()


def log_growth(norms: Tensor, first: Tensor) -> Tensor:
    """Returns the logarithm of the factor by which norms have grown since the first depth; both of one shape."""
    return norms.clamp(min=1e-12).log() - first.clamp(min=1e-12).log()


@dataclass
class Chain:
    """One drafted chain. `inputs`: norms of each aux hidden state, and of the fused state they become, at the position
    where the chain begins. By depth: `states`, the norm of the state that is scored and fed to the next step;
    `masses`, the attention masses in the order of `attention_mass.KINDS`, and `entropies` in nats, of layer 0."""

    inputs: list[float]
    states: list[float] = field(default_factory=list)
    masses: list[list[float]] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Drift:
    """Means over `num_chains` chains of K tokens: `inputs` as in `Chain`, norms `states` (K,), `masses` (K, 4) and
    `entropies` (K,)."""

    num_chains: int
    inputs: list[float]
    states: list[float]
    masses: list[list[float]]
    entropies: list[float]


class ChainRecorder:
    """Records the chains that a drafter drafts while it serves one text at a time; see `recorded_chains`."""

    def __init__(self) -> None:
        self.chains = list[Chain]()

    def begin(self, drafter: Eagle31DrafterModel, args: Any, kwargs: dict[str, Any]) -> None:
        """Begins a chain where the drafter reads states of the target. A forward pre-hook of the drafter."""
        states = kwargs.get("target_hidden_states")
        if states is not None:
            last = states[:, -1:]
            parts = (*last.split(drafter.config.target_hidden_size, dim=-1), drafter.fuse_target_states(last))
            self.chains.append(Chain([float(state_norm(part)) for part in parts]))

    def attend(self, module: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        """Adds the attention of the newest token. A forward hook of layer 0's attention."""
        chain, weights = self.chains[-1], output[1][:, :, -1:].float()
        chain.masses.append(mass_of_chain(weights, len(chain.states))[0, 0].tolist())
        chain.entropies.append(float(attention_entropy(weights)))

    def end(self, drafter: Eagle31DrafterModel, args: Any, output: Any) -> None:
        """Adds the norm of the newest state. A forward hook of the drafter."""
        self.chains[-1].states.append(float(state_norm(output.last_hidden_state[:, -1])))

    def drift(self, depth: int) -> Drift:
        """Returns the means over the chains of `depth` tokens. Raises ValueError where there was none."""
        chains = [chain for chain in self.chains if len(chain.states) == depth]
        if not chains:
            raise ValueError(f"none of {len(self.chains)} chains is {depth} tokens deep; expected some.")

        def mean(name: str) -> list:
            return torch.tensor([getattr(chain, name) for chain in chains]).mean(0).tolist()

        return Drift(len(chains), mean("inputs"), mean("states"), mean("masses"), mean("entropies"))


@contextmanager
def recorded_chains(drafter: Eagle31DrafterModel) -> Iterator[ChainRecorder]:
    """Records the chains the drafter drafts in the block, one text at a time, without trees.

    Only the "eager" attention says what it attends to, so the drafter uses it in the block, in every thread.
    """
    recorder, implementation = ChainRecorder(), drafter.config._attn_implementation
    drafter.set_attn_implementation("eager")
    handles = (
        drafter.register_forward_pre_hook(recorder.begin, with_kwargs=True),
        drafter.layers[0].self_attn.register_forward_hook(recorder.attend),
        drafter.register_forward_hook(recorder.end),
    )
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()
        drafter.set_attn_implementation(implementation)
