"""Rounds that verify what followed in the text before, where that promises more tokens than a round of the drafter."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import Any

from .plan import Plan, Planner
from .prompt_lookup import Chances, PromptLookup


class LookupPlanner(Planner):
    """Plans as `planner` does, but for rounds in which chains from the text are worth more. `prompts`: the token ids of
    each sequence; `most`: tokens of such a chain; `vocab_size`: ids from there on, those of images, say, are not
    drafted."""

    def __init__(self, planner: Planner, prompts: Sequence[Sequence[int]], most: int, vocab_size: int):
        super().__init__()
        self.planner = planner
        self.most = most
        self.vocab_size = vocab_size
        self.choices = planner.choices
        chances = Chances()
        self.lookups = [PromptLookup(prompt, chances) for prompt in prompts]
        self.is_from_text = False  # the round under way
        self.verified = self.accepted = 0  # tokens from the text

    def begin(self, tokens: list[list[int]]) -> None:
        self._add(tokens)

    def plan(self, max_depth: int, max_nodes: int, going: list[int], num_unread: int) -> Plan:
        drafts, chances = self._drafts(min(self.most, max_depth, max_nodes - 1), going)
        depth = self.planner.depth_worth(chances) if chances else 0
        self.is_from_text = depth > 0
        if not self.is_from_text:
            return self.planner.plan(max_depth, max_nodes, going, num_unread)
        return Plan(depth, drafts=[ids[:depth] for ids in drafts])

    def _drafts(self, most: int, going: list[int]) -> tuple[list[list[int]], list[float]]:
        """A chain for every sequence, all of them equally long, and by their length how many of a sequence's drafts are
        expected to be accepted. A sequence's last token fills what has no chain or a shorter one."""
        chains, chances = list[list[int]](), list[list[float]]()
        for b, lookup in enumerate(self.lookups):
            ids, by_depth = lookup.drafts(most) if b in going and most > 0 else ([], [])
            end = next((i for i, token in enumerate(ids) if token >= self.vocab_size), len(ids))
            chains.append(ids[:end])
            chances.append(by_depth[:end])
        longest = max(map(len, chains))
        drafts = [
            ids + lookup.text[-1:] * (longest - len(ids)) for ids, lookup in zip(chains, self.lookups, strict=True)
        ]
        return drafts, [*accumulate(sum(row) / len(going) for row in zip_longest(*chances, fillvalue=0.0))]

    def observe(self, num_nodes: int, accepted: Any, seconds: Mapping[str, float]) -> None:
        self._add(accepted.tokens)
        if not self.is_from_text:
            self.planner.observe(num_nodes, accepted, seconds)
            return
        self.planner.observe_forward(num_nodes, seconds)
        self.choices["from the text"] += 1
        counts = [count for count in accepted.num_drafts if count is not None]
        self.verified += (num_nodes - 1) * len(counts)
        self.accepted += sum(counts)

    def end(self) -> None:
        self.planner.end()

    def explain(self) -> str:
        said = [self.planner.explain()]
        if self.verified:
            said.append(f"from the text: {self.accepted} of {self.verified} drafts were accepted")
        return "\n".join(filter(None, said))

    def _add(self, tokens: list[list[int]]) -> None:
        for lookup, new in zip(self.lookups, tokens, strict=True):
            lookup.add(new)
