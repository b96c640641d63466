"""The loss mask: which chains of the unroll are supervised at each depth, and what their losses are divided by.

B sequences, T tokens, N supervised chains. The chain of position t embeds x[t+1+k] at depth k and predicts x[t+2+k].
"""

import torch
from torch import Tensor

CONVENTIONS = {  # answer mask (B, T), depth k -> loss mask (B, T - 2 - k)
    # Chains that serving begins and the target goes on with: the answer holds all tokens from the first one embedded,
    # which the target itself has chosen, to the one predicted. A chain that began in the prompt is never drafted, nor
    # one that goes on past the end of a turn.
    "serving": lambda answers, depth: answers.unfold(1, depth + 2, 1)[:, 1:].all(-1),
    # the token embedded at this depth is in the answer: speculators, ModelOpt, Automodel
    "embedded": lambda answers, depth: answers[:, 1 + depth : -1],
    # the token before that one is: SpecForge, TorchSpec
    "unshifted": lambda answers, depth: answers[:, depth:-2],
}


def loss_mask(answers: Tensor, depth: int, convention: str = "serving", documents: Tensor | None = None) -> Tensor:
    """Returns whether the chain of each position is supervised at this depth: (B, T - 2 - depth) bool.

    `answers` (B, T): which tokens belong to answers. No chain predicts a token past the end of its sequence or, with
    `documents` (B, T), of its text.
    """
    if answers.shape[1] < depth + 2:
        return answers[:, :0].bool()
    mask = CONVENTIONS[convention](answers.bool(), depth)
    if documents is not None:
        mask = mask & (documents[:, : mask.shape[1]] == documents[:, 2 + depth :])
    return mask


def supervised_positions(
    answers: Tensor, depth: int, convention: str, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the sequence and the position, both (N,), of every chain that is supervised at this depth."""
    sequence, position = loss_mask(answers, depth, convention, documents).nonzero(as_tuple=True)
    return sequence, position


def by_token(sequence: Tensor, position: Tensor, documents: Tensor) -> tuple[Tensor, int]:
    """Weighs all chains alike; the denominator is their number."""
    return torch.ones(len(sequence), device=sequence.device), len(sequence)


def by_sequence(sequence: Tensor, position: Tensor, documents: Tensor) -> tuple[Tensor, int]:
    """Weighs all texts alike, so that long answers do not drown short ones; the denominator is the number of texts with
    a supervised chain."""
    _, text, counts = (sequence * (documents.max() + 1) + documents[sequence, position]).unique(
        return_inverse=True, return_counts=True
    )
    return 1 / counts[text].float(), len(counts)


# supervised chains by sequence (N,) and position (N,), documents (B, T) -> weights (N,) and their sum, the denominator
NORMALISATIONS = {"token": by_token, "sequence": by_sequence}


def loss_denominators(answers: Tensor, documents: Tensor, depth: int, convention: str, normalisation: str) -> Tensor:
    """Returns what a batch adds to the denominator of each of `depth` depths: (depth,) int64.

    The sums of losses are divided by the denominators of all batches that make one optimizer step.
    """
    weigh = NORMALISATIONS[normalisation]
    counts = [weigh(*supervised_positions(answers, k, convention, documents), documents)[1] for k in range(depth)]
    return torch.tensor(counts)
