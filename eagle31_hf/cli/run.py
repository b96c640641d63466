"""`eagle31 demo` and `eagle31 generate`: decode with a drafter, and beside it with the target alone."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from .. import demo as pair
from ..acceptance import by_position, track_acceptance
from ..bench import AUTO_SHAPE, TREE_SHAPE, Shape, environment, profile
from ..chat_template import as_read
from ..printable import printable
from ..reports.acceptance_report import same_texts
from ..reports.acceptance_study import TARGET_ALONE, AcceptanceStudy, Condition, Settings
from ..reports.document import Column, Table
from ..reports.figures import accepted_length, speedup, tokens_per_second
from ..reports.journal import Journal
from ..reports.prompts import Prompts, Renderer, Source
from ..reports.writing import aligned
from ..targets.context import context_of, room_for
from ..training.skipped import refused_by
from .loading import add_pair, knobs_of, load_causal_lm, load_drafter, load_tokenizer, sampling_options
from .parsing import LARGEST, Parser, positive, progress, seed, show, temperature, words

DEPTHS = (3, 5, 7)


class PrintableStreamer(TextStreamer):
    """Prints a text as it is made, its control characters spelled out."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Prints what is new of the text."""
        super().on_finalized_text(printable(text), stream_end)


def demo(args: argparse.Namespace) -> int:
    """Decodes the demo's prompts in several ways, and shows their speed. Returns 1 where a text is not the target's."""
    progress("loading the demo pair")
    target, tokenizer = pair.load_target(args.device)
    drafters = {name: pair.load_drafter(name, args.device) for name in pair.DRAFTERS}
    texts = pair.prompts(tokenizer, args.prompts)
    if not args.json:
        _show_completion(target, tokenizer, drafters["eagle31"], texts[0].to(args.device), args.max_new_tokens)
    ways = [*(Shape(depth) for depth in DEPTHS), TREE_SHAPE, AUTO_SHAPE]
    result = measure(target, tokenizer, drafters, texts, ways, args.max_new_tokens)
    show(args, result, "" if args.json else _table(result, args.profile))
    return 0 if all(run["identical"] for run in result["runs"]) else 1


def measure(
    target: Any,
    tokenizer: Any,
    drafters: Mapping[str, Any],
    texts: Sequence[Tensor],
    ways: Sequence[Shape],
    max_new_tokens: int,
) -> dict[str, Any]:
    """Decodes prompts (1, L) by the target alone and by every drafter in every way, in turn. Returns what `--json`
    prints: of each run its `profile`, too, the seconds of one call by part."""
    renderer = Renderer(tokenizer, LARGEST, len(tokenizer), {})
    sources = enumerate(Source(ids=text[0]) for text in texts)
    prompts = Prompts("the demo", renderer, len(texts), LARGEST, max_new_tokens, sources)
    settings = Settings(tuple(ways), ways[0], max_new_tokens, has_perturbations=False)
    [served] = AcceptanceStudy(target, prompts, Journal(None, {}), settings, drafters).measure().values()
    first = texts[0].to(target.device)
    runs = [
        _figures(served, label, way) | profile(target, drafter, way, first, max_new_tokens)
        for label, drafter in drafters.items()
        for way in ways
    ]
    return {
        "target": {"tokens_per_second": tokens_per_second(served.rows[TARGET_ALONE]).value},
        "runs": runs,
        "environment": environment(target, prompts=len(texts), max_new_tokens=max_new_tokens),
    }


def _figures(served: Condition, label: str, way: Shape) -> dict[str, Any]:
    rows, alone = served.rows[label, way.name], served.rows[TARGET_ALONE]
    counts = {
        f"{name}_per_position": [sum(column) for column in zip_longest(*(row[name] for row in rows), fillvalue=0)]
        for name in ("accepted", "drafted")
    }
    return {
        "drafter": label,
        "depth": way.depth,
        "tree": way.top_k > 1,
        "auto": way.is_auto,
        "name": way.name,
        "shape": way.knobs,
        "tokens_per_second": tokens_per_second(rows).value,
        "speedup": speedup(rows, alone).value,
        "mean_accepted_length": accepted_length(rows).value or 0.0,
        **counts,
        "identical": same_texts(rows, alone) == len(rows),
    }


def generate(args: argparse.Namespace) -> int:
    """Streams a completion, and says what was accepted."""
    progress(f"loading {args.target} and {args.drafter}")
    tokenizer = load_tokenizer(args.target)
    inputs = _inputs(tokenizer, args)
    target = load_causal_lm(args.target, dtype=args.dtype).to(args.device)
    drafter = load_drafter(args, target)
    options = knobs_of(args) | sampling_options(args)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    streamer = None if args.json else PrintableStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    length, context = inputs["input_ids"].shape[1], context_of(target)
    room = room_for(args.max_new_tokens, length, context)
    if room < args.max_new_tokens:
        progress(f"at most {room} new tokens: the target reads {context}, and the prompt has {length}")
    with track_acceptance() as stats:
        sequence = target.generate(
            **inputs.to(args.device), assistant_model=drafter, max_new_tokens=room, streamer=streamer, **options
        )
    if args.json:
        text = tokenizer.decode(sequence[0, length:], skip_special_tokens=True)
        show(args, {"text": text, **stats.as_dict()}, "")
    else:
        print(stats.summary(), file=sys.stderr)
    if args.explain:
        from ..generation.captured.kept import explained

        print(printable(explained(drafter, target)), file=sys.stderr)
    return 0


def _inputs(tokenizer: Any, args: argparse.Namespace) -> Any:
    """Returns the prompt's token ids and mask. Raises ValueError for one without tokens, and for a missing template."""
    if args.chat and tokenizer.chat_template is None:
        found = f"--chat: {args.target} has no chat template"
        raise ValueError(f"{found}; expected a target for chats, or the prompt without --chat.")
    if args.chat:
        messages = as_read(tokenizer, [{"role": "user", "content": args.prompt}], {})
        with refused_by("template"):
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
    else:
        inputs = tokenizer(args.prompt, return_tensors="pt")
    if inputs["input_ids"].numel() == 0:
        raise ValueError(f"prompt: {args.prompt[:40]!r} makes no tokens; expected text.")
    return inputs


def _show_completion(target, tokenizer, drafter, prompt, max_new_tokens: int) -> None:
    """Streams one completion by the target alone and one with the drafter, so that the difference can be seen."""
    words = tokenizer.decode(prompt[0], skip_special_tokens=True)
    print(f"--- the prompt, from a file neither model was trained on\n{printable(words)}")
    for title, options in (("the target alone", {}), ("with the EAGLE 3.1 drafter", {"assistant_model": drafter})):
        print(f"\n--- {title}", flush=True)
        streamer = PrintableStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        mask = torch.ones_like(prompt)
        target.generate(
            prompt, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer, **options
        )


def _table(result: dict[str, Any], with_profile: bool) -> str:
    env, runs = result["environment"], result["runs"]
    names = ("drafter", "depth", "tokens/s", "speedup", "accepted length", "accepted by position (share of drafted)")
    formats = ("", "", ".1f", "", ".2f", "", ".1%", "")
    columns = [Column(*column) for column in zip((*names, "overhead", "same text"), formats, strict=True)]
    rows = list[list[Any]]()
    for run in runs:
        pairs = zip(run["accepted_per_position"], run["drafted_per_position"], strict=True)
        rates = by_position([accepted / drafted for accepted, drafted in pairs])
        speed = [run["tokens_per_second"], f"{run['speedup']:.2f}x", run["mean_accepted_length"]]
        rows.append([run["drafter"], run["name"], *speed, rates, run["overhead"], "yes" if run["identical"] else "NO"])
    alone = (
        f"target alone: {result['target']['tokens_per_second']:.1f} tokens/s ({env['prompts']} prompts x"
        f" {env['max_new_tokens']} tokens, greedy, {env['dtype']}, {env['device']}, {env['threads']} threads)"
    )
    lines = ["", alone, *aligned(Table("", columns, rows))]
    if with_profile:
        ways = [Column(f"{run['drafter']} {run['name']}", ".1f") for run in runs]
        parts = [[part, *(1000 * run["profile"][part] for run in runs)] for part in runs[0]["profile"]]
        lines += ["", *aligned(Table("", [Column("milliseconds of one generate() call"), *ways], parts))]
    return "\n".join(lines)


def add_demo(parser: Parser) -> None:
    parser.add_device()
    parser.add_json()
    parser.add_flag("--profile", "also show where each millisecond goes")
    parser.add_option("--prompts", positive, 4, "prompts to decode")
    parser.add_option("--max-new-tokens", positive, 64, "tokens per prompt")


def add_generate(parser: Parser) -> None:
    parser.add_device()
    parser.add_json()
    add_pair(parser)
    parser.add("prompt", words)
    parser.add_option("--max-new-tokens", positive, 256)
    parser.add("--temperature", temperature, "0 (default): greedy", default=0.0)
    parser.add("--seed", seed)
    parser.add_flag("--chat", "wrap the prompt in the target's chat template")
    parser.add_flag("--explain", "say how rounds are run: as CUDA graphs or eagerly, by which kernels")
