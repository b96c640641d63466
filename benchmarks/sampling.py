"""Sampled chains: rejection sampling by blocks, beside noise that target and drafter share; the demo pair at
temperature 1. Counts, which no other load changes."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from command import run_benchmark

from eagle31_hf import demo
from eagle31_hf.acceptance import track_acceptance
from eagle31_hf.bench import environment
from eagle31_hf.cli.parsing import positive
from eagle31_hf.generation import request
from eagle31_hf.generation.noise import Noise

KINDS = {"rejection": False, "shared noise": True}  # name -> is_coupled
DEPTHS = (3, 5, 7)


def with_coupling(is_coupled: bool, *arguments: Any) -> Noise:
    """The noise of a call, coupled or not, whatever the call would have."""
    num_sequences, vocab_size, device, _ = arguments
    return Noise(num_sequences, vocab_size, device, is_coupled)


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    target, tokenizer = demo.load_target()
    drafter = demo.load_drafter("eagle31")
    asked = {"max_new_tokens": args.max_new_tokens, "do_sample": True, "top_k": 0, "assistant_model": drafter}
    runs, lines = [], []
    for depth in DEPTHS:
        for name, is_coupled in KINDS.items():
            coupling = partial(with_coupling, is_coupled)
            with patch.object(request, "Noise", coupling), track_acceptance() as stats:
                for seed, prompt in enumerate(demo.prompts(tokenizer, args.prompts) * args.seeds):
                    torch.manual_seed(seed)
                    mask = torch.ones_like(prompt)
                    target.generate(prompt, attention_mask=mask, num_assistant_tokens=depth, **asked)
            runs.append({"depth": depth, "kind": name, "accepted_length": stats.mean_accepted_length})
            rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rates)
            lines.append(f"chain of {depth}, {name:<14}{stats.mean_accepted_length:>6.2f}   by depth {rates}")
    facts = environment(target, prompts=args.prompts, seeds=args.seeds, max_new_tokens=args.max_new_tokens)
    return {"runs": runs, "environment": facts}, "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=positive, default=24, help="(default: 24)")
    parser.add_argument("--seeds", type=positive, default=2, help="of each prompt (default: 2)")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="(default: 64)")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
