"""The options of making training data."""

from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from ..configuration import Eagle31Config
from ..targets.layers import decoder_layers
from .fresh import layer_ids_for
from .servers import EngineOptions

MASKS = ("answers", "all")
LEAST_TEXT = 4  # tokens of a piece of plain text
RECORDS_PER_SHARD = 64
RECORDS_PER_LARGE_SHARD = 1024  # of tokens alone, read or answered by an engine, which is asked for all at once


@dataclass(frozen=True)
class PreparationOptions:
    """Options of training data.

    `split` is that of a dataset; `max_samples`: only so many records of the data are read, the first ones, and one of
    the Hub is streamed. Examples have at most `max_length` tokens. `mask`: "answers", or "all": every token
    counts as an answer's. `template_augmentation`: the share of chats rendered in another of `chats.RENDERINGS`, the
    same ones for the same `seed`. `chat_template`: instead of the tokenizer's; `template_options`: further variables of
    it, as `enable_thinking`. `regenerate`: answers are the target's own, of at most `max_new_tokens` tokens, by
    generate() with the arguments `generation`; where there is an `engine`, by this one, as generate() would sample.
    `self_prompts`: so many chats are added whose user is the target, too, see `SelfPrompts`; with `regenerate` only.
    `states`: the target's states are stored too, those at `layer_ids` (by default where drafters read) in `dtype`, one
    of STORED_DTYPES (by default the target's). `batch_size`: examples the target reads, or prompts it answers, at once.
    `records_per_shard`: by default 64, without states and answers made here 1,024. `processes`: so many tokenize where
    the target has nothing to do, None: as many as there are cores for this process.
    Raises ValueError for options that do not go together.
    """

    max_length: int = 2048
    mask: str = "answers"
    split: str = "train"
    max_samples: int | None = None
    seed: int = 0
    template_augmentation: float = 0.0
    chat_template: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    regenerate: bool = False
    self_prompts: int = 0
    max_new_tokens: int = 1024
    generation: dict[str, Any] = field(default_factory=dict)
    engine: EngineOptions | None = None
    states: bool = False
    layer_ids: list[int] | None = None
    dtype: str | None = None
    batch_size: int = 8
    records_per_shard: int | None = None
    processes: int | None = None

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"mask is {self.mask!r}; expected one of {', '.join(MASKS)}.")
        if not 0 <= self.template_augmentation <= 1:
            raise ValueError(f"template_augmentation is {self.template_augmentation}; expected a share, 0 to 1.")
        if self.max_length < LEAST_TEXT:
            raise ValueError(f"max_length is {self.max_length}; expected at least {LEAST_TEXT}.")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples is {self.max_samples}; expected at least 1, or None for all.")
        if not self.states and (self.layer_ids, self.dtype) != (None, None):
            raise ValueError(
                f"layer_ids is {self.layer_ids} and dtype {self.dtype!r} without states; expected neither, or states."
            )
        if self.self_prompts < 0 or (self.self_prompts and not self.regenerate):
            raise ValueError(
                f"self_prompts is {self.self_prompts} and regenerate {self.regenerate}; expected a number of chats,"
                " whose answers are the target's, too."
            )
        if self.regenerate and self.template_augmentation:
            raise ValueError(
                f"template_augmentation is {self.template_augmentation}; expected 0 with regenerate: prompts are as"
                " they are served."
            )

    @property
    def template(self) -> dict[str, Any]:
        """Arguments of `apply_chat_template`."""
        return {"chat_template": self.chat_template, **self.template_options}

    def for_target(self, target: PreTrainedModel) -> "PreparationOptions":
        """Returns the options with the records of a shard and the layers and dtype of the states filled in. Raises
        ValueError for layers that the target does not have."""
        is_slow_or_large = self.states or (self.regenerate and self.engine is None)
        num_records = self.records_per_shard or (RECORDS_PER_SHARD if is_slow_or_large else RECORDS_PER_LARGE_SHARD)
        if not self.states:
            return replace(self, records_per_shard=num_records)
        asked = self.layer_ids or layer_ids_for(target.config.get_text_config(decoder=True))
        layer_ids = Eagle31Config(aux_hidden_state_layer_ids=asked).resolve_layer_ids(len(decoder_layers(target)))
        dtype = self.dtype or str(target.dtype).removeprefix("torch.")
        return replace(self, layer_ids=layer_ids, dtype=dtype, records_per_shard=num_records)
