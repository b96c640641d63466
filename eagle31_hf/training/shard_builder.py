"""The making of a store's shards: their records become examples, in the target's own words and with its states where
asked. T tokens of an example.

A shard depends on its own records, the options and the target, never on other shards: any process can make any of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..seeding import seeded
from ..storage.fingerprints import digest, tokenizer_fingerprint, weights_fingerprint
from ..targets.ends import shape_of
from .answers import AnswerGenerator, AnswerSource, seed_of, stop_ids
from .chats import ExampleMaker
from .ends import is_spread
from .engine_states import EngineStates
from .engines import EngineAnswers
from .images import NO_PIXELS, files_digest, images_of
from .kinds import ONLY_TEXT, Chat, parse_record
from .preparation_options import RECORDS_PER_SHARD, PreparationOptions
from .records import Record, Records, identity
from .regenerate import Beginning, first_prompt, regenerate
from .self_prompts import SelfPrompt, first_token
from .servers import Servers, Tell
from .skipped import Skipped, Skips, refused_by
from .store import Columns, Manifest
from .target import TargetReader

PROBES = 3  # prompts by which an engine is checked
A_QUESTION = "Why is the sky blue?"  # answered by an engine that is checked, where the data has no prompts
Made = TypeVar("Made")
Unanswered = Chat | SelfPrompt | Beginning


def each_record(
    records: Records, numbers: Iterable[int], make: Callable[[Record, int], Made], skips: Skips
) -> Iterator[tuple[int, Made]]:
    """Yields the number of each record and what `make` makes of the record and its number; one that cannot be read, or
    of which nothing can be made, is counted with its reason instead."""
    for number in numbers:
        try:
            made = make(records[number], number)
        except Skipped as refusal:
            skips.add(number, refusal)
        else:
            yield number, made


@dataclass
class ShardBuilder:
    """Makes the examples of a store's shards; `options` are those of the target, see `for_target`. `processor`: the
    target's, or its tokenizer. `tell` is told of servers that fail. `states_by`: gives the states in the target's
    place."""

    target: PreTrainedModel
    processor: PreTrainedTokenizerBase | ProcessorMixin
    records: Records
    options: PreparationOptions
    skips: Skips
    tell: Tell
    states_by: EngineStates | None = None

    def __post_init__(self):
        options = self.options
        self.tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        vocab_size, _ = shape_of(self.target.get_input_embeddings())
        self.reader: TargetReader | EngineStates | None = None
        if options.states:
            self.reader = self.states_by or TargetReader(self.target, options.layer_ids, reads_alike=True)
        images = images_of(self.target, self.processor, options.template, _why_no_images(self))
        self.maker = ExampleMaker(self.tokenizer, options, vocab_size, {*stop_ids(self.target, self.tokenizer)}, images)
        self.generator: AnswerSource | None = None
        if options.regenerate and options.engine is None:
            self.generator = AnswerGenerator(self.target, self.tokenizer, options)
        elif options.regenerate:
            engine = Servers(options.engine, self.target.name_or_path, self.tell)
            self.generator = EngineAnswers(self.target, self.tokenizer, options, engine, vocab_size)

    def meet_engine(self, complete: Manifest | None) -> None:
        """Checks on the first prompts that the engine answers as the target does; does nothing without an engine.
        `complete`: the manifest of a store with nothing left to answer; the engine is then not asked.

        Raises ValueError where answers differ, RuntimeError where no server is reached.
        """
        if not isinstance(self.generator, EngineAnswers):
            return
        if complete is not None:
            self.generator.recall(complete.source.get("engine", {}))
            return
        prompts, silent = list[Tensor](), Skips(self.records.where)
        for _, made in each_record(self.records, range(len(self.records)), self._unanswered, silent):
            for each in made:
                asks = Chat([{"role": "user", "content": A_QUESTION}]) if isinstance(each, SelfPrompt) else each
                prompts += first_prompt(self.generator, asks)
            if len(prompts) >= PROBES:
                break
        self.generator.meet(prompts[:PROBES])

    def build(self, index: int) -> tuple[list[Columns], Counter[str]]:
        """Returns the examples of a shard, and by reason how many of its records gave none. Of the target's states,
        those of `batch_size` examples of like length are read together; servers are asked for all at once."""
        size = self.options.records_per_shard or RECORDS_PER_SHARD
        numbers = range(index * size, min((index + 1) * size, len(self.records)))
        if self.generator is None:
            made = each_record(self.records, numbers, self._examples, self.skips)
            examples = [example for _, of_record in made for example in of_record]
        else:
            with seeded(seed_of(self.options.seed, index)):
                examples = self._regenerated(self.generator, numbers)
        if self.reader is not None:
            longest_first = sorted(examples, key=lambda example: -len(example["input_ids"]))
            order = [example for example in longest_first if "states" not in example]
            at_once = self.options.batch_size if isinstance(self.reader, TargetReader) else max(1, len(order))
            for start in range(0, len(order), at_once):
                batch = order[start : start + at_once]
                states = self.reader.of_texts([example["input_ids"] for example in batch])
                for example, (aux, last) in zip(batch, states, strict=True):
                    example |= {"states": aux, "last_states": last}
        return examples, self.skips.taken()

    def _examples(self, record: Record, number: int) -> list[Columns]:
        """Returns a record's examples, with the target's states in place of their pixels, at once, so that only one
        record's pixels are in memory."""
        examples = self.maker.examples(record, number)
        for example in examples:
            pixels = example.pop("pixels", None)
            if pixels is not None:
                assert isinstance(self.reader, TargetReader)
                with refused_by("target", (ValueError, RuntimeError)):
                    try:
                        example["states"], example["last_states"] = self.reader.of_images(example["input_ids"], pixels)
                    except torch.OutOfMemoryError as error:  # which is nothing of this record's
                        raise MemoryError(str(error)) from None
        return examples

    @property
    def needs_target(self) -> bool:
        """True where the target, or an engine in its place, answers or gives states."""
        return self.generator is not None or self.reader is not None

    def _regenerated(self, source: AnswerSource, numbers: range) -> list[Columns]:
        """Returns examples in the target's words: chats are answered; of what is no chat, all before the first answer
        is the prompt, or the first half of a plain text."""
        made = each_record(self.records, numbers, self._unanswered, self.skips)
        chats = [(number, each) for number, of_record in made for each in of_record]
        chats.sort(key=lambda pair: isinstance(pair[1], Beginning))  # examples of chats come first in a shard
        unanswered = [chat for _, chat in chats]
        answered = regenerate(source, unanswered, lambda i, refusal: self.skips.add(chats[i][0], refusal))
        examples = list[Columns]()
        for (number, _), of_chat in zip(chats, answered, strict=True):
            for example in of_chat:
                if torch.isin(example["input_ids"], self.maker.images.ids).any():
                    self.skips.add(number, NO_PIXELS)
                else:
                    examples.append({**example})
        if self.options.mask == "all":
            for example in examples:
                example["answers"] = torch.ones_like(example["answers"])
        return examples

    def _unanswered(self, record: Record | SelfPrompt, number: int) -> Sequence[Unanswered]:
        """Returns what of a record the target is to answer, or to go on with."""
        if isinstance(record, SelfPrompt):
            return [self._self_prompt(record)]
        parsed = parse_record(record)
        if isinstance(parsed, Chat):
            return [parsed]
        examples = self.maker.examples(record, number)
        ends = [int(example["answers"].int().argmax()) or len(example["answers"]) // 2 for example in examples]
        return [Beginning(example["input_ids"][:end]) for example, end in zip(examples, ends, strict=True)]

    def _self_prompt(self, record: SelfPrompt) -> SelfPrompt | Beginning:
        """Returns a chat that the target is to write, or, where there is no chat template, the beginning of a text. A
        temperature that the caller gave wins."""
        given, usual = self.options.generation, self.target.generation_config
        temperature = record.temperature
        if {"temperature", "do_sample"} & given.keys():
            is_sampled = given.get("do_sample", usual.do_sample)
            temperature = (given.get("temperature") or usual.temperature or 1.0) if is_sampled else 0.0
        if self.options.chat_template or self.tokenizer.chat_template:
            system = record.system if self._has_system else None
            return replace(record, system=system, temperature=temperature)
        first = torch.tensor([first_token(self.tokenizer)])
        return Beginning(first, temperature or 1.0)  # greedy texts would all be one

    @cached_property
    def _has_system(self) -> bool:
        """True where the template takes a system message."""
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}]
        with suppress(Skipped):
            self.generator.rendered(messages, tokenize=False)
            return True
        return False

    def manifest(self, source: str | None) -> Manifest:
        """Returns the manifest of the store."""
        return Manifest(
            self.target.name_or_path,
            weights_fingerprint(self.target, values=self.needs_target),
            tokenizer_fingerprint(self.tokenizer),
            self._made_of(source),
            self.target.config.get_text_config(decoder=True).hidden_size,
            num_records=len(self.records),
            records_per_shard=self.options.records_per_shard or RECORDS_PER_SHARD,
            commit=getattr(self.target.config, "_commit_hash", None),  # only those of the Hub have one
            layer_ids=self.options.layer_ids,
            dtype=self.options.dtype,
        )

    def _made_of(self, source: str | None) -> dict[str, Any]:
        """Returns all that the examples follow from besides the target and its tokenizer, as the manifest keeps it."""
        options = self.options
        made_of: dict[str, Any] = {
            "data": None if source is None else identity(source, options.split, options.max_samples),
            "max_length": options.max_length,
            "mask": options.mask,
            "seed": options.seed,
            "regenerate": options.regenerate,
            "template_augmentation": options.template_augmentation,
            "chat_template": None if options.chat_template is None else digest(options.chat_template),
            "stop_ids": sorted(self.maker.stop_ids),
        }
        files = None if self.maker.images.why_not else files_digest(self.records, self.tell)
        if files is not None:
            made_of["images"] = files
        if options.template_options:
            made_of["template_options"] = options.template_options
        if options.self_prompts:
            made_of["self_prompts"] = options.self_prompts
        if self.states_by is not None:
            made_of["states_by"] = self.states_by.servers.identity
        if isinstance(self.generator, EngineAnswers):
            made_of["engine"] = self.generator.engine.identity
        elif options.regenerate:
            made_of["batch_size"] = options.batch_size  # generate() pads so many prompts to one length
        if options.regenerate:
            made_of |= {
                "max_new_tokens": options.max_new_tokens,
                "generation": options.generation,
                # what `generation` leaves out is as it says
                "generation_config": digest(self.target.generation_config.to_json_string(ignore_metadata=True)),
            }
        return made_of

    @property
    def earlier(self) -> dict[str, str]:
        """The values of a manifest as earlier versions of this library made them, by field, so that their stores still
        match: the generation config's digest had transformers' version in it."""
        return {"source.generation_config": digest(self.target.generation_config.to_json_string(use_diff=False))}


def _why_no_images(builder: ShardBuilder) -> str | None:
    """Returns why chats with images are left out, None where the target reads their pixels."""
    if not isinstance(builder.reader, TargetReader):
        return f"{ONLY_TEXT} These are read by prepare-data --states, without an engine; train on the store it makes."
    if builder.options.regenerate:
        return f"{ONLY_TEXT} The target is asked for answers without these; expected data whose answers stay."
    if is_spread(builder.target):
        return f"{ONLY_TEXT} They are read by one process; expected a target that is whole in every process."
    return None
