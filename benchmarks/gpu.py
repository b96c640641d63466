"""Checks and measures all that a GPU decides, in ten minutes: `--output` gets the figures."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command import add_device, progress, run_benchmark
from engine import SHAPES
from on_gpu import measure_gpu
from on_gpu.report import table
from on_gpu.sections import BUDGET, NAMES
from on_gpu.watched import Watch

from eagle31_hf import demo
from eagle31_hf.cli.parsing import path, positive
from eagle31_hf.names import refuse_unknown

USUAL_SHAPES = ("llama-3.1-8b", "qwen3-8b")


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    shapes = USUAL_SHAPES if args.device.startswith("cuda") else ("tiny",)
    shapes = shapes if args.shape is None else (args.shape,)
    output = Path(args.output)
    if not output.absolute().parent.is_dir():
        raise SystemExit(f"--output: {output.parent} is no folder; expected one that is there.")
    if args.here:
        result = measure_gpu(output, args.device, shapes, args.only, args.budget, demo_pair, progress)
    else:
        options = ["--device", args.device, *(["--shape", args.shape] if args.shape else [])]
        watch = Watch(output, args.budget, options, progress)
        result = watch.measure([name for name in NAMES if name in args.only])
    return result, f"{table(result)}\n\nall figures: {output}"


def sections(text: str) -> tuple[str, ...]:
    """Reads names of sections. Raises argparse.ArgumentTypeError where there is none of a name."""
    names = tuple(text.split(","))
    try:
        refuse_unknown(names, NAMES, "a section")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def demo_pair(place: str) -> tuple[Any, dict[str, Any], list[Any]]:
    """The demo's target, its drafters by name, and prompts."""
    target, tokenizer = demo.load_target(place)
    return target, {name: demo.load_drafter(name, place) for name in demo.DRAFTERS}, demo.prompts(tokenizer, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=[*SHAPES], help="of the target (default: the two of 8B, without a GPU tiny)")
    add_device(parser)
    parser.add_argument(
        "--output", type=path, default="bench-gpu.json", help="of the figures (default: bench-gpu.json)"
    )
    parser.add_argument("--budget", type=positive, default=BUDGET, help=f"seconds at most (default: {BUDGET:g})")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # not in a child that is watched
    parser.add_argument(
        "--only", type=sections, default=NAMES, metavar="NAME,...", help="sections, by their names (default: all)"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
