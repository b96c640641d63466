"""The sequences of a batch as they grow, each at its own pace. B sequences, L tokens of the left-padded prompt."""

import torch
from torch import Tensor

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
