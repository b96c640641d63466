"""The ends of a target, its embedding and its head, and how its logits follow from its last state.

B sequences, T tokens, ht target width, V target vocabulary.
"""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ..targets.ends import execution_device, scores_of, shape_of, weight_of
from ..targets.layers import decoder_of

PROBE_TOKENS = 24
CLOSE = {torch.float32: 5e-3, torch.float64: 5e-3}  # of the logits' spread; other dtypes round more
CLOSE_IN_HALF = 0.05
NOT_OF_LAYERS = ("architectures", "eos_token_id")  # lists of a config that may be as long as it has layers


@dataclass(frozen=True)
class Scoring:
    """The function by which a target makes its logits of its head's output y: cap * tanh(scale y / cap), or scale y
    without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        scores = scores.float() if self.scale == 1 else scores.float() * self.scale
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
    # compared on the CPU: not every device has float64
    logits = target(input_ids=tokens, use_cache=False).logits.cpu().double()
    if not logits.isfinite().all():
        raise ValueError(
            f"{name}: its logits are not finite on a probe in {target.dtype}; load it in another dtype, or mend its"
            " weights."
        )
    scores = scores_of(head, last_state(target, tokens)).cpu().double()
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


def last_state(target: PreTrainedModel, tokens: Tensor, pixels: Mapping[str, Tensor] | None = None) -> Tensor:
    """Returns the states (B, T, ht) that enter the head for tokens (B, T), after the target's final norm. `pixels`:
    what the target reads besides, where tokens stand for images."""
    owner: Any = target
    decoder = next((part for part in (decoder_of(owner), owner.base_model) if part is not owner), None) or owner.model
    if pixels is None:
        return decoder(input_ids=tokens, use_cache=False).last_hidden_state
    found = list[Tensor]()
    few = {"logits_to_keep": 1} if "logits_to_keep" in signature(owner.forward).parameters else {}
    with decoder.register_forward_hook(lambda module, args, output: found.append(output.last_hidden_state)):
        owner(input_ids=tokens, use_cache=False, **pixels, **few)  # the decoder alone reads text
    return found[-1]


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
        weight = nn.Parameter(parts["head"], requires_grad=False) if "head" in parts else self.embedding.weight
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


def ends_of(target: Any, device: torch.device | None = None) -> Any:
    """Returns the target itself, or whole copies of its embedding and head: where each process has a part of them, and
    on `device`, if given, where they are no quantized or adapted ones."""
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    in_parts = any(isinstance(getattr(end, "weight", None), DTensor) for end in (embedding, head))
    is_plain = isinstance(embedding, nn.Embedding) and type(head) is nn.Linear
    if not in_parts and (device is None or not is_plain):
        return target
    parts = {name: weight.to(device) for name, weight in parts_of(target).items()}
    return TargetEnds(target.name_or_path, target.config, target.generation_config, parts, Scoring())


def ends_from_checkpoint(outline: PreTrainedModel, revision: str | None = None) -> tuple[TargetEnds, nn.Module]:
    """Returns the embedding and head of a target of which `outline` has the configs, in its dtype, and its final norm,
    which makes of the last layer's output what the head reads.

    transformers is asked for the same model with no layers, so that a checkpoint's names mean here what they mean
    there. Raises ValueError for an architecture that cannot be made without layers, or whose logits do not follow from
    its last state.
    """
    config = without_layers(outline.config)
    try:
        with ExitStack() as after:  # the weights of all layers are left out, which transformers would list
            after.callback(logging.set_verbosity, logging.get_verbosity())
            logging.set_verbosity_error()
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                outline.name_or_path, config=config, dtype=outline.dtype, revision=revision, output_loading_info=True
            )
        bare, found = loaded
        if found["missing_keys"]:
            raise ValueError(f"the checkpoint has no {', '.join(sorted(found['missing_keys']))}")
        bare.eval()
        configs = outline.name_or_path, outline.config, outline.generation_config
        return TargetEnds(*configs, parts_of(bare), find_scoring(bare)), final_norm(bare)
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{outline.name_or_path}: its embedding, head and norm cannot be read without its layers"
            f" ({type(error).__name__}: {reason}); expected an architecture that can be made without layers. Have the"
            " engine answer alone, and read the states here: prepare-data --engine, then prepare-data --states on what"
            " it wrote."
        ) from error


def without_layers(config: Any) -> Any:
    """Returns a copy of a target's config for the same model with no layers. Quantized targets keep these ends in their
    own dtype, which no quantizer has to read."""
    cut = copy.deepcopy(config)
    if hasattr(cut, "quantization_config"):
        del cut.quantization_config
    decoder = cut.get_text_config(decoder=True)
    num_layers, decoder.num_hidden_layers = decoder.num_hidden_layers, 0
    for name, value in [*vars(decoder).items()]:
        if isinstance(value, list) and len(value) == num_layers and name not in NOT_OF_LAYERS:
            setattr(decoder, name, [])
    return cut


@torch.no_grad()
def final_norm(bare: PreTrainedModel) -> nn.Module:
    """Returns the module of a target without layers that gives the states which enter its head. Raises ValueError where
    none does."""
    given = list[tuple[nn.Module, Any]]()
    num_ids, _ = shape_of(bare.get_input_embeddings())
    with ExitStack() as hooks:
        for module in bare.modules():
            hook = module.register_forward_hook(lambda module, args, output: given.append((module, output)))
            hooks.callback(hook.remove)
        last = last_state(bare, torch.arange(PROBE_TOKENS)[None] % num_ids)
    for module, output in given:  # inner modules return before outer ones: the first with this tensor has made it
        if output is last:
            return module
    raise ValueError("no module gives its last state")
