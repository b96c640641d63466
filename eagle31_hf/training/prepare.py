"""Training data made into a store: records become examples, in the target's own words and with its states where asked.

Shards are made one by one from the records that are theirs, and from nothing else: a run that was stopped goes on, and
several processes can make some each. T tokens of an example, n aux hidden states, ht target width.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration import Eagle31Config
from ..seeding import seeded
from ..storage.fingerprints import digest, tokenizer_fingerprint, weights_fingerprint
from ..targets.ends import shape_of
from ..targets.layers import decoder_layers
from .answers import AnswerGenerator, AnswerSource, seed_of, stop_ids
from .chats import ExampleMaker
from .ends import tensor_parallel_group
from .engines import EngineAnswers, EngineOptions, engine_answers
from .kinds import Chat, parse_record
from .packing import Examples
from .records import Joined, Record, Records, identity, read_records
from .regenerate import continue_texts, first_prompt, regenerate
from .self_prompts import SelfPrompt, SelfPrompts, first_token
from .shapes import layer_ids_for
from .skipped import Skipped, Skips, refused_by
from .store import (
    MANIFEST,
    Columns,
    HiddenStateStore,
    Manifest,
    missing_shards,
    open_store,
    read_manifest,
    save_target_parts,
    write_shard,
)
from .target import TargetReader

MOST_REASONS = 5  # in an error
PROBES = 3  # prompts by which an engine is checked
RECORDS_PER_SHARD = 64
RECORDS_PER_SHARD_OF_AN_ENGINE = 1024  # it answers what it is asked at once many times faster than one by one
A_QUESTION = "Why is the sky blue?"  # answered by an engine that is checked, where the data has no prompts
Made = TypeVar("Made")
Prompt = tuple[Tensor, float | None]  # ids (T,), and the temperature of what follows them (None: as the source samples)
Progress = Callable[[str], None]  # is told one line at a time


@dataclass(frozen=True)
class PreparationOptions:
    """Options of training data.

    `split` is that of a dataset; `max_length`, `mask`, `template_augmentation`, `chat_template`, `template_options` and
    `seed` are `ExampleMaker`'s. `regenerate`: answers are the target's own, of at most `max_new_tokens` tokens, by
    generate() with the arguments `generation`; where there is an `engine`, by this one, as generate() would sample.
    `self_prompts`: so many chats are added whose user is the target, too, see `SelfPrompts`; with `regenerate` only.
    `states`: the target's states are stored too, those at `layer_ids` (by default where drafters read) in `dtype`, one
    of STORED_DTYPES (by default the target's). `batch_size`: examples the target reads, or prompts it answers, at once.
    `records_per_shard`: by default 64, of an engine's answers without states 1,024.
    Raises ValueError for options that do not go together.
    """

    max_length: int = 2048
    mask: str = "answers"
    split: str = "train"
    seed: int = 0
    template_augmentation: float = 0.0
    chat_template: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    regenerate: bool = False
    self_prompts: int = 0
    max_new_tokens: int = 1024
    generation: dict[str, Any] = field(default_factory=dict)
    engine: EngineOptions | None = None
    states: bool = False
    layer_ids: list[int] | None = None
    dtype: str | None = None
    batch_size: int = 8
    records_per_shard: int | None = None

    def __post_init__(self) -> None:
        if not self.states and (self.layer_ids, self.dtype) != (None, None):
            raise ValueError(
                f"layer_ids is {self.layer_ids} and dtype {self.dtype!r} without states; expected neither, or states."
            )
        if self.self_prompts < 0 or (self.self_prompts and not self.regenerate):
            raise ValueError(
                f"self_prompts is {self.self_prompts} and regenerate {self.regenerate}; expected a number of chats,"
                " whose answers are the target's, too."
            )
        if self.regenerate and self.template_augmentation:
            raise ValueError(
                f"template_augmentation is {self.template_augmentation}; expected 0 with regenerate: prompts are as"
                " they are served."
            )

        if self.states and self.engine is not None and not self.engine.is_served:
            raise ValueError(
                "the engine is vllm and states are to be stored, for which the target would be loaded twice here;"
                " expected the address of a server, or no states."
            )

    def for_target(self, target: PreTrainedModel) -> "PreparationOptions":
        """Returns the options with the records of a shard and the layers and dtype of the states filled in. Raises
        ValueError for layers that the target does not have."""
        if not self.states:
            usual = RECORDS_PER_SHARD if self.engine is None else RECORDS_PER_SHARD_OF_AN_ENGINE
            return replace(self, records_per_shard=self.records_per_shard or usual)
        asked = self.layer_ids or layer_ids_for(target.config.get_text_config(decoder=True))
        layer_ids = Eagle31Config(aux_hidden_state_layer_ids=asked).resolve_layer_ids(len(decoder_layers(target)))
        dtype = self.dtype or str(target.dtype).removeprefix("torch.")
        num_records = self.records_per_shard or RECORDS_PER_SHARD
        return replace(self, layer_ids=layer_ids, dtype=dtype, records_per_shard=num_records)


@dataclass
class Prepared:
    """The contents of a store by now: examples (`rows`), their tokens, and by reason what gave none; `shards` of
    `num_shards` are there."""

    folder: str
    rows: int
    tokens: int
    skipped: dict[str, int]
    shards: int
    num_shards: int


def prepare_data(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str | None,
    output: str | Path,
    options: PreparationOptions | None = None,
    *,
    part: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> Prepared:
    """Makes the shards that are missing in the store `output`; run again, it goes on.

    `source`: what `read_records` reads, or None where all chats are self-prompted. `part`: makes only the shards whose
    number is part[0] modulo part[1]. A record that gives no example is counted with its reason, and the first ones of
    each reason are told to `progress`, with file and line. Where an engine answers and no states are stored, the target
    may be without weights, on the meta device. Raises ValueError for a target whose processes depend on each other,
    where `output` holds something else, where no record gives an example, and for an engine that does not give the
    target's answers; RuntimeError where its servers fail.
    """
    if not 0 <= part[0] < part[1]:
        raise ValueError(f"part is {part[0]}/{part[1]}; expected 0/n to n-1/n for n processes.")
    if tensor_parallel_group(target) is not None:
        raise ValueError(
            "the target is tensor-parallel, whose processes cannot each make their own shards; expected a whole one in"
            " every process, or one that device_map spreads over devices."
        )
    options = (options or PreparationOptions()).for_target(target)
    records = _records(source, options)
    skips = Skips(records.where, progress)
    tell = progress or (lambda line: None)
    builder = ShardBuilder(target, tokenizer, records, options, skips, tell)
    builder.meet_engine(tell, None if _is_to_do(output, part) else read_manifest(output))
    open_store(output, builder.manifest(source))
    if builder.reader is not None and part[0] == 0:
        save_target_parts(output, target, builder.reader.scoring.as_dict())
    _make_shards(builder, output, part, tell)
    prepared = _summary(output)
    if prepared.shards == prepared.num_shards and not prepared.rows:
        raise _no_examples(source, records, skips, prepared.skipped)
    return prepared


def _records(source: str | None, options: PreparationOptions) -> Records:
    """Returns the records of a source, and after them those that the target is to write. Raises ValueError where there
    are none of either."""
    own = SelfPrompts(options.self_prompts, options.seed)
    if source is None:
        if not options.self_prompts:
            raise ValueError("there is no data and self_prompts is 0; expected one of the two, or both.")
        return own
    given = read_records(source, options.split)
    return Joined([given, own]) if options.self_prompts else given


def examples_in_memory(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    options: PreparationOptions,
    progress: Progress | None = None,
) -> tuple[Examples, dict[str, int]]:
    """Returns the examples of a source as it is, and by reason how many records gave none; `progress` is told where the
    first ones of each reason are. Options of stores, regeneration and states do not count.

    Raises ValueError where no record gives an example.
    """
    records = read_records(source, options.split)
    skips = Skips(records.where, progress)
    maker = example_maker(target, tokenizer, options)
    made = each_record(records, range(len(records)), maker.examples, skips)
    examples = [example for _, of_record in made for example in of_record]
    skipped = dict(skips.taken())
    if not examples:
        raise _no_examples(source, records, skips, skipped)
    return Examples.from_iterable(examples), skipped


def example_maker(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: PreparationOptions
) -> ExampleMaker:
    """Returns what makes examples of records for a target. In answers that are regenerated all else is a prompt."""
    embedding: Any = target.get_input_embeddings()
    return ExampleMaker(
        tokenizer,
        options.max_length,
        vocab_size=shape_of(embedding)[0],
        mask="answers" if options.regenerate else options.mask,
        template_augmentation=options.template_augmentation,
        seed=options.seed,
        chat_template=options.chat_template,
        stop_ids=set(stop_ids(target, tokenizer)),
        template_options=options.template_options,
    )


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


class ShardBuilder:
    """Makes the examples of a store's shards; `options` are those of the target, see `for_target`. `tell` is told of
    servers that fail."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        records: Records,
        options: PreparationOptions,
        skips: Skips,
        tell: Progress,
    ):
        self.target = target
        self.tokenizer = tokenizer
        self.records = records
        self.options = options
        self.skips = skips
        self.maker = example_maker(target, tokenizer, options)
        self._template = {"chat_template": options.chat_template, **options.template_options}
        self.generator = self._answer_source(tell) if options.regenerate else None
        self.reader = TargetReader(target, options.layer_ids) if options.states else None

    def _answer_source(self, tell: Progress) -> AnswerSource:
        options = self.options
        generator = AnswerGenerator(
            self.target,
            self.tokenizer,
            options.max_length,
            options.max_new_tokens,
            options.batch_size,
            options.generation,
        )
        if options.engine is None:
            return generator
        return engine_answers(generator, options.engine, options.generation, self.maker.vocab_size, tell)

    def meet_engine(self, tell: Progress, complete: Manifest | None) -> None:
        """Checks that the engine, if one answers, gives the target's answers, on the first prompts of the records.
        Where nothing is left to answer, `complete` is the store's manifest, and the engine is not asked.

        Raises ValueError where it does not, RuntimeError where it cannot be reached.
        """
        if not isinstance(self.generator, EngineAnswers):
            return
        if complete is not None:
            self.generator.recall(complete.source.get("engine", {}))
        else:
            self.generator.meet(self._first_prompts(self.generator), tell)

    def _first_prompts(self, source: AnswerSource) -> list[Tensor]:
        prompts, silent = list[Tensor](), Skips(self.records.where)
        for _, made in each_record(self.records, range(len(self.records)), self._chat_or_prompts, silent):
            if isinstance(made, SelfPrompt):
                made = Chat([{"role": "user", "content": A_QUESTION}])
            if isinstance(made, Chat):
                prompts += first_prompt(source, made, **self._template)
            else:
                prompts += [prompt for prompt, _ in made if source.fits(prompt)]
            if len(prompts) >= PROBES:
                break
        return prompts[:PROBES]

    def build(self, index: int) -> tuple[list[Columns], Counter[str]]:
        """Returns the examples of a shard, and by reason how many of its records gave none."""
        size = self.options.records_per_shard or RECORDS_PER_SHARD
        numbers = range(index * size, min((index + 1) * size, len(self.records)))
        if self.generator is None:
            made = each_record(self.records, numbers, self.maker.examples, self.skips)
            examples = [example for _, of_record in made for example in of_record]
        else:
            with seeded(seed_of(self.options.seed, index)):
                examples = self._regenerated(self.generator, numbers)
        if self.reader is not None:
            self._add_states(self.reader, examples)
        return examples, self.skips.taken()

    def _regenerated(self, source: AnswerSource, numbers: range) -> list[Columns]:
        """Returns examples in the target's words: chats are answered; of what is no chat, all before the first answer
        is the prompt, or the first half of a plain text."""
        chats, prompts = list[tuple[int, Chat | SelfPrompt]](), list[tuple[int, Prompt]]()
        for number, made in each_record(self.records, numbers, self._chat_or_prompts, self.skips):
            if isinstance(made, Chat | SelfPrompt):
                chats.append((number, made))
            else:
                prompts += [(number, prompt) for prompt in made]
        answered = regenerate(
            source,
            [chat for _, chat in chats],
            lambda i, refusal: self.skips.add(chats[i][0], refusal),
            **self._template,
        )
        continued = continue_texts(
            source,
            [ids for _, (ids, _) in prompts],
            lambda i, refusal: self.skips.add(prompts[i][0], refusal),
            [temperature for _, (_, temperature) in prompts],
        )
        examples = [{**example} for made in (*answered, *continued) for example in made]
        if self.options.mask == "all":
            for example in examples:
                example["answers"] = torch.ones_like(example["answers"])
        return examples

    def _chat_or_prompts(self, record: Record | SelfPrompt, number: int) -> Chat | SelfPrompt | list[Prompt]:
        if isinstance(record, SelfPrompt):
            return self._self_prompt(record)
        parsed = parse_record(record)
        if isinstance(parsed, Chat):
            return parsed
        examples = self.maker.examples(record, number)
        return [(example["input_ids"][: _end_of_prompt(example)], None) for example in examples]

    def _self_prompt(self, record: SelfPrompt) -> SelfPrompt | list[Prompt]:
        """Returns a chat that the target is to write, or, where there is no chat template, the beginning of a text. A
        temperature that the caller gave wins."""
        given = {"temperature", "do_sample"} & self.options.generation.keys()
        temperature = None if given else record.temperature
        if self.options.chat_template or self.tokenizer.chat_template:
            system = record.system if self._has_system else None
            return replace(record, system=system, temperature=temperature)
        return [(torch.tensor([first_token(self.tokenizer)]), 1.0 if temperature is None else temperature or 1.0)]

    @cached_property
    def _has_system(self) -> bool:
        """True where the template takes a system message."""
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}]
        try:
            with refused_by("template"):
                self.tokenizer.apply_chat_template(messages, tokenize=False, **self._template)
        except Skipped:
            return False
        return True

    def _add_states(self, reader: TargetReader, examples: list[Columns]) -> None:
        """Adds the target's states to the examples; examples of like length are read together."""
        order = sorted(examples, key=lambda example: -len(example["input_ids"]))
        for start in range(0, len(order), self.options.batch_size):
            batch = order[start : start + self.options.batch_size]
            ids = pad_sequence([example["input_ids"] for example in batch], batch_first=True)
            documents = pad_sequence([torch.ones_like(example["input_ids"]) for example in batch], batch_first=True)
            for example, states, last_states in zip(batch, *reader.read(ids, documents), strict=True):
                length = len(example["input_ids"])
                example |= {"states": states[:length], "last_states": last_states[:length]}

    def manifest(self, source: str | None) -> Manifest:
        """Returns the manifest of the store."""
        return Manifest(
            self.target.name_or_path,
            weights_fingerprint(self.target),
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
            "data": None if source is None else identity(source, options.split),
            "max_length": options.max_length,
            "mask": options.mask,
            "seed": options.seed,
            "regenerate": options.regenerate,
            "template_augmentation": options.template_augmentation,
            "chat_template": None if options.chat_template is None else digest(options.chat_template),
            "stop_ids": sorted(self.maker.stop_ids or ()),
        }
        if options.template_options:
            made_of["template_options"] = options.template_options
        if options.self_prompts:
            made_of["self_prompts"] = options.self_prompts
        if options.regenerate:
            made_of |= {
                "max_new_tokens": options.max_new_tokens,
                "generation": options.generation,
                **self._answered_by(),
                # what `generation` leaves out is as it says
                "generation_config": digest(self.target.generation_config.to_json_string(use_diff=False)),
            }
        return made_of

    def _answered_by(self) -> dict[str, Any]:
        """Returns what answers follow from besides the call: the engine, or how many prompts generate() pads to one
        length."""
        if isinstance(self.generator, EngineAnswers):
            return {"engine": self.generator.engine.identity}
        return {"batch_size": self.options.batch_size}


def _end_of_prompt(example: Columns) -> int:
    return int(example["answers"].int().argmax()) or len(example["answers"]) // 2


def _no_examples(source: str | None, records: Records, skips: Skips, counts: dict[str, int]) -> ValueError:
    reasons = ", ".join(f"{count:,}: {reason}" for reason, count in sorted(counts.items())[:MOST_REASONS])
    first = "".join(f" {number}) {text}" for number, text in enumerate(skips.first, 1))
    return ValueError(
        f"{source or 'self-prompts'}: none of its {len(records):,} records makes a row ({reasons}); expected some with"
        " answers." + (f" The first:{first}" if first else "")
    )


def _is_to_do(output: str | Path, part: tuple[int, int]) -> bool:
    """Returns True unless all shards of the part are there."""
    made = (Path(output) / MANIFEST).is_file()
    return not made or any(index % part[1] == part[0] for index in missing_shards(output))


def _make_shards(builder: ShardBuilder, output: str | Path, part: tuple[int, int], progress: Progress) -> None:
    mine = [index for index in missing_shards(output) if index % part[1] == part[0]]
    begin, total = time.monotonic(), 0
    for done, index in enumerate(mine, 1):
        examples, skipped = builder.build(index)
        write_shard(output, index, examples, skipped)
        num_tokens = sum(len(example["input_ids"]) for example in examples)
        total += num_tokens
        seconds = time.monotonic() - begin
        progress(
            f"shard {done} of {len(mine)}: {len(examples):,} rows, {num_tokens:,} tokens; {total / seconds:,.0f}"
            f" tokens/s, {seconds / done * (len(mine) - done) / 60:.0f} minutes left"
        )


def _summary(output: str | Path) -> Prepared:
    store = HiddenStateStore(output, allow_partial=True)
    total = store.manifest.num_shards
    return Prepared(
        str(output), len(store), sum(store.lengths), dict(store.skipped), total - len(missing_shards(output)), total
    )
