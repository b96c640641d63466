"""Rivals of the whole: the target alone, eager and compiled, and transformers' own speculation from the prompt."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from eagle31_hf.bench import synchronize

from .run import Row, Run, Task
from .subprocesses import in_subprocess

STATIC_LIMIT = 150.0  # seconds, building and compiling 32 layers included
LOOKUP = {"prompt_lookup_num_tokens": 5}


def rivals(run: Run) -> Iterator[Task]:
    """The first shape, in every way without a drafter."""
    yield from without_compiling(run, run.shapes[0])
    prompt = run.sizes.prompts[:2][-1]
    yield f"{run.shapes[0]}, plain, static cache, compiled, prompt {prompt}", partial(_static, run, prompt)


def without_compiling(run: Run, shape: str) -> Iterator[Task]:
    """Plain generate and prompt lookup."""
    for prompt in run.sizes.prompts[:2]:
        yield f"{shape}, plain, prompt {prompt}", partial(timed, run, shape, prompt)
        yield f"{shape}, prompt lookup of 5, prompt {prompt}", partial(timed, run, shape, prompt, **LOOKUP)


def timed(run: Run, shape: str, prompt: int, **options: Any) -> Row:
    """Decodes greedily without a drafter. `ms_a_token`, and `tokens_per_second` as its inverse, are of the second half
    of the text, so that they leave out the prompt. Prompt lookup finds in a random model's text what it would not in a
    real one's: its `ms_a_forward` is what tells."""
    target, _ = run.pair(shape)
    ids = run.ids(shape, 1, prompt)
    seconds: list[float] = []
    forwards: list[int] = []
    new_tokens = run.sizes.new_tokens
    for count in (2, new_tokens // 2, new_tokens):  # the first warms up
        with counted(target) as calls:
            synchronize()
            began = time.perf_counter()
            target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options)
            synchronize()
        seconds.append(time.perf_counter() - began)
        forwards.append(len(calls))
    taken, rest = seconds[2] - seconds[1], new_tokens - new_tokens // 2
    return {
        "shape": shape,
        "prompt_tokens": prompt,
        "ms_a_token": 1000 * taken / rest,
        "tokens_per_second": rest / taken,
        "tokens_per_second_of_call": new_tokens / seconds[2],
        "ms_a_forward": 1000 * taken / max(1, forwards[2] - forwards[1]),
        "forwards": forwards,
        "seconds": seconds,
    }


@contextmanager
def counted(module: nn.Module) -> Iterator[list[None]]:
    """A context with a list that has one entry for each forward of a module."""
    calls: list[None] = []
    handle = module.register_forward_pre_hook(lambda module, args: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


def _static(run: Run, prompt: int) -> Row:
    facts = {
        "shape": run.shapes[0],
        "prompt": prompt,
        "new_tokens": run.sizes.new_tokens,
        "dtype": str(run.dtype).removeprefix("torch."),
    }
    return facts | in_subprocess("static", min(STATIC_LIMIT, run.left()), str(run.device), facts)
