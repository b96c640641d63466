"""A seam that does on a CPU what CUDA graphs do on a GPU: the operations of a function are recorded once, with the very
tensors they read and wrote, and replayed on the same memory. Python is not run again, and reading a value while
recording is an error."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from eagle31_hf.generation.captured import seam
from eagle31_hf.generation.captured.seam import Uncaptured

READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


class Recording(TorchDispatchMode):
    """Notes every operation: the function, its arguments and what it returned."""

    def __init__(self):
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.split("::")[1] in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, out))
        return out

    def poison(self) -> None:
        """Leaves nothing usable in what the operations made: capturing a graph runs none of them."""
        for func, _, _, out in self.operations:
            if not func.is_view and all(returned.alias_info is None for returned in func._schema.returns):
                for made in _tensors(out):
                    made.fill_(_poison(made.dtype))

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            if func.is_view:
                continue  # of the same memory as ever
            again = func(*args, **kwargs)
            for new, kept in zip(_tensors(again), _tensors(out), strict=True):
                if new.data_ptr() != kept.data_ptr():  # else it is an argument that was written to, or a view of one
                    kept.copy_(new)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


class Recorded(Uncaptured):
    """`fails_at`: the number of the capture that fails, from 1 on, after it has run half of its operations.
    `shares_memory`: a replay writes over what later captures of its pool have left, as a CUDA graph may."""

    name = "recorded tensors"

    def __init__(self, fails_at: int | None = None, shares_memory: bool = False):
        self.fails_at = fails_at
        self.shares_memory = shares_memory
        self.by_pool: dict[str, list[Recording]] = {}
        self.captures = 0
        self.replays = 0

    def capture(self, function: Callable[[], None], part: str) -> Callable[[], None]:
        self.captures += 1
        function()  # warms up, as for a graph
        recording = Recording()
        with recording:
            function()
        recording.poison()
        if self.captures == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory, say")

        pool = self.by_pool.setdefault(seam.pool_of(part), [])
        pool.append(recording)
        number = len(pool)

        def replay() -> None:
            self.replays += 1
            recording.replay()
            for later in pool[number:] if self.shares_memory else []:
                later.poison()

        return replay
