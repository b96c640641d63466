"""Accepted length without generating: an answer is walked as serving would, draft, count hits, go on after the bonus
token.

Exact for greedy decoding where the text is the target's own greedy text. L tokens of an answer, K depths.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .documents import Text, runs


def walk(hits: Tensor, stops: bool = True) -> Tensor:
    """Walks one answer. Returns counts (2 + K,) in fp64, which add up over answers, see `walk_metrics`: the rounds; the
    tokens they brought, bonus tokens included, without the answer's first, which the prompt's forward gives; and how
    many rounds accepted the draft of each depth.

    `hits` (K, L - 1) bool: the draft of depth k in a chain that begins at token i is token i + 1 + k. `stops`: the last
    token ends the text, rather than a limit of length. Entries past the end of the answer are not looked at.
    """
    depth, left = hits.shape[0], hits.shape[1]
    leading = hits.int().cumprod(dim=0).sum(dim=0).tolist()  # hits before the first miss
    rounds = at = 0
    accepted_per_position = [0] * depth
    while at < left:
        remaining = left - at
        # A limit of length leaves room for the bonus token; an end of the text may itself be a draft.
        accepted = min(leading[at], remaining if stops else remaining - 1)
        rounds += 1
        for position in range(accepted):
            accepted_per_position[position] += 1
        at += min(accepted + 1, remaining)
    return torch.tensor([rounds, at, *accepted_per_position], dtype=torch.float64)


def walk_metrics(counts: Tensor) -> dict[str, float]:
    """Returns the figures of an evaluation from the counts of `walk` (2 + K,), none before the first round.

    `accepted_length`: tokens a target forward, the bonus token included, as `stats.mean_accepted_length` has it;
    `_no_bonus`: without it. `walked_acceptance_1` on: the share of rounds that accept each position.
    """
    rounds, tokens, *accepted = counts.tolist()
    if not rounds:
        return {}
    return {
        "accepted_length": tokens / rounds,
        "accepted_length_no_bonus": sum(accepted) / rounds,
        **{f"walked_acceptance_{k}": count / rounds for k, count in enumerate(accepted, 1)},
    }


def answers_of(answers: Tensor, documents: Tensor) -> Iterator[Text]:
    """Yields every answer that drafting begins in, as `walk` takes it; answer mask and document numbers are (B, T).

    A text without a prompt begins with a token that no drafter has a state before: there the second token counts as the
    answer's first.
    """
    for number, (sequence, start, end) in runs(torch.where(answers.bool(), documents, 0)):
        has_prompt = start > 0 and int(documents[sequence, start - 1]) == number
        if number > 0 and end - start > 1 + (not has_prompt):
            yield Text(sequence, start + (not has_prompt), end)
