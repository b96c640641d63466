"""Where a burst of new tokens ends a text: token by token, as if they had come one at a time."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from .texts import Texts
from .verify import Verdict


class Stopping:
    """A call's stopping criteria. `eos_token_ids`: the ids that end a row; `max_length`: of every row, padding included."""

    def __init__(self, criteria: StoppingCriteriaList, max_length: int):
        self.criteria = criteria
        self.max_length = min([max_length, *(one.max_length for one in criteria if isinstance(one, MaxLengthCriteria))])
        self.eos_token_ids = {int(i) for one in criteria if isinstance(one, EosTokenCriteria) for i in one.eos_token_id}
        kinds = {type(one) for one in criteria}
        self._usual = kinds <= {MaxLengthCriteria, EosTokenCriteria}
        # A row that has met another criterion goes on as long as any row does, unless there is a token that ends rows.
        self.is_rowwise = self._usual or (kinds <= {MaxLengthCriteria, EosTokenCriteria, StopStringCriteria} and bool(self.eos_token_ids))

    def row_by_row(self, texts: Texts, verdict: Verdict, scores: tuple[Tensor, ...] | None) -> tuple[list[int], list[bool]]:
        """How many of a verdict's tokens come before and with the one that ends each row, and which rows have ended."""
        counts, ended = [], []
        for b, tokens in enumerate(verdict.tokens):
            count, end = len(tokens), True
            if not texts.finished[b]:
                look = self._first_stop if self._usual else self._first_stop_of_any
                count, end = look(texts.row(b), tokens, None if scores is None else (scores, verdict.scores[b]))
            counts.append(count)
            ended.append(end)
        return counts, ended

    def together(self, texts: Texts, scores: tuple[Tensor, ...] | None) -> Callable[[Tensor, list[Tensor]], list[bool]]:
        """Where rows keep step: which have ended, by the texts (B, L) with some new tokens and the scores (B, V) of each of these."""

        def ended(rows: Tensor, new_scores: list[Tensor]) -> list[bool]:
            met = self.criteria(rows, None if scores is None else (*scores, *new_scores)).tolist()
            return [was or now for was, now in zip(texts.finished, met, strict=True)]

        return ended

    def _first_stop(self, text: Tensor, tokens: list[int], scores: object) -> tuple[int, bool]:
        """The usual case, length and EOS, without building the text token by token."""
        for i, token in enumerate(tokens):
            if token in self.eos_token_ids or text.shape[1] + i + 1 >= self.max_length:
                return i + 1, True
        return len(tokens), False

    def _first_stop_of_any(self, text: Tensor, tokens: list[int], scores: tuple | None) -> tuple[int, bool]:
        new = torch.tensor([tokens], device=text.device)
        for count in range(1, len(tokens) + 1):
            so_far = None if scores is None else (*scores[0], *scores[1][:count])
            if self.criteria(torch.cat((text, new[:, :count]), dim=1), so_far).all():
                return count, True
        return len(tokens), False
