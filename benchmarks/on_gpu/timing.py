"""Milliseconds of small pieces of work, on inputs that the device's cache does not hold."""

import itertools
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

Work = Callable[[], Any]
MOST_COPIES = 64
REPEATS = 7


def copies_beyond_cache(num_bytes: int, device: torch.device) -> int:
    """Returns the number of copies of an input of so many bytes that have to be used in turn, so that none of them is
    still in the GPU's cache when its turn comes; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MOST_COPIES, 1 + 2 * cache // max(1, num_bytes)))


def milliseconds(works: list[Work], device: torch.device) -> dict[str, Any]:
    """Times pieces of work that differ in their inputs alone. Returns medians of one of them: `ms`, on a GPU within a
    CUDA graph of all of them, gaps included, and `ms_alone`, each launched by the host over a cleared cache."""
    if device.type != "cuda":
        return {"ms": _on_host(works)}
    figures: dict[str, Any] = {}
    try:
        figures["ms"] = _in_graph(works)
    except RuntimeError as error:  # what cannot be captured is timed alone
        figures["not_captured"] = str(error).splitlines()[0][:200]
    if find_spec("triton") is not None:
        from triton.testing import do_bench

        turns = itertools.cycle(works)
        figures["ms_alone"] = float(do_bench(lambda: next(turns)(), warmup=5, rep=25, return_mode="median"))
    figures.setdefault("ms", figures.get("ms_alone") or elapsed(works[0]))
    return figures


def _on_host(works: list[Work]) -> float:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        for work in works:
            work()
        seconds.append(time.perf_counter() - began)
    return 1000 * median(seconds) / len(works)


def _in_graph(works: list[Work]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for work in works:
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for work in works:
            work()
    graph.replay()
    return elapsed(graph.replay) / len(works)


def elapsed(work: Work, repeats: int = REPEATS) -> float:
    """Milliseconds of work between two events of the present stream, the median of `repeats`."""
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return median(taken)
