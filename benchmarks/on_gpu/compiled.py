"""Rivals that torch.compile makes, each run in a process of its own: `python -m ...compiled NAME DEVICE FACTS`, FACTS a
JSON object. Prints one JSON object."""

import json
import sys
import time

import torch
from engine import build

from eagle31_hf.bench import synchronize


def static(device: str, shape: str, prompt: int, new_tokens: int, dtype: str) -> dict:
    """The target alone over a static cache: transformers compiles its forward, by default with CUDA graphs."""
    target, _ = build(shape, getattr(torch, dtype), device)
    ids = torch.randint(target.config.vocab_size, (1, prompt), device=device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "cache_implementation": "static"}
    seconds = []
    for count in (new_tokens, new_tokens, new_tokens // 2, new_tokens):  # the longest first: its cache is kept
        synchronize()
        began = time.perf_counter()
        target.generate(ids, max_new_tokens=count, **options)
        synchronize()
        seconds.append(time.perf_counter() - began)
    first, _, half, whole = seconds
    rest = new_tokens - new_tokens // 2
    return {
        "ms_a_token": 1000 * (whole - half) / rest,
        "tokens_per_second": rest / (whole - half),
        "tokens_per_second_of_call": new_tokens / whole,
        "seconds_to_compile": first - whole,
        "seconds": seconds,
    }


if __name__ == "__main__":
    what, device, facts = sys.argv[1:]
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in the process that asks
    print(json.dumps({"static": static}[what](device, **json.loads(facts))))
