"""Peak memory of a long prompt with and without a drafter, each in a process of its own (on a GPU: torch's peak)."""

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from command import add_models, progress, run_benchmark
from engine import SHAPES, build


def measure_memory(
    shape: str = "qwen3-0.6b",
    dtype: str = "bfloat16",
    device: str = "cpu",
    prompt_tokens: int = 16384,
    chunk: int | None = None,
) -> dict[str, Any]:
    """-> bytes: `alone`, `drafted`, both without the drafter's weights, and their `ratio`. `chunk`:
    `prefill_chunk_size`."""
    figures, context = {}, multiprocessing.get_context("forkserver")  # a server that has only imported forks them
    context.set_forkserver_preload(["engine"])
    for way in ("alone", "drafted"):
        with ProcessPoolExecutor(1, context) as pool:
            figures[way] = pool.submit(peak, way, shape, dtype, device, prompt_tokens, chunk).result()
    return {"prompt_tokens": prompt_tokens, "chunk": chunk, **figures, "ratio": figures["drafted"] / figures["alone"]}


def peak_memory(device: torch.device) -> int:
    """Bytes at most, of a GPU or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # which Windows lacks

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak(way: str, shape: str, dtype: str, device: str, prompt_tokens: int, chunk: int | None) -> int:
    """Bytes this process has needed at most to decode a prompt and 32 tokens, the drafter's weights not counted; both
    ways build it."""
    target, drafter = build(shape, getattr(torch, dtype), device)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in (*drafter.parameters(), *drafter.buffers()))
    prompt = torch.randint(0, target.config.vocab_size, (1, prompt_tokens), device=device)
    options = {"assistant_model": drafter, "num_assistant_tokens": 5} if way == "drafted" else {}
    chunked = {"prefill_chunk_size": chunk} if chunk else {}
    target.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False, **options, **chunked
    )
    return peak_memory(target.device) - weights


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    rows = []
    for chunk in (None, 2048):
        way = f"in chunks of {chunk}" if chunk else "in one forward"
        progress(f"a prompt of {args.prompt_tokens} tokens, {way}")
        rows.append(measure_memory(args.shape, args.dtype, args.device, args.prompt_tokens, chunk))
    lines = [
        f"{args.shape}, {args.dtype}, {args.device}: peak memory less the drafter's weights",
        "prompt   chunk   alone      drafted    ratio",
    ]
    lines += [
        f"{row['prompt_tokens']:>6}  {row['chunk'] or 'whole':>6}  {row['alone'] / 1e6:>6.0f} MB "
        f" {row['drafted'] / 1e6:>6.0f} MB  {row['ratio']:.3f}"
        for row in rows
    ]
    return {"memory": rows}, "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__doc__, measured, lambda parser: add_models(parser, [*SHAPES], 16384), arguments)


if __name__ == "__main__":
    main()
