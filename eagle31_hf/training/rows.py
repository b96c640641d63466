"""Which rows are supervised. B texts, T tokens; slot t at depth k embeds x[t+1+k] and predicts x[t+2+k]."""

import torch
from torch import Tensor

CONVENTIONS = {  # answer mask (B, T) -> (B, T - 2 - k): is slot t supervised at depth k
    # Chains that serving begins and the target goes on with: the answer holds all from the first token embedded, which
    # the target itself has chosen, to the one predicted. A chain that began in the prompt is never drafted, nor one
    # that goes on past the end of a turn.
    "serving": lambda mask, depth: mask.unfold(1, depth + 2, 1)[:, 1:].all(-1),
    # the token embedded at this depth: speculators, ModelOpt, Automodel
    "embedded": lambda mask, depth: mask[:, 1 + depth : -1],
    "unshifted": lambda mask, depth: mask[:, depth:-2],  # the token before it: SpecForge, TorchSpec
}


def runs(numbers: Tensor) -> list[tuple[int, int, int, int]]:
    """(B, T) -> row, number, start and end of every run of equal numbers, in order."""
    found = []
    for row, line in enumerate(numbers.cpu()):
        values, counts = line.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0)
        found += [(row, *one) for one in zip(values.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)]
    return found


def supervised(mask: Tensor, depth: int, convention: str = "serving", documents: Tensor | None = None) -> Tensor:
    """Answer mask (B, T) and `documents` (B, T), numbering packed texts, -> (B, T - 2 - depth): whether a slot's row
    counts at this depth.

    No row predicts a token past the end of the text, or of its document.
    """
    if mask.shape[1] < depth + 2:
        return mask[:, :0].bool()
    kept = CONVENTIONS[convention](mask.bool(), depth)
    if documents is not None:
        kept = kept & (documents[:, : kept.shape[1]] == documents[:, 2 + depth :])
    return kept


def places(mask: Tensor, depth: int, convention: str, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Row and slot of everything supervised at this depth, both (N,)."""
    row, slot = supervised(mask, depth, convention, documents).nonzero(as_tuple=True)
    return row, slot


def by_token(row: Tensor, slot: Tensor, documents: Tensor) -> tuple[Tensor, int]:
    """All rows weigh alike; there are as many shares as rows."""
    return torch.ones(len(row), device=row.device), len(row)


def by_sequence(row: Tensor, slot: Tensor, documents: Tensor) -> tuple[Tensor, int]:
    """Every text with a supervised row has one share, which its rows split: long answers do not drown short ones."""
    _, text, counts = (row * (documents.max() + 1) + documents[row, slot]).unique(
        return_inverse=True, return_counts=True
    )
    return 1 / counts[text].float(), len(counts)


# How a depth's rows are averaged: rows (N,), slots (N,), documents (B, T) -> weights (N,) and the shares they add up
# to.
NORMALISATIONS = {"token": by_token, "sequence": by_sequence}


def total_shares(mask: Tensor, documents: Tensor, depth: int, convention: str, normalisation: str) -> Tensor:
    """How many shares a batch (B, T) has at each of `depth` depths (depth,): what its sums are divided by, added up
    over all batches that make one optimizer step."""
    shares = [
        NORMALISATIONS[normalisation](*places(mask, k, convention, documents), documents)[1] for k in range(depth)
    ]
    return torch.tensor(shares)
