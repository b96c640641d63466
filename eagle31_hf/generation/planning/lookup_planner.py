"""Rounds that verify what followed in the text before, where that promises more tokens than a round of the drafter."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import Any

from .plan import Plan, Planner
from .prompt_lookup import Chances, PromptLookup


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
