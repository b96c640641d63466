"""A new drafter in its target's shape, and its draft vocabulary. V and Vd are the sizes of the vocabularies."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import vocab
from ..configuration import Eagle31Config, default_layer_ids
from ..modeling import Eagle31DrafterModel
from ..seeding import seeded
from ..targets.ends import shape_of, weight_of
from ..targets.layers import num_layers_of
from .ends import TargetEnds, ends_of
from .packing import tokens_at

# fields a drafter takes from its target's config under the same name, where it has them
SAME = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
HEADS = ("target", "scratch")


def new_drafter(
    target: PreTrainedModel | TargetEnds,
    draft_ids: Tensor | None = None,
    head: str = "target",
    seed: int = 0,
    **fields: Any,
) -> Eagle31DrafterModel:
    """Makes an untrained EAGLE 3.1 drafter in fp32, one layer of the target's shape, tied to the target's embedding.

    `draft_ids` (Vd,): the target ids it can propose, by default all. `head`: begins as the target's ("target") or at
    random ("scratch"). `fields` of `Eagle31Config` win over what follows from the target. Raises ValueError for a head
    that cannot be copied.
    """
    if head not in HEADS:
        raise ValueError(f"head is {head!r}; expected one of {', '.join(HEADS)}.")
    target = ends_of(target)
    text_config = target.config.get_text_config(decoder=True)
    values = {name: of_first_layer(text_config, name) for name in SAME}
    values |= {name: getattr(text_config, name, None) for name in SPECIAL_IDS}
    rope = getattr(text_config, "rope_parameters", None)
    if rope and "rope_type" not in rope:  # each type of layer has its own: those of full attention are taken
        rope = rope.get("full_attention") or next(iter(rope.values()))
    values = {name: value for name, value in values.items() if value is not None} | {
        "hidden_size": text_config.hidden_size,
        "aux_hidden_state_layer_ids": layer_ids_for(text_config),
        "rope_parameters": dict(rope) if rope else None,
        "vocab_size": shape_of(target.get_input_embeddings())[0],
        "draft_vocab_size": None if draft_ids is None else len(draft_ids),
        "target_model": target.name_or_path or None,
    }
    config = Eagle31Config(**values | fields)
    with seeded(seed):
        drafter = Eagle31DrafterModel(config).float()
    if draft_ids is not None:
        drafter.set_draft_vocabulary(draft_ids)
    drafter.load_target_embeddings(target)
    if head == "target" and drafter.lm_head is not None:
        copy_head(drafter, target)
    return drafter


def layer_ids_for(config: Any) -> list[int]:
    """Returns the states a new drafter reads: `[2, L // 2, L - 3]` of L layers, or an early, a middle and the last one
    where that is too deep."""
    num_layers = num_layers_of(config)
    try:
        return default_layer_ids(num_layers)
    except ValueError:
        return sorted({0 if num_layers < 3 else 1, num_layers // 2, num_layers})


def of_first_layer(config: Any, name: str) -> Any:
    """Returns a field of a config, None where it has none; where every layer has a value of its own, as in Gemma 3n and
    4, that of the first."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # how a config says that its layers differ in it
        value = getattr(config.per_layer_config[0], name)
    return (value[0] if isinstance(value, list | tuple) else value) or None  # GLM5-Next says 0 for what it derives


@torch.no_grad()
def copy_head(drafter: Eagle31DrafterModel, target: PreTrainedModel | TargetEnds) -> None:
    """Copies the target's head, the part of the draft vocabulary. Raises ValueError where it does not fit or is
    quantized."""
    head: Any = target.get_output_embeddings()
    try:
        weight = weight_of(head, "head")
    except ValueError as error:
        raise ValueError(f"{error} It cannot be copied: begin with head='scratch'.") from None
    if weight.shape[1] != drafter.lm_head.weight.shape[1]:
        raise ValueError(
            f"the target's head is {tuple(weight.shape)}, the drafter's {tuple(drafter.lm_head.weight.shape)}; it"
            " cannot be copied. Begin with head='scratch'."
        )
    ids = drafter.draft_to_target_ids()
    weight = weight if ids is None else weight[ids.to(weight.device)]
    drafter.lm_head.weight[: len(weight)] = weight.to(drafter.lm_head.weight)


def count_answers(examples: Any, vocab_size: int) -> Tensor:
    """Returns how often each token is one of an answer's: (V,) int64."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for index in range(len(examples)):
        tokens = tokens_at(examples, index)
        ids = tokens.input_ids[tokens.answers]
        counts.index_add_(0, ids, torch.ones_like(ids))
    return counts


def choose_vocabulary(counts: Tensor, size: int, always: Iterable[int]) -> tuple[Tensor, float]:
    """Chooses the `size` most frequent ids of `counts` (V,): returns them (Vd,), ascending, and the share of all
    counted tokens they cover.

    `always`: ids to choose however rare, those that end a text: a drafter without them never drafts an end. Raises
    ValueError for a size that cannot be.
    """
    always = sorted(set(always))
    if not len(always) <= size <= len(counts):
        raise ValueError(
            f"the draft vocabulary is to have {size} ids; expected {max(1, len(always))} to {len(counts)}, the"
            " target's."
        )
    forced = counts.clone()
    forced[always] = counts.max() + 1
    ids = vocab.most_frequent_ids(forced, size)
    return ids, float(counts[ids].sum() / counts.sum().clamp(min=1))
