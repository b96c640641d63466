"""The acceptance report: what drafters gain on the user's prompts, by way of drafting, perturbation, context,
temperature and concurrency, beside the target alone.

Speed is measured prompt by prompt, the target alone and every way in turn: machines are shared and noisy.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..acceptance import Round, track_acceptance, watch_rounds
from ..bench import Shape, synchronize
from ..diagnostics.acceptance import counts_of
from ..modeling import Eagle31DrafterModel
from ..storage.fingerprints import digest
from ..training.skipped import Skipped
from .document import Generation
from .figures import Row
from .perturbed import PERTURBATIONS
from .study import Study
from .tokens import generation_of, shown_round

ALONE = "the target alone"
SERVED = "as served"
# kinds of conditions
PERTURBED = "perturbed"
CONTEXT = "context"
TEMPERATURE = "temperature"
CONCURRENCY = "concurrency"
WARM_UP = 8  # tokens
Batch = list[Tensor]  # ids (T,) of prompts that are decoded at once


@dataclass(frozen=True)
class Condition:
    """Prompts in one state: `batches` by their numbers, `options` of `generate`, and whether the target alone is
    measured, too. `ways` are those in which it is drafted."""

    kind: str
    name: str
    batches: Mapping[int, Batch]
    ways: Sequence[Shape]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_timed: bool = False

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.batches.values()))


@dataclass(frozen=True)
class Settings:
    """What is measured: `ways` on the prompts as they are served; the others by `reference` alone."""

    ways: tuple[Shape, ...]
    reference: Shape
    max_new_tokens: int
    lengths: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()
    concurrency: tuple[int, ...] = ()
    has_perturbations: bool = True


Who = tuple[str, str]  # decodes: a drafter by its label and the way it drafts; TARGET_ALONE
TARGET_ALONE: Who = (ALONE, "")


@dataclass(frozen=True)
class Decoded:
    """What was measured in a condition: the `numbers` of its batches, by who decoded a row for each of them, and how
    many prompts these are."""

    kind: str
    numbers: list[int]
    rows: dict[Who, list[Row]]
    num_prompts: int

    @property
    def alone(self) -> list[Row] | None:
        """The rows of the target alone, where it was measured."""
        return self.rows.get(TARGET_ALONE)


@dataclass(frozen=True)
class AcceptanceStudy(Study):
    """Measures drafters, by their labels, on the same prompts."""

    settings: Settings
    drafters: Mapping[str, Eagle31DrafterModel]

    def measure(self) -> dict[str, Decoded]:
        """Measures all conditions, by their names; those that no prompt can be in are left out."""
        conditions = [condition for condition in self.conditions() if condition.batches]
        return {condition.name: self._decoded(condition) for condition in conditions}

    def generations(self) -> list[Generation]:
        """Returns the first prompt's text, token by token, by every drafter, as chains and as the first tree."""
        ways = [self.settings.reference, *[way for way in self.settings.ways if way.top_k > 1][:1]]
        tokenizer, ids = self.prompts.renderer.tokenizer, self.prompts.ids[0]
        found = list[Generation]()
        for label, drafter in self.drafters.items():
            for way in ways:
                rounds = self.journal.once(f"{label}: {way.name}: rounds", partial(self._rounds, ids, drafter, way))
                found.append(generation_of(f"{label}, drafting {named(way.name)}", str(tokenizer.decode(ids)), rounds))
        return found

    def _rounds(self, ids: Tensor, drafter: Eagle31DrafterModel, way: Shape) -> list[dict[str, Any]]:
        found = list[Round]()
        with watch_rounds(found.append):
            self._generate([ids], drafter, way, {"max_new_tokens": self.settings.max_new_tokens})
        return [shown_round(one, self.prompts.renderer.tokenizer) for one in found]

    def conditions(self) -> Iterator[Condition]:
        """Yields the conditions in the order in which they are measured."""
        settings, served = self.settings, {number: [ids] for number, ids in self.as_served().items()}
        one_way = [settings.reference]
        ways = [*settings.ways, *(way for way in one_way if way not in settings.ways)]
        yield Condition(SERVED, SERVED, served, ways, is_timed=True)
        for name in PERTURBATIONS if settings.has_perturbations else []:
            yield Condition(PERTURBED, name, self._perturbed(name), one_way)
        for length in settings.lengths:
            longer = {number: [ids] for number, ids in self.lengthened(length).items()}
            yield Condition(CONTEXT, f"{length} tokens", longer, one_way, is_timed=True)
        for temperature in settings.temperatures:
            options = {"do_sample": True, "temperature": temperature}
            yield Condition(TEMPERATURE, f"temperature {temperature:g}", served, one_way, options)
        for count in settings.concurrency:
            ids = self.prompts.ids
            groups = [ids[start : start + count] for start in range(0, len(ids) - count + 1, count)]
            yield Condition(CONCURRENCY, f"{count} at once", dict(enumerate(groups)), one_way, is_timed=True)

    def _perturbed(self, name: str) -> dict[int, Batch]:
        """Returns the prompts that can be perturbed so."""
        found = dict[int, Batch]()
        for number, (source, ids) in enumerate(zip(self.prompts.sources, self.prompts.ids, strict=True)):
            try:
                changed = PERTURBATIONS[name](self.prompts.renderer, source, ids, number)
            except Skipped:  # a template that takes no system prompt
                continue
            if changed is not None and 0 < len(changed) <= self.prompts.room - self.prompts.answer:
                found[number] = [changed]
        return found

    def _decoded(self, condition: Condition) -> Decoded:
        """Decodes a condition's prompts, each by all in turn."""
        alone = {TARGET_ALONE: (None, Shape(0))} if condition.is_timed else {}
        drafted = {
            (label, way.name): (drafter, way) for label, drafter in self.drafters.items() for way in condition.ways
        }
        rows: dict[Who, list[Row]] = {who: [] for who in (*alone, *drafted)}
        is_warm = False
        for number in self.counted([*condition.batches], condition.name):
            for who, (drafter, way) in {**alone, **drafted}.items():
                name = name_of(who, condition, number)
                if name not in self.journal and not is_warm:
                    self._warm_up(condition, [*alone.values(), *drafted.values()])
                    is_warm = True
                decode = partial(self._decode, condition, number, drafter, way)
                rows[who].append(self.journal.once(name, decode))
        return Decoded(condition.kind, [*condition.batches], rows, condition.num_prompts)

    def _warm_up(self, condition: Condition, all_ways: Sequence[tuple[Eagle31DrafterModel | None, Shape]]) -> None:
        """Decodes a few tokens in every way: the first call takes longer than the others."""
        first = next(iter(condition.batches.values()))
        for drafter, way in all_ways:
            self._generate(first, drafter, way, {**condition.options, "max_new_tokens": WARM_UP})

    def _decode(self, condition: Condition, number: int, drafter: Eagle31DrafterModel | None, way: Shape) -> Row:
        torch.manual_seed(number)  # of sampling
        batch, options = (
            condition.batches[number],
            {**condition.options, "max_new_tokens": self.settings.max_new_tokens},
        )
        with track_acceptance() as stats:
            synchronize()
            began = time.perf_counter()
            new = self._generate(batch, drafter, way, options)
            synchronize()
            seconds = time.perf_counter() - began
        ids = [_through_end(row, self._ends()) for row in new.tolist()]
        row = {"seconds": seconds, "new_tokens": sum(map(len, ids)), "text": digest(repr(ids))[:16]}
        return row | (counts_of(stats) if drafter is not None else {})

    def _generate(
        self, batch: Batch, drafter: Eagle31DrafterModel | None, way: Shape, options: Mapping[str, Any]
    ) -> Tensor:
        """Returns the new tokens (B, N) of a batch."""
        ids, mask = self._padded(batch)
        drafting: dict[str, Any] = {} if drafter is None else {"assistant_model": drafter, **way.knobs}
        settings = {"do_sample": False, "pad_token_id": self._pad(), **options, **drafting}
        return self.target.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]

    def _padded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns ids and mask (B, T) of prompts, padded in front."""
        length = max(map(len, batch))
        ids = torch.full((len(batch), length), self._pad())
        mask = torch.zeros_like(ids)
        for b, one in enumerate(batch):
            ids[b, length - len(one) :] = one
            mask[b, length - len(one) :] = 1
        return ids.to(self.target.device), mask.to(self.target.device)

    def _ends(self) -> set[int]:
        ends = self.target.generation_config.eos_token_id
        return set() if ends is None else {ends} if isinstance(ends, int) else {*ends}

    def _pad(self) -> int:
        found = self.target.generation_config.pad_token_id
        return min(self._ends(), default=0) if found is None else found


def name_of(who: Who, condition: Condition, number: int) -> str:
    """Returns the name under which the journal keeps the figures of a batch."""
    return f"{': '.join(filter(None, who))}: {condition.name}: prompt {number}"


def named(way: str) -> str:
    """Returns the name of a way of drafting as people say it."""
    depth, _, nodes = way.partition(", tree ")
    return f"a tree of {nodes} nodes, {depth} deep" if nodes else f"a chain of {way}" if way.isdecimal() else way


def _through_end(ids: list[int], ends: set[int]) -> list[int]:
    """Returns ids up to the one that ends the text; after it there is padding."""
    end = next((k + 1 for k, token in enumerate(ids) if token in ends), len(ids))
    return ids[:end]
