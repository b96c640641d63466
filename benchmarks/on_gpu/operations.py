"""The operations of `kernels`, each beside its reference: how far off the kernel is, and how fast."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from engine import DRAFT_VOCABULARY, SHAPES
from torch import Tensor

from eagle31_hf.kernels import acceptance, distillation_loss, drafts, joint_linear, norms, rope, tree_attention  # noqa: F401 -- each adds OPERATIONS
from eagle31_hf.kernels.operation import OPERATIONS, Operation, why_torch

from .inputs import MAKERS, Inputs, Maker, Size, num_bytes
from .machine import bandwidth
from .run import Row, Run, Task
from .timing import copies_beyond_cache, milliseconds

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
AWKWARD = (
    Size(1, 1, 36, 3, 1, 12, 40, 61, 0, 7),
    Size(3, 7, 61, 6, 2, 80, 99, 500, 37, 61),
    Size(1, 60, 512, 8, 2, 64, 1500, 3001, 500, 777),
)
MOST_BYTES = 4_000_000_000  # of the inputs of one operation
NEAR_ZERO = 0.01  # of the largest value: units in the last place are not taken of smaller ones


def accuracy(run: Run) -> Iterator[Task]:
    """Every operation at awkward sizes in every dtype, beside its reference."""
    for dtype in DTYPES:
        for name in OPERATIONS:
            yield f"{name}, {str(dtype).removeprefix('torch.')}", partial(compared, run, name, dtype)


def compared(run: Run, name: str, dtype: torch.dtype) -> Row:
    """The largest errors of an operation over the awkward sizes: of what it returns and of what it writes to."""
    operation = OPERATIONS[name]
    worst: Row = {"ran": _what_runs(operation, run.device), "ulps": 0.0, "of_scale": 0.0, "wrong_integers": 0}
    for size in AWKWARD:
        args = MAKERS[name](Maker(size, dtype, run.device)).args
        of_reference, of_kernel = cloned(args), cloned(args)
        expected = tensors(operation.reference(*of_reference), of_reference)
        got = tensors(operation(*of_kernel), of_kernel)
        for errors in (error_of(one, other) for one, other in zip(got, expected, strict=True)):
            worst |= {key: max(worst[key], value) for key, value in errors.items()}
    return worst


def _what_runs(operation: Operation, device: torch.device) -> str:
    reason = why_torch(operation.name, device)
    return "kernel" if reason is None else f"reference: {reason}"


def cloned(value: Any) -> Any:
    """A copy of arguments, strides kept as far as `clone` keeps them."""
    if isinstance(value, list | tuple):
        return type(value)(cloned(each) for each in value)
    return value.clone() if isinstance(value, Tensor) else value


def tensors(*values: Any) -> list[Tensor]:
    """The tensors in values, however deep."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors(*value)
    return found


def error_of(got: Tensor, expected: Tensor) -> dict[str, float]:
    """The largest error: in units in the last place and as a share of the largest value; integers that differ. A NaN
    or an infinity that only one of both has counts as an error of 1e9."""
    if not got.is_floating_point():
        return {"wrong_integers": int((got != expected).sum())}
    one, other = got.double(), expected.double()
    same = (one == other) | (one.isnan() & other.isnan())
    scale = float(torch.where(other.isfinite(), other.abs(), 0.0).max()) if other.numel() else 0.0
    error = (one - other).abs().nan_to_num(nan=1e9, posinf=1e9).masked_fill(same, 0.0)
    unit = torch.finfo(got.dtype).eps * 2.0 ** other.abs().clamp(min=max(NEAR_ZERO * scale, 1e-30)).log2().floor()
    ulps = (error / unit).nan_to_num(nan=0.0)
    return {"ulps": float(ulps.max()), "of_scale": float(error.max()) / scale if scale else 0.0}


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
