"""Arguments, progress and results, as all commands read, show and print them."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..checkpoints.knobs import LEAST, MAX_TOKENS
from ..checkpoints.layer_ids import CONVENTIONS
from ..configuration import FIELDS
from ..json_file import finite, parse_value
from ..names import refuse_unknown
from ..printable import printable
from ..training.engine_server import base_of

DTYPES = ("auto", "float32", "bfloat16", "float16")
AUTO = "auto"  # the name of the default device
PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")  # of transformers' device_map
LARGEST = 2**31 - 1  # the largest count accepted: more fits no memory, and overflows 32-bit integers of other libraries
OF_PYTHON = {"True": "true", "False": "false", "None": "null"}  # Python's words: JSON's
MAX_SEED = 2**32 - 1  # NumPy's, which transformers seeds too


def progress(message: str) -> None:
    """Prints to stderr; of the processes of a distributed run only the first does."""
    if os.environ.get("RANK", "0") == "0":
        print(f"eagle31: {printable(message)}", file=sys.stderr, flush=True)


def show(args: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """Prints the result: with --json as JSON, and then nothing else is on stdout; otherwise as text."""
    print(to_json(result) if args.json else printable(text), file=args.out)


def to_json(value: Any) -> str:
    """Returns strict JSON, in printable ASCII: a figure that is not finite is null."""
    return json.dumps(finite(value), allow_nan=False)


class Parser(argparse.ArgumentParser):
    """A parser that reports bad arguments as all other errors of input are reported."""

    def error(self, message: str):
        raise ValueError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args=None, namespace=None):
        """Refuses `--name=--`, of which argparse before Python 3.13 makes an empty list; else as in argparse."""
        for word in args or ():
            if word.startswith("--") and word.endswith("=--"):
                self.error(f"argument {word[:-3][:80]}: expected a value, got '--'")
        return super().parse_known_args(args, namespace)

    def add(self, name: str, read: Any, what: str = "", **others: Any) -> None:
        """Adds an argument. `read`: a function that parses its value, or the values it may have."""
        self.add_argument(name, help=what, **{"type" if callable(read) else "choices": read}, **others)

    def add_option(self, name: str, read: Any, default: Any, what: str = "", **others: Any) -> None:
        """Adds an option whose help ends with its default."""
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        self.add(name, read, f"{what} (default: {shown})".strip(), default=default, **others)

    def add_path(self, name: str, what: str, **others: Any) -> None:
        """Adds the name of a file, a folder or a repository."""
        self.add(name, path, what, **others)

    def add_flag(self, name: str, what: str) -> None:
        """Adds an option without a value."""
        self.add_argument(name, action="store_true", help=what)

    def add_several(self, name: str, read: Any, what: str, metavar: str = "NAME=VALUE") -> None:
        """Adds an option that may be given several times."""
        self.add(name, read, what, action="append", default=[], metavar=metavar)

    def add_device(self, default: str = AUTO) -> None:
        """Adds --device."""
        said = "auto, a GPU where there is one" if default == AUTO else default
        self.add("--device", device, f"cpu, cuda, cuda:1, mps (default: {said})", default=default)

    def add_json(self) -> None:
        """Adds --json."""
        self.add_flag("--json", "print one JSON object")

    def add_template_option(self) -> None:
        """Adds --template-option."""
        self.add_several("--template-option", field, "what the chat template reads besides, as enable_thinking=false")

    def add_reading(self) -> None:
        """Adds the options that decide how an ambiguous checkpoint is read, and the one for its revision."""
        self.add("--aux-layer-convention", CONVENTIONS, "how the checkpoint counts the target's layers")
        self.add_several("--set", config_field, "overrides a field of Eagle31Config", "FIELD=VALUE")
        self.add_path("--revision", "branch, tag or commit of the drafter's Hub repository")


def integer(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """Returns a reader of integers from `least` to `most`."""

    def read(text: str) -> int:
        value = int(text) if text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 20 else None
        if value is None or not least <= value <= most:
            upper = "" if value is not None and value < least else f" and at most {most}"
            raise argparse.ArgumentTypeError(f"got {text[:40]!r}, expected an integer of at least {least}{upper}")
        return value

    return read


def number(least: float, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """Returns a reader of finite numbers from `least` to `most`; with `above`, `least` itself is refused."""
    upper = "" if most == math.inf else f" and at most {most:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most) or (above and value == least):
            lower = f"{'above' if above else 'of at least'} {least:g}"
            raise argparse.ArgumentTypeError(f"got {text[:40]!r}, expected a number {lower}{upper}")
        return value

    return read


positive = integer(1)
count = integer(0)
seed = integer(0, MAX_SEED)
temperature = number(0)
share = number(0, 1)
top_p = number(0, 1, above=True)


def or_word(read: Callable[[str], Any], word: str, value: Any) -> Callable[[str], Any]:
    """Returns a reader of what `read` reads, or of a word, which stands for `value`."""

    def read_either(text: str) -> Any:
        try:
            return value if text.lower() == word else read(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or {word}") from None

    return read_either


def knob(name: str) -> Callable[[str], int | str]:
    """Returns a reader of a drafting knob that counts tokens: an integer of its range, or the word auto."""
    return or_word(integer(LEAST[name], MAX_TOKENS), "auto", "auto")


rate_or_none = or_word(number(0, above=True), "none", None)


def path(text: str) -> str:
    """Reads the name of a file, a folder or a repository.

    An empty one, of an unset variable maybe, is refused: it would mean the current folder.
    """
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a name")
    return text


def server(text: str) -> str:
    """Reads the address of a server."""
    try:
        return base_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def words(text: str) -> str:
    """Reads text for a tokenizer. Invalid UTF-8 is refused; it arrives as lone surrogates, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"character {error.start + 1} is no UTF-8; expected text in UTF-8") from None
    return text


def device(text: str) -> str:
    """Reads the name of a device that this machine has and this build of PyTorch can use; "auto" is its accelerator,
    or else its CPU."""
    if text == AUTO:
        return next((name.partition(":")[0] for name in _accelerators()), "cpu")
    with suppress(RuntimeError):  # no device at all
        wanted = torch.device(text)
        if wanted.type == "cpu" or f"{wanted.type}:{wanted.index or 0}" in _accelerators():
            return text
    devices = f"{' or '.join(['cpu', *_accelerators()])}, which PyTorch {torch.__version__} finds here"
    raise argparse.ArgumentTypeError(f"got {text[:40]!r}, expected a device: {devices}")


def device_map(text: str) -> str:
    """Reads one of transformers' ways to spread a model over devices, or the name of a device."""
    return text if text in PLACEMENTS else device(text)


def _accelerators() -> list[str]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [] if found is None else [f"{found.type}:{index}" for index in range(torch.accelerator.device_count())]


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of `add_reading` as keyword arguments of a `from_pretrained`."""
    options = {"aux_layer_convention": args.aux_layer_convention, "revision": args.revision} | dict(args.set)
    return {name: value for name, value in options.items() if value is not None}


def field(text: str) -> tuple[str, Any]:
    """Reads `NAME=VALUE`. The value is JSON, or else a plain string. True, False and None are refused: JSON writes
    true, false and null."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}, expected NAME=VALUE, e.g. norm_output=false")
    if value in OF_PYTHON:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}, expected {name[:40]}={OF_PYTHON[value]}")
    try:
        return name, parse_value(value)
    except ValueError:
        return name, value


def config_field(text: str) -> tuple[str, Any]:
    """Reads `FIELD=VALUE` for a field of Eagle31Config."""
    name, value = field(text)
    try:
        refuse_unknown([name], FIELDS, "a field of Eagle31Config")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, value
