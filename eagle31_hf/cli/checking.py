"""`eagle31 check`: says what will work with a target and a drafter, before either is downloaded."""

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers.utils import logging

from ..checking import TargetReport, check_target
from .parsing import Parser, progress, show

UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
# Capabilities, and the names of their lines.
LINES = {
    "chain": "chains", "tree": "trees", "auto": "auto", "batch": "batches", "static_cache": "static cache",
    "prompt_in_chunks": "prompt in chunks", "sampling": "sampling", "training": "training",
}  # fmt: skip


def check(args: argparse.Namespace) -> int:
    """Shows the report on a target and maybe a drafter. Returns 1 where they do not work."""
    with _quietly():
        report = check_target(
            args.target,
            args.drafter,
            revision=args.target_revision,
            drafter_revision=args.revision,
            overrides=dict(args.set),
            aux_layer_convention=args.aux_layer_convention,
            progress=progress,
        )
    # Through JSON and back: values of a drafter's config that JSON does not have, as a dtype, become their names.
    show(args, json.loads(json.dumps(report.as_dict(), default=str)), "\n".join(_lines(report)))
    return 0 if report.works else 1


@contextmanager
def _quietly() -> Iterator[None]:
    """A context in which transformers and this library log errors only, and torch runs on one thread.

    The report says what `generate` would log for the tiny model, and at its size threads only wait for each other.
    """
    ours = logging.get_logger("eagle31_hf")
    with ExitStack() as before:
        before.callback(logging.set_verbosity, logging.get_verbosity())
        before.callback(ours.setLevel, ours.level)
        before.callback(torch.set_num_threads, torch.get_num_threads())
        logging.set_verbosity_error()
        ours.setLevel(logging.ERROR)
        torch.set_num_threads(1)
        yield


def _lines(report: TargetReport) -> list[str]:
    rows = [("target", f"{report.target}{_about(report)}")]
    rows += [("tried", report.tried)] if report.tried else []
    said: dict[str, str] = {}  # every reason is said in full once
    for each in report.capabilities:
        again = said.setdefault(each.text, each.name) != each.name and each.answer != "works"
        rows += [(LINES[each.name], f"{each.answer}: {f'as {LINES[said[each.text]]}' if again else each.text}")]
    rows += [("note", note) for note in report.notes]
    if report.drafter is not None:
        drafter = report.drafter
        size = f": {drafter.num_parameters:,} parameters, {_size(drafter.num_bytes)}" if drafter.num_bytes else ""
        beside = f" beside the target's {_size(report.num_bytes)}" if drafter.num_bytes and report.num_bytes else ""
        rows += [("drafter", f"{drafter.name}{size}{beside}")]
        for found in drafter.findings:
            rows += [(f"  {found.name}", f"{'does not fit: ' if found.fits is False else ''}{found.text}")]
    rows += [("verdict", report.verdict)]
    return [f"{name:<17} {text}" for name, text in rows]


def _about(report: TargetReport) -> str:
    if report.architecture is None:
        return ""
    layers = f"{report.num_layers} layers" if report.num_layers else ""
    width = f"width {report.hidden_size}" if report.hidden_size else ""
    parts = [report.architecture, " of ".join(filter(None, (layers, width)))]
    parts += [f"{report.vocab_size:,} ids"] if report.vocab_size else []
    parts += [f"{report.num_parameters:,} parameters"] if report.num_parameters else []
    parts += [f"{_size(report.num_bytes)}{' in ' + report.dtype if report.dtype else ''}"] if report.num_bytes else []
    return ": " + ", ".join(filter(None, parts))


def _size(num_bytes: int) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if num_bytes >= unit), UNITS[-1])
    return f"{num_bytes / unit:.1f} {name}"


def add_check(parser: Parser) -> None:
    parser.add_path("target", "Hub repository (only its config.json is fetched), folder, or config.json")
    what = "folder or Hub repository of a drafter, of any format (config and headers are read)"
    parser.add_path("drafter", what, nargs="?")
    parser.add_path("--target-revision", "branch, tag or commit of the target's Hub repository")
    parser.add_reading()
    parser.add_json()
