"""Kinds of records: chats, plain text, and tokens. Their fields may have any type that JSON has. T tokens."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from reprlib import Repr
from typing import Any

import torch
from torch import Tensor

from ..images import Picture
from .records import Record
from .skipped import Skipped

SHORT = Repr()
SHORT.maxstring = SHORT.maxother = 60
ONLY_TEXT = "expected text: a drafter is trained on tokens, and those of images mean nothing without their pixels."
IMAGE_PARTS = ("image", "image_url", "input_image")  # types of a part that is an image, by transformers and two APIs
PLACE = "<image>"  # in words, where the data of LLaVA has an image
SYSTEM_COLUMNS = ("system", "system_prompt")  # beside messages, or a question and its answer
SOURCES = ("image", "path", "url", "base64", "image_url")  # fields of such a part that may say which image it is


@dataclass
class Chat:
    """A chat: messages as chat templates take them, and the tools offered in it. Parts of a message that are images
    have a `Picture` under "image"."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    @property
    def images(self) -> list[dict[str, Any]]:
        """The parts of its messages that are images, in their order."""
        contents = (message.get("content") for message in self.messages)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return [part for part in parts if part.get("type") == "image"]


def text_of(message: dict[str, Any]) -> str:
    """Returns the words of a message: its content, or those parts of it that are text."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


@dataclass
class Tokens:
    """A text as tokens: `input_ids` (T,) int64; `answers` (T,) bool, which of them belong to answers; `pixels`: what
    the target reads besides, where images are in it."""

    input_ids: Tensor
    answers: Tensor
    pixels: Mapping[str, Tensor] | None = None


ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "claude", "model", "chatbot"), "assistant"),
    "human": "user",
    "observation": "tool",
}


def tokens_of(record: Record) -> Tokens:
    """Reads a record that has been tokenized already, its answers under any of ANSWER_COLUMNS. Raises Skipped where ids
    or answers are missing, differ in number or are of another type."""
    column = next((name for name in ANSWER_COLUMNS if record.get(name) is not None), None)
    if column is None or record.get("input_ids") is None:
        names = SHORT.repr([*record]) if len(record) > 8 else ", ".join(map(str, record)) or "nothing"
        raise Skipped(
            "input_ids without answers",
            f"a row has {names}; expected input_ids and one of {', '.join(ANSWER_COLUMNS)}.",
        )
    ids, answers = _whole_numbers(record, "input_ids"), ANSWER_COLUMNS[column](record, column)
    if ids.dim() != 1 or ids.shape != answers.shape:
        raise Skipped(
            "input_ids and answers differ in number",
            f"input_ids are {tuple(ids.shape)} and {column} {tuple(answers.shape)}; expected one mark for each id.",
        )
    return Tokens(ids, answers)


def _whole_numbers(record: Record, column: str) -> Tensor:
    """Returns a column of integers as int64; it may be empty. Raises Skipped for floats, whole ones too."""
    values = record[column]
    others = {*map(type, values)} - {int} if isinstance(values, list | tuple) else ()
    is_refused = any(kind is bool or not issubclass(kind, Integral) for kind in others)
    numbers = None if is_refused else _tensor(values)
    if numbers is None or (
        numbers.numel() and (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
    ):
        raise _wrong(f"{column} are", "no integers", values, "a list of integers")
    return numbers.long()


def _zeros_and_ones(record: Record, column: str) -> Tensor:
    """Returns a column of marks, bool or 0 and 1, as bool. Raises Skipped for others."""
    marks = _tensor(record[column])
    if marks is None or not ((marks == 0) | (marks == 1)).all():
        raise _wrong(f"{column} are", "not 0 or 1", record[column], "true or false, or 1 or 0, each")
    return marks.bool()


def _tensor(values: Any) -> Tensor | None:
    """None for what makes no tensor: text, lists of several lengths, integers of more than 64 bits."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        return None


ANSWER_COLUMNS: dict[str, Callable[[Record, str], Tensor]] = {  # a column -> reads which tokens belong to answers
    **dict.fromkeys(("answers", "loss_mask", "assistant_masks"), _zeros_and_ones),
    "labels": lambda record, column: _whole_numbers(record, column) != -100,
}


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raises Skipped for ids (T,) the target does not have: on a GPU they would fail as an assertion that explains
    nothing."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise Skipped(
            "token ids the target does not have",
            f"token ids go from {int(ids.min())} to {int(ids.max())}; expected 0 to {vocab_size - 1}, the target's."
            " They are of another tokenizer: use the one that belongs to the target.",
        )


def _wrong(what: str, fault: str, value: Any, expected: str) -> Skipped:
    """Returns the refusal of a value: its reason is `what` and `fault`, as in "tools are" and "no list of objects", and
    its details quote the value and say what was expected."""
    return Skipped(f"{what} {fault}", f"{what} {SHORT.repr(value)}; expected {expected}.")


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(f"{name} is", "no text", value, "text")
    return value


def check_text(parsed: Any) -> None:
    """Raises Skipped for half a surrogate pair, which no tokenizer reads, anywhere in a parsed record."""
    try:
        json.dumps(parsed, ensure_ascii=False, default=str).encode()
    except RecursionError:
        raise Skipped("nested too deep") from None
    except UnicodeEncodeError as error:
        text = SHORT.repr(error.object[max(0, error.start - 20) : error.end + 20])
        raise Skipped("text is not Unicode", f"text holds half a surrogate pair ({text}); expected Unicode.") from None


def _message(turn: Any) -> dict[str, Any]:
    """Returns a message as templates take it, from one with role and content, or with from and value (ShareGPT's): its
    fields that are None dropped, the parts of its content in one form, images as `Picture`s. Raises Skipped for other
    types."""
    is_native = isinstance(turn, Mapping) and turn.get("role") is not None
    if not is_native and not (isinstance(turn, Mapping) and {"from", "value"} <= turn.keys()):
        expected = "expected an object with role and content, or from and value"
        raise Skipped("a message without role and content", f"a message is {SHORT.repr(turn)}; {expected}.")
    if is_native:
        # Columns of a dataset hold None where a message lacks a field; a template would take that for a value.
        message = {name: value for name, value in turn.items() if value is not None}
    else:
        speaker = _string(turn["from"], "from").lower()
        if speaker not in ROLES:
            raise Skipped(
                "a message from nobody known",
                f"a message is from {SHORT.repr(turn['from'])}; expected one of {', '.join(ROLES)}.",
            )
        message = {"role": ROLES[speaker], "content": "" if turn["value"] is None else turn["value"]}
    _string(message["role"], "role")
    for name in ("reasoning_content", "reasoning", "thinking"):
        _string(message.get(name, ""), name)
    calls, content = message.get("tool_calls", []), message.get("content", "")
    if not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise _wrong("tool_calls are", "no list of objects", calls, "a list of objects")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text") or "", str) for part in content):
            raise _wrong("content is", "no text", content, "text, or a list of objects with text")
        # None where a part lacks what others of its column have
        parts = [{name: value for name, value in part.items() if value is not None} for part in content]
        return message | {"content": [_part(part) for part in parts]}
    _string(content, "content")
    return message


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Returns a part of a message that is text as {"type": "text"} with its text, one that is an image as {"type":
    "image"} with its `Picture`, if it says which image it is."""
    kind = str(part.get("type", "text"))  # "input_text" of one API, "output_text" of another
    if kind in ("text", "input_text", "output_text"):
        return part | {"type": "text", "text": part.get("text") or ""}  # templates leave out other types
    if kind.endswith("text"):
        return part
    if kind not in IMAGE_PARTS:
        raise Skipped("holds more than text", f"content holds a part of type {SHORT.repr(kind)}; {ONLY_TEXT}")
    name = next((name for name in SOURCES if name in part), None)
    if name is None:
        return {"type": "image"}
    source = part[name]["url"] if isinstance(part[name], Mapping) and "url" in part[name] else part[name]
    return {"type": "image", "image": _picture(f"data:,{source}" if name == "base64" else source)}


def _picture(source: Any) -> Picture:
    """Returns an image of any source that a `Picture` has."""
    if isinstance(source, Picture):
        return source
    fields = (source.get("bytes"), source.get("path")) if isinstance(source, Mapping) else (source,)
    if not any(isinstance(value, str | bytes) or hasattr(value, "convert") for value in fields):  # as Pillow's have it
        raise Skipped("an image of no known kind", f"an image is {SHORT.repr(source)}; expected a path or its bytes.")
    return Picture(source)


def _chat(record: Record, turns: Any, name: str) -> Chat:
    """Makes a chat of messages, after the system prompt that a column beside them may have, with the tools of
    another, which may be JSON."""
    if not isinstance(turns, list | tuple):
        raise _wrong(f"{name} is", "no list", turns, "a list of messages")
    messages = [_message(turn) for turn in turns]
    systems = [text for text in map(record.get, SYSTEM_COLUMNS) if isinstance(text, str) and text.strip()]
    if systems and messages and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": systems[0]})
    tools = given = record.get("tools")
    if isinstance(given, str) and given.strip():
        with suppress(ValueError, RecursionError):  # else it is still a string, which is refused
            tools = json.loads(given)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise _wrong("tools are", "no list of objects", given, "a list of objects, or that as JSON")
    return Chat(messages, tools or None)


def images_beside(record: Record) -> list[Any]:
    """Returns the images of a record's column `images` or `image`."""
    given = record.get("images") or record.get("image")
    return list(given) if isinstance(given, list | tuple) else [given] if given else []


def _place_images(chat: Chat, given: list[Any]) -> None:
    """Puts images into the parts of a chat that name none, of a chat without such parts where its words say PLACE.
    Raises Skipped where they are not as many."""
    if not chat.images:
        chat.messages = [_with_places(message) for message in chat.messages]
    places = [part for part in chat.images if "image" not in part]
    if len(given) != len(places):
        raise Skipped(
            "images and their places differ in number",
            f"{len(given)} images stand beside the messages, and {len(places)} parts of type 'image', or {PLACE} in its"
            " words, name none; expected as many.",
        )
    for part, source in zip(places, given, strict=True):
        part["image"] = _picture(source)


def _with_places(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its words cut into parts where they say PLACE."""
    words = message.get("content")
    if message["role"] == "assistant" or not isinstance(words, str) or PLACE not in words:
        return message
    parts = list[dict[str, Any]]()
    for number, text in enumerate(words.split(PLACE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text.strip()}] if text.strip() else []
    return message | {"content": parts}


def is_filled(value: Any) -> bool:
    """Returns whether a column holds anything: neither None nor an empty text or list."""
    return value is not None and not (isinstance(value, str | list | tuple) and not value)


def question_of(record: Record, name: str) -> list[Any]:
    """Returns the messages that ask what a record's column of QUESTIONS asks: those that it has, as they are, or one
    made of its words. These follow the text, or texts, that they are about (`context`), and are followed by the choices
    of an answer and an instruction's input. Images beside them for which they have no PLACE go first."""
    asked = record[name]
    if isinstance(asked, list | tuple):
        return list(asked)
    choices = [f"({letter}) {record[f'choice_{letter}']}" for letter in "ABCD" if record.get(f"choice_{letter}")]
    context = record.get("context") or ""
    if isinstance(context, list | tuple) and all(isinstance(text, str) for text in context):
        context = "\n\n".join(context)
    behind = _string(record.get("input") or "", "input") if name == "instruction" else ""
    words = "\n".join([_string(asked, name), *choices])
    words = "\n\n".join(filter(None, (context if isinstance(context, str) else "", words, behind)))
    return [{"role": "user", "content": PLACE * (len(images_beside(record)) - words.count(PLACE)) + words}]


def pair_of(record: Record) -> tuple[str, str] | None:
    """Returns the columns of a record's question and answer: the first of PAIRS that are both filled, or else both
    there; None where there are none."""
    there = [pair for pair in PAIRS if all(record.get(name) is not None for name in pair)]
    filled = [pair for pair in there if all(is_filled(record[name]) for name in pair)]
    return next(iter(filled or there), None)


# Columns of a question and its answer, as published sets name them. A `prompt` may be all of a formatted text, and an
# `answer` the bare result beside a `solution`.
PAIRS = (
    ("instruction", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "response"),
    ("problem", "solution"),
    ("question", "solution"),
    ("question", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("inputs", "targets"),
)
QUESTIONS = tuple(dict.fromkeys(question for question, _ in PAIRS))
# other columns that tell the kind of a record, before those of a question; `text` is after them
KINDS: dict[str, Callable[[Record], Chat | str | Tokens]] = {
    "input_ids": tokens_of,
    "messages": lambda record: _chat(record, record["messages"], "messages"),
    "conversations": lambda record: _chat(record, record["conversations"], "conversations"),
}


def parse_record(record: Record, others: Iterable[str] = (), no_images: str | None = ONLY_TEXT) -> Chat | str | Tokens:
    """Parses a record into a chat, plain text or tokens. Raises Skipped for a record of no known kind, and for fields
    of other types; `others`: columns that a caller reads besides, for the message. `no_images`: the reason to skip
    chats with images, None where the caller reads images."""
    parsed = _parsed(record, others)
    if isinstance(parsed, Chat) and (parsed.images or images_beside(record)):
        if no_images is not None:
            raise Skipped("holds more than text", f"a chat holds an image; {no_images}")
        _place_images(parsed, images_beside(record))
    if not isinstance(parsed, Tokens):
        check_text([parsed.messages, parsed.tools] if isinstance(parsed, Chat) else parsed)
    return parsed


def _parsed(record: Record, others: Iterable[str]) -> Chat | str | Tokens:
    there = [name for name in KINDS if record.get(name) is not None]
    filled = [name for name in there if is_filled(record[name])]
    pair = pair_of(record)
    if filled or (there and pair is None):
        name = (filled or there)[0]
        return KINDS[name](record)
    if pair is not None:
        asked, answer = pair
        said = record[answer]
        if not isinstance(said, list | tuple):
            said = [{"role": "assistant", "content": _string(said, answer)}]
        return _chat(record, [*question_of(record, asked), *said], asked)
    if record.get("text") is not None:
        return _string(record["text"], "text")
    found = sorted(name for name, value in record.items() if value is not None)
    names = SHORT.repr(found) if len(found) > 8 else ", ".join(found) or "nothing"
    kinds = "; ".join([*KINDS, *map(" and ".join, PAIRS), "text", *others])
    raise Skipped("of no known kind", f"a record has {names}; expected one of: {kinds}.")
