"""What a training step costs on a GPU, by count: operations, arithmetic, bytes, memory; and the time that follows.

Real shapes, no values, no GPU, a few seconds. One row a step, by the code that `training.py` times. An operation takes
the longer of its arithmetic, at 600 TFLOP/s, and its bytes, at 2.6 TB/s, and at least 3 us: some three fifths of what
an H100 can multiply in bf16, and four fifths of what its memory can give. The host launches in that time what comes
next, at some 10 us an operation, and waits for the GPU where a size or a value is needed.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from command import run_benchmark
from counted import Cost, Ledger, counting
from engine import SHAPES, build
from training import PARTS, WAYS, Step

from eagle31_hf.cli.parsing import integer, positive
from eagle31_hf.targets.decoder_layer import why_no_norm
from eagle31_hf.targets.fused_norms import FusedNorm
from eagle31_hf.training import attention, chunked, target
from eagle31_hf.training.attention_ways import FLASH_CUDA
from eagle31_hf.training.ends import Scoring
from eagle31_hf.training.objective import MAX_DEPTH

FLOP_A_SECOND, BYTES_A_SECOND = 600e12, 2.6e12
LEAST, LAUNCH = 3e-6, 10e-6  # seconds of an operation, and of the host that launches it


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A context in which training does what it does on a GPU: here tensors say that they are on a CPU, and what is
    found by trying a target, which has no values, is as of most targets."""
    at_once = chunked.predictions_at_once
    replaced = {
        (attention, "way_of"): lambda q, v, is_masked: FLASH_CUDA,
        (chunked, "predictions_at_once"): lambda config, states, count: at_once(config, states.x, count),
        (target, "find_scoring"): lambda model: Scoring(),
        (target, "usual_norms"): lambda model: [FusedNorm(part) for part in model.modules() if not why_no_norm(part)],
    }
    with ExitStack() as stack:
        for (module, name), function in replaced.items():
            stack.enter_context(mock.patch.object(module, name, function))
        yield


class CountedStep(Step):
    ledger: Ledger

    def _timed(self, part: str, work: Callable[[], Any]) -> Any:
        self.ledger.begin(part)
        return work()


def count_step(shape: str, tokens: int, depth: int, recomputes: bool, texts: int) -> Ledger:
    """Returns the costs of a second step, bf16 beside a target in bf16: the first one makes the optimizer's state."""
    with as_on_a_gpu(), counting() as ledger:
        model = build(shape, torch.bfloat16, "cpu")[0]
        step = CountedStep(model, tokens, depth, recomputes, texts)
        step.ledger = ledger
        step.run()
        ledger.rows.clear()
        ledger.peak.clear()
        step.run()
    return ledger


def seconds_of(cost: Cost) -> float:
    return max(cost.flop / FLOP_A_SECOND, cost.nbytes / BYTES_A_SECOND, LEAST)


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    runs = [
        {"tokens": tokens, "activations": name} | _summary_of(args, tokens, recomputes)
        for tokens in args.prompt_tokens
        for name, recomputes in WAYS.items()
    ]
    figures = {name: getattr(args, name) for name in ("shape", "depth", "texts", "accumulate")}
    return {**figures, "runs": runs}, "\n\n".join(map(_table, runs))


def _summary_of(args: argparse.Namespace, tokens: int, recomputes: bool) -> dict[str, Any]:
    """Returns the costs of a run's parts, and the tokens a second that follow."""
    ledger = count_step(args.shape, tokens, args.depth, recomputes, args.texts)
    parts = {part: _sums([row for row in ledger.rows if row.part == part], ledger.peak[part]) for part in PARTS}
    micro_batch = sum(parts[part]["seconds"] for part in PARTS if part != "optimizer")
    step = args.accumulate * micro_batch + parts["optimizer"]["seconds"]
    return {"parts": parts, "tokens_per_second": args.accumulate * tokens / step}


def _sums(rows: list[Cost], peak: int) -> dict[str, float]:
    return {
        "operations": len(rows),
        "waits": sum(row.waits for row in rows),
        "flop": sum(row.flop for row in rows),
        "bytes": sum(row.nbytes for row in rows),
        "seconds": sum(map(seconds_of, rows)),
        "peak_memory": peak,
    }


def _table(run: dict[str, Any]) -> str:
    lines = [
        f"{run['tokens']:,} tokens, activations {run['activations']}: {run['tokens_per_second']:,.0f} tokens/s",
        f"{'':<10} operations  waits    TFLOP       GB       ms  launched in ms  peak memory",
    ]
    for part, found in run["parts"].items():
        lines.append(
            f"{part:<10}{found['operations']:>11,}{found['waits']:>7}{found['flop'] / 1e12:>9.1f}"
            f"{found['bytes'] / 1e9:>9.1f}{1e3 * found['seconds']:>9.1f}{1e3 * LAUNCH * found['operations']:>16.1f}"
            f"{found['peak_memory'] / 1e9:>10.1f} GB"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="of the target (default: qwen3-8b)")
    parser.add_argument(
        "--prompt-tokens", type=positive, nargs="+", default=[4096], metavar="N", help="of a row (default: 4,096)"
    )
    parser.add_argument("--depth", type=integer(1, MAX_DEPTH), default=4, help="steps unrolled (default: 4)")
    parser.add_argument("--texts", type=positive, default=1, help="packed into a row (default: 1)")
    parser.add_argument("--accumulate", type=positive, default=4, help="rows a step of the optimizer (default: 4)")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
