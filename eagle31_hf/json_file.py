"""JSON of untrusted files, read within limits on size, depth and numbers, or refused."""

import json
import math
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
MAX_VALUES = 200_000  # a few hundred bytes of memory each; the index of a target of 91,000 tensors has as many
MAX_DEPTH = 32  # configs nest three or four deep; code that copies or prints them is recursive
DIGITS = 20  # of an integer: 2**64 has as many
# control characters (a terminal obeys them), lone surrogates
NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def read_json(path: Path, max_values: int = MAX_VALUES, constants: bool = False) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises ValueError for anything else; the message begins with the path.

    `constants`: NaN and Infinity are numbers, as in configs of targets, which Python wrote.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # reading from a pipe would wait for ever
        raise ValueError(f"{path}: is a folder or a device; expected a file.")
    if found.st_size > MAX_BYTES:
        raise ValueError(
            f"{path}: is {found.st_size} bytes; expected at most {MAX_BYTES}. This is not a config or an index."
        )
    return parse_json(path.read_bytes(), str(path), max_values, constants)


def parse_json(data: bytes, where: str, max_values: int = MAX_VALUES, constants: bool = False) -> dict[str, Any]:
    """Returns the JSON object in `data`. Raises ValueError for anything else, for one that is nested too deep, and for
    text with control characters; the message begins with `where`."""
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > max_values:
        raise ValueError(
            f"{where}: holds more than {max_values} values; expected fewer. This is not a config or an index."
        )
    try:
        value = _decoded(data, constants)
        for depth, level in enumerate(levels(value), 1):
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
            for item in level:
                if isinstance(item, str) and NOT_TEXT.search(item):
                    raise ValueError(f"{show(item)} holds control characters")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: is not valid JSON ({error}); expected one JSON object. Download it again."
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: holds a {type(value).__name__}; expected one JSON object.")
    return value


def parse_value(text: str) -> Any:
    """Returns the JSON value in a text. Raises ValueError where there is none, as for NaN, infinity and numbers that
    are too large."""
    try:
        return _decoded(text, constants=False)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _decoded(data: str | bytes, constants: bool) -> Any:
    return json.loads(
        data,
        parse_constant=float if constants else _no_constant,
        parse_float=_finite,
        parse_int=_integer,
        object_pairs_hook=_without_repetition,
    )


def _no_constant(text: str) -> float:
    """Refuses NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(float(text)):
        raise ValueError(f"{text[:DIGITS]} is larger than any number")
    return float(text)


def _integer(text: str) -> int:
    if len(text) > DIGITS + 1 or abs(int(text)) >= 2**64:
        raise ValueError(f"{text[:DIGITS]}... has {len(text)} digits")
    return int(text)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these pairs.

    Raises ValueError for a repeated key: parsers differ in which of its values they keep.
    """
    counts = Counter(key for key, _ in pairs)
    if len(counts) != len(pairs):
        raise ValueError(f"it has {show(counts.most_common(1)[0][0])} twice")
    return dict(pairs)


def levels(value: Any) -> Iterator[list[Any]]:
    """Yields a value, then all that is in it, names of objects included, level by level: recursion would exhaust the
    stack."""
    level = [value]
    while level:
        yield level
        level = [
            child
            for parent in level
            if isinstance(parent, list | dict)
            for child in ([*parent, *parent.values()] if isinstance(parent, dict) else parent)
        ]


def show(text: str) -> str:
    """Returns the beginning of an untrusted text, escaped so that it is safe to print."""
    return ascii(text[:80])


def finite(value: Any) -> Any:
    """Returns a value as it is read from JSON, None in place of numbers that are not finite, which JSON has not."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)
