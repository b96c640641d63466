"""First weights of a drafter from its target, in seconds: a part of `search_recipe.py`.

N positions, n captured states, h width.
"""

from collections.abc import Callable

import torch
from search_material import Material
from torch import Tensor

from eagle31_hf import Eagle31DrafterModel

NUM_TEXTS = 48  # that the least squares are of
RIDGE = 1e-3  # of the mean of the inputs' squares


def solved(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Returns the matrix W (h, m) that brings inputs (N, m) nearest to outputs (N, h) in least squares."""
    inputs, outputs = inputs.double(), outputs.double()
    gram = inputs.T @ inputs
    ridge = RIDGE * gram.diagonal().mean()
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), inputs.T @ outputs).T.float()


def from_noise(drafter: Eagle31DrafterModel, material: Material, kind: str) -> None:
    """Leaves the weights as they were drawn."""


@torch.no_grad()
def fitted(drafter: Eagle31DrafterModel, material: Material, kind: str) -> None:
    """Fits `fc` to bring the captured states to the target's last state, one position later. The drafter's last norm
    begins as large as those states are, and the layer as nothing but its residual."""
    texts = material.training_texts(kind, drafter.config.aux_hidden_state_layer_ids)
    states, last = texts.states[:NUM_TEXTS].float(), texts.last_states[:NUM_TEXTS].float()
    inputs = normed(drafter, states[:, :-1]).flatten(0, 1)
    drafter.fc.weight.copy_(solved(inputs, last[:, 1:].flatten(0, 1)))
    drafter.norm.weight.copy_(root_mean_square(last.flatten(0, 1)))
    drafter.fc.weight.div_(drafter.norm.weight[:, None])
    for weight in (drafter.layers[0].self_attn.o_proj.weight, drafter.layers[0].mlp.down_proj.weight):
        weight.zero_()


@torch.no_grad()
def same_position(drafter: Eagle31DrafterModel, material: Material, kind: str) -> None:
    """Fits `fc` as `fitted` does, but to the state of the same position, and keeps the layer's noise."""
    texts = material.training_texts(kind, drafter.config.aux_hidden_state_layer_ids)
    states, last = texts.states[:NUM_TEXTS].float(), texts.last_states[:NUM_TEXTS].float()
    drafter.norm.weight.copy_(root_mean_square(last.flatten(0, 1)))
    outputs = last.flatten(0, 1) / drafter.norm.weight
    drafter.fc.weight.copy_(solved(normed(drafter, states).flatten(0, 1), outputs))


@torch.no_grad()
def last_norm(drafter: Eagle31DrafterModel, material: Material, kind: str) -> None:
    """Begins the last norm as large as the target's last states are, and the rest with noise."""
    texts = material.training_texts(kind, drafter.config.aux_hidden_state_layer_ids)
    drafter.norm.weight.copy_(root_mean_square(texts.last_states[:NUM_TEXTS].float().flatten(0, 1)))


def normed(drafter: Eagle31DrafterModel, states: Tensor) -> Tensor:
    """Returns captured states (..., n*h) as `fc` reads them."""
    if drafter.fc_norm is None:
        return states
    parts = states.split(drafter.config.target_hidden_size, dim=-1)
    return torch.cat([norm(part) for norm, part in zip(drafter.fc_norm, parts, strict=True)], dim=-1)


def root_mean_square(states: Tensor) -> Tensor:
    """Returns the root mean square of each entry of states (N, h): (h,)."""
    return states.square().mean(0).sqrt()


START: dict[str, Callable[[Eagle31DrafterModel, Material, str], None]] = {
    "noise": from_noise, "fitted": fitted, "same position": same_position, "last norm": last_norm,
}  # fmt: skip
