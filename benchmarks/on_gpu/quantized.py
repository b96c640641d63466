"""Benchmarks of drafters with weights in 8 bits: times their layers beside torch's, and captured rounds with them."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from eagle31_hf.quantized import KINDS, QuantizedLinear

from .machine import bandwidth
from .matmuls import weights
from .rounds import chain, timed
from .run import Row, Run, Task
from .timing import copies_beyond_cache, milliseconds

LAYERS = ("gate_proj", "down_proj", "drafter's lm_head")
ROWS = (1, 8)


def quantized(run: Run) -> Iterator[Task]:
    """Lists what is timed: layers of the first shape for few rows, and a chain of up to five drafts, in each kind."""
    shape = run.shapes[0]
    prompt, depth = run.sizes.prompts[0], min(5, max(run.sizes.chains))
    for kind in KINDS:
        yield f"{shape}, chain {depth}, {kind}, prompt {prompt}", partial(_round, run, kind, prompt, depth)
    for name in LAYERS:
        for rows in ROWS:
            for kind in KINDS:
                yield f"{name}, {rows} rows, {kind}", partial(_layer, run, kind, weights(shape)[name], rows)


def _round(run: Run, kind: str, prompt: int, depth: int) -> Row:
    """Times captured chains as `rounds` does, the drafter's weights held in 8 bits."""
    shape = run.shapes[0]
    target, drafter = run.pair(shape)
    held: Any = deepcopy(drafter).quantize(kind)
    with run.standing_in(shape, (target, held)):
        return timed(run, shape, chain(depth), prompt)


@torch.no_grad()
def _layer(run: Run, kind: str, shape: tuple[int, int], rows: int) -> Row:
    """Times a layer: milliseconds of ours, of torch's linear in the run's dtype, and of torch's together with making
    the weight of that dtype."""
    count = copies_beyond_cache(shape[0] * shape[1], run.device)
    plain = [_linear(run, shape) for _ in range(count)]
    held = [QuantizedLinear(layer, kind).eval() for layer in plain]
    x = torch.randn(rows, shape[1], device=run.device).to(run.dtype)
    of_linear, ours = (milliseconds([partial(layer, x) for layer in some], run.device) for some in (plain, held))
    unpacked = milliseconds([partial(layer.by_copy, x) for layer in held], run.device)
    moved = shape[0] * shape[1] + 4 * shape[0] + rows * sum(shape) * x.element_size()
    floor = 1000 * moved / bandwidth(run)
    return {
        **ours,
        "ms_of_linear": of_linear["ms"],
        "ms_of_dequantized": unpacked["ms"],
        "rows": rows,
        "weight": list(shape),
        "bytes": moved,
        "gb_per_second": moved / ours["ms"] / 1e6,
        "floor_ms": floor,
        "over_floor": ours["ms"] / floor,
    }


def _linear(run: Run, shape: tuple[int, int]) -> nn.Linear:
    layer = nn.Linear(shape[1], shape[0], bias=False, device=run.device, dtype=run.dtype)
    nn.init.normal_(layer.weight, std=0.02)
    return layer
