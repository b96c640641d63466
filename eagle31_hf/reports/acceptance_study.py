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
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ..acceptance import Round, track_acceptance, watch_rounds
from ..bench import Shape, synchronize
from ..diagnostics.acceptance import counts_of
from ..generation.candidate_generator import Eagle31CandidateGenerator
from ..modeling import Eagle31DrafterModel
from ..storage.fingerprints import digest
from ..training.answers import stop_ids
from ..training.images import on_target
from ..training.kinds import Chat
from ..training.skipped import Skipped
from .document import Generation
from .figures import Row
from .journal import Study, counted, place
from .prompts import PERTURBATIONS, Change, Renderer, Source

ALONE = "the target alone"
SERVED = "as served"
# kinds of conditions
TURN = "turn"
PERTURBED = "perturbed"
CONTEXT = "context"
TEMPERATURE = "temperature"
CONCURRENCY = "concurrency"
WARM_UP = 8  # tokens
PROMPT_END = 240  # characters of a prompt that are shown
# rivals: ways of speculating that transformers has itself, greedily and one prompt at a time
LOOKUP, LOOP = "prompt-lookup", "assisted-loop"
RIVALS = (LOOKUP, LOOP)
LOOKUP_LENGTHS = (3, 10)  # tokens: those of transformers' own example, and those of the method's authors
Generate = Callable[..., Tensor]  # ids (B, T) and arguments of generate() -> sequences (B, T + N)
Batch = list[Tensor]  # ids (T,) of prompts that are decoded at once
Who = tuple[str, str]  # decodes: a drafter by its label and the way it drafts; a rival by its name; TARGET_ALONE
TARGET_ALONE: Who = (ALONE, "")


@dataclass(frozen=True)
class Condition:
    """Prompts in one state: `batches` by their numbers, `options` of `generate`, and whether the target alone is
    measured, too. `ways` are those in which it is drafted. `rows`, once they are measured: by who decoded, the figures
    of each batch."""

    kind: str
    name: str
    batches: Mapping[int, Batch]
    ways: Sequence[Shape]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_timed: bool = False
    rows: dict[Who, list[Row]] = field(default_factory=dict)

    @property
    def alone(self) -> list[Row] | None:
        """The rows of the target alone, where it was measured."""
        return self.rows.get(TARGET_ALONE)


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


@dataclass(frozen=True)
class AcceptanceStudy(Study):
    """Measures drafters, by their labels, on the same prompts."""

    settings: Settings
    drafters: Mapping[str, Eagle31DrafterModel]

    def measure(self) -> dict[str, Condition]:
        """Measures all conditions, by their names; those that no prompt can be in are left out."""
        conditions = [condition for condition in self.conditions() if condition.batches]
        self._decode_all(conditions)
        for condition in conditions:
            for who in self._everybody(condition):
                names = [place(label_of(who), condition.name, number) for number in condition.batches]
                condition.rows[who] = [self.journal[name] for name in names]
        return {condition.name: condition for condition in conditions}

    def generations(self) -> list[Generation]:
        """Returns the first prompt's text, token by token, by every drafter, as chains and as the first tree."""
        ways = [self.settings.reference, *[way for way in self.settings.ways if way.top_k > 1][:1]]
        ids = self.prompts.ids[0]
        prompt = end_of(str(self.prompts.renderer.tokenizer.decode(ids)))
        found = list[Generation]()
        for label, drafter in self.drafters.items():
            for way in ways:
                rounds = self.journal.once(f"{label}: {way.name}: rounds", partial(self._rounds, ids, drafter, way))
                found.append(Generation(f"{label}, drafting {named(way.name)}", prompt, rounds))
        return found

    def _rounds(self, ids: Tensor, drafter: Eagle31DrafterModel, way: Shape) -> list[dict[str, Any]]:
        found = list[Round]()
        with watch_rounds(found.append):
            self._new_tokens(self._drafted(drafter, way), [ids], self.settings.max_new_tokens)
        return [shown_round(one, self.prompts.renderer.tokenizer) for one in found]

    def conditions(self) -> Iterator[Condition]:
        """Yields the conditions in the order in which they are measured."""
        settings, ids = self.settings, self.prompts.ids
        served, one_way = {number: [each] for number, each in enumerate(ids)}, [settings.reference]
        ways = [*settings.ways, *(way for way in one_way if way not in settings.ways)]
        yield Condition(SERVED, SERVED, served, ways, is_timed=True)
        yield Condition(TURN, "second turn", self._changed(self._second_turn), one_way, is_timed=True)
        for name, perturb in PERTURBATIONS.items() if settings.has_perturbations else []:
            yield Condition(PERTURBED, name, self._changed(perturb), one_way)
        for length in settings.lengths:
            longer = {number: [each] for number, each in self.prompts.lengthened(length)}
            yield Condition(CONTEXT, f"{length} tokens", longer, one_way, is_timed=True)
        for temperature in settings.temperatures:
            options = {"do_sample": True, "temperature": temperature}
            yield Condition(TEMPERATURE, f"temperature {temperature:g}", served, one_way, options)
        # pixels of several prompts make a batch in ways that differ from target to target
        texts = [each for source, each in zip(self.prompts.sources, ids, strict=True) if not source.images]
        for count in settings.concurrency:
            groups = [texts[start : start + count] for start in range(0, len(texts) - count + 1, count)]
            yield Condition(CONCURRENCY, f"{count} at once", dict(enumerate(groups)), one_way, is_timed=True)

    def _changed(self, change: Change) -> dict[int, Batch]:
        """Returns the prompts without images that can be changed so, are not empty then, and leave room for an
        answer."""
        found, most = dict[int, Batch](), self.prompts.room - self.prompts.answer
        for number, (source, ids) in enumerate(zip(self.prompts.sources, self.prompts.ids, strict=True)):
            with suppress(Skipped):  # what a template refuses
                changed = None if source.images else change(self.prompts.renderer, source, ids, number)
                if changed is not None and 0 < len(changed) <= most:
                    found[number] = [changed]
        return found

    def _second_turn(self, renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
        """Has the user of a chat ask a second time, with the target's answer in between."""
        if source.chat is None or not source.later:
            return None
        answer = self.journal.once(place(ALONE, "first answer", number), partial(self._answer, ids))
        said = [
            *source.chat.messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": source.later[0]},
        ]
        return renderer.ids(Source(chat=Chat(said, source.chat.tools)))

    def _answer(self, ids: Tensor) -> str:
        """Returns what the target says to a prompt."""
        new = self._new_tokens(self.target.generate, [ids], self.settings.max_new_tokens)
        return str(self.prompts.renderer.tokenizer.decode(new[0], skip_special_tokens=True)).strip()

    def _everybody(self, condition: Condition) -> dict[Who, Generate]:
        """Returns who decodes in a condition, and how."""
        found = dict[Who, Generate]()
        if condition.is_timed:
            found[TARGET_ALONE] = self.target.generate
        rivals = self.settings.rivals if condition.kind == SERVED else ()
        if LOOKUP in rivals:  # drafts the tokens that followed the text's last ones where these occurred before
            for count in LOOKUP_LENGTHS:
                generate = partial(self.target.generate, prompt_lookup_num_tokens=count)
                found[f"prompt lookup, {count} tokens", ""] = generate
        if LOOP in rivals:
            depth = self.settings.reference.depth
            for label, drafter in self.drafters.items():
                name = f"{label} in transformers' assisted loop, {depth} deep"
                found[name, ""] = partial(in_their_loop, self.target, drafter, depth)
        for label, drafter in self.drafters.items():
            for way in condition.ways:
                found[label, way.name] = self._drafted(drafter, way)
        return found

    def _drafted(self, drafter: Eagle31DrafterModel, way: Shape) -> Generate:
        return partial(self.target.generate, assistant_model=drafter, **way.measured_knobs)

    def _decode_all(self, conditions: Sequence[Condition]) -> None:
        """Decodes the prompts of every condition, each by all in turn, and keeps in the journal what is not there."""
        for condition in conditions:
            everybody = self._everybody(condition)
            is_warm = False
            for number in counted([*condition.batches], condition.name):
                for who, generate in everybody.items():
                    name = place(label_of(who), condition.name, number)
                    if name not in self.journal and not is_warm:
                        self._warm_up(condition, everybody.values())
                        is_warm = True
                    self.journal.once(name, partial(self._decode, condition, number, who, generate))

    def _warm_up(self, condition: Condition, everybody: Iterable[Generate]) -> None:
        """Decodes a few tokens in every way: the first call takes longer than the others."""
        first = next(iter(condition.batches.values()))
        for generate in everybody:
            self._new_tokens(generate, first, min(WARM_UP, self.settings.max_new_tokens), **condition.options)

    def _decode(self, condition: Condition, number: int, who: Who, generate: Generate) -> Row:
        torch.manual_seed(number)  # of sampling
        batch, count = condition.batches[number], self.settings.max_new_tokens
        ids, options = self._inputs(batch, count, **condition.options)
        with track_acceptance() as stats:
            synchronize(self.target.device)
            began = time.perf_counter()
            new = generate(ids, **options)[:, ids.shape[1] :]
            synchronize(self.target.device)
            seconds = time.perf_counter() - began
        stops = stop_ids(self.target, None)
        # up to the token that ends the text: after it there is padding
        ends = [next((k + 1 for k, token in enumerate(row) if token in stops), len(row)) for row in new.tolist()]
        texts = [row[:end] for row, end in zip(new.tolist(), ends, strict=True)]
        return row_of(texts, seconds) | (counts_of(stats) if who[0] in self.drafters else {})

    def _new_tokens(self, generate: Generate, batch: Batch, max_new_tokens: int, **options: Any) -> Tensor:
        """Returns the new tokens (B, N) that a function makes of a batch."""
        ids, options = self._inputs(batch, max_new_tokens, **options)
        return generate(ids, **options)[:, ids.shape[1] :]

    def _inputs(self, batch: Batch, max_new_tokens: int, **options: Any) -> tuple[Tensor, dict[str, Any]]:
        """Returns the ids of a batch (B, T), padded in front, and the arguments of generate() for it."""
        pad = self.target.generation_config.pad_token_id
        pad = min(stop_ids(self.target, None), default=0) if pad is None else pad
        ids = pad_sequence(batch, batch_first=True, padding_value=pad, padding_side="left")
        mask = pad_sequence([torch.ones_like(one) for one in batch], batch_first=True, padding_side="left")
        device = self.target.device
        pixels = on_target(self.prompts.pixels_of(batch), device, self.target.dtype)
        settings = {"do_sample": False, "pad_token_id": pad, "max_new_tokens": max_new_tokens, **options}
        return ids.to(device), {"attention_mask": mask.to(device), **pixels, **settings}


def row_of(ids: Sequence[Sequence[int]], seconds: float) -> dict[str, Any]:
    """Returns the figures of a batch by the new ids of its prompts, and the seconds they took."""
    return {"seconds": seconds, "new_tokens": sum(map(len, ids)), "text": digest(repr(ids))[:16]}


def label_of(who: Who) -> str:
    """Returns who decodes in words."""
    return ": ".join(filter(None, who))


def named(way: str) -> str:
    """Returns the name of a way of drafting as people say it."""
    depth, _, nodes = way.partition(", tree ")
    return f"a tree of {nodes} nodes, {depth} deep" if nodes else f"a chain of {way}" if way.isdecimal() else way


def end_of(prompt: str) -> str:
    """Returns the end of a prompt, as much as is shown of it."""
    return prompt if len(prompt) <= PROMPT_END else f"...{prompt[-PROMPT_END:]}"


def shown_round(found: Round, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns the round of the only sequence of a batch as plain values, ids as their texts: the `accepted` drafts, the
    `bonus` token (None where a draft ended the text), and all `drafts`, children below the token they follow, each with
    its `text`, its `depth` and whether it `is_accepted`."""
    [tokens], [drafts] = found.tokens, found.drafts
    count = found.num_accepted[0] or 0
    parents = [*range(len(drafts))] if found.parents is None else found.parents[0]
    accepted = tokens[:count]

    def below(node: int, depth: int, is_on_path: bool) -> Iterator[dict[str, Any]]:
        """Yields the drafts that follow a node at that depth, each followed by those below it."""
        for child, token in enumerate(drafts, 1):
            if parents[child - 1] == node:
                is_accepted = is_on_path and depth <= len(accepted) and token == accepted[depth - 1]
                yield {"text": _text_of(token, tokenizer), "depth": depth, "is_accepted": is_accepted}
                yield from below(child, depth + 1, is_accepted)

    texts = [_text_of(token, tokenizer) for token in tokens]
    bonus = texts[count] if len(tokens) > count else None
    return {"accepted": texts[:count], "bonus": bonus, "drafts": [*below(0, 1, True)]}


def _text_of(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns what a token adds to a text: decoded alone, it may lack the space that it begins with."""
    once, twice = (str(tokenizer.decode([token] * count)) for count in (1, 2))
    return twice[len(once) :] or once


def in_their_loop(target: Any, drafter: Eagle31DrafterModel, depth: int, ids: Tensor, **options: Any) -> Tensor:
    """Generates in the loop which transformers has for assistants, with chains that a drafter drafts through an
    `Eagle31CandidateGenerator`. Raises RuntimeError where the loop did not ask for it, as in a release that finds its
    assistant by another name."""
    made = Eagle31CandidateGenerator(drafter, target, depth, ids.shape[1] + options["max_new_tokens"])
    asked = list[dict[str, Any]]()

    def ours(**arguments: Any) -> Eagle31CandidateGenerator:
        asked.append(arguments)
        return made

    target._get_candidate_generator = ours
    try:
        with made:  # asked for prompt lookup, generate() enters the loop
            found: Tensor = target.generate(ids, prompt_lookup_num_tokens=depth, **options)
    finally:
        del target._get_candidate_generator
    if not asked:
        said = "transformers' loop did not draft with the drafter: this release finds its assistant in another way"
        raise RuntimeError(f"{said}; expected transformers 5.17 to 5.24, or no assisted-loop among the rivals.")
    return found
