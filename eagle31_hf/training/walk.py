"""Accepted length by walking a text as serving would: draft, count hits, go on after the bonus token. No target forward
is needed.

Exact for greedy decoding where the text is the target's own greedy text. L tokens of an answer, K depths.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .rows import runs


@dataclass
class Walk:
    """Counts of drafting rounds: `tokens` they brought, bonus tokens included, the one the prompt's forward gives
    excluded."""

    rounds: int = 0
    tokens: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    expected_rounds: float = 0.0  # of drafts drawn at random, kept as rejection sampling keeps them

    def add(self, other: "Walk") -> None:
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.accepted += other.accepted
        self.expected_rounds += other.expected_rounds
        size = max(len(self.accepted_per_position), len(other.accepted_per_position))
        both = ([*walk.accepted_per_position, *[0] * size][:size] for walk in (self, other))
        self.accepted_per_position = [a + b for a, b in zip(*both, strict=True)]

    def metrics(self) -> dict[str, float]:
        """`accepted_length`: tokens a target forward, bonus included, as `stats.mean_accepted_length` has it;
        `_no_bonus`: drafts of it; `_sampled`: with the bonus, expected of drafts that are sampled.
        `walked_acceptance_1` on: the share of rounds that accept each position."""
        if not self.rounds:
            return {}
        return {
            "accepted_length": self.tokens / self.rounds,
            "accepted_length_no_bonus": self.accepted / self.rounds,
            "accepted_length_sampled": self.tokens / self.expected_rounds,
            **{f"walked_acceptance_{k}": count / self.rounds for k, count in enumerate(self.accepted_per_position, 1)},
        }


def walk(hits: Tensor, chances: Tensor, stops: bool = True) -> Walk:
    """One answer: `hits` (K, L - 1) bool, whether the draft of depth k from a chain that begins at token i is token i +
    1 + k; `chances` (K, L - 1), that rejection sampling keeps it. `stops`: the last token ends the text, rather than
    its length.

    The answer's first token comes from the prompt's forward; entries past the end are not looked at.
    """
    depth, left = hits.shape[0], hits.shape[1]
    leading = hits.int().cumprod(dim=0).sum(dim=0).tolist()  # hits before the first miss
    found, at = Walk(accepted_per_position=[0] * depth), 0
    while at < left:
        remaining = left - at
        # A limit of length leaves room for the bonus token; an end of the text may itself be a draft.
        accepted = min(leading[at], remaining if stops else remaining - 1)
        tokens = min(accepted + 1, remaining)
        found.rounds += 1
        found.tokens += tokens
        found.accepted += accepted
        for position in range(accepted):
            found.accepted_per_position[position] += 1
        at += tokens
    found.expected_rounds = expected_rounds(chances)
    return found


def expected_rounds(chances: Tensor) -> float:
    """Mean number of rounds if the draft of depth k from token i is kept with chance `chances[k, i]` (K, L - 1): from
    the end backwards."""
    depth, left = chances.shape
    kept = chances.double().cpu().cumprod(dim=0).T.tolist()  # chance that the first k + 1 drafts are all kept
    rounds = [0.0] * (left + 1)
    for at in range(left - 1, -1, -1):
        reach = [1.0, *kept[at][: min(depth, left - at)]]
        expected = sum(
            (here - further) * rounds[min(left, at + n + 1)]
            for n, (here, further) in enumerate(zip(reach, [*reach[1:], 0.0], strict=True))
        )
        rounds[at] = 1.0 + expected
    return rounds[0]


def answers_of(answers: Tensor, documents: Tensor) -> Iterator[tuple[int, int, int]]:
    """Answer mask and document numbers (B, T) -> row, start and end of every answer that drafting begins in, as `walk`
    takes it.

    A text without a prompt begins with a token that no drafter has a state before: there the second one counts as the
    first.
    """
    for row, number, start, end in runs(torch.where(answers.bool(), documents, 0)):
        has_prompt = start > 0 and int(documents[row, start - 1]) == number
        if number > 0 and end - start > 1 + (not has_prompt):
            yield row, start + (not has_prompt), end
