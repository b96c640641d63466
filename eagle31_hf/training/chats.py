"""Training examples from records, rendered as serving renders them. T tokens."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..chat_template import as_read
from .alike_texts import AlikeTexts, num_alike
from .images import NO_PIXELS, ImageRenderer, Pixels
from .kinds import Chat, Tokens, check_ids, parse_record, text_of
from .loss_mask import loss_mask
from .preparation_options import LEAST_TEXT, PreparationOptions
from .records import Record
from .skipped import Skipped, refused_by

RENDERINGS = {  # of a chat: with the template or not, with BOS or not
    "regular": (True, True),
    "no_bos": (True, False),
    "no_template": (False, True),
    "no_bos_no_template": (False, False),
}
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# the fields of which an assistant's message has at least one
SAID = ("content", "tool_calls", "reasoning_content", "reasoning", "thinking")
OTHERWISE = "template refused it: it renders a prompt otherwise once it is answered"


@dataclass
class ExampleMaker:
    """Makes examples, {"input_ids": (T,) int64, "answers": (T,) bool}, as `options` say. `stop_ids`: the ids a turn of
    the target may end with. `images`: renders chats with images, whose examples have "pixels", too."""

    tokenizer: PreTrainedTokenizerBase
    options: PreparationOptions
    vocab_size: int
    stop_ids: set[int]
    images: ImageRenderer = field(default_factory=ImageRenderer)

    def __post_init__(self):
        # With `regenerate`, prompts have to be told from answers, whatever is learnt in the end.
        self.learns_all = self.options.mask == "all" and not self.options.regenerate
        self._texts_of_chat = AlikeTexts(self.tokenizer)

    def examples(self, record: Record, index: int = 0) -> list[dict[str, Any]]:
        """Makes the examples of one record: one of a chat, or one for each answer; of a text one for each piece of it.

        `index`: the record's place in the data, which decides about its augmentation. Raises Skipped for a record that
        gives no example, ValueError for what is wrong with more than the record.
        """
        parsed, most = parse_record(record, no_images=self.images.why_not), self.options.max_length
        if isinstance(parsed, Tokens):
            texts = [parsed]
        else:
            texts = self._chat(parsed, index) if isinstance(parsed, Chat) else self._pieces(parsed)
        for text in texts:
            check_ids(text.input_ids, self.vocab_size)
            if self.learns_all:
                text.answers = torch.ones_like(text.answers)
            of_images = torch.isin(text.input_ids, self.images.ids)
            if bool(of_images.any()) != (text.pixels is not None):
                raise Skipped(NO_PIXELS if text.pixels is None else "images without tokens of their own")
            if of_images[most:].any():
                raise Skipped("over-long prompt", f"an image ends after {most} tokens, max_length.")
            text.answers = text.answers & ~of_images
        # An example has a loss only where two tokens of an answer follow each other: the target gives the first itself,
        # and the drafter drafts from the second on.
        examples = [
            {"input_ids": text.input_ids[:most].clone(), "answers": text.answers[:most].clone()}
            | ({} if text.pixels is None else {"pixels": text.pixels})
            for text in texts
        ]
        kept = [example for example in examples if loss_mask(example["answers"][None], 0).any()]
        if not kept:
            is_long = any(len(text.input_ids) > most for text in texts)
            is_silent = not any(text.answers.any() for text in texts)
            raise Skipped("no answer" if is_silent else "over-long prompt" if is_long else "too short")
        return kept

    def _pieces(self, text: str) -> list[Tokens]:
        with refused_by("tokenizer"):
            ids = torch.tensor(self.tokenizer(text)["input_ids"], dtype=torch.long)
        pieces = [piece for piece in ids.split(self.options.max_length) if len(piece) >= LEAST_TEXT]
        if not pieces:
            raise Skipped("too short")
        return [Tokens(piece, torch.ones_like(piece, dtype=torch.bool)) for piece in pieces]

    def _chat(self, chat: Chat, index: int) -> list[Tokens]:
        if not chat.messages:
            raise Skipped("no answer")
        if chat.images:
            return self._by_prefixes(self.images.opened(chat))
        draw = random.Random(f"{self.options.seed}/{index}")
        regular, *others = RENDERINGS.values()
        has_template, has_bos = draw.choice(others) if draw.random() < self.options.template_augmentation else regular
        texts = self._templated(chat) if has_template else [self._bare(chat)]
        bos = self.tokenizer.bos_token_id
        if has_bos:
            return texts
        return [Tokens(t.input_ids[1:], t.answers[1:]) if t.input_ids[:1].tolist() == [bos] else t for t in texts]

    def _bare(self, chat: Chat) -> Tokens:
        """Renders contents alone, a line each; the line break after an answer is not part of it."""
        bos = self.tokenizer.bos_token_id
        ids = [bos] if self.tokenizer("")["input_ids"][:1] == [bos] else []
        answers = [False] * len(ids)
        for number, message in enumerate(chat.messages):
            between = [("\n", False)] if number else []
            for part, is_answer in [*between, (text_of(message), message["role"] == "assistant")]:
                with refused_by("tokenizer"):
                    piece = self.tokenizer(part, add_special_tokens=False)["input_ids"]
                ids += piece
                answers += [is_answer] * len(piece)
        return _tokens(ids, answers)

    def _templated(self, chat: Chat) -> list[Tokens]:
        if self.options.chat_template is None and self.tokenizer.chat_template is None:
            raise ValueError(
                "the record is a chat and the tokenizer has no chat template; expected one. Pass chat_template, or use"
                " the tokenizer of the instruction-tuned target."
            )
        if self.learns_all:
            ids = self._rendered(chat)
            return [_tokens(ids, [False] * len(ids))]
        # Slow tokenizers do not say where in the text their tokens lie, which the template's generation marks need.
        template = self.tokenizer.get_chat_template(self.options.chat_template, chat.tools)
        return (
            [self._by_marks(chat)]
            if self.tokenizer.is_fast and GENERATION.search(template)
            else self._by_prefixes(chat)
        )

    def _render(self, chat: Chat, num_messages: int | None = None, **options: Any) -> Any:
        messages = as_read(self.tokenizer, chat.messages[:num_messages], self.options.template)
        with refused_by("template"):
            return self.tokenizer.apply_chat_template(messages, tools=chat.tools, **self.options.template | options)

    def _rendered(self, chat: Chat, num_messages: int | None = None, **options: Any) -> list[int]:
        """Returns the ids of the first messages of a chat, by default of all."""
        if chat.images:
            return self.images.inputs(chat, num_messages, **options)[0].tolist()
        text = self._render(chat, num_messages, tokenize=False, **options)
        with refused_by("template"):
            return self._texts_of_chat.ids(text)

    def _by_marks(self, chat: Chat) -> Tokens:
        """Renders the chat; answers are the parts that the template marks as generated."""
        rendered = self._render(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids = rendered["input_ids"]
        answers = [False] * len(rendered["input_ids"])
        end = 0
        for is_answer, run in groupby(rendered["assistant_masks"]):
            begin, end = end, end + len([*run])
            if is_answer:
                self._mark(ids, answers, begin, end)
        return _tokens(ids, answers)

    def _by_prefixes(self, chat: Chat) -> list[Tokens]:
        """Renders the chat; an answer is what its message adds to the prompt before it. Returns one text where no later
        message changes that, else one for each answer."""
        whole, pixels = self._reference(chat)
        turns = []
        for number, message in enumerate(chat.messages):
            # Nobody asks a target to speak first.
            if number and message["role"] == "assistant" and any(message.get(name) for name in SAID):
                is_last = number + 1 == len(chat.messages)
                turns.append((number, *self._turn(chat, number, whole if is_last else None)))
        if any(whole[: len(ids)] != ids for _, ids, _ in turns):
            return [
                _tokens(ids, marks, self.images.inputs(chat, number + 1)[1] if pixels else None)
                for number, ids, marks in turns
            ]
        answers = [False] * len(whole)
        for _, ids, marks in turns:
            if any(marks):  # with the token that ends the turn, where that is the first of the next message
                self._mark(whole, answers, marks.index(True), len(ids) - (ids[-1] in self.stop_ids))
        return [_tokens(whole, answers, pixels)]

    def _reference(self, chat: Chat) -> tuple[list[int], Pixels | None]:
        """Returns the ids of a chat, which its beginnings are compared with, and the pixels of its images."""
        if chat.images:
            ids, pixels = self.images.inputs(chat)
            return ids.tolist(), pixels
        text = self._render(chat, tokenize=False)
        with refused_by("template"):
            return self._texts_of_chat.set_reference(text), None

    def _turn(self, chat: Chat, number: int, ids: list[int] | None = None) -> tuple[list[int], list[bool]]:
        """Renders the chat up to the end of a message, as it is when the target has just given it: the only answer.
        `ids`: the chat up to there, where it is known."""
        prompt = self._rendered(chat, number, add_generation_prompt=True)
        ids = self._rendered(chat, number + 1) if ids is None else ids
        begin = len(prompt)
        if ids[:begin] != prompt:
            begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False)))
            if not chat.images:
                said = _said_after(
                    lambda said, asks: self._render(Chat(said, chat.tools), tokenize=False, add_generation_prompt=asks),
                    chat.messages[: number + 1],
                )
                ids = prompt + (ids[begin:] if said is None else self._texts_of_chat.ids(said))
                begin = len(prompt)
            # They may part within the header of the answer: a line break of the prompt may be one token with more.
            elif begin < len(self._rendered(chat, number)):
                raise Skipped(OTHERWISE)
        answers = [False] * len(ids)
        end = self._mark(ids, answers, begin, len(ids))
        return ids[:end], answers[:end]

    def _mark(self, ids: list[int], answers: list[bool], begin: int, end: int) -> int:
        """Marks an answer up to the token that ends its turn, which may be the one after it, and returns its end.
        Templates go on with a line break."""
        stops = [place for place in range(begin, min(end + 1, len(ids))) if ids[place] in self.stop_ids]
        end = stops[-1] + 1 if stops else end
        if any(token not in self.stop_ids for token in ids[begin:end]):
            answers[begin:end] = [True] * (end - begin)
        return end


def _said_after(render: Callable[[list[dict[str, Any]], bool], str], messages: list[dict[str, Any]]) -> str | None:
    """Returns what the last of messages adds to the prompt of those before it. `render`: renders messages, with what
    asks for an answer or without.

    Templates render a message otherwise where it is the last, and leave out what a prompt ends with (a thought begun,
    or an empty one). Returns None where that is all they do: what is said is then what differs. Raises Skipped where
    nothing tells what is said.
    """
    asked = messages[:-1]
    prompt, answered = render(asked, True), render(messages, False)
    begin = num_alike(prompt, answered)
    if begin == len(prompt):
        return answered[begin:]
    header = len(render(asked, False))  # where that of the answer begins; it is empty where templates have none
    words = num_alike(prompt, render([*asked[:-1], asked[-1] | {"content": "\0"}], True))
    # What is said comes after the prompt from its last words on, or after the header of the answer alone.
    for start in (words, max(begin, header)):
        sign = prompt[start:]
        mark = sign.strip()
        if mark and start >= begin:
            count = prompt[begin:].count(mark)  # earlier messages may be alike
            before, *others = answered[begin:].split(mark, count)
            if len(others) == count and (begin < header or not before.strip()):
                return others[-1].removeprefix(sign[len(sign.rstrip()) :])
    if begin < header and (header < len(prompt) or words >= begin):
        raise Skipped(OTHERWISE)
    return None


def _tokens(ids: list[int], answers: list[bool], pixels: Pixels | None = None) -> Tokens:
    return Tokens(torch.tensor(ids, dtype=torch.long), torch.tensor(answers, dtype=torch.bool), pixels)
