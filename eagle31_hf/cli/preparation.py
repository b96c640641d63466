"""`eagle31 prepare-data`: makes a store of training data, with the target's own answers and states where asked."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ..storage.folders import read_text
from ..training.ends import is_spread
from ..training.preparation_options import PreparationOptions
from ..training.prepare import prepare_data as prepare
from ..training.records import check_apart
from ..training.servers import EngineOptions
from ..training.store import MANIFEST, check_store_folder
from .loading import load_outline, load_processor, load_tokenizer, sampling_options
from .parsing import (
    DTYPES,
    Parser,
    count,
    device_map,
    number,
    positive,
    progress,
    seed,
    server,
    share,
    show,
    temperature,
    top_p,
)
from .target import QUANTIZATIONS, target_for

SAMPLING = ("top_p", "top_k")  # of generate()
ENGINE_OPTIONS = ("requests", "timeout", "states_folder")  # of EngineOptions, behind --engine-


def prepare_data(args: argparse.Namespace) -> int:
    """Makes the shards that are missing, and shows what the store holds."""
    if args.data is None and not args.self_prompts:
        found = "neither --data nor --self-prompts is given"
        raise ValueError(f"{found}; expected prompts, or the number of chats to make up.")
    options = data_options(
        args,
        mask=args.mask,
        template_augmentation=args.template_augmentation,
        chat_template=None if args.chat_template is None else read_text(args.chat_template),
        states=args.states,
        layer_ids=args.layers,
        dtype=args.states_dtype,
        batch_size=args.batch_size,
        records_per_shard=args.records_per_shard,
    )
    check_apart(args.data, args.output)
    check_store_folder(args.output)
    tokenizer = load_tokenizer(args.target, args.revision)
    if options.regenerate or options.states:
        target, states_by = target_for(args, options, is_new=not Path(args.output, MANIFEST).is_file())
    else:  # data as it is needs none of the weights
        target, states_by = load_outline(args.target, args.revision, args.dtype), None
    processor = tokenizer if states_by else load_processor(args.target, args.revision, target, tokenizer)
    prepared = prepare(
        target, processor, args.data, args.output, options, part=args.part, progress=progress, states_by=states_by
    )
    rows = [
        ("store", f"{prepared.folder}: {prepared.shards} of {prepared.num_shards} shards"),
        ("rows", f"{prepared.rows:,} of {prepared.tokens:,} tokens"),
        *(("skipped", f"{count:,}: {reason}") for reason, count in sorted(prepared.skipped.items())),
    ]
    if not is_spread(target) or PartialState().is_main_process:
        show(args, asdict(prepared), "\n".join(f"{name:<8} {text}" for name, text in rows))
    return 0


def data_options(args: argparse.Namespace, **others: Any) -> Any:
    """Returns the options of the data that `prepare-data` and `train` both have, and `others`. Raises ValueError for
    those that do not go together."""
    engine = engine_options(args)
    lengths = {} if args.max_new_tokens is None else {"max_new_tokens": args.max_new_tokens}
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    generation = given | sampling_options(args)  # what is not given is as in the target's own generation config
    if not is_regenerated(args) and (generation or lengths):
        found = "--max-new-tokens, --temperature, --top-p and --top-k are of regenerated answers"
        raise ValueError(f"{found}; expected --regenerate too.")
    return PreparationOptions(
        max_length=args.max_length,
        split=args.split,
        max_samples=args.max_samples,
        seed=args.seed,
        template_options=dict(args.template_option),
        engine=engine,
        processes=args.processes,
        regenerate=is_regenerated(args),
        self_prompts=args.self_prompts or 0,
        generation=generation,
        **lengths,
        **others,
    )


def engine_options(args: argparse.Namespace) -> Any:
    """Returns the options of the engine that answers, None without one. Raises ValueError for options without what they
    belong to."""
    given = {name: value for name in ENGINE_OPTIONS if (value := getattr(args, f"engine_{name}")) is not None}
    if args.engine is None:
        for name in given:
            raise ValueError(f"--engine-{name.replace('_', '-')} is of an engine; expected --engine too.")
        return None
    if not (is_regenerated(args) or getattr(args, "states", True)):  # `train` has no --states, and trains on them
        raise ValueError("--engine gives the target's own answers and states; expected --regenerate or --states too.")
    return EngineOptions(tuple(args.engine), **given)


def is_regenerated(args: argparse.Namespace) -> bool:
    """Returns True where answers are the target's own: where they are asked for, and wherever it asks the questions."""
    return bool(args.regenerate or args.self_prompts)


def part_of(text: str) -> tuple[int, int]:
    """Reads `I/N`, the I-th of N processes, counted from 0."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected I/N with I from 0 to N - 1, e.g. 0/4")
    return int(index), int(count)


def add_prepare_data(parser: Parser) -> None:
    parser.set_defaults(left_behind="Complete shards are kept in {output}; the same command makes the others.")
    parser.add_path("--target", "folder or Hub repository of the model to train a drafter for", required=True)
    parser.add_path("--data", ".jsonl, .json, .parquet or text file, a folder of them, or a dataset of the Hub")
    what = "the store's folder; run again with the same arguments, what is missing is added"
    parser.add_path("--output", what, required=True)
    add_data(parser)
    parser.add_flag("--regenerate", "replace answers by the target's own")
    parser.add_flag("--states", "store the target's states too, to train without it")
    parser.add_option("--max-length", positive, 2048, "tokens of a row")
    parser.add_option("--mask", ("answers", "all"), "answers", "which tokens are trained on")
    parser.add_path("--chat-template", "a Jinja template instead of the tokenizer's", metavar="FILE")
    parser.add_option("--template-augmentation", share, 0.0, "share of chats without template or BOS", metavar="SHARE")
    what = "hidden_states indices to store (default: 2, L // 2, L - 3 of L layers)"
    parser.add("--layers", count, what, nargs="+", metavar="ID")
    what = "how states are stored (default: as the target has them)"
    parser.add("--states-dtype", ("float32", "bfloat16", "float16", "fp8"), what)
    what = "make only the shards of process I of N (default: 0/1)"
    parser.add("--part", part_of, what, default=(0, 1), metavar="I/N")
    what = "records of the data in a shard (default: 64, without states and answers made here 1,024)"
    parser.add("--records-per-shard", positive, what)
    parser.add_option("--batch-size", positive, 8, "rows the target reads at once")
    parser.add_option("--seed", seed, 0)
    add_loading(parser)


def add_data(parser: Parser) -> None:
    """Adds the options that say which records of the data count, how they are read, and who answers them."""
    parser.add_option("--split", str, "train", "of a dataset")
    what = "only the first N records of the data; a dataset of the Hub is streamed then, not downloaded whole"
    parser.add("--max-samples", positive, what, metavar="N")
    parser.add("--processes", positive, "so many tokenize where no answers are made (default: all cores)", metavar="N")
    what = "add N chats that the target makes up: it asks the questions, then answers them; no data is needed"
    parser.add("--self-prompts", positive, what, metavar="N")
    parser.add("--max-new-tokens", positive, "of a regenerated answer (default: 1024)")
    usual = "as the target's generation config has it; self-prompted: 0, .7 and 1 in turn"
    parser.add("--temperature", temperature, f"of answers, 0: greedy (default: {usual})")
    parser.add("--top-p", top_p)
    parser.add("--top-k", positive)
    what = "servers of vLLM or SGLang that run the target instead of transformers, as http://localhost:8000"
    parser.add("--engine", server, what, nargs="+", metavar="URL")
    parser.add("--engine-requests", positive, "prompts that servers are asked at once, all together (default: 64)")
    what = "how long a server may be silent before it is asked again (default: 600)"
    parser.add("--engine-timeout", number(0, above=True), what, metavar="SECONDS")
    what = "where the folder that servers write hidden states into is on this machine (default: under the same name)"
    parser.add_path("--engine-states-folder", what, metavar="FOLDER")
    parser.add_template_option()


def add_loading(parser: Parser) -> None:
    """Adds the options by which `load_target` loads the target."""
    parser.add_path("--revision", "branch, tag or commit of the target's Hub repository")
    parser.add("--dtype", DTYPES, "of the target (default: auto, its own)", default="auto")
    what = "spread the target over devices, as transformers does: auto, balanced, ..."
    parser.add("--device-map", device_map, what)
    parser.add_flag("--tensor-parallel", "each process of `accelerate launch` holds a part of every weight")
    parser.add("--load-in", QUANTIZATIONS, "quantize the target with bitsandbytes while loading")
    parser.add_device()
    parser.add_json()
