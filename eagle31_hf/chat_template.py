"""Messages in the form that a chat template reads. Templates of processors read words in parts alone, and leave out
those of a plain string without an error.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

PROBE = "eagle"  # words that a template is tried with
_reads_parts: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()  # by tokenizer and template


def as_read(tokenizer: Any, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns messages with their words in parts, where the tokenizer's chat template reads no others. `options`:
    arguments of `apply_chat_template`."""
    template = ""
    with suppress(Exception):  # there is none: the caller is told when it is rendered
        template = tokenizer.get_chat_template(options.get("chat_template"))
    if "type" not in template:  # which tells parts from each other
        return list(messages)
    known = _reads_parts.setdefault(tokenizer, {})
    if template not in known:
        in_words, in_parts = (_has_probe(tokenizer, content, options) for content in (PROBE, parts_of(PROBE)))
        known[template] = in_parts and not in_words
    return [in_form_of_parts(message) for message in messages] if known[template] else list(messages)


def in_form_of_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose words, where they are a string, are its one part."""
    words = message.get("content")
    return message | {"content": parts_of(words)} if isinstance(words, str) and words else message


def parts_of(words: str) -> list[dict[str, Any]]:
    """Returns words as the content of a message in parts."""
    return [{"type": "text", "text": words}]


def _has_probe(tokenizer: Any, content: Any, options: Mapping[str, Any]) -> bool:
    with suppress(Exception):  # a template is a program of its author's, and may raise anything
        messages = [{"role": "user", "content": content}]
        return PROBE in tokenizer.apply_chat_template(messages, **{**options, "tokenize": False, "return_dict": False})
    return False
