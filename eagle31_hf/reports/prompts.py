"""The prompts a report is about: read from files and datasets, rendered as they are served. T tokens."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..chat_template import as_read
from ..demo import HELD_OUT, held_out_file
from ..training.images import ImageRenderer, Pixels
from ..training.kinds import (
    ANSWER_COLUMNS,
    KINDS,
    QUESTIONS,
    SYSTEM_COLUMNS,
    Chat,
    Tokens,
    check_ids,
    check_text,
    is_filled,
    pair_of,
    parse_record,
    question_of,
    text_of,
)
from ..training.records import Record, read_records
from ..training.skipped import Skipped, Skips, refused_by

PYTHON = "python"  # the built-in set: files of Python's own library
# sets of the Hub that go by a short name: (dataset as `read_records` takes it, split)
NAMED_SETS = {
    # 880 questions of 11 kinds, of which 386 are in the dataset itself
    "speed-bench": ("nvidia/SPEED-Bench:qualitative", "test"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", "train"),  # 80 questions of 8 kinds, the first turns
    "humaneval": ("openai/openai_humaneval", "test"),  # 164 functions of Python to complete
    "gsm8k": ("openai/gsm8k:main", "test"),  # 1,319 word problems
    "longbench": ("zai-org/LongBench-v2", "train"),  # 503 questions about texts of 8k to 2M words
}
# Stands in SPEED-Bench in place of prompts that have another licence; NVIDIA's prepare_data.py (Model-Optimizer,
# examples/specdec_bench) fetches these, and its files can be read here.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
ASKED = ("prompt", "question", "turns", *QUESTIONS)  # columns that ask something, the first that is filled
BESIDE = ("images", "image", *SYSTEM_COLUMNS)  # columns that belong to it
EMPTY, OVER_LONG = "empty prompt", "over-long prompt"
# how a report says what `Prompts.lengthened` makes
LENGTHENED = (
    "Texts go on for as many tokens; chats have the words of other prompts in front of their question. Prompts that are"
    " longer already, or for which there is not as much text, are left out."
)


@dataclass(frozen=True)
class Source:
    """A prompt before it is rendered: a chat's messages up to the target's first turn, plain text, or tokens. Of a chat
    `later` holds the messages that the user sends afterwards, one after each answer."""

    chat: Chat | None = None
    text: str | None = None
    ids: Tensor | None = None
    later: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Returns its text without any template; of tokens, none."""
        if self.chat is None:
            return self.text or ""
        return "\n".join(text_of(message) for message in self.chat.messages)

    @property
    def images(self) -> list[dict[str, Any]]:
        """The parts of a chat's messages that are images; of others, none."""
        return [] if self.chat is None else self.chat.images


def read_sources(name: str, split: str | None = None) -> Iterator[tuple[int, Source | Skipped]]:
    """Yields the prompts of a file, a folder, a dataset of the Hub, one of NAMED_SETS or PYTHON, each with its number,
    a Skipped in place of one that cannot be read. `split` of a dataset: by default "train", of a named set its own.
    Raises what `read_records` raises."""
    if name == PYTHON:
        for number, file in enumerate(HELD_OUT):
            text = held_out_file(file)
            yield number, Source(text=text[len(text) // 3 :])
        return
    records = read_records(*resolved(name, split))
    for number in range(len(records)):
        try:
            yield number, source_of(records[number])
        except Skipped as refusal:
            refusal.place = refusal.place or records.where(number)
            yield number, refusal


def resolved(name: str, split: str | None) -> tuple[str, str]:
    """Returns what `read_records` takes for a named set, file, folder or dataset: its source and split. A file or
    folder of the name of a set goes first."""
    dataset, its_split = (name, "train") if Path(name).exists() else NAMED_SETS.get(name, (name, "train"))
    return dataset, split or its_split


def source_of(record: Record) -> Source:
    """Makes a prompt of a record of training data, of which what the target would answer is left out, or of one that
    has nothing but a question or token ids. Raises Skipped for any other."""
    columns = sorted((name for name in ASKED if name in record), key=lambda name: not is_filled(record[name]))
    pair = pair_of(record)
    is_text = is_filled(record.get("text")) and pair is None
    if is_text or not columns or any(is_filled(record.get(name)) for name in KINDS):
        return _without_answer(record)
    name = pair[0] if pair is not None and is_filled(record[pair[0]]) else columns[0]
    asked = record[name]
    turns = asked if isinstance(asked, list) and asked and isinstance(asked[0], str) else [asked]
    check_text(turns)
    if not turns[0]:
        raise Skipped(EMPTY, f"the column {name!r} is empty; expected a question.")
    if isinstance(turns[0], str) and PLACEHOLDER in turns[0]:
        raise Skipped("placeholder", "stands for a prompt that is not in the dataset; NVIDIA's script fetches it.")
    beside = {other: record.get(other) for other in BESIDE} | {"tools": record.get("tools") if pair else None}
    source = _asked(question_of({**record, name: turns[0]}, name), beside)
    later = tuple(turn for turn in turns[1:] if isinstance(turn, str) and turn)
    return replace(source, later=later) if turns[1:] else source


def _without_answer(record: Record) -> Source:
    """Makes a prompt of a record of training data: of token ids those before the first answer, or all where there are
    none. Raises Skipped for any other record."""
    ids = record.get("input_ids")
    if isinstance(ids, list) and not any(mark in record for mark in ANSWER_COLUMNS):
        record = {**record, "answers": [0] * len(ids)}
    parsed = parse_record(record, ASKED, no_images=None)
    if isinstance(parsed, Chat):
        return _asked(parsed.messages, {"tools": parsed.tools})
    if not isinstance(parsed, Tokens):
        return Source(text=parsed)
    begins = parsed.answers.nonzero()
    before = parsed.input_ids[: int(begins[0])] if len(begins) else parsed.input_ids
    return Source(ids=before if len(before) else parsed.input_ids)


def _asked(messages: list[Any], beside: Record) -> Source:
    """Makes a prompt of messages up to the first answer, with what stands `beside` them in their record."""
    parsed = parse_record({"messages": messages, **beside}, no_images=None)
    assert isinstance(parsed, Chat)
    roles = [message["role"] for message in parsed.messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    if "user" not in roles[:end]:
        raise Skipped("no question", "a chat has no message of a user before the first answer; expected one.")
    asked_later = (text_of(message) for message in parsed.messages[end:] if message["role"] == "user")
    return Source(chat=Chat(parsed.messages[:end], parsed.tools), later=tuple(filter(None, asked_later)))


@dataclass(frozen=True)
class Renderer:
    """Makes token ids of prompts, as they are served: chats by the template, with what asks for an answer at the end;
    texts as the tokenizer has them, at most their first `num_tokens`. A chat for a tokenizer without a template is its
    words. `template_options`: variables of the template, as `enable_thinking`. `images`: renders chats with images."""

    tokenizer: PreTrainedTokenizerBase
    num_tokens: int
    vocab_size: int
    template_options: dict[str, Any]
    images: ImageRenderer = field(default_factory=ImageRenderer)

    def ids(self, source: Source) -> Tensor:
        """Returns the prompt's ids (T,). Raises Skipped for an empty prompt, for ids the target lacks, and for images
        that it does not read."""
        if source.images and self.images.why_not is not None:
            raise Skipped("holds more than text", f"a chat holds an image; {self.images.why_not}")
        if source.ids is not None:
            ids = source.ids
        elif source.chat is None:
            ids = self.plain(source.words)[: self.num_tokens]
        elif source.images:
            ids = self.with_pixels(source.chat)[0]
        elif self.tokenizer.chat_template is not None:
            ids = self.templated(source.chat)
        else:
            ids = self.plain(source.words)
        if not len(ids) or source.text == "":
            raise Skipped(EMPTY)
        check_ids(ids, self.vocab_size)
        return ids

    def with_pixels(self, chat: Chat) -> tuple[Tensor, Pixels]:
        """Returns the ids (T,) of a chat with images as serving renders it, and what the target reads besides."""
        ids, pixels = self.images.inputs(self.images.opened(chat), add_generation_prompt=True)
        return ids, pixels or {}

    def templated(self, chat: Chat) -> Tensor:
        """Returns the ids (T,) of a chat as serving renders it."""
        messages = as_read(self.tokenizer, chat.messages, self.template_options)
        with refused_by("template"):
            rendered: Any = self.tokenizer.apply_chat_template(
                messages,
                tools=chat.tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self.template_options,
            )
        return torch.tensor(rendered["input_ids"], dtype=torch.long)

    def plain(self, text: str, special: bool = True) -> Tensor:
        """Returns the ids (T,) of plain text, with what the tokenizer adds where `special`."""
        with refused_by("tokenizer"):
            return torch.tensor(self.tokenizer(text, add_special_tokens=special)["input_ids"], dtype=torch.long)


class Prompts:
    """The prompts of a report, at most `limit` of them, that leave room for an answer; `skips` counts the others.

    They are of the sources that are given, by default of what the name stands for. `sources` and `ids` have an entry
    for each; `room`: the tokens at most of prompt and answer together, `answer` those of the answer. Raises ValueError
    where no prompt is left.
    """

    def __init__(
        self,
        name: str,
        renderer: Renderer,
        limit: int,
        room: int,
        answer: int,
        sources: Iterable[tuple[int, Source | Skipped]] | None = None,
        report: Any = None,
    ):
        self.name = name
        self.renderer = renderer
        self.room = room
        self.answer = answer
        self.sources, self.ids = list[Source](), list[Tensor]()
        self.skips = Skips(lambda number: f"{name}, prompt {number + 1}", report)
        for number, source in read_sources(name) if sources is None else sources:
            if len(self.sources) == limit:
                break
            try:
                if isinstance(source, Skipped):
                    raise source
                ids = renderer.ids(source)
                if len(ids) + answer > room:
                    found = f"a prompt has {len(ids)} tokens; expected at most {room - answer}, with room to answer"
                    raise Skipped(OVER_LONG, found)
                self.sources.append(source)
                self.ids.append(ids)
            except Skipped as refusal:
                self.skips.add(number, refusal)
        if not self.sources:
            why = "; ".join(self.skips.first) or "it is empty"
            raise ValueError(f"{name}: gives no prompt ({why}); expected chats, questions or texts.")

    def __len__(self) -> int:
        return len(self.ids)

    def pixels_of(self, batch: list[Tensor]) -> Pixels:
        """Returns what the target reads besides the ids of a batch where that is a prompt with images as it is served.
        Images are read anew: the pixels of all prompts may not fit into memory."""
        for source, ids in zip(self.sources, self.ids, strict=True):
            if source.chat is not None and source.images and batch[0] is ids:
                return self.renderer.with_pixels(source.chat)[1]
        return {}

    def check_lengths(self, lengths: Iterable[int]) -> None:
        """Raises ValueError for a context that leaves no room for an answer, or that no prompt can be put in."""
        longest = self.room - self.answer
        for length in lengths:
            if length > longest:
                raise ValueError(
                    f"--lengths: got {length}; expected at most {longest}, which is what the target reads less"
                    f" {self.answer} tokens of the answer."
                )
            if not any(True for _ in self.lengthened(length)):
                raise ValueError(
                    f"--lengths: no prompt can be made {length} tokens long; expected more than the prompts have"
                    f" ({min(map(len, self.ids))} to {max(map(len, self.ids))}), and texts, or other prompts, as long."
                )

    def lengthened(self, num_tokens: int) -> Iterator[tuple[int, Tensor]]:
        """Yields the prompts that can be put in a context of about `num_tokens`, each by its number and ids (T,): a
        text goes on for as long; a chat has the words of other prompts in front of its last message. Left out are those
        that are longer already, and where there is not enough text."""
        for number, (source, ids) in enumerate(zip(self.sources, self.ids, strict=True)):
            longer = None
            with suppress(Skipped):  # a template that refuses what is so long
                longer = self._lengthened(source, ids, number, num_tokens)
            if longer is not None and len(longer) <= self.room - self.answer:  # words may be other tokens in a chat
                yield number, longer

    def _lengthened(self, source: Source, ids: Tensor, number: int, num_tokens: int) -> Tensor | None:
        if len(ids) >= num_tokens or source.images:
            return None
        if source.text is not None:
            longer = replace(self.renderer, num_tokens=num_tokens).ids(source)
            return longer if len(longer) == num_tokens else None
        filler = self._filler(number, num_tokens - len(ids))
        if filler is None:
            return None
        if source.chat is None or self.renderer.tokenizer.chat_template is None:
            return torch.cat((filler, ids))
        text = self.renderer.tokenizer.decode(filler, skip_special_tokens=True)
        *before, last = source.chat.messages
        asked = {**last, "content": f"{text}\n\n{text_of(last)}"}
        return self.renderer.templated(Chat([*before, asked], source.chat.tools))

    def _filler(self, number: int, num_tokens: int) -> Tensor | None:
        """Returns so many ids of the words of the other prompts, those that follow this one first; None where there
        are fewer."""
        parts, count = list[Tensor](), 0
        for step in range(1, len(self)):
            other = (number + step) % len(self)
            words = self.sources[other].words
            part = self.renderer.plain(f"{words}\n\n", special=False) if words else self.ids[other]
            parts.append(part)
            count += len(part)
            if count >= num_tokens:
                return torch.cat(parts)[:num_tokens]
        return None


# Prompts as they should not be: what a drafter makes of them that it was not trained on. The renderings are those of
# "Attention Drift" (arXiv 2605.09992), with a foreign system prompt and noise.
FOREIGN = "You are the captain of a trading vessel in the year 1720. Answer in rhyme, and never mention the weather."
NOISY_SHARE = 0.1  # of the tokens, replaced by random ones
Change = Callable[[Renderer, Source, Tensor, int], Tensor | None]  # makes other ids (T,) of a prompt and its number


def no_bos(renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
    """Leaves out the token that begins every text; None where there is none."""
    return ids[1:] if len(ids) > 1 and ids[0] == renderer.tokenizer.bos_token_id else None


def no_template(renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
    """Renders the words of a chat alone; None for what has no template."""
    has_template = source.chat is not None and renderer.tokenizer.chat_template is not None
    return renderer.plain(source.words) if has_template else None


def neither(renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
    """Renders the words of a chat alone, without the token that begins a text."""
    bare = no_template(renderer, source, ids, number)
    return None if bare is None else no_bos(renderer, source, bare, number)


def foreign_system_prompt(renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
    """Puts another system prompt in place of a chat's; in front of a text, its words."""
    if source.chat is not None and renderer.tokenizer.chat_template is not None:
        asked = [message for message in source.chat.messages if message["role"] not in ("system", "developer")]
        return renderer.templated(Chat([{"role": "system", "content": FOREIGN}, *asked], source.chat.tools))
    begins = int(ids[0] == renderer.tokenizer.bos_token_id)
    words = renderer.plain(f"{FOREIGN}\n\n", special=False)
    return torch.cat((ids[:begins], words, ids[begins:]))


def noise(renderer: Renderer, source: Source, ids: Tensor, number: int) -> Tensor | None:
    """Replaces NOISY_SHARE of the tokens after the first, the same ones for the same `number`."""
    generator = torch.Generator().manual_seed(number)
    hit = torch.rand(len(ids), generator=generator) < NOISY_SHARE
    hit[0] = False
    return torch.where(hit, torch.randint(renderer.vocab_size, (len(ids),), generator=generator), ids)


PERTURBATIONS: dict[str, Change] = {
    "no BOS": no_bos,
    "no template": no_template,
    "no template, no BOS": neither,
    "foreign system prompt": foreign_system_prompt,
    f"{NOISY_SHARE:.0%} of the tokens replaced": noise,
}
