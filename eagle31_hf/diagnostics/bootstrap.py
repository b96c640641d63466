"""How far a figure of these prompts may be from that of others like them: bootstrap over prompts (Efron, 1979).

P prompts, D draws.
"""

import torch
from torch import Tensor

DRAWS = 1000
LEVEL = 0.95


def ratio_interval(numerators: Tensor, denominators: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ends (...) of the interval that holds LEVEL of the ratios sum / sum over prompts drawn with
    replacement.

    `numerators` (P, ...) and `denominators` (P,) or (P, ...): counts of each prompt. NaN where there is nothing to
    divide by.
    """
    return interval_of(drawn_ratios(numerators, denominators))


def interval_of(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ends (...) of the interval that holds LEVEL of the draws (D, ...)."""
    tail = (1 - LEVEL) / 2
    return draws.nanquantile(tail, dim=0), draws.nanquantile(1 - tail, dim=0)


def drawn_ratios(numerators: Tensor, denominators: Tensor, seed: int = 0) -> Tensor:
    """Returns the ratio (D, ...) of every draw. Calls of one seed draw the same of as many prompts, so that figures of
    the same prompts can be compared draw by draw; figures of other prompts take another seed."""
    counts = drawn_prompts(len(numerators), seed)
    tops, bottoms = (torch.einsum("dp,p...->d...", counts, part.double()) for part in (numerators, denominators))
    return tops / bottoms.view(*bottoms.shape, *[1] * (tops.dim() - bottoms.dim()))


def drawn_prompts(num_prompts: int, seed: int) -> Tensor:
    """Returns how often each prompt is drawn in each of DRAWS samples as large as the set, (D, P)."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(num_prompts, (DRAWS, num_prompts), generator=generator)
    ones = torch.ones_like(chosen, dtype=torch.double)
    return torch.zeros(DRAWS, num_prompts, dtype=torch.double).scatter_add_(1, chosen, ones)
