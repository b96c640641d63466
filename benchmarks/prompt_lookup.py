"""Drafts from the text: auto as it comes, beside auto with the drafter's drafts alone (`prompt_lookup_num_tokens=0`).

By default the demo pair goes on with source files. With `--questions`, `eagle/data` of EAGLE's repository, a chat model
answers its sets, and edits functions of eagle31_hf/generation/request.py. Also says how often the token after a match
repeated, by the length of the match.
"""

import argparse
import ast
import inspect
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from eagle31_hf.generation.planning.prompt_lookup import PRIOR, Chances
from eagle31_hf.modeling import Eagle31DrafterModel

ALONE, DRAFTER, TEXT = "alone", "drafter", "drafter and text"
EDITS = "edits"
SETS = ("sum", "mt_bench", "humaneval", "gsm8k", "alpaca", "qa")
INSTRUCTIONS = (
    "Add comments to this function and give the whole function.",
    "Rename this function to compute and give the whole function.",
    "Add logging to this function and give the whole function.",
)
LINES = range(10, 27)  # of a function that is edited


def edits() -> Iterator[str]:
    """Questions that ask for a function, changed a little."""
    source = inspect.getsource(request)
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    for number, function in enumerate(functions):
        code = ast.get_source_segment(source, function) or ""
        if len(code.splitlines()) in LINES:
            yield f"{INSTRUCTIONS[number % len(INSTRUCTIONS)]}\n\n```python\n{code}\n```"


def load_prompts(tokenizer: Any, questions: Path, kind: str, count: int) -> list[Tensor]:
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


@contextmanager
def counted_matches() -> Iterator[tuple[Counter[int], Counter[int]]]:
    """A context in which it is counted how often a token came after a match, and how often it repeated, by the lengths
    that `PRIOR` tells apart."""
    seen, right = Counter[int](), Counter[int]()
    learn = Chances.learn

    def counted(self: Chances, length: int, is_right: bool) -> None:
        least = max(bound for bound in PRIOR if bound <= length)
        seen[least] += 1
        right[least] += is_right
        learn(self, length, is_right)

    Chances.learn = counted  # type: ignore[method-assign]
    try:
        yield seen, right
    finally:
        Chances.learn = learn  # type: ignore[method-assign]


def measure_kind(
    target: Any, drafter: Eagle31DrafterModel, prompts: list[Tensor], options: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Decodes every prompt by the target alone and in both ways, in turn, from the same seed; of a prompt's times in a
    way the shortest counts, since other load only ever makes it longer."""
    ways: dict[str, dict[str, Any]] = {
        ALONE: {},
        DRAFTER: {"assistant_model": drafter, "prompt_lookup_num_tokens": 0},
        TEXT: {"assistant_model": drafter},
    }
    stats = {way: AcceptanceStats() for way in ways}
    seconds, tokens, same = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0), 0
    for prompt in prompts:
        texts: dict[str, Tensor] = {}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for way, drafting in list(ways.items()) * rounds:
            torch.manual_seed(0)
            with track_acceptance(stats[way]):
                began = time.perf_counter()
                texts[way] = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **drafting)
                times[way].append(time.perf_counter() - began)
        for way, text in texts.items():
            seconds[way] += min(times[way])
            tokens[way] += text.shape[1] - prompt.shape[1]
        same += torch.equal(texts[DRAFTER], texts[TEXT])
    rates = {way: tokens[way] / seconds[way] for way in ways}
    return {
        "tokens_per_second": rates,
        "gain": rates[TEXT] / rates[DRAFTER],
        "accepted_length": {way: stats[way].mean_accepted_length for way in (DRAFTER, TEXT)},
        "from_text": stats[TEXT].choices["from the text"] / stats[TEXT].target_forwards,
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
        prompts = {kind: load_prompts(tokenizer, args.questions, kind, args.prompts) for kind in args.kinds}
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    if args.temperature:
        options |= {"do_sample": True, "temperature": args.temperature}
    kinds = {}
    with counted_matches() as (seen, right):
        for kind, of_kind in prompts.items():
            progress(kind)
            kinds[kind] = measure_kind(target, drafter, of_kind, options, args.rounds)
    repeated = {least: {"share": right[least] / seen[least], "of": seen[least]} for least in sorted(seen)}
    facts = environment(target, max_new_tokens=args.max_new_tokens, temperature=args.temperature, rounds=args.rounds)
    return {"kinds": kinds, "repeated": repeated, "environment": facts}, table(kinds, repeated)


def table(kinds: dict[str, Any], repeated: dict[int, Any]) -> str:
    """The figures for people: tokens a second in the three ways, accepted lengths, rounds from the text."""
    head = ("", ALONE, DRAFTER, "and text", "gain", "accepted", "and text", "from text", "same text")
    lines = ["".join(f"{cell:>12}" for cell in head)]
    for kind, found in kinds.items():
        figures = [*found["tokens_per_second"].values(), found["gain"], *found["accepted_length"].values()]
        cells = [kind, *(f"{figure:.2f}" for figure in (*figures, found["from_text"]))]
        lines.append("".join(f"{cell:>12}" for cell in (*cells, f"{found['same_text']} of {found['prompts']}")))
    lines += [f"after {n} tokens or more: {each['share']:.2f} of {each['of']} repeated" for n, each in repeated.items()]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--questions", type=Path, help="`eagle/data` of EAGLE's repository (default: the demo pair)")
    parser.add_argument("--target", help="with --questions: chat model, folder or Hub repository")
    parser.add_argument("--drafter", help="with --questions: its drafter, folder or Hub repository")
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
