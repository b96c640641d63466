"""Drafts from the text itself: its last tokens stood in it before, and what followed them then may follow again.

No model runs for such drafts, and where an answer quotes its prompt, as summaries and edits of code do, many of them in
a row are accepted. Sources: prompt lookup decoding (transformers' `prompt_lookup_num_tokens`), suffix decoding (arXiv
2411.04975).
"""

from collections import defaultdict
from collections.abc import Iterable

SHORTEST = 2  # tokens of a match
LONGEST = 32  # tokens of a match that are counted
PLACES = 8  # where a match may stand, the last so many: texts that go round have very many
# By tokens of a match, up to the next entry's: the share of next tokens that are as they were after the earlier place,
# before any is known. SmolLM2-135M on six kinds of prompts: `python benchmarks/prompt_lookup.py`.
USUAL = {2: 0.4, 3: 0.55, 4: 0.7, 6: 0.8, 8: 0.85, 12: 0.87, 16: 0.92, 24: 0.96}
WEIGHT_OF_USUAL = 4.0  # tokens
MEMORY = 0.95  # what is left of a token's weight when there is another one


class Chances:
    """The chance that the token after a match is as it was before, by the length of the match: the share that was
    so lately."""

    def __init__(self):
        self._bounds = [*USUAL]
        self._right = [WEIGHT_OF_USUAL * share for share in USUAL.values()]
        self._seen = [WEIGHT_OF_USUAL] * len(USUAL)

    def after(self, length: int) -> float:
        """The chance after a match of `length` tokens."""
        kind = self._kind(length)
        return self._right[kind] / self._seen[kind]

    def learn(self, length: int, is_right: bool) -> None:
        """Notes whether the token after a match of `length` tokens was as before."""
        kind = self._kind(length)
        self._right[kind] = MEMORY * self._right[kind] + is_right
        self._seen[kind] = MEMORY * self._seen[kind] + 1

    def _kind(self, length: int) -> int:
        return sum(bound <= length for bound in self._bounds) - 1


class PromptLookup:
    """A text that grows, prompt and answer, and its match: the longest run of tokens at its end that stood in it
    before.

    `chances` learn from every token that is added, since the match has said which one it would be, whether that was
    drafted or not.
    """

    def __init__(self, prompt: Iterable[int], chances: Chances):
        self.chances = chances
        self.text = list[int]()
        self._places = defaultdict[tuple[int, ...], list[int]](list)  # where each pair of tokens ends, in order
        self._place = 0  # where the earlier run ends: the index of the token after it
        self._length = 0  # tokens of the match; 0: there is none
        for token in prompt:
            self._append(token)
        self._find()

    def add(self, tokens: Iterable[int]) -> None:
        """Adds tokens of the answer."""
        for token in tokens:
            is_right = self._length > 0 and self.text[self._place] == token
            if self._length:
                self.chances.learn(self._length, is_right)
            self._append(token)
            if is_right:
                self._place += 1
                self._length = min(self._length + 1, LONGEST)
            else:
                self._find()

    def drafts(self, count: int) -> tuple[list[int], list[float]]:
        """The `count` tokens after the earlier place, none without a match, and the chance of each that it follows with
        all before it. A match that reaches into its own continuation goes round."""
        if not self._length:
            return [], []
        size = len(self.text) - self._place
        tokens = [self.text[self._place + i % size] for i in range(count)]
        chances, chance = list[float](), 1.0
        for i in range(count):
            chance *= self.chances.after(self._length + i)
            chances.append(chance)
        return tokens, chances

    def _append(self, token: int) -> None:
        """Adds a token, and notes where the tokens before it end."""
        if len(self.text) >= SHORTEST:
            self._places[tuple(self.text[-SHORTEST:])].append(len(self.text))
        self.text.append(token)

    def _find(self) -> None:
        """Finds the match, of several as long the last."""
        self._length = 0
        for place in reversed(self._places.get(tuple(self.text[-SHORTEST:]), ())[-PLACES:]):
            length = self._length_at(place)
            if length > self._length:
                self._length, self._place = length, place

    def _length_at(self, place: int) -> int:
        """How many tokens before a place are those at the end of the text, LONGEST at most."""
        text, end = self.text, len(self.text)
        length = SHORTEST
        while length < min(LONGEST, place) and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        return length
