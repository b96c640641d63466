"""`eagle31 bench`: measurements, reported as ratios within one run."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..names import refuse_unknown
from . import diagnosing
from .parsing import add_device_alone, add_json, path, positive, progress, show

BENCHED = ("tiny", "small", "qwen3-0.6b", "qwen3-8b", "llama-3.1-8b")  # those of bench.engine.SHAPES
USUAL_SHAPE = "qwen3-0.6b"
GPU_SHAPES = ("llama-3.1-8b", "qwen3-8b")


def bench(args: argparse.Namespace) -> int:
    """Runs one of MEASUREMENTS and shows its figures."""
    result, table = args.measure(args)
    show(args, result, table)
    return 0


def _convert(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..bench.conversion import measure_conversion

    if args.folder is not None and not Path(args.folder).is_dir():
        raise ValueError(f"--folder: {args.folder} is no folder; expected one that is there.")
    progress(f"converting {args.megabytes} MB of random weights, {args.rounds} rounds beside a plain copy")
    result = measure_conversion(args.megabytes, args.rounds, args.folder)
    lines = ["source       size     copy       convert    convert / copy speed"]
    lines += [
        f"{row['form']:<11}  {row['bytes'] / 1e6:>4.0f} MB  {row['copy_mb_per_second']:>5.0f} MB/s "
        f"{row['convert_mb_per_second']:>6.0f} MB/s {row['ratio']:>9.0%}"
        for row in result["conversion"]
    ]
    return result, "\n".join(lines)


def _engine(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    import torch

    from ..bench.engine import measure_engine

    shape = args.shape or USUAL_SHAPE
    prompt_tokens = args.prompt_tokens or 128
    max_new_tokens = args.max_new_tokens or 64
    result = measure_engine(
        shape, getattr(torch, args.dtype), args.device, prompt_tokens, max_new_tokens, args.rounds, progress=progress
    )
    env = result["environment"]
    lines = [
        (
            f"{shape}, random weights, {env['dtype']}, {env['device']}, {env['threads']} threads; {prompt_tokens}"
            f" + {max_new_tokens} tokens, medians of {args.rounds} rounds"
        ),
        f"the target alone: {result['target']['tokens_per_second']:.1f} tokens/s",
        "drafting                rows  accepted length  speedup  efficiency (bare forwards / generate)",
    ]
    lines += [
        f"{run['setting']:<22}  {run['rows']:>4}  {run['mean_accepted_length']:>15.2f}  {run['speedup']:>6.2f}x "
        f" {run['efficiency']:>10.1%}"
        for run in result["runs"]
    ]
    return result, "\n".join([*lines, *(run["explanation"] for run in result["runs"] if run["explanation"])])


def _memory(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..bench.memory import measure_memory

    tokens = 16384 if args.prompt_tokens is None else args.prompt_tokens
    shape, place = args.shape or USUAL_SHAPE, args.device
    rows = []
    for chunk in (None, 2048):
        progress(f"a prompt of {tokens} tokens, {f'in chunks of {chunk}' if chunk else 'in one forward'}")
        rows.append(measure_memory(shape, args.dtype, place, tokens, chunk))
    lines = [
        f"{shape}, {args.dtype}, {place}: peak memory less the drafter's weights",
        "prompt   chunk   alone      drafted    ratio",
    ]
    lines += [
        f"{row['prompt_tokens']:>6}  {row['chunk'] or 'whole':>6}  {row['alone'] / 1e6:>6.0f} MB "
        f" {row['drafted'] / 1e6:>6.0f} MB  {row['ratio']:.3f}"
        for row in rows
    ]
    return {"memory": rows}, "\n".join(lines)


def _auto(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from .. import demo
    from ..bench.auto import measure_auto, prompts_by_kind

    target, tokenizer = demo.load_target()
    prompts = prompts_by_kind(tokenizer, demo.prompts(tokenizer, 6), 6)
    result = measure_auto(target, demo.load_drafter("eagle31"), prompts, rounds=args.rounds, progress=progress)
    lines = []
    for kind, figures in result.items():
        lines += [
            (
                f"{kind}: auto is {figures['auto_over_target']:.2f}x the target alone, {figures['auto_over_best']:.3f}"
                f" of the best fixed setting ({figures['best']})"
            ),
            *(
                f"  {run['name']:<12} {run['speedup']:>5.2f}x {run['mean_accepted_length']:>6.2f}"
                for run in figures["runs"]
            ),
        ]
    return result, "\n".join(lines)


def _train(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    import torch

    from ..bench.training import PARTS, measure_training

    tokens = 2048 if args.prompt_tokens is None else args.prompt_tokens
    shape, place = args.shape or USUAL_SHAPE, args.device
    result = measure_training(shape, getattr(torch, args.dtype), place, tokens, args.depth, args.rounds, progress)
    env = result["environment"]
    lines = [
        (
            f"{shape}, random weights, {env['dtype']}, {env['device']}, {env['threads']} threads; steps of"
            f" {tokens} tokens, {args.depth} deep, medians of {args.rounds}"
        ),
        "activations     tokens/s"
        + "".join(f"{name:>12}" for name in ("step", *PARTS))
        + "  step / target  peak memory",
    ]
    for run in result["runs"]:
        seconds = "".join(f"{value:>10.3g} s" for value in (run["step"], *run["seconds"].values()))
        lines.append(
            f"{run['activations']:<15} {run['tokens_per_second']:>8.0f}{seconds}{run['times_target']:>14.2f}x "
            f"{run['peak_memory'] / 1e9:>9.2f} GB"
        )
    return result, "\n".join(lines)


def _small(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..bench.small import measure_small

    result = measure_small(args.prompt_tokens or 64, args.max_new_tokens or 192, progress)
    lines = ["accepted  drafting     tokens a round  speedup  by call"]
    lines += [
        f"{run['rate']:>8}  {run['setting']:<11} {run['mean_accepted_length']:>15.2f}  {run['speedup']:>6.2f}x "
        + "".join(f" {speedup:.2f}" for speedup in run["speedups"])
        for run in result["runs"]
    ]
    return result, "\n".join(lines)


def _gpu(args: argparse.Namespace) -> tuple[dict[str, Any], str]:

    from ..bench.gpu import measure_gpu
    from ..bench.gpu.report import table
    from ..bench.gpu.sections import BUDGET, NAMES
    from ..bench.gpu.watched import Watch

    names = NAMES if args.only is None else tuple(args.only.split(","))
    refuse_unknown(names, NAMES, "a section")
    place = args.device
    shapes = GPU_SHAPES if place.startswith("cuda") else ("tiny",)
    shapes = shapes if args.shape is None else (args.shape,)
    output = Path(args.output)
    if not output.absolute().parent.is_dir():
        raise ValueError(f"--output: {output.parent} is no folder; expected one that is there.")
    budget = args.budget or BUDGET
    if args.here:
        result = measure_gpu(output, place, shapes, names, budget, _demo_pair, progress)
    else:
        options = ["--device", place, *(["--shape", args.shape] if args.shape else [])]
        result = Watch(output, budget, options, progress).measure([name for name in NAMES if name in names])
    return result, f"{table(result)}\n\nall figures: {output}"


def _demo_pair(place: str) -> tuple[Any, dict[str, Any], list[Any]]:
    """The demo's target, its drafters by name, and prompts."""
    from .. import demo

    target, tokenizer = demo.load_target(place)
    return target, {name: demo.load_drafter(name, place) for name in demo.DRAFTERS}, demo.prompts(tokenizer, 4)


def _add_auto(parser: argparse.ArgumentParser) -> None:
    _add_rounds(parser, "decodings of every prompt in every setting")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    _add_rounds(parser, "of which the fastest counts")
    parser.add_argument("--megabytes", type=positive, default=1000, help="size of the checkpoint (default: 1000)")
    parser.add_argument("--folder", type=path, help="where to write (default: the system's temporary folder)")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    _add_rounds(parser, "of which the median counts")
    _add_shape(parser, USUAL_SHAPE, 128)
    parser.add_argument("--max-new-tokens", type=positive, help="tokens a sequence (default: 64)")


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=BENCHED, help="of the target (default: the two of 8B, without a GPU tiny)")
    add_device_alone(parser)
    parser.add_argument(
        "--output", type=path, default="bench-gpu.json", help="of the figures (default: bench-gpu.json)"
    )
    parser.add_argument("--budget", type=positive, help="seconds at most (default: 540)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # not in a child that is watched
    parser.add_argument("--only", type=path, metavar="NAME,...", help="sections, by their names (default: all)")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser, USUAL_SHAPE, 16384)


def _add_small(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=positive, help="(default: 64)")
    parser.add_argument("--max-new-tokens", type=positive, help="tokens a sequence (default: 192)")


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_rounds(parser, "of which the median counts")
    _add_shape(parser, USUAL_SHAPE, 2048)
    parser.add_argument("--depth", type=positive, default=4, help="steps unrolled (default: 4)")


def _add_rounds(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--rounds", type=positive, default=3, help=f"{what} (default: 3)")


def _add_shape(parser: argparse.ArgumentParser, shape: str, prompt_tokens: int) -> None:
    """Adds the arguments that say which models, with random weights, run where."""
    parser.add_argument("--shape", choices=BENCHED, help=f"of the target (default: {shape})")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights (default: bfloat16)"
    )
    add_device_alone(parser)
    parser.add_argument("--prompt-tokens", type=positive, help=f"(default: {prompt_tokens})")


Measure = Callable[[argparse.Namespace], tuple[dict[str, Any], str]]  # returns figures, and a table of them
# name: (function, function that adds its arguments, what it measures, example)
MEASUREMENTS: dict[str, tuple[Measure, Callable[[argparse.ArgumentParser], None], str, str]] = {
    "acceptance": (
        diagnosing.acceptance,
        diagnosing.add_acceptance,
        "report on drafters beside the target alone, on your prompts: acceptance, speed, perturbations, contexts",
        "acceptance --target Qwen/Qwen3-8B --drafter ./my-drafter --prompts prompts.jsonl --output report",
    ),
    "auto": (_auto, _add_auto, "the demo pair by auto, beside every fixed setting", "auto --rounds 1"),
    "convert": (_convert, _add_convert, "converting a checkpoint, beside copying it", "convert --megabytes 100"),
    "engine": (
        _engine,
        _add_engine,
        "decoding with made-up acceptance, beside the bare forwards",
        "engine --shape qwen3-8b --device cuda",
    ),
    "gpu": (_gpu, _add_gpu, "all that a GPU decides, in ten minutes", "gpu --output results.json"),
    "memory": (
        _memory,
        _add_memory,
        "a long prompt, with and without a drafter",
        "memory --shape qwen3-8b --device cuda",
    ),
    "small": (_small, _add_small, "a small target, from auto's first call on", "small"),
    "train": (_train, _add_train, "a step of training, by part", "train --shape qwen3-8b --device cuda"),
}


def add_bench(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    commands = parser.add_subparsers(required=True, metavar="what")
    for name, (measure, add_arguments, line, example) in MEASUREMENTS.items():
        one = commands.add_parser(name, help=line, description=line, epilog=f"example: eagle31 bench {example}")
        add_arguments(one)
        add_json(one, default=argparse.SUPPRESS)  # it may stand before the name, too
        one.set_defaults(measure=measure)
