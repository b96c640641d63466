"""The end of a text within a burst of new tokens: criteria and streamer are told of the tokens one by one, as if they
had come one at a time.

B sequences, V target vocabulary.
"""

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from .sequences import Sequences


class Stopping:
    """A call's stopping criteria, and its streamer, which is told of every token after them: the user's may know of
    each other.

    `eos_token_ids`: the ids that end a sequence; `max_length`: of every sequence, padding included; `is_length_alone`:
    nothing else ends one.
    """

    def __init__(self, criteria: StoppingCriteriaList, max_length: int, streamer: BaseStreamer | None = None):
        self.criteria = criteria
        self.streamer = streamer
        limits = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
        self.max_length = min([max_length, *limits])
        self.eos_token_ids = {int(i) for one in criteria if isinstance(one, EosTokenCriteria) for i in one.eos_token_id}
        kinds = {type(one) for one in criteria}
        self.is_usual = kinds <= {MaxLengthCriteria, EosTokenCriteria}
        self.is_length_alone = kinds <= {MaxLengthCriteria}
        # A sequence that has met another criterion goes on as long as any does, unless there is a token that ends it.
        self.is_per_sequence = self.is_usual or (
            kinds <= {MaxLengthCriteria, EosTokenCriteria, StopStringCriteria} and bool(self.eos_token_ids)
        )


class Ends:
    """The sequences that have ended, in `finished`, as far as it has been asked in one round. `scores`: of the
    tokens before this round, where they are kept."""

    def __init__(self, stopping: Stopping, sequences: Sequences, scores: tuple[Tensor, ...] | None = None):
        self.stopping = stopping
        self.sequences = sequences
        self.scores = scores
        self.finished = list(sequences.finished)

    def after(self, b: int, tokens: list[int], new_scores: list[Tensor]) -> bool:
        """Returns whether sequence b ends with the last of its new tokens; asked once for each of them, in order.
        `new_scores`: (1, V) a token, where they are kept."""
        stopping, sequences = self.stopping, self.sequences
        if stopping.is_usual:  # without building the text
            length = sequences.lengths.host[b] + len(tokens)
            self.finished[b] = tokens[-1] in stopping.eos_token_ids or length >= stopping.max_length
        else:
            new = torch.tensor([tokens], device=sequences.device)
            text = torch.cat((sequences.prefix(b), new), dim=1)
            self.finished[b] = bool(stopping.criteria(text, self._all_scores(new_scores)).all())
        if stopping.streamer is not None:
            stopping.streamer.put(torch.tensor(tokens[-1:], device="cpu"))
        return self.finished[b]

    def after_step(self, ids: Tensor, new_scores: list[Tensor]) -> None:
        """Asks the criteria about all sequences at once, each with one more token, and notes in `finished` which
        have ended.

        `ids` (B, L): the sequences, equally long, new tokens included; `new_scores`: (B, V) for each new token."""
        met = self.stopping.criteria(ids, self._all_scores(new_scores)).tolist()
        if self.stopping.streamer is not None:
            self.stopping.streamer.put(ids[:, -1].cpu())
        self.finished = [was or now for was, now in zip(self.sequences.finished, met, strict=True)]

    def _all_scores(self, new_scores: list[Tensor]) -> tuple[Tensor, ...] | None:
        return None if self.scores is None else (*self.scores, *new_scores)
