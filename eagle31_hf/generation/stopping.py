"""Where a burst of new tokens ends a text: criteria and streamer are told of them token by token, as if they had come
one at a time."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from .texts import Texts


class Stopping:
    """A call's stopping criteria, and its streamer, which is told of every token after them: the user's may know of
    each other.

    `eos_token_ids`: the ids that end a row; `max_length`: of every row, padding included.
    """

    def __init__(self, criteria: StoppingCriteriaList, max_length: int, streamer: BaseStreamer | None = None):
        self.criteria, self.streamer = criteria, streamer
        self.max_length = min([max_length, *(one.max_length for one in criteria if isinstance(one, MaxLengthCriteria))])
        self.eos_token_ids = {int(i) for one in criteria if isinstance(one, EosTokenCriteria) for i in one.eos_token_id}
        kinds = {type(one) for one in criteria}
        self.is_usual = kinds <= {MaxLengthCriteria, EosTokenCriteria}
        # A row that has met another criterion goes on as long as any row does, unless there is a token that ends rows.
        self.is_rowwise = self.is_usual or (
            kinds <= {MaxLengthCriteria, EosTokenCriteria, StopStringCriteria} and bool(self.eos_token_ids)
        )

    def row_by_row(self, texts: Texts, scores: tuple[Tensor, ...] | None) -> "RowEnds":
        """Where every row goes at its own pace: says after each of its new tokens whether it ends."""
        return RowEnds(self, texts, scores)

    def together(self, texts: Texts, scores: tuple[Tensor, ...] | None) -> Callable[[Tensor, list[Tensor]], list[bool]]:
        """Where rows keep step: which have ended, by the texts (B, L) with some new tokens and the scores (B, V) of
        each of these."""

        def ended(rows: Tensor, new_scores: list[Tensor]) -> list[bool]:
            met = self.criteria(rows, None if scores is None else (*scores, *new_scores)).tolist()
            if self.streamer is not None:
                self.streamer.put(rows[:, -1].cpu())
            return [was or now for was, now in zip(texts.finished, met, strict=True)]

        return ended


class RowEnds:
    """Which rows have ended, in `rows`, as far as it has been asked. `scores`: of all tokens so far, where they are
    kept."""

    def __init__(self, stopping: Stopping, texts: Texts, scores: tuple[Tensor, ...] | None):
        self.stopping = stopping
        self.texts = texts
        self.scores = scores
        self.rows = list(texts.finished)

    def __call__(self, b: int, tokens: list[int], new_scores: list[Tensor]) -> bool:
        """Whether row b ends with the last of its new tokens; asked once for each of them, in order. `new_scores`: (1,
        V) a token."""
        self.rows[b] = self._is_met(b, tokens, new_scores)
        if self.stopping.streamer is not None:
            self.stopping.streamer.put(torch.tensor(tokens[-1:]))
        return self.rows[b]

    def _is_met(self, b: int, tokens: list[int], new_scores: list[Tensor]) -> bool:
        stopping, texts = self.stopping, self.texts
        if stopping.is_usual:  # without building the text
            return tokens[-1] in stopping.eos_token_ids or texts.lengths[b] + len(tokens) >= stopping.max_length
        text = torch.cat((texts.row(b), torch.tensor([tokens], device=texts.device)), dim=1)
        return bool(stopping.criteria(text, None if self.scores is None else (*self.scores, *new_scores)).all())
