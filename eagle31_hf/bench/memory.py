"""Peak memory of a long prompt with and without a drafter, each in a process of its own (on a GPU: torch's peak)."""

import json
import subprocess
import sys
from typing import Any

import torch

from . import peak_memory
from .engine import build


def measure_memory(
    shape: str = "qwen3-0.6b",
    dtype: str = "bfloat16",
    device: str = "cpu",
    prompt_tokens: int = 16384,
    chunk: int | None = None,
) -> dict[str, Any]:
    """-> bytes: `alone`, `drafted`, both without the drafter's weights, and their `ratio`. `chunk`:
    `prefill_chunk_size`."""
    figures = {}
    for way in ("alone", "drafted"):
        options = [way, shape, dtype, device, str(prompt_tokens), str(chunk or 0)]
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, *options], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"measuring the memory of decoding {way} failed: {done.stderr.strip().splitlines()[-1:]}"
            )
        figures[way] = json.loads(done.stdout.splitlines()[-1])
    return {"prompt_tokens": prompt_tokens, "chunk": chunk, **figures, "ratio": figures["drafted"] / figures["alone"]}


def peak(way: str, shape: str, dtype: str, device: str, prompt_tokens: int, chunk: int) -> int:
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


if __name__ == "__main__":
    print(peak(*sys.argv[1:5], *map(int, sys.argv[5:])))  # type: ignore[arg-type]
