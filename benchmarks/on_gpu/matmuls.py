"""The matmuls of a shape at the few rows of a round: how near their weights are read at the speed of a copy."""

from collections.abc import Iterator
from functools import partial

import torch
from engine import DRAFT_VOCABULARY, SHAPES

from .machine import bandwidth
from .run import Row, Run, Task
from .timing import copies_beyond_cache, milliseconds


def weights(shape: str) -> dict[str, tuple[int, int]]:
    """The matrices (out, in) of a shape's target and drafter, by name; equal ones once."""
    fields = SHAPES[shape]
    hidden, inner, vocab = (fields[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    queries = fields["num_attention_heads"] * fields["head_dim"]
    keys = fields["num_key_value_heads"] * fields["head_dim"]
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "q, k and v in one": (queries + 2 * keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "gate and up in one": (2 * inner, hidden),
        "down_proj": (hidden, inner),
        "lm_head": (vocab, hidden),
        "drafter's fc": (hidden, 3 * hidden),
        "drafter's q_proj": (queries, 2 * hidden),
        "drafter's lm_head": (min(DRAFT_VOCABULARY, vocab // 2), hidden),
    }


def matmuls(run: Run) -> Iterator[Task]:
    """Every matrix of the first shape, for every number of rows."""
    for name, shape in weights(run.shapes[0]).items():
        for rows in run.sizes.rows:
            yield f"{name}, {rows} rows", partial(timed, run, shape, rows)


def timed(run: Run, shape: tuple[int, int], rows: int) -> Row:
    """Milliseconds of torch's matmul, and the share of a copy's bandwidth at which it moves its bytes."""
    size = torch.empty((), dtype=run.dtype).element_size()
    moved = size * (shape[0] * shape[1] + rows * sum(shape))
    x = torch.randn(rows, shape[1], device=run.device).to(run.dtype)
    count = copies_beyond_cache(size * shape[0] * shape[1], run.device)
    held = [torch.randn(shape, device=run.device, dtype=run.dtype) * 0.02 for _ in range(count)]
    figures = milliseconds([partial(torch.nn.functional.linear, x, weight) for weight in held], run.device)
    speed = moved / figures["ms"] * 1000
    return {**figures, "rows": rows, "weight": list(shape), "bytes": moved, "gb_per_second": speed / 1e9,
            "share_of_copy": speed / bandwidth(run)}  # fmt: skip
