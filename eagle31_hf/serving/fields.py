"""Requests of clients: which fields they may have, and which values. What is not named here is refused, so that nothing
a client sends reaches the loader, the chat template or `generate` by a name that nobody thought of."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..json_file import parse_value
from .messages import check_input, check_messages, check_tools
from .request_error import RequestError, shown

MOST_VALUES = 200_000
MOST_ITEMS = 10_000  # of a list or an object
MOST_DEPTH = 64
CHARACTERS_A_TOKEN = 16  # more than any text has that a target can read whole; beyond, nothing is tokenized
MOST_STOPS, LONGEST_STOP = 4, 100  # stop strings are compared with every token of the vocabulary beforehand
LEAST_TEMPERATURE = 1e-3  # below, logits overflow; it means greedy
MOST_BEAMS = 16
LONGEST_OPTION = 10_000  # characters of a variable of the chat template
SURROGATE = re.compile("[\ud800-\udfff]")
MEDIA = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,")  # text is counted without them


@dataclass(frozen=True)
class Served:
    """What a server serves. `model`: the one name it answers to; `vocab_size` and `context`: the target's, in tokens,
    None for a context without end; `template_options`: the variables of the chat template that a client may set;
    `reads_images`: whether messages may hold images."""

    model: str
    vocab_size: int
    context: int | None
    template_options: frozenset[str]
    reads_images: bool


@dataclass(frozen=True)
class Rule:
    """A field of a request: the values it may have, in words and as a test."""

    expected: str
    holds: Callable[[Any], bool]


def integer(least: int, most: int) -> Rule:
    """Returns the rule of integers from `least` to `most`."""
    return Rule(f"an integer from {least} to {most}", lambda value: is_integer(value) and least <= value <= most)


def number(least: float, most: float, above: bool = False) -> Rule:
    """Returns the rule of numbers from `least` to `most`; with `above`, `least` itself is none of them."""
    words = f"a number {'above' if above else 'from'} {least:g} {'and at most' if above else 'to'} {most:g}"
    return Rule(
        words, lambda value: is_number(value) and (least < value or (value == least and not above)) and value <= most
    )


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_stop(value: Any) -> bool:
    """Returns whether a value is one stop string, or a few."""
    stops = value if isinstance(value, list) else [value]
    return 0 < len(stops) <= MOST_STOPS and all(
        isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops
    )


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MOST_ITEMS and all(is_integer(id) and id >= 0 for id in value)


def is_end(value: Any) -> bool:
    """Returns whether a value names the tokens that end a text: an id, -1 for none, or several ids."""
    return (is_integer(value) and -1 <= value < 2**31) or is_token_ids(value)


YES_OR_NO = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("text", lambda value: isinstance(value, str))
TOKENS = integer(1, 2**31 - 1)
TEMPERATURE = number(0, 100)
TOP_P = number(0, 1, above=True)
STOP = Rule(f"text of 1 to {LONGEST_STOP} characters, or a list of 1 to {MOST_STOPS} such texts", is_stop)
COMMON = {
    "model": TEXT,
    "stream": YES_OR_NO,
    "seed": integer(-(2**63), 2**63 - 1),
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "generation_config": Rule("a JSON object, as text", lambda value: isinstance(value, str)),
}
COMPLETIONS = {"max_tokens": TOKENS, "frequency_penalty": number(-0.9, 2), "stop": STOP}
BIAS = Rule(
    "an object of token ids and numbers from -100 to 100",
    lambda value: isinstance(value, dict) and all(is_number(bias) and abs(bias) <= 100 for bias in value.values()),
)
OPTIONS = Rule("an object", lambda value: isinstance(value, dict))
LIST = Rule("a list", lambda value: isinstance(value, list))
# by route: the fields that are served, of which the first must be there
FIELDS: dict[str, dict[str, Rule]] = {
    "/v1/chat/completions": {
        "messages": LIST,
        **COMMON,
        **COMPLETIONS,
        "max_completion_tokens": TOKENS,
        "logit_bias": BIAS,
        "tools": LIST,
        "chat_template_kwargs": OPTIONS,
    },
    "/v1/completions": {"prompt": TEXT, **COMMON, **COMPLETIONS, "suffix": TEXT},
    "/v1/responses": {
        "input": Rule("text or a list", lambda value: isinstance(value, str | list)),
        **COMMON,
        "instructions": TEXT,
        "max_output_tokens": TOKENS,
        "tools": LIST,
    },
    "/load_model": {"model": TEXT},
}
# fields of OpenAI's API that change no answer here: taken, and not read
UNREAD = frozenset(
    [
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "truncation",
        "user",
        "verbosity",
        "web_search_options",
        "max_tool_calls",
        "include",
    ]
)
# fields that would change an answer, and are not served: the values that leave it as it is
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}
# arguments of `generate` that a request's `generation_config` may have
GENERATION: dict[str, Rule] = {
    "do_sample": YES_OR_NO,
    "temperature": TEMPERATURE,
    "top_k": integer(0, 2**31 - 1),
    "top_p": TOP_P,
    "min_p": number(0, 1),
    "typical_p": TOP_P,
    "repetition_penalty": number(0.1, 10),
    "no_repeat_ngram_size": integer(0, 10_000),
    "num_beams": integer(1, MOST_BEAMS),
    "length_penalty": number(-10, 10),
    "early_stopping": YES_OR_NO,
    "max_new_tokens": TOKENS,
    "min_new_tokens": integer(0, 2**31 - 1),
    "stop_strings": STOP,
    "eos_token_id": Rule("a token id, -1 for none, or a list of ids", is_end),
    "bos_token_id": integer(0, 2**31 - 1),
    "pad_token_id": integer(0, 2**31 - 1),
    "suppress_tokens": Rule("a list of token ids", is_token_ids),
    "use_cache": Rule("true", lambda value: value is True),
}


def read_body(data: bytes) -> dict[str, Any]:
    """Returns the JSON object of a request. Raises RequestError for anything else."""
    try:
        value = parse_value(data.decode())
    except ValueError as error:
        raise RequestError(f"the request is no JSON ({error}); expected one JSON object.") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request is {shown(value)}; expected one JSON object.")
    return value


def check(route: str, body: dict[str, Any], served: Served) -> dict[str, Any]:
    """Returns the fields of a request that the server reads. Raises RequestError for the first that is wrong."""
    _check_text(body, served)
    fields = FIELDS[route]
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check_field(name, value, fields)
    first = next(iter(fields))
    if first not in given and first != "model":
        raise RequestError(f"{first} is missing; expected {fields[first].expected}.", first)
    if given.get("model", served.model) != served.model:
        raise RequestError(
            f"model is {shown(given['model'])}; expected {shown(served.model)}, the only one here.",
            "model",
            "model_not_found",
        )
    if given.get("tool_choice") == "none":
        given.pop("tools", None)
    read = {name: value for name, value in given.items() if name in fields}
    return read | {name: CHECKS[name](value, served) for name, value in read.items() if name in CHECKS}


def _check_field(name: str, value: Any, fields: dict[str, Rule]) -> None:
    """Raises RequestError for a field that there is not, and for a value that it cannot have."""
    if name in fields:
        if not fields[name].holds(value):
            raise RequestError(f"{name} is {shown(value)}; expected {fields[name].expected}.", name)
    elif name in NEUTRAL:
        if not any(
            (value == neutral and type(value) is type(neutral)) or value == neutral == 0 for neutral in NEUTRAL[name]
        ):
            allowed = " or ".join(shown(neutral) for neutral in NEUTRAL[name])
            raise RequestError(f"{name} is {shown(value)}; expected {allowed}: nothing else is served.", name)
    elif name not in UNREAD:
        raise RequestError(f"{shown(name)} is no field of this request; expected some of {', '.join(fields)}.", name)


def _check_text(body: dict[str, Any], served: Served) -> None:
    """Raises RequestError for a request of too many values, or nested too deep, and for text that is no UTF-8 or far
    longer than the target's context."""
    length = 0
    for text in _texts(body):
        found = SURROGATE.search(text)
        if found:
            raise RequestError(f"the request has the lone surrogate {found[0]!a}; expected text in UTF-8.")
        length += 0 if MEDIA.match(text) else len(text)
    most = math.inf if served.context is None else CHARACTERS_A_TOKEN * (served.context + 4096)
    if length > most:
        raise RequestError(
            f"the request has {length} characters; expected at most {most}: the target's context is {served.context}"
            " tokens.",
            code="context_length_exceeded",
        )


def _texts(body: dict[str, Any]) -> Iterator[str]:
    """Yields all text of a request, level by level: recursion would exhaust the stack. Raises RequestError where it is
    too large."""
    level, count = list[Any]([body]), 0
    for _ in range(MOST_DEPTH):
        count += len(level)
        sizes = [len(value) for value in level if isinstance(value, list | dict)]
        if count > MOST_VALUES or any(size > MOST_ITEMS for size in sizes):
            raise RequestError(f"the request has too many values; expected at most {MOST_ITEMS} in a list.")
        yield from (value for value in level if isinstance(value, str))
        yield from (key for value in level if isinstance(value, dict) for key in value)
        level = [child for value in level if isinstance(value, list | dict) for child in _children(value)]
    if level:
        raise RequestError(f"the request is nested more than {MOST_DEPTH} deep; expected less.")


def _children(value: list | dict) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value


def _generation_config(text: str, served: Served) -> str:
    """Returns the arguments of generate() in a request, for `GenerationConfig`. An argument as it is by default changes
    nothing, and is left out: clients send whole configs."""
    from transformers import GenerationConfig

    try:
        values = parse_value(text)
    except ValueError as error:
        raise RequestError(
            f"generation_config is no JSON ({error}); expected an object.", "generation_config"
        ) from None
    if not isinstance(values, dict):
        raise RequestError(f"generation_config is {shown(values)}; expected an object.", "generation_config")
    usual = GenerationConfig().to_dict()
    read = dict[str, Any]()
    for name, value in values.items():
        if (
            value is None
            or name == "transformers_version"
            or (name not in GENERATION and usual.get(name, _ABSENT) == value)
        ):
            continue
        if name not in GENERATION:
            raise RequestError(
                f"generation_config has {shown(name)}; expected some of {', '.join(GENERATION)}.", "generation_config"
            )
        if not GENERATION[name].holds(value):
            expected = GENERATION[name].expected
            raise RequestError(f"generation_config.{name} is {shown(value)}; expected {expected}.", "generation_config")
        read[name] = _temperature(value, served) if name == "temperature" else value
    _check_ids(read, served)
    return json.dumps(read)


_ABSENT = object()


def _check_ids(values: dict[str, Any], served: Served) -> None:
    """Raises RequestError for token ids that the target does not have."""
    for name in ("eos_token_id", "bos_token_id", "pad_token_id", "suppress_tokens"):
        ids = values.get(name, [])
        for id in ids if isinstance(ids, list) else [ids]:
            if id >= served.vocab_size:
                raise RequestError(
                    f"generation_config.{name} is {id}; expected an id below {served.vocab_size}.", "generation_config"
                )


def _temperature(value: float, served: Served) -> float:
    return float(value) if value >= LEAST_TEMPERATURE else 0.0


def _logit_bias(values: dict[str, float], served: Served) -> dict[str, float] | None:
    """Returns biases by token id, None where there are none. Raises RequestError for ids that the target does not
    have."""
    for key in values:
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < served.vocab_size):
            raise RequestError(
                f"logit_bias has the token {shown(key)}; expected ids below {served.vocab_size}.", "logit_bias"
            )
    return {str(int(key)): float(value) for key, value in values.items()} or None


def _template_options(values: dict[str, Any], served: Served) -> dict[str, Any]:
    """Returns variables of the chat template. Raises RequestError for one that it does not read: it would be taken for
    an argument of what renders it."""
    for name, value in values.items():
        if name not in served.template_options:
            known = ", ".join(sorted(served.template_options)) or "none"
            raise RequestError(
                f"chat_template_kwargs has {shown(name)}; expected variables that the chat template reads: {known}.",
                "chat_template_kwargs",
            )
        is_text = isinstance(value, str) and len(value) <= LONGEST_OPTION
        if not (is_text or value is None or isinstance(value, bool) or is_number(value)):
            raise RequestError(
                f"chat_template_kwargs.{name} is {shown(value)}; expected text, a number, true or false.",
                "chat_template_kwargs",
            )
    return values


def _prompt(value: str, served: Served) -> str:
    if not value:
        raise RequestError("prompt is empty; expected text.", "prompt")
    return value


# by field: returns the value as it is read. Raises RequestError for one that the field's rule lets pass
CHECKS: dict[str, Callable[[Any, Served], Any]] = {
    "messages": lambda value, served: check_messages(value, served.reads_images),
    "input": lambda value, served: check_input(value, served.reads_images),
    "tools": lambda value, served: check_tools(value),
    "generation_config": _generation_config,
    "temperature": _temperature,
    "logit_bias": _logit_bias,
    "chat_template_kwargs": _template_options,
    "prompt": _prompt,
}
