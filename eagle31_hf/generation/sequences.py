"""The sequences of a batch as they grow, each at its own pace, and their end within a burst of new tokens: criteria and
streamer are told of the tokens one by one, as if they had come one at a time.

B sequences, L tokens of the left-padded prompt, V target vocabulary.
"""

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from ..cache.transfer import Commit, Mirrored


class Sequences:
    """The token ids so far, on the device, with their lengths on the host and on the device.

    `lengths`: tokens of each sequence, left padding included; `finished[b]`: sequence b has ended.
    `pad_token_id` fills what is shorter than the longest sequence.
    """

    def __init__(self, input_ids: Tensor, pad_token_id: int):
        self.pad_token_id = pad_token_id
        self.prompt_length = input_ids.shape[1]
        self.lengths = Mirrored([self.prompt_length] * len(input_ids))
        self.finished = [False] * len(input_ids)
        self._ids = input_ids.long()
        self.commit_nothing()

    def __len__(self) -> int:
        return len(self.finished)

    @property
    def going(self) -> list[int]:
        """The sequences that have not ended."""
        return [b for b, finished in enumerate(self.finished) if not finished]

    @property
    def device(self) -> torch.device:
        return self._ids.device

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that goes on (of the longest of all, when none does)."""
        lengths = self.lengths.host
        return max((lengths[b] for b, finished in enumerate(self.finished) if not finished), default=max(lengths))

    def prefix(self, b: int) -> Tensor:
        """Sequence b so far (1, its length)."""
        return self._ids[b : b + 1, : self.lengths.host[b]]

    def prefixes(self) -> list[Tensor]:
        """Returns the tokens of every sequence so far, each (1, its length)."""
        return [self.prefix(b) for b in range(len(self))]

    def padded(self) -> Tensor:
        """All sequences (B, length of the longest), shorter ones padded on the right."""
        ids = self._ids[:, : max(self.lengths.host)]
        if self.lengths.is_uniform:
            return ids
        is_padding = torch.arange(ids.shape[1], device=ids.device) >= self.lengths.on(ids.device)
        return ids.masked_fill(is_padding, self.pad_token_id)

    def last(self) -> Tensor:
        """The token committed last in every sequence (B, 1)."""
        if self.lengths.is_uniform:
            end = self.lengths.host[0]
            return self._ids[:, end - 1 : end]
        return self._ids.gather(1, self.lengths.on(self.device) - 1)

    def hold_in(self, text: Tensor) -> None:
        """Keeps the tokens in `text` (B, C) from now on, where the device adds to them."""
        length = max(self.lengths.host)
        text[:, :length] = self._ids[:, :length]
        self._ids = text

    def grow(self, counts: list[int], finished: list[bool]) -> None:
        """Notes that the device has added so many tokens to every sequence, and which have ended with them."""
        self.lengths = self.lengths + Mirrored(counts)
        self.finished = finished

    def commit_nothing(self) -> None:
        """Has `commit` be one of no tokens, by which those go on that have not ended: `grow` leaves it as it was."""
        none: list[list[int]] = [[]] * len(self)
        self.commit = Commit(self.device, none, none, self.finished)

    def append(self, commit: Commit, finished: list[bool]) -> None:
        """Adds the commit's tokens, and notes which sequences have ended with them."""
        num_new = commit.ids.shape[1]
        end = max(self.lengths.host) + num_new
        if end > self._ids.shape[1]:
            ample = self._ids.new_zeros(len(self), end + end // 4 + 64)
            ample[:, : self._ids.shape[1]] = self._ids
            self._ids = ample
        if self.lengths.is_uniform:
            begin = self.lengths.host[0]
            self._ids[:, begin : begin + num_new] = commit.ids
        else:
            slots = self.lengths.on(self.device) + torch.arange(num_new, device=self.device)
            self._ids.scatter_(1, slots, commit.ids)
        self.lengths = self.lengths + commit.counts
        self.finished = finished
        self.commit = commit


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
