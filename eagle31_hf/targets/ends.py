"""The target's embedding and head, which a drafter shares: weak references to them, and reads of wrapped, offloaded and
quantized ones.

V target vocabulary, h drafter width.
"""

import threading
from typing import Any
from weakref import ReferenceType, ref

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from torch import Tensor, nn
from torch.nn.functional import embedding

Pair = tuple[ReferenceType, ReferenceType | None]
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # any other dtype: quantized


class TargetTie:
    """Weak references to the embedding and head of the target a drafter works for: the drafter keeps no target alive.

    Each thread has a tie of its own, since threads may generate with one drafter and different targets; a thread that
    has tied nothing gets the latest tie of any thread. A deep copy keeps the tie; a pickled one loses it, and
    `generate` ties it again.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self._last: Pair | None = None  # of any thread

    def set(self, table: nn.Module, head: nn.Module | None) -> None:
        """Ties the drafter, in this thread, to a target's embedding and head."""
        pair = ref(table), None if head is None else ref(head)
        self._own.pair, self._last = pair, pair

    def get(self) -> tuple[nn.Module | None, nn.Module | None]:
        """The embedding and head, each None where it was not tied or its target is gone."""
        table, head = getattr(self._own, "pair", None) or self._last or (None, None)
        return None if table is None else table(), None if head is None else head()

    def __deepcopy__(self, memo: dict) -> "TargetTie":
        copied, (table, head) = TargetTie(), self.get()
        if table is not None:
            copied.set(table, head)
        return copied

    def __reduce__(self) -> tuple:
        return TargetTie, ()


def shape_of(table: Any) -> tuple[int, int]:
    """An embedding's number of ids and its width, also where its quantized weight is packed into another shape."""
    if hasattr(table, "num_embeddings"):
        return table.num_embeddings, table.embedding_dim
    return tuple(table.weight.shape)


def rows_of(table: Any, input_ids: Tensor) -> Tensor:
    """Token ids (...) -> their embedding vectors (..., h), without the factor that some embeddings (Gemma's) apply to
    them."""
    weight = table.weight
    if not isinstance(table, nn.Embedding):  # wrapped: an adapter changes the vectors, so it has to be called
        scale = getattr(getattr(table, "base_layer", None), "embed_scale", None)
        rows = table(_on_device_of(input_ids, weight))
        return rows if scale is None else rows / scale
    if weight.is_meta and has_offloaded_params(table):  # on the CPU: moving the whole table for a few vectors is slow
        with align_module_device(table, torch.device("cpu")):
            return embedding(input_ids.cpu(), table.weight)
    if hasattr(table, "embed_scale") and not weight.is_meta:
        return embedding(input_ids.to(weight.device), weight)
    return table(_on_device_of(input_ids, weight))


def scores_of(head: Any, states: Tensor) -> Tensor:
    """States (..., h) -> a head's logits (..., V), on the head's device; it may be quantized, offloaded or wrapped by
    an adapter."""
    weight = _stored(head)
    states = _on_device_of(states, weight)
    return head(states.to(weight.dtype) if weight.dtype in ACTIVATION_DTYPES else states)


@torch.no_grad()
def weight_of(module: Any, what: str, name: str = "weight") -> Tensor:
    """The weight or bias (`name`) of a target's embedding or head (`what`, for the message); where it is offloaded, a
    copy on the CPU.

    Raises ValueError where it is quantized, or not loaded at all.
    """
    if has_offloaded_params(module):
        with align_module_device(module, torch.device("cpu")):
            return getattr(module, name).detach().clone()
    weight = _stored(module, name)
    if weight.is_meta or weight.dtype not in ACTIVATION_DTYPES:
        raise ValueError(
            f"the target's {what} is {weight.dtype} on {weight.device}; expected it loaded, and not quantized."
        )
    return weight


def execution_device(model: nn.Module) -> torch.device:
    """The device on which a model's first module with weights runs; "meta" where no module's weights are loaded or
    offloaded."""
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        if has_offloaded_params(module) and hook.execution_device is not None:
            return torch.device(hook.execution_device)
        for weight in module.parameters(recurse=False):
            if not weight.is_meta:
                return weight.device
    return torch.device("meta")


def check_loaded(module: nn.Module, name: str) -> None:
    """Raises ValueError where a module's weight is on the meta device and no hook of accelerate loads it for the
    forward."""
    is_hooked = any(hasattr(part, "_hf_hook") for part in module.modules())
    if not is_hooked and any(weight.is_meta for weight in module.parameters()):
        raise ValueError(
            f"{name} is on the meta device, and nothing loads it when it is called; expected weights on a device, or"
            " offloaded by accelerate module by module (a device_map, cpu_offload or disk_offload without"
            " preload_module_classes)."
        )


def _stored(module: Any, name: str = "weight") -> Tensor:
    value = getattr(module, name)
    return value() if callable(value) else value  # a method of torch.ao's quantized modules


def _on_device_of(inputs: Tensor, weight: Tensor) -> Tensor:
    """The inputs on the weight's device; as they are for an offloaded module, whose hook moves them itself."""
    return inputs if weight.is_meta else inputs.to(weight.device)


def num_logits(target: Any) -> int:
    """Returns how many tokens a target's logits are of: of a vocabulary that is padded (Inkling), those before the
    padding."""
    config = target.config.get_text_config(decoder=True)
    return min(config.vocab_size, getattr(config, "unpadded_vocab_size", None) or config.vocab_size)
