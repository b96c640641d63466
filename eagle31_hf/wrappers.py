"""Wrappers around a drafter: torch.compile, PEFT and data parallelism, in which `generate` finds it."""

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .errors import DraftingRefusedError
from .modeling import Eagle31DrafterModel


def drafter_in(model: Any) -> Any:
    """Returns the drafter that an assistant model is or wraps, or None where there is none.

    A compiled module is returned as it is: its attributes are the drafter's, and a call of it runs the compiled
    forward, unless it was compiled around data parallelism. For a PEFT model it is the adapted drafter, whose adapters
    stay active. Raises ValueError for a drafter in a wrapper that cannot draft.
    """
    compiled, inner = None, model
    while isinstance(inner, nn.Module) and not isinstance(inner, Eagle31DrafterModel):
        if "_orig_mod" in inner._modules:  # torch.compile's
            compiled, inner = inner if compiled is None else compiled, inner._orig_mod
        elif isinstance(inner, DataParallel | DistributedDataParallel):
            compiled, inner = None, inner.module  # what is compiled around it has not the drafter's attributes
        elif hasattr(inner, "get_base_model"):  # PEFT's
            base, adapter = inner.get_base_model(), inner.active_peft_config
            if getattr(adapter, "is_prompt_learning", False) and isinstance(base, Eagle31DrafterModel):
                raise DraftingRefusedError(
                    f"EAGLE drafting: the drafter's adapter is a {adapter.peft_type}, whose virtual tokens have no"
                    " target states; expected one that changes weights, such as LoRA, or none."
                )
            inner = base
        elif any(isinstance(part, Eagle31DrafterModel) for part in inner.modules()):
            # plain assisted generation would fail on it much later
            raise DraftingRefusedError(
                f"EAGLE drafting: assistant_model is a {type(inner).__name__} around a drafter; expected the drafter"
                " itself, or one in torch.compile, PEFT, DataParallel or DistributedDataParallel. Pass the drafter"
                " without this wrapper."
            )
        else:
            return None
    if not isinstance(inner, Eagle31DrafterModel):
        return None
    return inner if compiled is None else compiled
