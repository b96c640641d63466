"""The acceptance report: what drafters gain on the user's prompts, by way of drafting, turn, perturbation, context,
temperature and concurrency, beside the target alone.

Speed is measured prompt by prompt, the target alone and every way in turn: machines are shared and noisy.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from ..training.kinds import Chat
from ..training.skipped import Skipped
from .document import Generation
from .figures import Row
from .perturbed import PERTURBATIONS
from .prompts import Source
from .rivals import Generate, rivals
from .study import Study
from .tokens import generation_of, shown_round

ALONE = "the target alone"
SERVED = "as served"
# kinds of conditions
TURN = "turn"
PERTURBED = "perturbed"
CONTEXT = "context"
TEMPERATURE = "temperature"
CONCURRENCY = "concurrency"
WARM_UP = 8  # tokens
Batch = list[Tensor]  # ids (T,) of prompts that are decoded at once
BatchGenerate = Callable[[Batch, Mapping[str, Any]], Tensor]  # arguments of generate() -> new tokens (B, N)


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
    """The plan of a report: it says which ways of drafting are measured, and in which conditions. `ways` and `rivals`,
    some of RIVALS, decode the prompts as they are served; all other conditions are drafted by `reference` alone."""

    ways: tuple[Shape, ...]
    reference: Shape
    max_new_tokens: int
    lengths: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()
    concurrency: tuple[int, ...] = ()
    has_perturbations: bool = True
    rivals: tuple[str, ...] = ()


Who = tuple[str, str]  # decodes: a drafter by its label and the way it drafts; a rival by its name; TARGET_ALONE
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
            self._generate([ids], {"max_new_tokens": self.settings.max_new_tokens}, drafter, way)
        return [shown_round(one, self.prompts.renderer.tokenizer) for one in found]

    def conditions(self) -> Iterator[Condition]:
        """Yields the conditions in the order in which they are measured."""
        settings, served = self.settings, {number: [ids] for number, ids in self.as_served().items()}
        one_way = [settings.reference]
        ways = [*settings.ways, *(way for way in one_way if way not in settings.ways)]
        yield Condition(SERVED, SERVED, served, ways, is_timed=True)
        yield Condition(TURN, "second turn", self._second_turns(), one_way, is_timed=True)
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

    def _second_turns(self) -> dict[int, Batch]:
        """Returns the chats in which the user asks a second time, with the target's answer in between."""
        found = dict[int, Batch]()
        for number, source in enumerate(self.prompts.sources):
            if source.chat is None or not source.later:
                continue
            answer = self.journal.once(f"{ALONE}: first answer: prompt {number}", partial(self._answer, number))
            said = [
                *source.chat.messages,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": source.later[0]},
            ]
            with suppress(Skipped):  # what a template refuses
                found[number] = [self.prompts.renderer.ids(Source(chat=Chat(said, source.chat.tools)))]
        return self._fitting(found)

    def _answer(self, number: int) -> str:
        """Returns what the target says to a prompt."""
        options = {"max_new_tokens": self.settings.max_new_tokens}
        new = self._generate([self.prompts.ids[number]], options)
        return str(self.prompts.renderer.tokenizer.decode(new[0], skip_special_tokens=True)).strip()

    def _perturbed(self, name: str) -> dict[int, Batch]:
        """Returns the prompts that can be perturbed so."""
        found = dict[int, Batch]()
        for number, (source, ids) in enumerate(zip(self.prompts.sources, self.prompts.ids, strict=True)):
            changed = None
            with suppress(Skipped):  # a template that takes no system prompt
                changed = PERTURBATIONS[name](self.prompts.renderer, source, ids, number)
            if changed is not None:
                found[number] = [changed]
        return self._fitting(found)

    def _fitting(self, prompts: dict[int, Batch]) -> dict[int, Batch]:
        """Returns the prompts that are not empty, and leave room for an answer."""
        most = self.prompts.room - self.prompts.answer
        return {number: [ids] for number, [ids] in prompts.items() if 0 < len(ids) <= most}

    def _decoded(self, condition: Condition) -> Decoded:
        """Decodes a condition's prompts, each by all in turn."""
        everybody = self._everybody(condition)
        rows: dict[Who, list[Row]] = {who: [] for who in everybody}
        is_warm = False
        for number in self.counted([*condition.batches], condition.name):
            for who, generate in everybody.items():
                name = name_of(who, condition, number)
                if name not in self.journal and not is_warm:
                    self._warm_up(condition, everybody.values())
                    is_warm = True
                rows[who].append(self.journal.once(name, partial(self._decode, condition, number, who, generate)))
        return Decoded(condition.kind, [*condition.batches], rows, condition.num_prompts)

    def _everybody(self, condition: Condition) -> dict[Who, BatchGenerate]:
        """Returns who decodes in a condition, and how."""
        found = dict[Who, BatchGenerate]()
        if condition.is_timed:
            found[TARGET_ALONE] = self._generate
        if condition.kind == SERVED:
            settings, target = self.settings, self.target
            for name, generate in rivals(settings.rivals, target, self.drafters, settings.reference.depth).items():
                found[name, ""] = partial(self._new_tokens, generate)
        for label, drafter in self.drafters.items():
            for way in condition.ways:
                found[label, way.name] = partial(self._generate, drafter=drafter, way=way)
        return found

    def _warm_up(self, condition: Condition, everybody: Iterable[BatchGenerate]) -> None:
        """Decodes a few tokens in every way: the first call takes longer than the others."""
        first = next(iter(condition.batches.values()))
        for generate in everybody:
            generate(first, {**condition.options, "max_new_tokens": WARM_UP})

    def _decode(self, condition: Condition, number: int, who: Who, generate: BatchGenerate) -> Row:
        torch.manual_seed(number)  # of sampling
        batch = condition.batches[number]
        options = {**condition.options, "max_new_tokens": self.settings.max_new_tokens}
        with track_acceptance() as stats:
            synchronize()
            began = time.perf_counter()
            new = generate(batch, options)
            synchronize()
            seconds = time.perf_counter() - began
        ids = [_through_end(row, self._ends()) for row in new.tolist()]
        row = {"seconds": seconds, "new_tokens": sum(map(len, ids)), "text": digest(repr(ids))[:16]}
        return row | (counts_of(stats) if who[0] in self.drafters else {})

    def _generate(
        self,
        batch: Batch,
        options: Mapping[str, Any],
        drafter: Eagle31DrafterModel | None = None,
        way: Shape = Shape(0),  # noqa: B008 -- frozen
    ) -> Tensor:
        """Returns the new tokens (B, N) of a batch, drafted in a way by a drafter, or by the target alone."""
        drafting: dict[str, Any] = {} if drafter is None else {"assistant_model": drafter, **way.knobs}
        generate: Any = self.target.generate
        return self._new_tokens(generate, batch, {**options, **drafting})

    def _new_tokens(self, generate: Generate, batch: Batch, options: Mapping[str, Any]) -> Tensor:
        """Returns the new tokens (B, N) that a function makes of the padded ids of a batch."""
        ids, mask = self._padded(batch)
        settings = {"do_sample": False, "pad_token_id": self._pad(), **options}
        return generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]

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
