"""FLOP of operations: products and attention, as torch counts them, but for causal attention, where it counts what is
masked, too, and of a CPU's kernel nothing."""

from math import prod
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
BACKWARD = 2.5  # times the forward: five products for two


def flop_of(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Returns the FLOP of one operation of torch, which gave `out`."""
    name = func._schema.name.removeprefix("aten::")
    if not name.startswith(ATTENTION):
        counter = flop_registry.get(func._overloadpacket)
        return counter(*args, **kwargs, out_val=out) if counter else 0
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    query, key, value = (given[each] for each in ("query", "key", "value"))
    scores = prod(query.shape[:3]) * key.shape[2] * (0.5 if given.get("is_causal") else 1.0)
    return int(2 * scores * (query.shape[3] + value.shape[3]) * (BACKWARD if "backward" in name else 1.0))


class FlopCounter(TorchDispatchMode):
    """A context that adds up the FLOP of what runs in it, in `total`. torch's own `FlopCounterMode` takes operations
    apart, which rounds otherwise."""

    total = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Has what is compiled stay so: dynamo would run it eagerly, and not try again later."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += flop_of(func, args, kwargs or {}, out)
        return out
