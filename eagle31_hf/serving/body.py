"""The body of a request: read as JSON, checked field by field, and returned as transformers' handlers read it."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..json_file import levels, parse_value
from ..targets.context import why_too_long
from .fields import (
    FIELDS,
    GENERATION,
    IGNORED,
    MOST_ITEMS,
    ONLY_DEFAULT,
    REQUIRED,
    RequestError,
    expect,
    is_number,
    shown,
)
from .messages import MOST_IMAGES, checked_input, checked_messages, checked_tools, images

MOST_VALUES = 200_000
MOST_DEPTH = 64
LONGEST_OPTION = 10_000  # characters of a variable of the chat template
LEAST_TEMPERATURE = 1e-3  # a lower one is greedy: logits would overflow
NO_MODEL = "dummy"  # what huggingface_hub's client sends for a server that serves one model
SURROGATE = re.compile("[\ud800-\udfff]")
CONFIG = "generation_config"
TEMPLATE_OPTIONS = "chat_template_kwargs"


@dataclass(frozen=True)
class Served:
    """The pair that is served. `model`: the one name it answers to; `vocab_size` and `context`: the target's, in
    tokens, None for a context without end; `template_options`: the variables of the chat template that a client may
    set, and `template_arguments`: names that it may not use; `reads_images`: whether messages may hold images."""

    model: str
    vocab_size: int
    context: int | None
    template_options: frozenset[str]
    template_arguments: frozenset[str]
    reads_images: bool


def parsed(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of a request. Raises RequestError for anything else."""
    return _object(data, "the request", "one JSON object")


def _object(data: bytes | str, what: str, expected: str, param: str | None = None) -> dict[str, Any]:
    try:
        value = parse_value(data if isinstance(data, str) else data.decode())
    except ValueError as error:
        raise RequestError(f"{what} is not JSON ({error}); expected {expected}.", param) from None
    if not isinstance(value, dict):
        raise RequestError(f"{what} is {shown(value)}; expected {expected}.", param)
    return value


def checked(route: str, body: dict[str, Any], served: Served) -> dict[str, Any]:
    """Returns the fields of a request that the server reads. Raises RequestError for the first that is wrong."""
    length = sum(map(len, _texts(body)))
    fields = FIELDS[route]
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in fields:
            expect(fields[name].holds(value), value, fields[name].expected, name)
        elif name in ONLY_DEFAULT:
            is_usual = any(value == usual and type(value) is type(usual) for usual in ONLY_DEFAULT[name])
            expect(is_usual, value, f"{' or '.join(map(shown, ONLY_DEFAULT[name]))}: nothing else is served", name)
        elif name not in IGNORED:
            raise RequestError(f"{shown(name)} is no field of {route}; expected some of {', '.join(fields)}.", name)
    for name in REQUIRED:
        if name in fields and name not in given:
            raise RequestError(f"{name} is missing; expected {fields[name].expected}.", name)
    name = given.pop("model", served.model)
    if name not in (served.model, NO_MODEL):
        message = f"model is {shown(name)}; expected {shown(served.model)}, the only one here."
        raise RequestError(message, "model", "model_not_found")
    if given.get("tool_choice") == "none":
        given.pop("tools", None)
    read = {name: value for name, value in given.items() if name in fields}
    read |= {name: convert(read[name], served) for name, convert in CONVERTERS.items() if name in read}
    pictures = [image for name in ("messages", "input") for image in images(read.get(name, ""))]
    if len(pictures) > MOST_IMAGES:
        raise RequestError(f"the request has {len(pictures)} images; expected at most {MOST_IMAGES}.")
    why = why_too_long(length - sum(map(len, pictures)), served.context)
    if why is not None:
        raise RequestError(f"the request {why}", code="context_length_exceeded")
    return {"stream": False, **read}


def _texts(body: dict[str, Any]) -> Iterator[str]:
    """Yields all text of a request. Raises RequestError where there are too many values, or they are nested too deep,
    and for text that is no UTF-8."""
    count = 0
    for depth, level in enumerate(levels(body), 1):
        count += len(level)
        if depth > MOST_DEPTH:
            raise RequestError(f"the request is nested more than {MOST_DEPTH} deep; expected less.")
        if count > MOST_VALUES:
            raise RequestError(f"the request has more than {MOST_VALUES} values; expected fewer.")
        if any(len(value) > MOST_ITEMS for value in level if isinstance(value, list | dict)):
            raise RequestError(f"the request has a list or an object of more than {MOST_ITEMS} values; expected fewer.")
        for text in level:
            if isinstance(text, str):
                found = SURROGATE.search(text)
                if found:
                    raise RequestError(f"the request has the lone surrogate {found[0]!a}; expected text in UTF-8.")
                yield text


def _generation_config(text: str, served: Served) -> str:
    """Returns the arguments of generate() in a request, for `GenerationConfig`. Clients send whole configs: nulls
    and empty lists, for what is not set, are left out. Raises RequestError for an argument that a client may not give,
    or not with this value."""
    given = dict[str, Any]()
    for name, value in _object(text, CONFIG, "an object", CONFIG).items():
        if value in (None, []) or name == "transformers_version":
            continue
        if name not in GENERATION:
            raise RequestError(f"{CONFIG} has {shown(name)}; expected some of {', '.join(GENERATION)}.", CONFIG)
        expect(GENERATION[name].holds(value), value, GENERATION[name].expected, f"{CONFIG}.{name}", CONFIG)
        if name.endswith(("_token_id", "_tokens")) and not name.endswith("_new_tokens"):
            _check_ids(name, value if isinstance(value, list) else [value], served)
        given[name] = float(value) if GENERATION[name].is_real else value
    if given.get("temperature", 1) < LEAST_TEMPERATURE:
        del given["temperature"]
        given["do_sample"] = False
    return json.dumps(given)


def _check_ids(name: str, ids: list[int], served: Served) -> None:
    """Raises RequestError for token ids that the target does not have, and for too many of them."""
    if max(ids) >= served.vocab_size:
        raise RequestError(f"{CONFIG}.{name} has {max(ids)}; expected ids below {served.vocab_size}.", CONFIG)
    if len(set(ids)) > served.vocab_size // 4:  # where none is left to choose, sampling fails, and a GPU for good
        raise RequestError(f"{CONFIG}.{name} has {len(set(ids))} ids; expected a quarter of all at most.", CONFIG)


def _logit_bias(values: dict[str, float], served: Served) -> dict[str, float] | None:
    """Returns biases by token id, None where there are none. Raises RequestError for ids that the target does not
    have."""
    for key in values:
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < served.vocab_size):
            message = f"logit_bias has the token {shown(key)}; expected ids below {served.vocab_size}."
            raise RequestError(message, "logit_bias")
    return {str(int(key)): float(value) for key, value in values.items()} or None


def _template_options(values: dict[str, Any], served: Served) -> dict[str, Any]:
    """Returns the variables that the chat template reads; clients send the same to all their models. Raises
    RequestError for an argument of what renders it, and for a value that is no text, number, true or false."""
    for name, value in values.items():
        if name in served.template_arguments:
            known = ", ".join(sorted(served.template_options)) or "none"
            message = f"{TEMPLATE_OPTIONS} has {shown(name)}; expected variables that the chat template reads: {known}."
            raise RequestError(message, TEMPLATE_OPTIONS)
        is_text = isinstance(value, str) and len(value) <= LONGEST_OPTION
        is_plain = is_text or value is None or isinstance(value, bool) or is_number(value)
        expect(is_plain, value, "text, a number, true or false", f"{TEMPLATE_OPTIONS}.{name}", TEMPLATE_OPTIONS)
    return {name: value for name, value in values.items() if name in served.template_options}


def _prompt(value: str | list[str], served: Served) -> str:
    text = value[0] if isinstance(value, list) else value  # many clients send a list of one
    if not text:
        raise RequestError("prompt is empty; expected text.", "prompt")
    return text


# by field: returns its value as it is read. Raises RequestError for one that the field's rule lets pass.
CONVERTERS: dict[str, Callable[[Any, Served], Any]] = {
    "messages": lambda value, served: checked_messages(value, served.reads_images),
    "input": lambda value, served: checked_input(value, served.reads_images),
    "tools": lambda value, served: checked_tools(value),
    CONFIG: _generation_config,
    "temperature": lambda value, served: float(value) if value >= LEAST_TEMPERATURE else 0.0,
    "stop": lambda value, served: value or None,
    "logit_bias": _logit_bias,
    TEMPLATE_OPTIONS: _template_options,
    "prompt": _prompt,
}
