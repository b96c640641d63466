"""The ends of a target, its embedding and its head, and how its logits follow from its last state.

B sequences, T tokens, ht target width, V target vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ..targets.ends import execution_device, scores_of, weight_of

PROBE_TOKENS = 24
CLOSE = {torch.float32: 5e-3, torch.float64: 5e-3}  # of the logits' spread; other dtypes round more
CLOSE_IN_HALF = 0.05


@dataclass(frozen=True)
class Scoring:
    """The function by which a target makes its logits of its head's output y: cap * tanh(scale y / cap), or scale y
    without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        scores = scores.float() * self.scale
        return scores if self.cap is None else torch.tanh(scores / self.cap) * self.cap


@torch.no_grad()
def find_scoring(target: PreTrainedModel) -> Scoring:
    """Finds how logits follow from the decoder's last state on a probe, instead of looking it up by family.

    Raises ValueError for a target whose logits are no function of its head's output of this form.
    """
    head, config = target.get_output_embeddings(), target.config.get_text_config(decoder=True)
    name = type(target).__name__
    if head is None:
        raise ValueError(f"{name} has no output head; expected a causal language model.")
    tokens = torch.arange(PROBE_TOKENS, device=execution_device(target))[None] % config.vocab_size
    logits = target(input_ids=tokens, use_cache=False).logits.double()
    if not logits.isfinite().all():
        raise ValueError(
            f"{name}: its logits are not finite on a probe in {target.dtype}; load it in another dtype, or mend its"
            " weights."
        )
    scores = scores_of(head, last_state(target, tokens)).double().to(logits.device)
    if logits.shape[-1] != scores.shape[-1]:
        raise ValueError(
            f"{name}: its logits are of {logits.shape[-1]} tokens, its head's output of {scores.shape[-1]}; expected"
            " as many: training asks the head alone. It does not work with this architecture."
        )
    cap = getattr(config, "final_logit_softcapping", None)
    uncapped = logits if cap is None else cap * torch.atanh((logits / cap).clamp(-0.999999, 0.999999))
    scale = ((uncapped * scores).sum() / scores.square().sum()).item()
    found = Scoring(1.0 if abs(scale - 1) < 1e-3 else scale, cap)
    away = (found(scores) - logits).abs().max() / logits.std()
    if not away < CLOSE.get(target.dtype, CLOSE_IN_HALF):
        raise ValueError(
            f"{name}: its logits do not follow from its last state by head, scale and cap (off by {away:.2g} of their"
            " spread); training cannot ask it what it would say without all logits at once. It does not work with this"
            " architecture."
        )
    return found


def last_state(target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Returns the states (B, T, ht) that enter the head for tokens (B, T), after the target's final norm."""
    owner: Any = target
    decoder = next((part for part in (owner.get_decoder(), owner.base_model) if part is not owner), None) or owner.model
    return decoder(input_ids=tokens, use_cache=False).last_hidden_state


def parts_of(target: Any) -> dict[str, Tensor]:
    """Returns the weights a drafter is made from and trained with: "embedding" (V, ht), "head" (V, ht) unless it is
    tied to it, "head_bias" (V,) if there is one.

    Raises ValueError where one is quantized. Those of a tensor-parallel target are made whole, for which all its
    processes have to call this.
    """
    head, embedding = target.get_output_embeddings(), target.get_input_embeddings()
    parts = {"embedding": weight_of(embedding, "embedding")}
    if head.weight is not embedding.weight:
        parts["head"] = weight_of(head, "head")
    if getattr(head, "bias", None) is not None:
        parts["head_bias"] = weight_of(head, "head's bias", "bias")
    return {
        name: weight.full_tensor().detach() if isinstance(weight, DTensor) else weight for name, weight in parts.items()
    }


class TargetEnds(nn.Module):
    """A target's configs, embedding and head, without what lies between: a drafter is made from it and tied to it as to
    the target. `parts` as `parts_of` gives them."""

    def __init__(self, name: str, config: Any, generation_config: Any, parts: dict[str, Tensor], scoring: Scoring):
        super().__init__()
        self.name_or_path = name
        self.config = config
        self.generation_config = generation_config
        self.scoring = scoring
        self.embedding = nn.Embedding.from_pretrained(parts["embedding"], freeze=True)
        tied = self.embedding.weight
        weight = nn.Parameter(parts["head"], requires_grad=False) if "head" in parts else tied
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias="head_bias" in parts, device="meta")
        self.head.weight = weight
        if "head_bias" in parts:
            self.head.bias = nn.Parameter(parts["head_bias"], requires_grad=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def logits(self, last_states: Tensor) -> Tensor:
        """Returns the target's logits (N, V), in fp32, from states that enter its head (N, ht)."""
        return self.scoring(linear(last_states.to(self.head.weight), self.head.weight, self.head.bias))


def tensor_parallel_group(target: PreTrainedModel) -> Any:
    """Returns the group of processes that hold a part of every weight of the target and run it together, or None."""
    if (getattr(target, "tp_size", None) or 1) == 1:
        return None
    return next(weight for weight in target.parameters() if isinstance(weight, DTensor)).device_mesh.get_group()


def is_spread(target: Any) -> bool:
    """Returns whether each process has a part of the target's weights alone: by tensor parallelism, or sharded as
    transformers loads it (`DistributedConfig(fsdp_size=...)`)."""
    return any(isinstance(weight, DTensor) for weight in target.parameters())


def ends_of(target: Any) -> Any:
    """Returns the target itself, or, where each process has a part of its embedding or head, whole copies of both."""
    ends = (target.get_input_embeddings(), target.get_output_embeddings())
    if not any(isinstance(getattr(end, "weight", None), DTensor) for end in ends):
        return target
    return TargetEnds(target.name_or_path, target.config, target.generation_config, parts_of(target), Scoring())
