"""Sentences on what a command has left on the disk when it is stopped or the machine fails, and on how to go on.

A parser names the function of its command by `set_defaults(left_behind=...)`.
"""

import argparse
from pathlib import Path

from ..json_file import read_json
from ..training.store import missing_shards, read_manifest


def new_folder(folder: str | None) -> str:
    """Says whether a folder is there that appears only once it is complete."""
    if folder is None:
        return "Nothing was written."
    return f"{folder} is complete." if Path(folder, "config.json").is_file() else f"Nothing was written to {folder}."


def conversion(args: argparse.Namespace) -> str:
    """Says how far `eagle31 convert` has come."""
    if args.create_pr:
        return "Nothing was changed on the Hub."
    if args.destination is not None:
        return new_folder(args.destination)
    try:
        is_native = read_json(Path(args.source, "config.json")).get("model_type") == "eagle31"
    except (OSError, ValueError):
        is_native = False
    state = "is native by now" if is_native else "is as it was"
    return f"{args.source} {state}; the same command finishes the work."


def upload(args: argparse.Namespace) -> str:
    """Says that `eagle31 publish` commits at its end only."""
    return "Nothing was committed; the same command goes on, and what was sent is not sent again."


def shards(args: argparse.Namespace) -> str:
    """Says how many shards `eagle31 prepare-data` has made."""
    try:
        total = read_manifest(args.output).num_shards
        found = total - len(missing_shards(args.output))
    except (OSError, ValueError):
        return f"Nothing was written to {args.output}."
    return f"{found} of {total} shards are kept in {args.output}; the same command makes the others."


def checkpoint(args: argparse.Namespace) -> str:
    """Names the newest checkpoint or the examples of `eagle31 train`, and the drafter that it was to replace."""
    from ..training.output import REPLACED, holds_data
    from ..training.saving import checkpoints

    aside = [path.parent for path in Path(args.output, REPLACED).glob("*/model*.safetensors*")]
    earlier = f" The earlier drafter is in {max(aside, key=lambda path: path.stat().st_mtime)}." if aside else ""
    begun = checkpoints(args.output)
    found = [path for path in begun if (path / "trainer_state.json").is_file()]
    resumed = f"the same command with --resume{' instead of --overwrite' if args.overwrite else ''} goes on"
    if found:
        newest = max(found, key=lambda path: path.stat().st_mtime)
        return f"{newest} is kept; {resumed} from the last complete checkpoint.{earlier}"
    if holds_data(args.output) and not begun:
        return f"There is no checkpoint in {args.output} yet, but rows, which are kept; {resumed} with them.{earlier}"
    return (
        f"There is no checkpoint in {args.output} yet; begin"
        f" anew{', with --overwrite' if aside or begun else ''}.{earlier}"
    )
