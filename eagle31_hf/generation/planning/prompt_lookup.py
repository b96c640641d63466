"""Drafts from the text itself: its last tokens stood in it before, and what followed them then may follow again.

No model runs for such drafts, and where an answer quotes its prompt, as summaries and edits of code do, many of them in
a row are accepted. Sources: prompt lookup decoding (transformers' `prompt_lookup_num_tokens`), suffix decoding (arXiv
2411.04975).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, zip_longest
from operator import mul
from typing import Any

from .costs import Rate
from .plan import Plan, Planner

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
        self._rates = [Rate(PRIOR_WEIGHT * share, 0.0, PRIOR_WEIGHT, DECAY) for share in PRIOR.values()]

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


class LookupPlanner(Planner):
    """Plans as `planner` does, except in rounds where chains from the text promise more: then every sequence of the
    batch is given one, and the drafter none.

    `prompts`: the token ids of each sequence; `max_length`: of a chain; `vocab_size`: of the target; other ids, as
    images may have, end a chain.
    """

    def __init__(self, planner: Planner, prompts: Sequence[Sequence[int]], max_length: int, vocab_size: int):
        super().__init__()
        self.planner = planner
        self.choices = planner.choices  # both count in it
        self.max_length = max_length
        self.vocab_size = vocab_size
        chances = Chances()  # of all sequences: those of a batch are often of one kind
        self.lookups = [PromptLookup(prompt, chances) for prompt in prompts]
        self.is_from_text = False  # the round planned last

    def begin(self, tokens: list[list[int]]) -> None:
        self._add(tokens)
        self.planner.begin(tokens)

    def plan(self, max_depth: int, max_nodes: int, going: list[int], num_unread: int) -> Plan:
        drafts, gains = self._drafts(min(self.max_length, max_depth, max_nodes - 1), going)
        depth = self.planner.lookup_depth(gains) if gains else 0
        self.is_from_text = depth > 0
        if depth == 0:
            return self.planner.plan(max_depth, max_nodes, going, num_unread)
        self.choices["from the text"] += 1
        return Plan(depth, drafts=[ids[:depth] for ids in drafts])

    def _drafts(self, limit: int, going: list[int]) -> tuple[list[list[int]], list[float]]:
        """Chains of at most `limit` tokens, one for every sequence, and the gains that `lookup_depth` takes. Chains are
        equally long: a sequence's last token, as good as any, fills those that the text does not."""
        chains: list[list[int]] = []
        chances: list[list[float]] = []
        for b, lookup in enumerate(self.lookups):
            ids, chances_of_ids = lookup.drafts(limit) if b in going else ([], [])
            end = next((i for i, token in enumerate(ids) if not 0 <= token < self.vocab_size), len(ids))
            chains.append(ids[:end])
            chances.append(chances_of_ids[:end])
        longest = max(map(len, chains))
        filled = [
            ids + [lookup.text[-1]] * (longest - len(ids)) for ids, lookup in zip(chains, self.lookups, strict=True)
        ]
        by_depth = [sum(each) / len(going) for each in zip_longest(*chances, fillvalue=0.0)]
        return filled, list(accumulate(by_depth))

    def observe(self, num_nodes: int, accepted: Any, seconds: Mapping[str, float]) -> None:
        self._add(accepted.tokens)
        if self.is_from_text:
            self.planner.observe_lookup(num_nodes, seconds)
        else:
            self.planner.observe(num_nodes, accepted, seconds)

    def end(self) -> None:
        self.planner.end()

    def explain(self) -> str:
        return self.planner.explain()

    def _add(self, tokens: list[list[int]]) -> None:
        """Adds new tokens, those of every sequence, none of one that has ended."""
        for lookup, new in zip(self.lookups, tokens, strict=True):
            lookup.add(new)
