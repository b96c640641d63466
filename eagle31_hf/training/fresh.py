"""A drafter to begin with: of the target's shape, or a published one. V target vocabulary, Vd draft vocabulary."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import vocab
from ..configuration import Eagle31Config, default_layer_ids
from ..modeling import Eagle31DrafterModel
from ..seeding import seeded
from ..tying import shape_of, weight_of
from .losses import Goal
from .target import StoredTarget, TargetReader, ends_of

# Fields a drafter takes from its target's config under the same name, where it has them.
SHAPE = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
HEADS = ("target", "scratch")
ROWS_AT_ONCE = 256  # of the target's logits


def layer_ids_for(shape: Any) -> list[int]:
    """Captured states for a new drafter: `[2, L // 2, L - 3]`, or an early, a middle and the last state where that is
    too deep."""
    num_layers = shape.num_hidden_layers
    try:
        return default_layer_ids(num_layers)
    except ValueError:
        return sorted({0 if num_layers < 3 else 1, num_layers // 2, num_layers})


def new_drafter(
    target: PreTrainedModel | StoredTarget,
    draft_ids: Tensor | None = None,
    head: str = "target",
    seed: int = 0,
    **fields: Any,
) -> Eagle31DrafterModel:
    """An untrained EAGLE 3.1 drafter in fp32, one layer of the target's shape, tied to the target's embedding.

    `draft_ids` (Vd,): what it can propose, by default everything. `head`: its rows begin as the target's ("target") or
    at random ("scratch"). `fields` of `Eagle31Config` win. Raises ValueError for a head that cannot be copied.
    """
    if head not in HEADS:
        raise ValueError(f"head is {head!r}; expected one of {', '.join(HEADS)}.")
    target = ends_of(target)
    embedding: Any = target.get_input_embeddings()
    shape = target.config.get_text_config(decoder=True)
    values: dict[str, Any] = {name: of_one_layer(shape, name) for name in SHAPE} | {
        name: getattr(shape, name, None) for name in SPECIAL
    }
    values = {name: value for name, value in values.items() if value is not None}
    values |= {
        "vocab_size": shape_of(embedding)[0],
        "draft_vocab_size": None if draft_ids is None else len(draft_ids),
        "hidden_size": shape.hidden_size,
        "aux_hidden_state_layer_ids": layer_ids_for(shape),
        "rope_parameters": rope_of(shape),
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


def of_one_layer(shape: Any, name: str) -> Any:
    """A field of a config, or None; where layers have one each, as in Gemma 3n and 4, that of the first."""
    try:
        value = getattr(shape, name, None)
    except RuntimeError:  # how a config says that its layers differ in it
        value = getattr(shape.per_layer_config[0], name)
    return value[0] if isinstance(value, list | tuple) else value


def rope_of(shape: Any) -> dict[str, Any] | None:
    """The target's rope; where its layer types have one each, that of full attention."""
    rope = getattr(shape, "rope_parameters", None)
    if rope and "rope_type" not in rope:
        rope = rope.get("full_attention") or next(iter(rope.values()))
    return dict(rope) if rope else None


@torch.no_grad()
def copy_head(drafter: Eagle31DrafterModel, target: PreTrainedModel | StoredTarget) -> None:
    """The target's head rows, those of the draft vocabulary. Raises ValueError where they do not fit or are quantized."""
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
    rows = weight if ids is None else weight[ids.to(weight.device)]
    drafter.lm_head.weight[: len(rows)] = rows.to(drafter.lm_head.weight)


def count_answers(rows: Iterable[dict[str, Tensor]], vocab_size: int) -> Tensor:
    """How often each token (V,) is one of an answer's."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        counts += torch.bincount(
            torch.as_tensor(row["input_ids"])[torch.as_tensor(row["answers"]).bool()], minlength=vocab_size
        )
    return counts


def choose_vocabulary(counts: Tensor, size: int, always: Iterable[int]) -> tuple[Tensor, float]:
    """Counts (V,) -> the ids of a draft vocabulary (Vd,), ascending, and the share of counted tokens it covers.

    `always`: ids that are in it however rare, those that end a text: a drafter without them never drafts an end.
    Raises ValueError for a size that cannot be.
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


@torch.no_grad()
def mass_covered(rows: Iterable[dict[str, Tensor]], draft_ids: Tensor, reader: TargetReader | StoredTarget) -> float:
    """The probability that the target gives to a draft vocabulary (Vd,), mean over the answers' tokens of these rows."""
    masses = list[Tensor]()
    for row in rows:
        ids, answers = torch.as_tensor(row["input_ids"])[None], torch.as_tensor(row["answers"]).bool()
        last = row["last_states"] if "last_states" in row else reader.read(ids, torch.ones_like(ids))[1][0]
        said = last[:-1][answers[1:]]  # the states an answer's tokens were said from
        masses += [Goal.of(reader.logits(part), draft_ids).coverage.cpu() for part in said.split(ROWS_AT_ONCE)]
    return float(torch.cat(masses).mean()) if masses else 0.0
