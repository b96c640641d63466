"""Token ids of texts that begin alike, as a chat's does at each of its turns: what they share is tokenized once."""

from bisect import bisect_right
from typing import Any

MOST_CHECKED = 3  # texts of a tokenizer that are tokenized both ways
LONGEST_KEPT = 64  # characters of an end of a text whose ids are kept: headers of answers come again and again
MOST_KEPT = 10_000


class AlikeTexts:
    """Gives the ids of texts as `tokenizer(text, add_special_tokens=False)` does.

    A tokenizer of the tokenizers library cuts a text at its special tokens, and tokenizes each part between two of them
    by itself. So a text that goes as another up to a special token has the same ids up to there, and its end is
    tokenized alone. That is compared on the first texts; a tokenizer of which it does not hold, or that is not of that
    library, tokenizes all of every text.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._text, self._ids = "", list[int]()  # of the reference
        # of its special tokens, in order: where each ends and begins in the text, and its place among the ids
        self._marks = list[tuple[int, int, int]]()
        self._kept = dict[str, list[int]]()
        self._num_checked = 0
        self._reuses_prefix = bool(tokenizer.is_fast)
        # other added tokens also match by the text around them
        self._cut_tokens = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        }

    def ids(self, text: str) -> list[int]:
        """Returns the ids of a text that may begin as the one last given to `set_reference` does."""
        found = self._from_the_reference(text) if self._reuses_prefix else None
        if found is not None and self._num_checked >= MOST_CHECKED:
            return found
        expected: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if found is not None:
            self._num_checked += 1
            self._reuses_prefix = found == expected
        return expected

    def _from_the_reference(self, text: str) -> list[int] | None:
        """Returns the ids of a text by those of the reference; None where they share no special token, or
        its id is another where the end is tokenized alone."""
        last = bisect_right(self._marks, num_alike(self._text, text), key=lambda mark: mark[0]) - 1
        if last < 0:
            return None
        _, start, index = self._marks[last]
        end = text[start:]
        ids = self._kept.get(end)
        if ids is None:
            ids = self.tokenizer(end, add_special_tokens=False)["input_ids"]
            if len(end) <= LONGEST_KEPT and len(self._kept) < MOST_KEPT:
                self._kept[end] = ids
        return None if ids[:1] != self._ids[index : index + 1] else self._ids[:index] + ids

    def set_reference(self, text: str) -> list[int]:
        """Returns the ids of a text, and compares the next ones with it."""
        encoded = self.tokenizer(text, add_special_tokens=False)
        ids: list[int] = encoded["input_ids"]
        if self._reuses_prefix:
            self._text, self._ids = text, ids
            self._marks = []
            for index in (index for index, token in enumerate(ids) if token in self._cut_tokens):
                span = encoded.token_to_chars(index)
                if span is not None and text[span.start : span.end] == self._cut_tokens[ids[index]]:
                    self._marks.append((span.end, span.start, index))
        return ids


def num_alike(one: str, other: str) -> int:
    """Returns how many characters two texts begin with that are the same."""
    if one.startswith(other):
        return len(other)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[:middle]) else (low, middle - 1)
    return low
