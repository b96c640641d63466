"""Accepted length without generating: an answer is walked as serving would, draft, count hits, go on after the bonus
token.

Exact for greedy decoding where the text is the target's own greedy text. L tokens of an answer, K depths.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .documents import Text, runs


@dataclass
class Walk:
    """Counts of drafting rounds. `tokens` they brought, bonus tokens included, without the answer's first, which the
    prompt's forward gives; `accepted` of them were drafted. `expected_rounds`: the mean number of rounds if drafts are
    drawn at random and kept as rejection sampling keeps them."""

    rounds: int = 0
    tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    expected_rounds: float = 0.0

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    def add(self, other: "Walk") -> None:
        """Adds the counts of another walk."""
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.expected_rounds += other.expected_rounds
        size = max(len(self.accepted_per_position), len(other.accepted_per_position))
        both = ([*walk.accepted_per_position, *[0] * size][:size] for walk in (self, other))
        self.accepted_per_position = [a + b for a, b in zip(*both, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Returns the figures of an evaluation, none before the first round.

        `accepted_length`: tokens a target forward, the bonus token included, as `stats.mean_accepted_length` has it;
        `_no_bonus`: without it; `_sampled`: with it, expected of sampled drafts. `walked_acceptance_1` on: the share of
        rounds that accept each position.
        """
        if not self.rounds:
            return {}
        return {
            "accepted_length": self.tokens / self.rounds,
            "accepted_length_no_bonus": self.accepted / self.rounds,
            "accepted_length_sampled": self.tokens / self.expected_rounds,
            **{f"walked_acceptance_{k}": count / self.rounds for k, count in enumerate(self.accepted_per_position, 1)},
        }


def walk(hits: Tensor, acceptance: Tensor, stops: bool = True) -> Walk:
    """Walks one answer.

    `hits` (K, L - 1) bool: the draft of depth k in a chain that begins at token i is token i + 1 + k. `acceptance` (K,
    L - 1): the probability that rejection sampling keeps it. `stops`: the last token ends the text, rather than a limit
    of length. Entries past the end of the answer are not looked at.
    """
    depth, left = hits.shape[0], hits.shape[1]
    leading = hits.int().cumprod(dim=0).sum(dim=0).tolist()  # hits before the first miss
    counts, at = Walk(accepted_per_position=[0] * depth), 0
    while at < left:
        remaining = left - at
        # A limit of length leaves room for the bonus token; an end of the text may itself be a draft.
        accepted = min(leading[at], remaining if stops else remaining - 1)
        tokens = min(accepted + 1, remaining)
        counts.rounds += 1
        counts.tokens += tokens
        for position in range(accepted):
            counts.accepted_per_position[position] += 1
        at += tokens
    counts.expected_rounds = expected_rounds(acceptance)
    return counts


def expected_rounds(acceptance: Tensor) -> float:
    """Returns the mean number of rounds if the draft of depth k from token i is kept with probability `acceptance[k,
    i]` (K, L - 1). Computed from the end backwards."""
    depth, left = acceptance.shape
    kept = acceptance.double().cpu().cumprod(dim=0).T.tolist()  # probability that the first k + 1 drafts are all kept
    rounds = [0.0] * (left + 1)
    for at in range(left - 1, -1, -1):
        reach = [1.0, *kept[at][: min(depth, left - at)]]
        expected = sum(
            (here - further) * rounds[min(left, at + n + 1)]
            for n, (here, further) in enumerate(zip(reach, [*reach[1:], 0.0], strict=True))
        )
        rounds[at] = 1.0 + expected
    return rounds[0]


def answers_of(answers: Tensor, documents: Tensor) -> Iterator[Text]:
    """Yields every answer that drafting begins in, as `walk` takes it; answer mask and document numbers are (B, T).

    A text without a prompt begins with a token that no drafter has a state before: there the second token counts as the
    answer's first.
    """
    for sequence, number, start, end in runs(torch.where(answers.bool(), documents, 0)):
        has_prompt = start > 0 and int(documents[sequence, start - 1]) == number
        if number > 0 and end - start > 1 + (not has_prompt):
            yield Text(sequence, start + (not has_prompt), end)
