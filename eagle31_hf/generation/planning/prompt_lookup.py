"""Drafts from the text itself: its last tokens stood in it before, and what followed them then may follow again.

No model runs for such drafts, and where an answer quotes its prompt, as summaries and edits of code do, many of them in
a row are accepted. Sources: prompt lookup decoding (transformers' `prompt_lookup_num_tokens`), suffix decoding (arXiv
2411.04975).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from operator import mul

from .costs import Rate

# Tokens of a match: shorter ones say little, and those above the most are judged alike.
MIN_MATCH, MAX_MATCH = 2, 32
MAX_PLACES = 8  # earlier places that are compared, the last ones: a text that repeats itself has very many
# Length of a match, up to the next entry's -> the chance that the next token repeats, before any has been seen; about
# the shares of SmolLM2-135M's answers, which `python benchmarks/prompt_lookup.py --questions` counts.
PRIOR = {2: 0.4, 3: 0.55, 4: 0.7, 6: 0.8, 8: 0.85, 12: 0.87, 16: 0.92, 24: 0.96}
BOUNDS = [*PRIOR]
PRIOR_WEIGHT = 4.0  # tokens
DECAY = 0.95  # of the weight of older tokens with each new one: a text may begin to quote, or stop


class Chances:
    """The chance that the token after a match repeats, by the length of the match: the share of those that did
    lately."""

    def __init__(self):
        self._rates = [Rate(DECAY) for _ in PRIOR]
        for rate, share in zip(self._rates, PRIOR.values(), strict=True):
            rate.tokens, rate.rounds = PRIOR_WEIGHT * share, PRIOR_WEIGHT

    def of(self, length: int) -> Rate:
        """Returns the rate for matches of `length` tokens: how many of the tokens after them repeated."""
        return self._rates[bisect_right(BOUNDS, length) - 1]

    def learn(self, length: int, is_right: bool) -> None:
        """Notes whether the token after a match of `length` tokens repeated."""
        self.of(length).add(float(is_right))


class PromptLookup:
    """A text that grows, prompt and answer, and its match: the most tokens at its end that also stand before one of the
    last MAX_PLACES places where its last MIN_MATCH tokens stood. A place is the index of the token after such a run.

    `chances` learn from each token of the answer that comes after a match, whether it was drafted or not; a prompt,
    which the target has not written, teaches them nothing.
    """

    def __init__(self, prompt: Iterable[int], chances: Chances):
        self.chances = chances
        self.text: list[int] = []
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._length = 0  # tokens of the match; 0: there is none
        self._place = 0
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
                self._length = min(self._length + 1, MAX_MATCH)
            else:
                self._find()

    def drafts(self, count: int) -> tuple[list[int], list[float]]:
        """Returns the `count` tokens from the match's place on, none without a match, and of each the chance that it
        and all before it are right. At the end of the text they begin again at the place, as a text in a loop does."""
        if not self._length:
            return [], []
        size = len(self.text) - self._place
        tokens = [self.text[self._place + i % size] for i in range(count)]
        return tokens, list(accumulate((self.chances.of(self._length + i).per_round for i in range(count)), mul))

    def _append(self, token: int) -> None:
        if len(self.text) >= MIN_MATCH:
            self._places[tuple(self.text[-MIN_MATCH:])].append(len(self.text))
        self.text.append(token)

    def _find(self) -> None:
        """Finds the match; of places with equally many tokens before them the last."""
        places = self._places.get(tuple(self.text[-MIN_MATCH:]), [])[-MAX_PLACES:]
        self._length, self._place = max(((self._length_at(place), place) for place in places), default=(0, 0))

    def _length_at(self, place: int) -> int:
        """Returns how many tokens right before a place are the same as those at the end of the text, at most
        MAX_MATCH."""
        text, end = self.text, len(self.text)
        length = MIN_MATCH
        while length < min(MAX_MATCH, place) and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        return length
