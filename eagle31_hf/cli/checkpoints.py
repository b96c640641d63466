"""`eagle31 info`, `convert`, `export`, `publish` and `upgrade`: say what a checkpoint is, or make another of it."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..checkpoints import (
    EXPORT_FORMATS,
    convert_checkpoint,
    export_checkpoint,
    export_notes,
    launch_line,
    read_checkpoint,
)
from ..checkpoints.export import refusal
from ..checkpoints.headers import read_headers
from ..hub import convert_on_hub, described, kind
from ..hub import publish as upload_folder
from ..modeling import Eagle31DrafterModel
from ..storage.folders import check_new_folder, new_folder
from ..training.kinds import check_text
from ..training.records import read_records
from ..training.skipped import Skipped
from ..upgrade import upgrade_to_eagle31
from .loading import load_causal_lm, load_tokenizer
from .parsing import Parser, positive, progress, reading_options, show


def info(args: argparse.Namespace) -> int:
    """Shows a checkpoint's format and config, and why it was read so."""
    checkpoint = read_headers(args.drafter, dict(args.set), args.aux_layer_convention, args.revision)
    config, depth = checkpoint.config, checkpoint.knobs.get("num_assistant_tokens")
    report: dict[str, Any] = {
        "kind": kind(config),
        "format": checkpoint.format,
        "native": checkpoint.is_native,
        "parameters": checkpoint.num_parameters,
        "reasons": checkpoint.reasons,
        "notes": checkpoint.notes,
        "exports": {name: refusal(config, name) or "yes" for name in EXPORT_FORMATS},
        "config": config.to_dict(),
    }
    form = "native" if checkpoint.is_native else "converted while loading"
    rows = [
        ("drafter", f"{args.drafter}: {report['kind']}, {report['parameters']:,} parameters"),
        ("target", config.target_model or "not named"),
        ("format", f"{form}; {checkpoint.reasons[0]}"),
        *(("", reason) for reason in checkpoint.reasons[1:]),
        *(("note", note) for note in checkpoint.notes),
        *described(config),
        ("rope", json.dumps(config.rope_parameters)),
        ("exports", ", ".join(name for name, answer in report["exports"].items() if answer == "yes") or "none"),
        *(("", answer) for answer in report["exports"].values() if answer != "yes"),
        *([("drafting", f"num_assistant_tokens={depth}")] if depth else []),
    ]
    show(args, report, "\n".join(f"{name:<22} {text}" for name, text in rows))
    return 0


def convert(args: argparse.Namespace) -> int:
    """Converts a folder or a repository to the native format."""
    progress(f"converting {args.source}")
    if args.create_pr:
        if args.destination is not None or args.discard_original:
            found = "--create-pr changes a Hub repository"
            raise ValueError(f"{found}; expected neither a destination nor --discard-original with it.")
        checkpoint, url = convert_on_hub(args.source, **reading_options(args))
        where = url or f"{args.source}: nothing to do, it is native already"
    else:
        how = {"discard_original": args.discard_original, **reading_options(args)}
        checkpoint = convert_checkpoint(args.source, args.destination, **how)
        where = str(checkpoint.folder)
    lines = [f"native checkpoint: {where}", *checkpoint.reasons, *(f"note: {note}" for note in checkpoint.notes)]
    show(args, {"result": where, "reasons": checkpoint.reasons, "notes": checkpoint.notes}, "\n".join(lines))
    return 0


def export(args: argparse.Namespace) -> int:
    """Writes a drafter for another engine, and shows the command that serves it."""
    progress(f"writing {args.destination}")
    options = reading_options(args)
    export_checkpoint(args.drafter, args.destination, args.format, target_type=args.target_type, **options)
    config = read_checkpoint(args.destination).config
    line = launch_line(config, args.destination, args.format, args.num_speculative_tokens)
    notes = export_notes(config, args.format, args.target_type)
    for note in notes:
        progress(note)
    show(args, {"folder": args.destination, "format": args.format, "command": line, "notes": notes}, line)
    return 0


def publish(args: argparse.Namespace) -> int:
    """Uploads a folder, and shows the commit's URL."""
    progress(f"uploading {args.folder} to {args.repo_id}")
    url = upload_folder(
        args.folder,
        args.repo_id,
        private=args.private or None,
        revision=args.revision,
        create_pr=args.create_pr,
        report=args.report,
    )
    show(args, {"url": url}, url)
    return 0


def upgrade(args: argparse.Namespace) -> int:
    """Makes an EAGLE 3 drafter an EAGLE 3.1 one, and shows its acceptance before and after."""
    texts = read_texts(args.texts)
    if args.output is not None:
        check_new_folder(Path(args.output))
        args.left_behind = "{output} is complete if it is there; otherwise nothing was written."
    progress(f"loading {args.target} and {args.drafter}")
    tokenizer, target = load_tokenizer(args.target), load_causal_lm(args.target, dtype="auto").to(args.device)
    options = reading_options(args)
    drafter = Eagle31DrafterModel.from_pretrained(args.drafter, dtype=target.dtype, **options).to(args.device).eval()
    progress(f"calibrating on {len(texts)} texts, then measuring acceptance before and after")
    upgraded = upgrade_to_eagle31(
        drafter, target, texts, tokenizer=tokenizer, num_prompts=args.prompts, max_new_tokens=args.max_new_tokens
    )
    report = upgraded.upgrade_report
    if args.output is not None:
        with new_folder(Path(args.output)) as folder:
            upgraded.save_pretrained(folder, repo_id=Path(args.output).name)  # the name on its card
    show(args, report.as_dict() | {"output": args.output}, report.summary())
    return 0


def read_texts(source: str) -> list[str]:
    """Returns the `text` of every record that is there. Raises what `read_records` raises, ValueError for a record
    without such a text, or whose text is not Unicode."""
    records, texts = read_records(source), []
    for i, record in enumerate(records):
        text = record.get("text")
        if not isinstance(text, str):
            raise ValueError(f'{records.where(i)}: holds no "text" string; expected {{"text": "..."}}.')
        try:
            check_text(text)
        except Skipped as error:
            raise ValueError(f"{records.where(i)}: {error}") from None
        texts.append(text)
    return texts


def add_info(parser: Parser) -> None:
    parser.add_path("drafter", "folder or Hub repository")
    parser.add_reading()
    parser.add_json()


def add_convert(parser: Parser) -> None:
    parser.set_defaults(left_behind="{source} is as it was, or native by now; the same command finishes the work.")
    parser.add_path("source", "folder or Hub repository")
    what = "a new folder (default: in place, the originals kept in SOURCE/original)"
    parser.add_path("destination", what, nargs="?")
    parser.add_flag("--discard-original", "remove what an in-place conversion keeps")
    parser.add_flag("--create-pr", "open a pull request on the Hub repository SOURCE")
    parser.add_reading()
    parser.add_json()


def add_export(parser: Parser) -> None:
    parser.set_defaults(left_behind="{destination} is complete if it is there; otherwise nothing was written.")
    parser.add_path("drafter", "folder or Hub repository, of any format")
    parser.add_path("destination", "a new folder")
    parser.add_option("--format", EXPORT_FORMATS, "vllm")
    what = "the target's model_type, where SGLang's layer ids depend on it (deepseek_v3, kimi_k2, ...)"
    parser.add_path("--target-type", what)
    parser.add_option("--num-speculative-tokens", positive, 5, "in the printed line")
    parser.add_reading()
    parser.add_json()


def add_publish(parser: Parser) -> None:
    said = "Nothing was committed; the same command goes on, and what was sent is not sent again."
    parser.set_defaults(left_behind=said)
    parser.add_path("folder", "a native checkpoint, or a config with weights_from")
    parser.add_path("--repo-id", "OWNER/NAME", required=True)
    parser.add_flag("--private", "make a new repository private")
    parser.add_path("--revision", "branch to upload to")
    parser.add_flag("--create-pr", "open a pull request instead of a commit")
    parser.add_path("--report", "folder of a report by eagle31 drift or bench acceptance, for the end of the card")
    parser.add_json()


def add_upgrade(parser: Parser) -> None:
    parser.add_path("--target", "folder or Hub repository of the target", required=True)
    what = "folder or Hub repository of its EAGLE 3 drafter, of any format"
    parser.add_path("--drafter", what, required=True)
    what = 'texts, {"text": ...} each, as prepare-data reads its data; or a plain text file; some thousand tokens'
    parser.add_path("--texts", what, required=True)
    parser.add_path("--output", "where to save the upgraded drafter")
    parser.add_option("--prompts", positive, 8, "texts to measure acceptance on")
    parser.add_option("--max-new-tokens", positive, 64, "tokens generated per text")
    parser.add_device()
    parser.add_reading()
    parser.add_json()
