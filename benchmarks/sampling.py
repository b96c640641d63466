"""Sampled chains: rejection sampling by blocks, beside noise that target and drafter share, at temperature 1. Of the
demo pair counts, which no other load changes; with `--pair TARGET DRAFTER` tokens a second of these, in turns: the
target alone, auto, whose noise is shared, and fixed chains, which go by blocks."""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from command import run_benchmark
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31DrafterModel, demo
from eagle31_hf.acceptance import track_acceptance
from eagle31_hf.bench import environment
from eagle31_hf.cli.parsing import positive
from eagle31_hf.generation import request
from eagle31_hf.generation.noise import Noise

QUESTIONS = (
    "Give me three tips for sleeping better.",
    "Write a Python function that reverses a string.",
    "What is the capital of France, and what is it known for?",
    "A shop sells apples at 3 dollars each. How much do 14 apples cost?",
)
WAYS: dict[str, dict[str, Any]] = {
    "target alone": {},
    "auto": {"num_assistant_tokens": "auto"},
    **{f"chain of {depth}": {"num_assistant_tokens": depth} for depth in (2, 3, 5)},
}
KINDS = {"rejection": False, "shared noise": True}  # name -> is_coupled
DEPTHS = (3, 5, 7)


def with_coupling(is_coupled: bool, *arguments: Any) -> Noise:
    """The noise of a call, coupled or not, whatever the call would have."""
    num_sequences, vocab_size, device, _, first_slot = arguments
    return Noise(num_sequences, vocab_size, device, is_coupled, first_slot)


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if args.pair:
        return speeds(args)
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


def speeds(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Tokens a second of a chat model and its drafter, over the questions; the first turn loads kernels."""
    target = AutoModelForCausalLM.from_pretrained(args.pair[0], dtype=args.dtype)
    drafter = Eagle31DrafterModel.from_pretrained(args.pair[1], dtype=target.dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.pair[0])
    texts = list(QUESTIONS)
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    prompts = [tokenizer(text, return_tensors="pt") for text in texts]
    asked = {"max_new_tokens": args.max_new_tokens, "do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    found = {name: [0.0, 0.0] for name in WAYS}
    for turn, inputs, name in product(range(args.seeds + 1), prompts, WAYS):
        torch.manual_seed(turn)
        given = {"assistant_model": drafter, "prompt_lookup_num_tokens": 0, **WAYS[name]} if WAYS[name] else {}
        began = time.perf_counter()
        text = target.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **asked, **given)
        if turn:
            found[name][0] += text.shape[1] - inputs["input_ids"].shape[1]
            found[name][1] += time.perf_counter() - began
    runs = [{"way": name, "tokens_per_second": tokens / seconds} for name, (tokens, seconds) in found.items()]
    lines = [f"{run['way']:<14}{run['tokens_per_second']:>7.1f} tokens/s" for run in runs]
    return {"runs": runs, "environment": environment(target, seeds=args.seeds)}, "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pair", nargs=2, metavar=("TARGET", "DRAFTER"), help="a chat model and its drafter")
    parser.add_argument("--dtype", default="auto", help="of the pair")
    parser.add_argument("--prompts", type=positive, default=24, help="(default: 24)")
    parser.add_argument("--seeds", type=positive, default=2, help="of each prompt (default: 2)")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="(default: 64)")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
