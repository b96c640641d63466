"""What each command leaves behind when it is stopped or the machine fails, and how to go on: a sentence, from what is on the disk."""

import argparse
import json
from pathlib import Path


def new_folder(folder: str | None) -> str:
    """For commands whose folder appears only once it is complete."""
    if folder is None:
        return "Nothing was written."
    return f"{folder} is complete." if Path(folder, "config.json").is_file() else f"Nothing was written to {folder}."


def conversion(args: argparse.Namespace) -> str:
    if args.create_pr:
        return "Nothing was changed on the Hub."
    if args.destination is not None:
        return new_folder(args.destination)
    try:
        is_native = json.loads(Path(args.source, "config.json").read_bytes()).get("model_type") == "eagle31"
    except (OSError, ValueError, AttributeError):
        is_native = False
    state = "is native by now" if is_native else "is as it was"
    return f"{args.source} {state}; the same command finishes the work."


def upload(args: argparse.Namespace) -> str:
    return "Nothing was committed; the same command goes on, and what was sent is not sent again."


def shards(args: argparse.Namespace) -> str:
    from ..training.store import missing_shards, read_manifest

    try:
        total = read_manifest(args.output).num_shards
        found = total - len(missing_shards(args.output))
    except (OSError, ValueError):
        return f"Nothing was written to {args.output}."
    return f"{found} of {total} shards are kept in {args.output}; the same command makes the others."


def checkpoint(args: argparse.Namespace) -> str:
    from ..training.output import REPLACED

    aside = [path.parent for path in Path(args.output, REPLACED).glob("*/model*.safetensors*")]
    earlier = f" The earlier drafter is in {max(aside, key=lambda path: path.stat().st_mtime)}." if aside else ""
    found = [path for path in Path(args.output).glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    if not found:
        return f"There is no checkpoint in {args.output} yet; begin anew{', with --overwrite' if aside else ''}.{earlier}"
    newest = max(found, key=lambda path: path.stat().st_mtime)
    return f"{newest} is kept; the same command with --resume goes on from the last complete checkpoint.{earlier}"
