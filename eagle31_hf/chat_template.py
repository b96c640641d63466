"""Messages in the form that a chat template reads. Templates refuse what they do not read, leave it out without an
error, or print it as Python does: words in parts where they read a string, or the other way round; a call's arguments
as JSON where they read an object.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

PROBE = "eagle"  # words that a template is tried with
ARGUMENTS = {"prey": "fish"}  # of a call that a template is tried with
MISREAD = ("{'type'", "{'prey'", '\\"prey')  # parts and arguments as Python writes them, and JSON within JSON
BEGIN_OF_THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
# gpt-oss (the harmony format): a message of each channel, whose marks are special tokens
CHANNEL = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|$)", re.DOTALL)


class Form(NamedTuple):
    """The form of messages that a template reads. `strings`: words as a string alone, `parts`: in parts alone;
    `json_arguments`: a call's arguments as JSON, else as an object."""

    strings: bool
    parts: bool
    json_arguments: bool


_forms: WeakKeyDictionary[Any, dict[str, Form]] = WeakKeyDictionary()  # by tokenizer and template


def as_read(tokenizer: Any, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns messages as the tokenizer's chat template reads them. `options`: arguments of `apply_chat_template`."""
    template = ""
    with suppress(Exception):  # there is none: the caller is told when it is rendered
        template = tokenizer.get_chat_template(options.get("chat_template"))
    known = _forms.setdefault(tokenizer, {})
    if template not in known:
        known[template] = _form_of(tokenizer, options)
    return [_in_form(message, known[template]) for message in messages]


def in_form_of_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose words, where they are a string, are its one part."""
    words = message.get("content")
    return message | {"content": parts_of(words)} if isinstance(words, str) and words else message


def parts_of(words: str) -> list[dict[str, Any]]:
    """Returns words as the content of a message in parts."""
    return [{"type": "text", "text": words}]


def message_of(raw: str, words: str) -> dict[str, Any]:
    """Returns an answer as a message of its chat, by its text with special tokens and by its words; thoughts stand in a
    field of their own, which templates leave out of later prompts."""
    channels = dict(CHANNEL.findall(raw))
    if "final" in channels:
        return {"role": "assistant", "content": channels["final"], "thinking": channels.get("analysis", "")}
    thoughts, mark, rest = words.partition(END_OF_THOUGHT)
    if not mark:
        return {"role": "assistant", "content": words}
    thoughts = thoughts.removeprefix(BEGIN_OF_THOUGHT).strip("\n")
    return {"role": "assistant", "content": rest.lstrip("\n"), "reasoning_content": thoughts}


def _form_of(tokenizer: Any, options: Mapping[str, Any]) -> Form:
    """Tries a template. Of arguments that it reads in neither form it gets objects, as from transformers' server."""

    def rendered(content: Any, *said: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": content}, *said]
        text = ""
        with suppress(Exception):  # a template is a program of its author's, and may raise anything
            text = str(tokenizer.apply_chat_template(messages, **{**options, "tokenize": False, "return_dict": False}))
        return "" if any(mark in text for mark in MISREAD) else text

    def reads(arguments: Any) -> bool:
        call = {"id": "eagle0000", "type": "function", "function": {"name": "hunt", "arguments": arguments}}
        text = rendered(PROBE, {"role": "assistant", "content": "", "tool_calls": [call]})
        return all(word in text for word in ("prey", "fish"))

    in_words, in_parts = rendered(PROBE), rendered(parts_of(PROBE))
    return Form(
        PROBE in in_words and in_parts != in_words,
        PROBE in in_parts and PROBE not in in_words,
        not reads(ARGUMENTS) and reads(json.dumps(ARGUMENTS)),
    )


def _in_form(message: dict[str, Any], form: Form) -> dict[str, Any]:
    if message.get("tool_calls"):
        calls = [_with_arguments(call, form.json_arguments) for call in message["tool_calls"]]
        message = message | {"tool_calls": calls}
    content = message.get("content")
    if content is None:  # as an answer has it that is nothing but calls, and as transformers' own rendering makes it
        return message | {"content": ""}
    if form.strings and isinstance(content, list) and all(isinstance(part.get("text"), str) for part in content):
        between = "" if message.get("role") == "assistant" else " "  # as transformers' server joins what is asked
        return message | {"content": between.join(part["text"] for part in content)}
    return in_form_of_parts(message) if form.parts else message


def _with_arguments(call: Mapping[str, Any], as_json: bool) -> Mapping[str, Any]:
    """Returns a call of a tool with its arguments as JSON, or as an object."""
    function = call.get("function", call)
    given = function.get("arguments") if isinstance(function, Mapping) else None
    arguments = given
    if isinstance(given, str) and not as_json:
        with suppress(ValueError, RecursionError):  # what is no object stays as it is
            found = json.loads(given)
            arguments = found if isinstance(found, Mapping) else given
    elif isinstance(given, Mapping) and as_json:
        arguments = json.dumps(given, ensure_ascii=False)
    if arguments is given:
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
