"""First weights of a drafter from its target, in seconds: a part of `search_recipe.py`.

N positions, n captured states, h width.
"""

from collections.abc import Callable

import torch
from search_material import Material
from torch import Tensor

from eagle31_hf import Eagle31DrafterModel

FIT_TEXTS = 48  # that the least squares are of
RIDGE = 1e-3  # of the mean of the inputs' squares


def solved(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Returns the matrix W (h, m) that brings inputs (N, m) nearest to outputs (N, h) in least squares."""
    inputs, outputs = inputs.double(), outputs.double()
    gram = inputs.T @ inputs
    ridge = RIDGE * gram.diagonal().mean()
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype), inputs.T @ outputs).T.float()


def from_noise(drafter: Eagle31DrafterModel, material: Material, kind: str) -> None:
    """Leaves the weights as they were drawn."""


def fit_fc(drafter: Eagle31DrafterModel, material: Material, kind: str, ahead: int) -> None:
    """Fits `fc` to bring the captured states to the target's last state `ahead` positions later, by the drafter's last
    norm, which begins as large as those states are."""
    texts = material.training_texts(kind, drafter.config.aux_hidden_state_layer_ids)
    states, last = texts.states[:FIT_TEXTS].float(), texts.last_states[:FIT_TEXTS].float()
    drafter.norm.weight.copy_(root_mean_square(last.flatten(0, 1)))
    inputs = normed(drafter, states[:, : states.shape[1] - ahead]).flatten(0, 1)
    drafter.fc.weight.copy_(solved(inputs, (last[:, ahead:] / drafter.norm.weight).flatten(0, 1)))


@torch.no_grad()
def fitted(drafter: Eagle31DrafterModel, material: Material, kind: str) -> None:
    """Fits `fc` to the next position; the layer begins as nothing but its residual."""
    fit_fc(drafter, material, kind, ahead=1)
    for weight in (drafter.layers[0].self_attn.o_proj.weight, drafter.layers[0].mlp.down_proj.weight):
        weight.zero_()


@torch.no_grad()
def same_position(drafter: Eagle31DrafterModel, material: Material, kind: str) -> None:
    """Fits `fc` to the same position, and keeps the layer's noise."""
    fit_fc(drafter, material, kind, ahead=0)


@torch.no_grad()
def last_norm(drafter: Eagle31DrafterModel, material: Material, kind: str) -> None:
    """Begins the last norm as large as the target's last states are, and the rest with noise."""
    texts = material.training_texts(kind, drafter.config.aux_hidden_state_layer_ids)
    drafter.norm.weight.copy_(root_mean_square(texts.last_states[:FIT_TEXTS].float().flatten(0, 1)))


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
