"""`eagle31 drift` and `eagle31 bench acceptance`: what drafters do on the user's own prompts, as reports."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..bench import AUTO_SHAPE, TREE_SHAPE, Shape, environment
from ..generation.planning.costs import MAX_DEPTH
from ..modeling import Eagle31DrafterModel, refuse_parallel
from ..printable import printable
from ..reports.acceptance_report import acceptance_report, against, read_earlier
from ..reports.acceptance_study import RIVALS, AcceptanceStudy, Settings
from ..reports.document import Report
from ..reports.drift_report import drift_report
from ..reports.drift_study import DriftStudy, default_lengths
from ..reports.journal import Journal, check_folder, open_journal
from ..reports.plots import check_installed
from ..reports.prompts import NAMED_SETS, Prompts, Renderer, read_sources
from ..reports.writing import terminal, write_report
from ..storage.fingerprints import digest, weights_fingerprint
from ..targets.context import context_of
from ..training.images import images_of
from .loading import load_causal_lm, load_processor, load_tokenizer
from .parsing import DTYPES, LARGEST, Parser, number, positive, progress, reading_options, show

TEXT_ALONE = "expected text, which is all that this report is of."
# Options of `bench acceptance` that take several values, and measure nothing unless they are given: what reads a value,
# or the values there are; help.
SEVERAL: dict[str, tuple[Any, str]] = {
    "lengths": (positive, "contexts to measure besides the prompts, in tokens"),
    "temperatures": (number(0, above=True), "to sample at"),
    "concurrency": (positive, "prompts in a batch"),
    "rivals": (
        RIVALS,
        (
            "speculation of transformers itself to measure besides, by the text's own words or with the drafter in its"
            " own loop"
        ),
    ),
}


def drift(args: argparse.Namespace) -> int:
    """Measures drift and shows it; with --output also writes the report."""
    if args.depth > MAX_DEPTH:
        raise ValueError(f"--depth is {args.depth}; expected at most {MAX_DEPTH}, the deepest that is drafted.")
    if args.max_new_tokens < args.depth + 2:
        why = f"for a chain of {args.depth} between the first token and the bonus token"
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; expected at least {args.depth + 2}, {why}.")
    loads = drafters_of(args)
    target, prompts = loaded(args, loads)
    lengths = args.lengths or default_lengths(max(map(len, prompts.ids)), prompts.room, args.max_new_tokens)
    lengths = tuple(sorted(set(lengths)))
    drafters = {label: load() for label, load in loads.items()}
    for drafter in drafters.values():
        refuse_parallel(drafter, "measured step by step")
    facts = facts_of(args, target, prompts, drafters)
    del drafters  # the study loads one after the other
    facts |= {"depth": args.depth, "lengths": [*lengths], "interventions": not args.no_interventions}

    def make(journal: Journal) -> Report:
        how = args.depth, args.max_new_tokens, lengths, not args.no_interventions
        study = DriftStudy(target, prompts, journal, *how)
        return drift_report([study.measure(label, load) for label, load in loads.items()], args.depth, facts)

    show_report(args, facts, ", ".join(loads), make)
    return 0


def bench(
    args: argparse.Namespace, make_study: Callable[..., AcceptanceStudy] = AcceptanceStudy, engine: str | None = None
) -> int:
    """Measures acceptance and speed and shows them; with --output also writes the report. `engine`: what decodes chains
    in place of generate(), in a study of another kind."""
    for option, deepest in (("--depth", args.depth), ("--depths", max(args.depths))):
        if deepest > MAX_DEPTH:
            raise ValueError(f"{option}: got {deepest}; expected at most {MAX_DEPTH}, the deepest that is drafted.")
    earlier = None if args.against is None else read_earlier(Path(args.against))
    loads = drafters_of(args)
    target, prompts = loaded(args, loads, reads_images=engine is None)
    if max(args.concurrency, default=1) > len(prompts):
        raise ValueError(f"--concurrency: got {max(args.concurrency)}; expected at most {len(prompts)}, all prompts.")
    drafters = {label: load() for label, load in loads.items()}
    chains = [Shape(depth) for depth in dict.fromkeys(args.depths)]
    trees = [replace(TREE_SHAPE, total_tokens=nodes) for nodes in dict.fromkeys(args.trees)]
    each_once = {name: tuple(dict.fromkeys(getattr(args, name))) for name in SEVERAL}
    settings = Settings(
        ways=(*chains, *([] if engine else [*trees, AUTO_SHAPE])),
        reference=Shape(args.depth),
        max_new_tokens=args.max_new_tokens,
        has_perturbations=not args.no_perturbations,
        **each_once,
    )
    facts = facts_of(args, target, prompts, drafters)
    facts |= {"ways of drafting": ", ".join(way.name for way in settings.ways), "elsewhere": settings.reference.name}
    facts |= {name: [*values] for name, values in each_once.items()}
    facts |= {"perturbations": settings.has_perturbations, "decoded by": engine or "generate()"}

    def make(journal: Journal) -> Report:
        study = make_study(target, prompts, journal, settings, drafters)
        report = acceptance_report(study.measure(), study.generations(), settings, [*loads], facts)
        if earlier is not None:
            report.sections.append(against(earlier, report.as_dict()["figures"], facts, printable(args.against)))
        return report

    show_report(args, facts, ", ".join(loads), make)
    return 0


def show_report(args: argparse.Namespace, facts: dict[str, Any], names: str, make: Callable[[Journal], Report]) -> None:
    """Makes a report and shows it; with --output its figures are kept in the folder as they come, and its files
    written."""
    if args.output is None:
        report = make(Journal(None, {}))
    else:
        args.left_behind = "What was measured is in {output}: --resume goes on."
        with open_journal(Path(args.output), facts, args.resume) as journal:
            report = make(journal)
            files = write_report(Path(args.output), report, names)
            progress(f"{files[2]} is the page; {len(files)} files in {args.output}")
    show(args, report.as_dict(), terminal(report))


def loaded(args: argparse.Namespace, labels: Iterable[str], reads_images: bool = False) -> tuple[Any, Prompts]:
    """Returns target and prompts, once it is known that a report of them can be written; `reads_images`: of prompts
    with images, too, where the target reads them. Raises ValueError where no prompt is left that fits."""
    if args.resume and args.output is None:
        raise ValueError("--resume goes on with a report; expected --output with its folder.")
    if args.output is not None:
        check_installed()
        check_folder(Path(args.output), args.resume)
    progress(f"loading {args.target} and {' and '.join(labels)}")
    tokenizer = load_tokenizer(args.target)
    target = load_causal_lm(args.target, reads_images, dtype=args.dtype).to(args.device)
    vocab_size, options = target.config.get_text_config(decoder=True).vocab_size, dict(args.template_option)
    processor = load_processor(args.target, None, target, tokenizer) if reads_images else tokenizer
    images = images_of(target, processor, options, None if reads_images else TEXT_ALONE)
    renderer = Renderer(tokenizer, args.prompt_tokens, vocab_size, options, images)
    sources, room = read_sources(args.prompts, args.split), context_of(target) or LARGEST
    prompts = Prompts(args.prompts, renderer, args.num_prompts, room, args.max_new_tokens, sources, progress)
    for reason, count in prompts.skips.taken().items():
        progress(f"left out {count:,}: {reason}")
    prompts.check_lengths(args.lengths or ())
    return target, prompts


def drafters_of(args: argparse.Namespace) -> dict[str, Callable[..., Eagle31DrafterModel]]:
    """Returns the drafters by the labels they are shown under: a function that loads each, and takes fields of its
    config to change. Raises ValueError for two of one name."""
    sources = [args.drafter, *args.compare]
    labels = [printable(Path(source).name or source) for source in sources]
    if len(set(labels)) < len(labels):
        labels = sources
    if len(set(labels)) < len(labels):
        raise ValueError(f"--compare: names a drafter twice ({', '.join(sources)}); expected others.")

    def load(source: str, **fields: Any) -> Eagle31DrafterModel:
        options = reading_options(args) | {"dtype": args.dtype} | fields
        return Eagle31DrafterModel.from_pretrained(source, **options).to(args.device).eval()

    return {label: partial(load, source) for label, source in zip(labels, sources, strict=True)}


def facts_of(
    args: argparse.Namespace, target: Any, prompts: Prompts, drafters: dict[str, Eagle31DrafterModel]
) -> dict[str, Any]:
    """Returns what figures are of: models and prompts by their fingerprints, sizes, hardware and versions."""
    # what prompts are made of counts, too: longer contexts and other renderings are made of it
    words = [part for source in prompts.sources for part in (source.words, *source.later)]
    images = [part["image"].open().tobytes() for source in prompts.sources for part in source.images]
    ids = digest(*(ids.numpy().tobytes() for ids in prompts.ids), *words, *images)
    # a folder may be another's, on another machine; what is in it counts
    models = {"target": (Path(args.target).name if Path(args.target).exists() else args.target, target)}
    models |= {f"drafter {label}": (label, drafter) for label, drafter in drafters.items()}
    named = dict[str, str]()
    for name, (source, model) in models.items():
        config = digest(model.config.to_json_string())
        named[name] = f"{source} (weights {weights_fingerprint(model)[:12]}, config {config[:12]})"
    return named | {
        "read with": ", ".join(f"{name}={value}" for name, value in reading_options(args).items()) or "no options",
        "prompts": f"{len(prompts)} of {printable(Path(prompts.name).name)} ({ids[:12]})",
        "new tokens a prompt": args.max_new_tokens,
        **environment(target),
    }


def add_drift(parser: Parser) -> None:
    parser.add_json()
    add_models_and_prompts(parser)
    parser.add_option("--depth", positive, MAX_DEPTH, "of the chains")
    what = "contexts to measure besides the prompts (default: 256, 1024, 4096 ... as far as target and texts go)"
    parser.add("--lengths", positive, what, nargs="+", metavar="TOKENS")
    parser.add_flag("--no-interventions", "leave out noise and pinned states")


def add_bench(parser: Parser) -> None:
    """Adds `acceptance`, all that is measured by a command, and its options; what the library costs is in
    `benchmarks/`."""
    what = "report on drafters beside the target alone, on your prompts: acceptance, speed, perturbations, contexts"
    parser.add("what", ("acceptance",), what)
    parser.add_json()
    add_models_and_prompts(parser)
    parser.add_option("--depths", positive, [1, 2, 3, 5, 7, 10], "of chains", nargs="+")
    parser.add_option("--trees", positive, [24], nargs="*", metavar="NODES")
    parser.add_option("--depth", positive, 5, "of chains in all but the first part of the report")
    parser.add_flag("--no-perturbations", "leave out prompts as they should not be")
    for name, (kind, what) in SEVERAL.items():
        parser.add(f"--{name}", kind, f"{what} (default: none)", nargs="+", default=[])
    parser.add_path("--against", "an earlier report.json, to say what changed", metavar="FILE")


def add_models_and_prompts(parser: Parser) -> None:
    """Adds the arguments that say what a report is about, and where it goes."""
    parser.add_path("--target", "folder or Hub repository of the target", required=True)
    parser.add_path("--drafter", "folder or Hub repository of its drafter", required=True)
    parser.add_path("--compare", "others beside it", nargs="+", default=[], metavar="DRAFTER")
    what = "file, folder or dataset with chats, questions or texts; python: files of Python's own library; or one of"
    parser.add_path("--prompts", f"{what} {', '.join(NAMED_SETS)}", required=True)
    parser.add_path("--split", "of a dataset (default: train; of a named one its own)")
    parser.add_option("--num-prompts", positive, 24, "at most")
    parser.add_option("--prompt-tokens", positive, 96, "of a text, which goes on after them")
    parser.add_option("--max-new-tokens", positive, 96, "a prompt")
    parser.add_template_option()
    parser.add_device()
    parser.add("--dtype", DTYPES, "of the models (default: auto, their own)", default="auto")
    parser.add_path("--output", "where the report is written", metavar="FOLDER")
    parser.add_flag("--resume", "go on with a report that was stopped")
    parser.add_reading()
