"""A conversation that goes on with its cache: the demo pair's accepted length by turn, beside one long prompt, and
beside a drafter that has not seen the turns before.

Texts are held-out source files: a turn asks with a piece of one, and the target goes on.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from command import run_benchmark
from transformers import DynamicCache

from eagle31_hf import demo
from eagle31_hf.acceptance import track_acceptance
from eagle31_hf.bench import environment
from eagle31_hf.cli.parsing import positive
from eagle31_hf.demo import HELD_OUT, held_out_file
from eagle31_hf.generation.read_text import ATTRIBUTE

ASKED, APART = 60, 100  # tokens that a turn asks, and how far apart they stand in a file
DEPTH = 5
WAYS = ("goes on", "one long prompt", "not seen")


def measure_turns(num_turns: int, num_texts: int, max_new_tokens: int) -> dict[str, Any]:
    """Returns {"runs", "environment"}. A run is a way and a turn, from 1: the `accepted_length`, in tokens a target
    forward, and the `seconds` of a text's call, the prompt included, on average over the texts."""
    target, tokenizer = demo.load_target()
    drafter = demo.load_drafter("eagle31")
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for file in list(HELD_OUT)[:num_texts]:
        source = torch.tensor([tokenizer(held_out_file(file)).input_ids])
        for way in WAYS:
            text, cache = source[:, :0], DynamicCache(config=target.config)
            for turn in range(1, num_turns + 1):
                begin = (turn - 1) * APART
                text = torch.cat((text, source[:, begin : begin + ASKED]), dim=1)
                if way == "not seen" and hasattr(cache, ATTRIBUTE):
                    delattr(cache, ATTRIBUTE)
                given = {} if way == "one long prompt" else {"past_key_values": cache}
                options = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_assistant_tokens": DEPTH}
                began = time.perf_counter()
                with track_acceptance() as stats:
                    text = target.generate(text, assistant_model=drafter, **options, **given)
                of_turn = stats.mean_accepted_length, time.perf_counter() - began
                found.setdefault((way, turn), []).append(of_turn)
    runs = []
    for (way, turn), each in found.items():
        lengths, seconds = zip(*each, strict=True)
        means = {"accepted_length": statistics.mean(lengths), "seconds": statistics.mean(seconds)}
        runs.append({"way": way, "turn": turn, **means})
    return {"runs": runs, "environment": environment(target, prompts=num_texts, max_new_tokens=max_new_tokens)}


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    result = measure_turns(args.turns, args.texts, args.max_new_tokens)
    lines = [f"{'accepted length':<16}" + "".join(f"{f'turn {turn}':>8}" for turn in range(1, args.turns + 1))]
    for way in WAYS:
        lengths = [run["accepted_length"] for run in result["runs"] if run["way"] == way]
        lines.append(f"{way:<16}" + "".join(f"{length:>8.2f}" for length in lengths))
    return result, "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=positive, default=6, help="(default: 6)")
    parser.add_argument("--texts", type=positive, default=6, help="files that are gone on with (default: 6)")
    parser.add_argument("--max-new-tokens", type=positive, default=48, help="of an answer (default: 48)")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
