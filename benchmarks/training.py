"""The seconds of a training step, by part, and the memory it needs: real shapes, random weights, random text.

The drafter is in fp32, under autocast where the target's dtype is another one, as `eagle31 train --bf16` has it.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from command import add_models, add_rounds, progress, run_benchmark
from engine import DRAFT_VOCABULARY, SHAPES, build
from memory import peak_memory
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle31_hf.bench import environment, synchronize
from eagle31_hf.cli.parsing import positive
from eagle31_hf.modeling import Eagle31DrafterModel
from eagle31_hf.targets.layers import decoder_layers
from eagle31_hf.training.fresh import new_drafter
from eagle31_hf.training.objective import Batch, DraftingObjective, Settings
from eagle31_hf.training.optimizer import JoinedOptimizer, matrices_of, new_muon, slow_down_tables
from eagle31_hf.training.target import TargetReader

PARTS = ("target", "forward", "backward", "optimizer")
TEXTS = 4  # packed into a row
WAYS = {"computed again": True, "kept": False}  # activations of the unroll; the frugal first


class Step:
    """Training steps over one packed row of `tokens`; `seconds` of every part, step by step."""

    def __init__(self, target: PreTrainedModel, tokens: int, depth: int, recomputes: bool, texts: int = TEXTS):
        self.texts = texts
        self.target, self.seconds = target, {part: list[float]() for part in PARTS}
        table: Any = target.requires_grad_(False).get_input_embeddings()
        drafter: Any = new_drafter(target, torch.arange(min(DRAFT_VOCABULARY, len(table.weight) // 2)))
        self.drafter: Eagle31DrafterModel = drafter.to(target.device)
        self.reader = TargetReader(target, self.drafter.config.resolve_layer_ids(len(decoder_layers(target))))
        self.objective = DraftingObjective(self.drafter, Settings(depth, (1.0,) * depth), self.reader.logits).train()
        self.objective.recomputes = recomputes
        self.trained: list[nn.Parameter] = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = usual_optimizer(self.drafter)
        self.ids = torch.randint(len(table.weight), (1, tokens), device=target.device)

    def run(self) -> None:
        device, tokens = self.ids.device, self.ids.shape[1]
        texts = 1 + torch.arange(tokens, device=device)[None] * self.texts // tokens
        states, last = self._timed("target", lambda: self.reader.read(self.ids, texts))
        batch = Batch(self.ids, torch.ones_like(texts, dtype=torch.bool), texts, states, last)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.target.dtype != torch.float32):
            loss: Tensor = self._timed("forward", lambda: self.objective(batch)["loss"])
        self._timed("backward", loss.backward)
        self._timed("optimizer", self._update)

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _timed(self, part: str, work: Callable[[], Any]) -> Any:
        synchronize()
        began = time.perf_counter()
        result = work()
        synchronize()
        self.seconds[part].append(time.perf_counter() - began)
        return result


def usual_optimizer(drafter: Eagle31DrafterModel) -> JoinedOptimizer:
    """Makes the optimizer that a Trainer makes by default, with rates that change nothing worth mentioning."""
    matrices = matrices_of(drafter)
    known = {id(matrix) for matrix in matrices}
    rest = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad and id(p) not in known], lr=1e-5)
    slow_down_tables(rest, drafter)
    return JoinedOptimizer([rest, new_muon(matrices, 1e-5, 0.0)])


def measure_training(
    shape: str,
    dtype: torch.dtype,
    device: str,
    tokens: int,
    depth: int,
    rounds: int,
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """-> `runs`, one for each of WAYS: median seconds of each part and of a step, tokens a second, how many times the
    target's forward a step takes, and the peak memory in bytes, weights and optimizer included. On a CPU that is the
    process's, so the second is no less."""
    target, _ = build(shape, dtype, device)
    runs = []
    for name, recomputes in WAYS.items():
        progress(f"activations {name}: {1 + rounds} steps of {tokens} tokens, {depth} deep")
        runs.append({"activations": name} | measure_steps(target, tokens, depth, recomputes, rounds))
    return {"runs": runs, "environment": environment(target, shape=shape, tokens=tokens, depth=depth, rounds=rounds)}


def measure_steps(target: PreTrainedModel, tokens: int, depth: int, recomputes: bool, rounds: int) -> dict[str, Any]:
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    step = Step(target, tokens, depth, recomputes)
    for _ in range(1 + rounds):
        step.run()
    seconds = {part: median(times[1:]) for part, times in step.seconds.items()}  # the first warms up
    whole = sum(seconds.values())
    return {
        "seconds": seconds,
        "step": whole,
        "tokens_per_second": tokens / whole,
        "times_target": whole / seconds["target"],
        "peak_memory": peak_memory(target.device),
    }


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    tokens = args.prompt_tokens
    result = measure_training(
        args.shape, getattr(torch, args.dtype), args.device, tokens, args.depth, args.rounds, progress
    )
    env = result["environment"]
    lines = [
        (
            f"{args.shape}, random weights, {env['dtype']}, {env['device']}, {env['threads']} threads; steps of"
            f" {tokens} tokens, {args.depth} deep, medians of {args.rounds}"
        ),
        "activations     tokens/s"
        + "".join(f"{name:>12}" for name in ("step", *PARTS))
        + "  step / target  peak memory",
    ]
    for run in result["runs"]:
        seconds = "".join(f"{value:>10.3g} s" for value in (run["step"], *run["seconds"].values()))
        lines.append(
            f"{run['activations']:<15} {run['tokens_per_second']:>8.0f}{seconds}{run['times_target']:>14.2f}x "
            f"{run['peak_memory'] / 1e9:>9.2f} GB"
        )
    return result, "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, "of which the median counts")
    add_models(parser, [*SHAPES], 2048)
    parser.add_argument("--depth", type=positive, default=4, help="steps unrolled (default: 4)")


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, add_arguments, arguments)


if __name__ == "__main__":
    main()
