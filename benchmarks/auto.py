"""`num_assistant_tokens="auto"` beside every fixed setting, on prompts that draft well, less well and not at all: the
demo pair."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from command import add_rounds, progress, run_benchmark
from torch import Tensor
from transformers import PreTrainedModel

from eagle31_hf import demo
from eagle31_hf.bench import AUTO_SHAPE, Shape
from eagle31_hf.cli.run import measure
from eagle31_hf.modeling import Eagle31DrafterModel

FIXED = (
    Shape(1),
    Shape(3),
    Shape(5),
    Shape(7),
    Shape(9),
    Shape(4, 4, 10),
    Shape(5, 4, 16),
    Shape(7, 4, 16),
    Shape(7, 4, 24),
    Shape(7, 4, 40),
)
# Nothing of it is Python, which is all that the pair has seen.
PROSE = (
    "It was late in the autumn when the letter came. The old man had been expecting it for some weeks, and "
    "yet, when he held it in his hand, he\n"
    "found that he did not want to open it at once. He put it on the table by the window, made himself a cup "
    "of tea, and sat down to look at\n"
    "the garden, where the last of the apples were still hanging on the tree. Nobody had picked them this "
    "year.\n"
    'When his daughter came home in the evening she saw the letter lying there and asked him what it said. "I '
    'do not know yet," he answered.\n'
    '"I thought that we might read it together, after supper, as we used to do when your mother was alive." '
    "She nodded, and hung up her coat.\n"
    "The road to the village was longer than she remembered. There had been rain in the night, and the fields "
    "on both sides were dark and\n"
    "heavy; now and then a bird went up from the hedge and was gone. She thought of what she would say to "
    "them, and how little of it was true.\n"
)


def prompts_by_kind(tokenizer: Any, code: list[Tensor], count: int, length: int = 96) -> dict[str, list[Tensor]]:
    """code: as given; prose: English; noise: random ids of the vocabulary. Each (1, length)."""
    paragraphs = tokenizer(PROSE, return_tensors="pt").input_ids[0]
    starts = torch.linspace(0, len(paragraphs) - length, count).long().tolist()
    generator = torch.Generator().manual_seed(0)
    return {
        "code": code[:count],
        "prose": [paragraphs[None, start : start + length] for start in starts],
        "noise": [torch.randint(0, len(tokenizer), (1, length), generator=generator) for _ in range(count)],
    }


def measure_auto(
    target: PreTrainedModel,
    tokenizer: Any,
    drafter: Eagle31DrafterModel,
    prompts_of: dict[str, list[Tensor]],
    max_new_tokens: int = 96,
    rounds: int = 2,
) -> dict[str, Any]:
    """-> by kind of prompt what `measure` returns, the `best` fixed setting, and auto's tokens a second over its and
    over the target's."""
    drafters, kinds = {"eagle31": drafter}, {}
    for kind, prompts in prompts_of.items():
        progress(kind)
        result = measure(target, tokenizer, drafters, prompts * rounds, [*FIXED, AUTO_SHAPE], max_new_tokens)
        *fixed, auto = result["runs"]
        best = max(fixed, key=lambda run: run["tokens_per_second"])
        over_best = auto["tokens_per_second"] / best["tokens_per_second"]
        kinds[kind] = result | {"best": best["name"], "auto_over_best": over_best, "auto_over_target": auto["speedup"]}
    return kinds


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    target, tokenizer = demo.load_target()
    prompts = prompts_by_kind(tokenizer, demo.prompts(tokenizer, 6), 6)
    result = measure_auto(target, tokenizer, demo.load_drafter("eagle31"), prompts, rounds=args.rounds)
    lines = []
    for kind, figures in result.items():
        lines += [
            (
                f"{kind}: auto is {figures['auto_over_target']:.2f}x the target alone, {figures['auto_over_best']:.3f}"
                f" of the best fixed setting ({figures['best']})"
            ),
            *(
                f"  {run['name']:<12} {run['speedup']:>5.2f}x {run['mean_accepted_length']:>6.2f}"
                for run in figures["runs"]
            ),
        ]
    return result, "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, "decodings of every prompt in every setting")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
