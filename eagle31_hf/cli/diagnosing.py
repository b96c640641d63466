"""`eagle31 drift`: what drafters do on the user's own prompts, as a report."""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loading import load_causal_lm, load_tokenizer
from .parsing import DTYPES, add_device, add_reading, path, positive, progress, reading_options, show
from .preparation import add_template_option

if TYPE_CHECKING:
    from ..modeling import Eagle31DrafterModel
    from ..reports.prompts import Prompts

DEEPEST = 16


def drift(args: argparse.Namespace) -> int:
    """Measures drift and shows it; with --output also writes the report."""
    from ..reports.drift import DriftStudy, Settings, default_lengths
    from ..reports.drift_report import drift_report
    from ..reports.journal import Journal, open_journal
    from ..reports.plots import check_installed
    from ..reports.text import terminal
    from ..reports.writing import write_report

    if args.depth > DEEPEST:
        raise ValueError(f"--depth is {args.depth}; expected at most {DEEPEST}, the deepest that is drafted.")
    if args.resume and args.output is None:
        raise ValueError("--resume goes on with a report; expected --output with its folder.")
    if args.output is not None:
        check_installed()
        args.left_behind = lambda args: f"What was measured is in {args.output}: --resume goes on."
    loads = drafters_of(args)
    progress(f"loading {args.target} and {' and '.join(loads)}")
    tokenizer, target = load_tokenizer(args.target), load_causal_lm(args.target, dtype=args.dtype).to(args.device)
    prompts = prompts_of(args, target, tokenizer)
    lengths = args.lengths or default_lengths(max(map(len, prompts.ids)), prompts.room, args.max_new_tokens)
    settings = Settings(args.depth, args.max_new_tokens, tuple(sorted(set(lengths))), not args.no_interventions)
    facts = facts_of(args, target, prompts, loads) | {"depth": args.depth, "lengths": [*settings.lengths]}
    facts |= {"interventions": settings.has_interventions}

    def report(journal: Journal) -> Any:
        study = DriftStudy(target, prompts, settings, journal, counted)
        found = [study.measure(label, load) for label, load in loads.items()]
        return drift_report(found, args.depth, facts)

    if args.output is None:
        result = report(Journal(None, {}))
    else:
        with open_journal(Path(args.output), facts, args.resume) as journal:
            result = report(journal)
            files = write_report(Path(args.output), result, ", ".join(loads))
            progress(f"{files[2]} is the page; {len(files)} files in {args.output}")
    show(args, result.as_dict(), terminal(result))
    return 0


def drafters_of(args: argparse.Namespace) -> dict[str, Callable[..., "Eagle31DrafterModel"]]:
    """Returns the drafters by the labels they are shown under: a function that loads each, and takes fields of its
    config to change. Raises ValueError for two of one name."""
    from ..modeling import Eagle31DrafterModel

    sources = [args.drafter, *args.compare]
    labels = [Path(source).name or source for source in sources]
    if len(set(labels)) < len(labels):
        labels = sources
    if len(set(labels)) < len(labels):
        raise ValueError(f"--compare: names a drafter twice ({', '.join(sources)}); expected others.")

    def loader(source: str) -> Callable[..., "Eagle31DrafterModel"]:
        def load(**fields: Any) -> "Eagle31DrafterModel":
            options = reading_options(args) | {"dtype": args.dtype} | fields
            return Eagle31DrafterModel.from_pretrained(source, **options).to(args.device).eval()

        return load

    return {label: loader(source) for label, source in zip(labels, sources, strict=True)}


def prompts_of(args: argparse.Namespace, target: Any, tokenizer: Any) -> "Prompts":
    """Reads the prompts. Raises ValueError where none is left that fits."""
    from ..reports.prompts import Prompts, Renderer

    config = target.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None)
    renderer = Renderer(tokenizer, args.prompt_tokens, config.vocab_size, dict(args.template_option))
    room = context if isinstance(context, int) else 2**31 - 1
    return Prompts(
        args.prompts, renderer, args.num_prompts, room, args.max_new_tokens, split=args.split, report=progress
    )


def facts_of(
    args: argparse.Namespace, target: Any, prompts: "Prompts", loads: dict[str, Callable[..., Any]]
) -> dict[str, Any]:
    """Returns what figures are of: models and prompts by their fingerprints, sizes, hardware and versions."""
    from ..bench import environment
    from ..storage.fingerprints import digest, weights_fingerprint

    ids = digest(*(ids.numpy().tobytes() for ids in prompts.ids))
    models = {"target": (args.target, target)} | {f"drafter {label}": (label, load()) for label, load in loads.items()}
    named = {name: f"{source} ({weights_fingerprint(model)[:12]})" for name, (source, model) in models.items()}
    return named | {
        "prompts": f"{len(prompts)} of {prompts.name} ({ids[:12]})",
        "new tokens a prompt": args.max_new_tokens,
        **environment(target),
    }


def counted(numbers: Iterable[int], what: str) -> Iterable[int]:
    """Shows a progress bar on stderr."""
    from tqdm import tqdm

    return tqdm(numbers, desc=what, file=sys.stderr, unit="prompt", mininterval=1.0)


def add_drift(parser: argparse.ArgumentParser) -> None:
    add_device(parser)
    add_models_and_prompts(parser)
    parser.add_argument("--depth", type=positive, default=DEEPEST, help=f"of the chains (default: {DEEPEST})")
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="TOKENS",
        help="contexts to measure besides the prompts (default: 256, 1024, 4096 ... as far as target and texts go)",
    )
    parser.add_argument("--no-interventions", action="store_true", help="leave out noise and pinned states")


def add_models_and_prompts(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say what a report is about, and where it goes."""
    parser.add_argument("--target", type=path, required=True, help="folder or Hub repository of the target")
    parser.add_argument("--drafter", type=path, required=True, help="folder or Hub repository of its drafter")
    parser.add_argument("--compare", type=path, nargs="+", default=[], metavar="DRAFTER", help="others beside it")
    parser.add_argument(
        "--prompts",
        type=path,
        required=True,
        help="file, folder or dataset with chats, questions or texts; or python: files of Python's own library",
    )
    parser.add_argument("--split", type=path, default="train", help="of a dataset (default: train)")
    parser.add_argument("--num-prompts", type=positive, default=24, help="at most (default: 24)")
    parser.add_argument(
        "--prompt-tokens", type=positive, default=96, help="of a text, which goes on after them (default: 96)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=96, help="a prompt (default: 96)")
    add_template_option(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the models (default: auto, their own)")
    parser.add_argument("--output", type=path, metavar="FOLDER", help="where the report is written")
    parser.add_argument("--resume", action="store_true", help="go on with a report that was stopped")
    add_reading(parser)
