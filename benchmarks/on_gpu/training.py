"""Benchmarks of training on a GPU: times the distillation loss and the unroll's attention beside their alternatives.

H heads, S positions, D width of a head.
"""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from eagle31_hf.training.attention_ways import DENSE, EFFICIENT_CUDA, FLASH_CPU, FLASH_CUDA, WAYS, FirstKeys, Seen

from .inputs import Maker
from .operations import real_sizes, timed
from .run import Row, Run, Task
from .timing import milliseconds

WAYS_OF = {"cpu": (DENSE, FLASH_CPU), "cuda": (DENSE, FLASH_CUDA, EFFICIENT_CUDA)}
MATMULS = {"forward": 2, "backward": 5}  # of queries with keys, each of which sees half of them


def training(run: Run) -> Iterator[Task]:
    """Lists what is timed: of the loss our kernel and its reference; of attention every way that the device has."""
    size = next(real_sizes(run, "distillation_loss"))
    yield f"distillation_loss, {size.tokens} predictions", partial(timed, run, "distillation_loss", size)
    for way in WAYS_OF.get(run.device.type, (DENSE,)):
        yield f"attention of the unroll, {run.sizes.positions} positions, {way}", partial(attended, run, way)


def attended(run: Run, way: str) -> Row:
    """Times a way of attending: milliseconds forward and backward, how fast it multiplies, and how far its gradient
    by the queries is from that of dense chunks."""
    inputs = [_inputs(run, seed) for seed in range(2)]
    forward: list[Callable] = [partial(WAYS[way].forward, first) for first, _ in inputs]
    both: list[Callable] = [partial(_there_and_back, way, first, grad) for first, grad in inputs]
    figures = milliseconds(both, run.device)
    first, grad = inputs[0]
    expected = _there_and_back(DENSE, first, grad).double()
    error = float((_there_and_back(way, first, grad).double() - expected).abs().max() / expected.abs().max())
    multiplied = sum(MATMULS.values()) * first.q.numel() * first.q.shape[2]
    return {
        **figures,
        "ms_of_forward": milliseconds(forward, run.device)["ms"],
        "tflops": multiplied / figures["ms"] / 1e9,
        "error_of_scale": error,
    }


def _inputs(run: Run, seed: int) -> tuple[FirstKeys, Tensor]:
    """Makes one text's queries, keys and values (1, H, S, D), every head with keys of its own, and the output's
    gradient."""
    size = next(real_sizes(run, "distillation_loss"))
    make = Maker(size, run.dtype, run.device, seed)
    shape = 1, run.sizes.positions, size.heads, size.head_dim
    q, k, v, grad = (make.floats(*shape).transpose(1, 2) for _ in range(4))
    return FirstKeys(q, k, v, size.head_dim**-0.5, Seen()), grad


def _there_and_back(way: str, first: FirstKeys, grad: Tensor) -> Tensor:
    return WAYS[way].backward(first, grad, *WAYS[way].forward(first))[0]
