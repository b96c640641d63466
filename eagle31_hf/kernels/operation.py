"""`@operation` makes an operation of torch's registry from a reference in plain torch; on a GPU a Triton kernel stands
in for it."""

import functools
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# "torch", or the names of operations that are to run as torch does: EAGLE31_KERNELS=add_rms_norm,joint_linear
SWITCH = "EAGLE31_KERNELS"
OPERATIONS: dict[str, "Operation"] = {}


class Operation:
    """`eagle31::name`, one operation for torch.compile, torch.export and profilers.

    `reference` is its specification: unless it says otherwise, what it computes in fp32, rounded once. The kernel is
    the function `name` of the module beside it, `x_triton.py`, which takes the same arguments. The first of these, a
    tensor or a list of them, says on which device it runs.
    """

    def __init__(self, reference: Callable[..., Any], mutates: tuple[str, ...], shapes: Callable[..., Any] | None):
        self.reference = reference
        self.name = reference.__name__
        self.module = f"{reference.__module__}_triton"

        @functools.wraps(reference)
        def run(*args: Any, **kwargs: Any) -> Any:
            first = (*args, *kwargs.values())[0]  # a tensor, or a list of them
            device = (first if isinstance(first, Tensor) else first[0]).device
            if why_torch(self.name, device) is not None:
                return reference(*args, **kwargs)
            with torch.cuda.device(device):  # Triton launches on the current one
                return self.kernel()(*args, **kwargs)

        self.run = run
        self._op = torch.library.custom_op(f"eagle31::{self.name}", run, mutates_args=mutates)
        self._op.register_fake(shapes or reference)
        OPERATIONS[self.name] = self
        functools.update_wrapper(self, reference)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._op(*args, **kwargs)

    def kernel(self) -> Callable[..., Any]:
        """The function that launches the kernel; Triton is imported here, not before."""
        return getattr(import_module(self.module), self.name)


def operation(
    mutates: tuple[str, ...] = (), shapes: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Operation]:
    """Makes an `Operation` of the reference that is decorated. `mutates`: names of the arguments it writes to;
    `shapes`: the same arguments -> what it returns, for tensors without data. None: the reference tells; not where its
    strides differ from the kernel's."""
    return functools.partial(Operation, mutates=mutates, shapes=shapes)


def why_torch(name: str, device: torch.device) -> str | None:
    """Returns why an operation runs as torch does on a device; None where its kernel runs."""
    switched_off = why_switched_off(name)
    if switched_off is not None:
        return switched_off
    if device.type != "cuda":
        return f"as torch does: no GPU, but {device.type}"
    if not _has_triton():
        return "as torch does: Triton is not installed"
    return None


def why_switched_off(name: str) -> str | None:
    """Returns how the user has an operation run as torch does; None where they have not."""
    wanted = os.environ.get(SWITCH, "")
    switched = {each.strip().lower() for each in wanted.split(",")}
    return f"as torch does: {SWITCH}={wanted}" if {"torch", name} & switched else None


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def with_close_entries(x: Tensor) -> Tensor:
    """x, copied where the entries of its last dimension do not lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
