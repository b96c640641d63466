"""How fast the operations of `kernels` are, each beside its reference; `tests/kernels` say how far off."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from engine import DRAFT_VOCABULARY, SHAPES

from eagle31_hf.kernels import distillation_loss, drafts, joint_linear, layer_parts, tree_attention  # noqa: F401 -- each adds OPERATIONS
from eagle31_hf.kernels.operation import OPERATIONS, Operation, why_torch

from .inputs import MAKERS, Inputs, Maker, Size, num_bytes
from .machine import bandwidth
from .run import Row, Run, Task
from .timing import copies_beyond_cache, milliseconds

MOST_BYTES = 4_000_000_000  # of the inputs of one operation


def _what_runs(operation: Operation, device: torch.device) -> str:
    reason = why_torch(operation.name, device)
    return "kernel" if reason is None else f"reference: {reason}"


def speed(run: Run) -> Iterator[Task]:
    """Every operation at the first shape's sizes, beside its reference and the time that its bytes take."""
    for name in OPERATIONS:
        for size in real_sizes(run, name):
            words = f"{name}, {size.tokens} tokens" + f" after {size.context}" * _reads_context(name)
            yield words, partial(timed, run, name, size)


def _reads_context(name: str) -> bool:
    return name == "tree_attention"


def real_sizes(run: Run, name: str) -> Iterator[Size]:
    """The sizes that an operation is timed at: nodes of a round and, where it reads the context, lengths of it; for one
    of training predictions."""
    fields = SHAPES[run.shapes[0]]
    most = max(run.sizes.prompts)
    counts = (run.sizes.predictions,) if name == "distillation_loss" else run.sizes.nodes
    for context in run.sizes.prompts if _reads_context(name) else (most,):
        for nodes in counts:
            yield Size(
                sequences=1,
                tokens=nodes,
                hidden=fields["hidden_size"],
                heads=fields["num_attention_heads"],
                kv_heads=fields["num_key_value_heads"],
                head_dim=fields["head_dim"],
                intermediate=fields["intermediate_size"],
                vocab=min(DRAFT_VOCABULARY, fields["vocab_size"] // 2),
                context=context,
                capacity=1 << (most + max(run.sizes.nodes)).bit_length(),
            )


def timed(run: Run, name: str, size: Size) -> Row:
    """Milliseconds of the operation and of its reference, over inputs that the cache does not hold."""
    operation = OPERATIONS[name]
    made = many_inputs(run, name, size)
    first = made[0]
    works = {"operation": operation, "reference": operation.reference}
    figures = {way: milliseconds(_calls(function, made), run.device) for way, function in works.items()}
    floor = 1000 * first.num_bytes / bandwidth(run)
    return {
        "ran": _what_runs(operation, run.device),
        **{f"{key}{suffix}": value for way, suffix in (("operation", ""), ("reference", "_of_reference"))
           for key, value in figures[way].items()},
        "bytes": first.num_bytes,
        "gb_per_second": first.num_bytes / figures["operation"]["ms"] / 1e6,
        "floor_ms": floor,
        "over_floor": figures["operation"]["ms"] / floor,
        "times_reference": figures["reference"]["ms"] / figures["operation"]["ms"],
        "inputs": len(made),
    }  # fmt: skip


def many_inputs(run: Run, name: str, size: Size) -> list[Inputs]:
    """Inputs that differ, so many that the device's cache does not hold them all."""
    first = MAKERS[name](Maker(size, run.dtype, run.device))
    fitting = max(2, MOST_BYTES // num_bytes(first.args))
    count = min(fitting, copies_beyond_cache(first.num_bytes, run.device))
    return [first, *(MAKERS[name](Maker(size, run.dtype, run.device, seed)) for seed in range(1, count))]


def _calls(function: Any, made: list[Inputs]) -> list[Any]:
    return [partial(function, *inputs.args) for inputs in made]
