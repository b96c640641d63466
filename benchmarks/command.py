"""The command line of a benchmark: the arguments that several share, and its figures as a table, or as JSON."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from eagle31_hf.cli.parsing import AUTO, device, positive, to_json

Figures = dict[str, Any]
USUAL_SHAPE = "qwen3-0.6b"


def run_benchmark(
    description: str,
    measure: Callable[[argparse.Namespace], tuple[Figures, str]],
    add_arguments: Callable[[argparse.ArgumentParser], None],
    arguments: Sequence[str] | None = None,
) -> None:
    """Reads the arguments, measures, and prints the figures. `measure` returns them, and a table of them."""
    parser = argparse.ArgumentParser(description=description.partition("\n\n")[0])
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    figures, table = measure(args)
    print(to_json(figures) if args.json else table)


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def add_rounds(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--rounds", type=positive, default=3, help=f"{what} (default: 3)")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", type=device, default=AUTO, help="cpu, cuda, ... (default: a GPU where there is one)"
    )


def add_models(parser: argparse.ArgumentParser, shapes: Sequence[str], prompt_tokens: int) -> None:
    """Adds the arguments that say which models, with random weights, run where."""
    parser.add_argument("--shape", choices=shapes, default=USUAL_SHAPE, help=f"of the target (default: {USUAL_SHAPE})")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights (default: bfloat16)"
    )
    add_device(parser)
    parser.add_argument("--prompt-tokens", type=positive, default=prompt_tokens, help=f"(default: {prompt_tokens:,})")
