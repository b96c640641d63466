"""A calculation of what one budget of drafts for a whole batch could gain: drafts that go to the sequences where they
are likeliest to be accepted, beside the best depth for all sequences.

A round takes as long as its weights take to be read, or its products to be worked out, whichever is longer, and each
draft step as long as the drafter's weights take to be read. Of experts those are read that a token of the round is sent
to. In the forward of a padded batch all sequences have the rows of the longest draft, so that a shorter one saves
nothing; the reckoning is of rows without padding, which is the most that a budget can gain.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from command import run_benchmark

from eagle31_hf.cli.parsing import positive
from eagle31_hf.markdown import table

# An H200's memory and its multiply-adds in bf16, times the share that kernels reach; FP8 would compute twice as fast.
BYTES_A_SECOND, MULTIPLY_ADDS_A_SECOND = 0.8 * 4.8e12, 0.6 * 989e12 / 2
DEPTHS = range(25)
MIXES = {"half .9, half .3": (0.9, 0.3), "from .2 to .9": tuple(0.2 + 0.1 * i for i in range(8))}


@dataclass(frozen=True)
class Shape:
    """A target and its drafter, in numbers of weights. `dense`: what all tokens run through; `expert`: an expert's, of
    `num_experts` in each of `layers`, of which a token takes `active`; `size`: bytes a weight; `draft_step`: what a
    draft step reads."""

    dense: float
    draft_step: float
    layers: int = 0
    num_experts: int = 1
    active: int = 0
    expert: float = 0.0
    size: int = 2

    def seconds(self, rows: int, steps: int) -> float:
        """The seconds of a round that verifies so many rows after so many draft steps."""
        read = self.num_experts * (1 - (1 - self.active / self.num_experts) ** rows)
        weights = self.dense + self.layers * self.expert * read
        products = rows * (self.dense + self.layers * self.expert * self.active)
        verifying = max(weights * self.size / BYTES_A_SECOND, products / MULTIPLY_ADDS_A_SECOND)
        return verifying + steps * self.draft_step * self.size / BYTES_A_SECOND


SHAPES = {
    "Llama-3.1-8B": Shape(7.5e9, 375e6),
    "Qwen3-30B-A3B": Shape(1.2e9, 135e6, 48, 128, 8, 4.7e6),
    "Qwen3-235B-A22B": Shape(7.3e9, 400e6, 94, 128, 8, 18.9e6),
    "DeepSeek-V3 in FP8": Shape(16e9, 1e9, 58, 256, 8, 44e6, size=1),
}


def tokens(chance: float, depth: int) -> float:
    """The tokens that a round of a chain yields on average, where each draft is accepted with this chance."""
    return sum(chance**d for d in range(depth + 1))


def best_depth(shape: Shape, chances: list[float]) -> float:
    """The most tokens a second with chains of one depth."""
    rates = (
        sum(tokens(chance, depth) for chance in chances) / shape.seconds(len(chances) * (depth + 1), depth)
        for depth in DEPTHS
    )
    return max(rates)


def best_budget(shape: Shape, chances: list[float]) -> float:
    """The most tokens a second with chains of any depths: of each number of drafts the likeliest ones."""
    best = 0.0
    for deepest in DEPTHS:
        likeliest = sorted((chance**d for chance in chances for d in range(1, deepest + 1)), reverse=True)
        for count in range(len(likeliest) + 1):
            gained = len(chances) + sum(likeliest[:count])
            best = max(best, gained / shape.seconds(len(chances) + count, deepest))
    return best


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    gains = dict[str, dict[str, float]]()
    for (name, shape), (mix, each) in product(SHAPES.items(), MIXES.items()):
        chances = [each[i % len(each)] for i in range(args.batch_size)]
        gains.setdefault(name, {})[mix] = best_budget(shape, chances) / best_depth(shape, chances)
    rows = [[name, *(f"{gain:.3f}" for gain in of_mixes.values())] for name, of_mixes in gains.items()]
    return {"batch": args.batch_size, "gain": gains}, table(["target", *MIXES], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__ or "", measure, add_arguments, arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=positive, default=16, help="sequences (default: 16)")


if __name__ == "__main__":
    main()
