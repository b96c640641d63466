"""The seam between rounds and CUDA graphs: how a function of static tensors is captured, and how the host reads what
came of it. Without a GPU the same functions run as they are."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor


class Seam:
    """A way to run rounds; this one runs the functions as they are, on any device. `name` tells it from others, and
    says to people which it is."""

    name = "tensors without graphs"

    def capture(self, function: Callable[[], None], part: str) -> Callable[[], None]:
        """Captures a function of static tensors and returns what replays it. The function may be run for warming up;
        the caller puts back what it then changes. `part`: which one it is, "draft", "verify" or one that keeps
        states."""
        return function

    def start_reading(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts to copy a tensor to the host; what is returned waits for the copy, and returns it."""
        copy = tensor.clone()  # the next round writes over it
        return copy.cpu

    def wait_for_last(self) -> None:
        """Has the work of a call wait on the device for that of the last one, whose last draft may still run."""

    def note_last(self) -> None:
        """Notes the work of a call that ends, for `wait_for_last`."""


Uncaptured = Seam  # what to call this very one
_capturing = threading.Lock()  # one capture at a time in a process


def pool_of(part: str) -> str:
    """The pool of memory that the graphs of a part share. Among those of one pool a replay may write over what any that
    was captured later has left. What verify leaves is read after the next draft, so they have pools of their own."""
    return part.split()[0]


class CudaGraphs(Seam):
    """Captures functions as CUDA graphs, which share a pool of memory with others of their part.

    Source: transformers' generation/continuous_batching/model_runner.py warms up and captures unmodified models so.
    """

    name = "CUDA graphs"

    def __init__(self, device: torch.device):
        self.device = device
        self.stream: Any = None  # made by the first capture, as pools are by that of each part
        self.pools: dict[str, Any] = {}
        self.last: Any = None  # event after the work of the last call

    def capture(self, function: Callable[[], None], part: str) -> Callable[[], None]:
        graph, pool = torch.cuda.CUDAGraph(), self.pools.get(pool_of(part))
        with _capturing, torch.cuda.device(self.device):
            self.stream = self.stream or torch.cuda.Stream()
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):
                    function()  # compiles kernels and loads modules, which cannot be captured
                # Of this thread alone, calls that a capture forbids are errors; others may use the device meanwhile.
                # A graph that is collected in the midst of a capture would end it.
                with (
                    without_collection(),
                    own_workspaces(),
                    torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"),
                ):
                    function()
            except BaseException:
                end_failed_capture(graph, torch.cuda.current_device())
                raise
            finally:  # where the end of a capture fails, torch leaves the thread on the stream of the capture
                torch.cuda.set_stream(current)
                current.wait_stream(self.stream)
        self.pools.setdefault(pool_of(part), graph.pool())
        return graph.replay

    def start_reading(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))

        def wait() -> Tensor:
            event.synchronize()
            return host

        return wait

    def wait_for_last(self) -> None:
        if self.last is not None:
            torch.cuda.current_stream(self.device).wait_event(self.last)

    def note_last(self) -> None:
        self.last = self.last or torch.cuda.Event()
        self.last.record(torch.cuda.current_stream(self.device))


@contextmanager
def without_collection() -> Iterator[None]:
    """A context in which Python's collector does not run by itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def own_workspaces() -> Iterator[None]:
    """A context of a capture whose workspaces of cuBLAS lie in the memory of its graph. One from before the capture may
    be freed later, by torch.compile where it captures graphs of its own, and the replay would then write to memory of
    others. Source: PyTorch, torch/_inductor/cudagraph_trees.py, `clear_cublas_manager`."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()


def end_failed_capture(graph: Any, device: int) -> None:
    """Does what torch leaves undone where a capture fails: `capture_end` raises before memory goes where it did before,
    and before the device's random numbers are drawn as usual ("Offset increment outside graph capture"). Nothing where
    the capture had not begun. Source: PyTorch, aten/src/ATen/cuda/CUDAGraph.cpp."""
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, graph.pool())
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())  # a copy is not in the midst of a capture


_overrides: list[Callable[[torch.device], Seam | None]] = []  # what `seams` says, the innermost last


@contextmanager
def seams(of_device: Callable[[torch.device], Seam | None]) -> Iterator[None]:
    """A context in which `of_device` says how rounds run on a device, None: eagerly. For tests and benchmarks; all
    threads see it."""
    _overrides.append(of_device)
    try:
        yield
    finally:
        _overrides.remove(of_device)


def seam_of(device: torch.device) -> Seam | None:
    """Returns the seam by which rounds run on a device: CUDA graphs on a GPU; None elsewhere, where they run
    eagerly."""
    if _overrides:
        return _overrides[-1](device)
    return CudaGraphs(device) if device.type == "cuda" else None
