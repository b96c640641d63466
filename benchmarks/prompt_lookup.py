"""Drafts from the text beside the drafter's alone: `prompt_lookup_num_tokens`, as auto takes it, and 0.

By default the demo pair goes on with source files. With `--questions`, `eagle/data` of EAGLE's repository, a chat model
answers its sets, and edits code, functions of this library.
"""

import argparse
import ast
import inspect
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from command import add_rounds, progress, run_benchmark
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import demo
from eagle31_hf.acceptance import AcceptanceStats, track_acceptance
from eagle31_hf.bench import environment
from eagle31_hf.cli.parsing import DTYPES, positive, temperature
from eagle31_hf.generation import request
from eagle31_hf.modeling import Eagle31DrafterModel

WAYS: dict[str, dict[str, Any]] = {"drafter": {"prompt_lookup_num_tokens": 0}, "drafter and text": {}}
SETS = ("sum", "mt_bench", "humaneval", "gsm8k", "alpaca", "qa")
EDITS = "edits"
ASKED = (
    "Add comments to this function and give the whole function.",
    "Rename this function to compute and give the whole function.",
    "Add logging to this function and give the whole function.",
)
LINES = range(10, 26)  # of a function that is edited


def edits() -> Iterator[str]:
    """Questions that ask for a function, changed a little."""
    source = inspect.getsource(request)
    functions = [each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)]
    for number, each in enumerate(functions):
        lines = ast.get_source_segment(source, each) or ""
        if lines.count("\n") in LINES:
            yield f"{ASKED[number % len(ASKED)]}\n\n```python\n{lines}\n```"


def asked(tokenizer: Any, questions: Path, kind: str, count: int) -> list[Tensor]:
    """The first questions of a kind, as the model's template has them, each (1, L)."""
    if kind == EDITS:
        turns = edits()
    else:
        lines = (questions / kind / "question.jsonl").read_text(encoding="utf-8").splitlines()
        turns = (json.loads(line)["turns"][0] for line in lines)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for turn in islice(turns, count)
    ]


def measure_kind(
    target: Any, drafter: Eagle31DrafterModel, prompts: list[Tensor], options: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Decodes every prompt in both ways and by the target alone, in turn; of a prompt's times in a way the shortest
    counts, since other load only ever makes it longer."""
    seconds, tokens = dict.fromkeys(("alone", *WAYS), 0.0), dict.fromkeys(("alone", *WAYS), 0)
    stats = {way: AcceptanceStats() for way in WAYS}
    same = 0
    for prompt in prompts:
        mask, texts = torch.ones_like(prompt), dict[str, Tensor]()
        times: dict[str, list[float]] = {way: [] for way in seconds}
        for number in range(rounds):
            for way, each in times.items():
                drafting = {} if way == "alone" else {"assistant_model": drafter, **WAYS[way]}
                torch.manual_seed(number)
                with track_acceptance(stats.get(way, AcceptanceStats())):
                    began = time.perf_counter()
                    texts[way] = target.generate(prompt, attention_mask=mask, **options, **drafting)
                    each.append(time.perf_counter() - began)
        for way, each in times.items():
            seconds[way] += min(each)
            tokens[way] += texts[way].shape[1] - prompt.shape[1]
        same += torch.equal(texts["drafter"], texts["drafter and text"])
    rates = {way: tokens[way] / seconds[way] for way in seconds}
    return {
        "tokens_per_second": rates,
        "gain": rates["drafter and text"] / rates["drafter"],
        "accepted_length": {way: each.mean_accepted_length for way, each in stats.items()},
        "from_text": stats["drafter and text"].choices["from the text"] / stats["drafter and text"].target_forwards,
        "same_text": same,
        "prompts": len(prompts),
    }


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    torch.set_num_threads(args.threads)
    if args.questions is None:
        target, tokenizer = demo.load_target()
        drafter = demo.load_drafter("eagle31")
        prompts = {"source files": demo.prompts(tokenizer, args.prompts)}
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype).eval()
        drafter = Eagle31DrafterModel.from_pretrained(args.drafter, dtype=target.dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        prompts = {kind: asked(tokenizer, args.questions, kind, args.prompts) for kind in args.kinds}
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature:
        options |= {"temperature": args.temperature}
    kinds = {}
    for kind, each in prompts.items():
        progress(kind)
        kinds[kind] = measure_kind(target, drafter, each, options, args.rounds)
    lines = [
        f"{'':<14}{'alone':>8}{'drafter':>9}{'and text':>9}{'gain':>7}{'accepted':>14}{'from text':>11}{'same':>7}"
    ]
    for kind, found in kinds.items():
        rates, lengths = found["tokens_per_second"].values(), found["accepted_length"].values()
        lines.append(
            f"{kind:<14}{'{:>8.1f}{:>9.1f}{:>9.1f}'.format(*rates)}{found['gain']:>7.2f}"
            f"{'{:>7.2f}{:>7.2f}'.format(*lengths)}{found['from_text']:>11.2f}"
            f"{found['same_text']:>4}/{found['prompts']}"
        )
    facts = environment(target, max_new_tokens=args.max_new_tokens, temperature=args.temperature, rounds=args.rounds)
    return {"kinds": kinds, "environment": facts}, "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=Path, help="`eagle/data` of EAGLE's repository (default: the demo pair)")
    parser.add_argument("--target", help="chat model, folder or Hub repository")
    parser.add_argument("--drafter", help="for it, folder or Hub repository")
    parser.add_argument("--kinds", nargs="+", choices=(EDITS, *SETS), default=(EDITS, *SETS), help="(default: all)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="(default: auto, the target's own)")
    parser.add_argument("--prompts", type=positive, default=6, help="of a kind (default: 6)")
    parser.add_argument("--max-new-tokens", type=positive, default=96, help="(default: 96)")
    parser.add_argument("--temperature", type=temperature, default=0.0, help="(default: 0, greedy)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="(default: torch's)")
    add_rounds(parser, "decodings of every prompt in every way")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
