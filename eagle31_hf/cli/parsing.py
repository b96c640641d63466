"""What all commands share: how arguments are read and how progress is shown."""

import argparse
import json
import os
import sys
from typing import Any


def progress(message: str) -> None:
    """To stderr; of several processes that do one thing together, the first speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"eagle31: {message}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Reports bad arguments the way all other input errors are reported."""

    def error(self, message: str):
        raise ValueError(f"{message} (see {self.prog} --help)")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def positive_or_auto(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_reading(parser: argparse.ArgumentParser) -> None:
    """What decides where a checkpoint leaves a question open."""
    parser.add_argument("--aux-layer-convention", choices=("boundary", "output"), help="how the checkpoint counts the target's layers")
    parser.add_argument("--set", type=field, action="append", default=[], metavar="FIELD=VALUE", help="a field of Eagle31Config that wins")
    parser.add_argument("--revision", help="branch, tag or commit of the drafter's Hub repository")


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {"aux_layer_convention": args.aux_layer_convention, "revision": args.revision} | dict(args.set)
    return {name: value for name, value in options.items() if value is not None}


def field(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, the value in JSON, or a plain string."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=VALUE, e.g. norm_output=false")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
