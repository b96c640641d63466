"""The fields of requests, and the values that they may have. What is not named here is refused, so that nothing a
client sends reaches the loader, the chat template or `generate` by a name that nobody thought of."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_ITEMS = 10_000  # of a list or an object
MOST_STOPS, LONGEST_STOP = 16, 100  # stop strings are compared with every token of the vocabulary beforehand
MOST_BEAMS = 16


class RequestError(ValueError):
    """Raised where a request is at fault, not the server: it is answered by status 400. `param`: the field, `code`: as
    in OpenAI's API, where there is one for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


def shown(value: Any) -> str:
    """Returns the beginning of a client's value, escaped so that it is safe to print."""
    text = ascii(value[:20] if isinstance(value, list) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def expect(holds: Any, value: Any, expected: str, where: str, param: str | None = None) -> None:
    """Raises RequestError, with what is `expected`, unless it `holds` of the value that stands at `where`."""
    if not holds:
        raise RequestError(f"{where} is {shown(value)}; expected {expected}.", param or where)


@dataclass(frozen=True)
class Rule:
    """A field of a request: the values it may have, in words and as a test. `is_real`: integers among them stand for
    real numbers, as JavaScript writes 2.0."""

    expected: str
    holds: Callable[[Any], bool]
    is_real: bool = False


def integer(least: int, most: int) -> Rule:
    """Returns the rule of integers from `least` to `most`."""
    return Rule(f"an integer from {least} to {most}", lambda value: is_integer(value) and least <= value <= most)


def number(least: float, most: float, above: bool = False) -> Rule:
    """Returns the rule of numbers from `least` to `most`; with `above`, `least` itself is none of them."""
    words = f"a number {'above' if above else 'from'} {least:g} {'and at most' if above else 'to'} {most:g}"
    return Rule(
        words,
        lambda value: is_number(value) and (least < value or (value == least and not above)) and value <= most,
        is_real=True,
    )


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_stop(value: Any) -> bool:
    """Returns whether a value is one stop string, or a few."""
    stops = value if isinstance(value, list) else [value]
    return len(stops) <= MOST_STOPS and all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops)


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MOST_ITEMS and all(is_integer(id) and id >= 0 for id in value)


YES_OR_NO = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("text", lambda value: isinstance(value, str))
TOKENS = integer(1, 2**31 - 1)
TEMPERATURE = number(0, 100)
TOP_P = number(0, 1)
STOP = Rule(f"text of 1 to {LONGEST_STOP} characters, or a list of at most {MOST_STOPS} such texts", is_stop)
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
PROMPT = Rule(
    "text, or a list of one",
    lambda value: isinstance(value, str) or (isinstance(value, list) and [type(text) for text in value] == [str]),
)
LIST = Rule("a list", lambda value: isinstance(value, list))
# fields that are served, by route
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
    "/v1/completions": {"prompt": PROMPT, **COMMON, **COMPLETIONS, "suffix": TEXT},
    "/v1/responses": {
        "input": Rule("text or a list", lambda value: isinstance(value, str | list)),
        **COMMON,
        "instructions": TEXT,
        "max_output_tokens": TOKENS,
        "tools": LIST,
    },
    "/load_model": {"model": TEXT},
}
REQUIRED = ("messages", "prompt", "input")  # where a route has them
# OpenAI's hints, which change nothing here: they may be given, and are not read
IGNORED = (
    "include",
    "max_tool_calls",
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
)
# OpenAI's fields that would change an answer, and are not served: the values by which they change nothing
ONLY_DEFAULT: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}}, {}, *({"verbosity": much} for much in ("low", "medium", "high"))),
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
    "typical_p": number(0, 1, above=True),
    "repetition_penalty": number(0.1, 10),
    "no_repeat_ngram_size": integer(0, 10_000),
    "num_beams": integer(1, MOST_BEAMS),
    "length_penalty": number(-10, 10),
    "early_stopping": YES_OR_NO,
    "max_new_tokens": TOKENS,
    "min_new_tokens": integer(0, 2**31 - 1),
    "stop_strings": STOP,
    "eos_token_id": Rule(
        "a token id, -1 for none, or a list of ids",
        lambda value: (is_integer(value) and -1 <= value < 2**31) or is_token_ids(value),
    ),
    "bos_token_id": integer(0, 2**31 - 1),
    "pad_token_id": integer(0, 2**31 - 1),
    "suppress_tokens": Rule("a list of token ids", is_token_ids),
    "use_cache": Rule("true", lambda value: value is True),
}
