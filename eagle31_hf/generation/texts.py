"""The rows of a batch as they grow, each at its own pace. B rows, L tokens of the left-padded prompt."""

import torch
from torch import Tensor


class Texts:
    """`lengths[b]` tokens of row b are committed, left padding included; `finished[b]`: no more will be.

    `input_ids` (B, L), `mask` (B, L) or None (no padding), `pad_token_id` fills what is shorter than the longest row.
    """

    def __init__(self, input_ids: Tensor, pad_token_id: int, num_padding: list[int]):
        self.num_rows, self.prompt_length = input_ids.shape
        self.pad_token_id, self.num_padding = pad_token_id, num_padding
        self.lengths = [self.prompt_length] * self.num_rows
        self.finished = [False] * self.num_rows
        self._ids = input_ids

    @property
    def device(self) -> torch.device:
        return self._ids.device

    @property
    def longest(self) -> int:
        """Of the rows that go on (of all, when none does)."""
        return max(
            (n for n, finished in zip(self.lengths, self.finished, strict=True) if not finished),
            default=max(self.lengths),
        )

    @property
    def is_uniform(self) -> bool:
        return len(set(self.lengths)) == 1

    def row(self, b: int) -> Tensor:
        """Row b so far (1, its length)."""
        return self._ids[b : b + 1, : self.lengths[b]]

    def rows(self) -> Tensor:
        """All rows (B, longest of all), shorter ones padded on the right."""
        return self._ids[:, : max(self.lengths)]

    def last(self) -> Tensor:
        """The token committed last in every row (B, 1)."""
        if self.is_uniform:
            return self._ids[:, self.lengths[0] - 1 : self.lengths[0]]
        return self._ids.gather(1, torch.tensor(self.lengths, device=self._ids.device)[:, None] - 1)

    def append(self, tokens: list[list[int]]) -> None:
        """Commits `tokens[b]` to row b."""
        end = max(length + len(new) for length, new in zip(self.lengths, tokens, strict=True))
        if end > self._ids.shape[1]:
            ample = self._ids.new_full((self.num_rows, end + end // 4 + 64), self.pad_token_id)
            ample[:, : self._ids.shape[1]] = self._ids
            self._ids = ample
        for b, new in enumerate(tokens):
            if new:
                self._ids[b, self.lengths[b] : self.lengths[b] + len(new)] = torch.tensor(new, device=self._ids.device)
                self.lengths[b] += len(new)
