"""Training data as a store: records become rows, in the target's own words where asked, with its states where asked.

Shards are made one by one from the records that are theirs, and from nothing else: a run that was stopped goes on, and
several processes can make some each. T tokens of a row, n captured states, ht target width.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration import Eagle31Config
from ..seeding import seeded
from ..storage.fingerprints import digest, tokenizer_fingerprint, weights_fingerprint
from ..targets.ends import shape_of
from ..targets.layers import decoder_layers
from . import regenerate as on_policy
from .chats import RowMaker
from .ends import tensor_parallel_group
from .kinds import Chat, parse_record
from .packing import Rows
from .records import Records, identity, read_records
from .skipped import Skipped, Skips
from .store import HiddenStateStore, Manifest, Row, missing_shards, open_store, save_target_parts, write_shard
from .target import TargetReader

MAX_LENGTH = 2048
MAX_NEW_TOKENS = 1024
BATCH_SIZE = 8
RECORDS_PER_SHARD = 64
MOST_REASONS = 5  # in an error


@dataclass
class Prepared:
    """What a store holds by now: rows, their tokens, and what made none, by reason. `shards` of `num_shards` are there."""

    folder: str
    rows: int
    tokens: int
    skipped: dict[str, int]
    shards: int
    num_shards: int


@dataclass
class _Workshop:
    """Makes the rows of one shard after the other."""

    records: Records
    records_per_shard: int
    maker: RowMaker
    speaker: on_policy.Speaker | None
    reader: TargetReader | None
    mask: str
    seed: int
    batch_size: int
    skips: Skips

    def shard(self, index: int) -> tuple[list[Row], Counter[str]]:
        first = index * self.records_per_shard
        numbers = range(first, min(first + self.records_per_shard, len(self.records)))
        if self.speaker is None:
            rows = [row for number in numbers for row in rows_of_record(self.records, number, self.maker, self.skips)]
        else:
            with seeded(on_policy.seed_of(self.seed, index)):
                rows = self._regenerated(self.speaker, numbers)
        return (rows if self.reader is None else self._with_states(self.reader, rows)), self.skips.taken()

    def _regenerated(self, speaker: on_policy.Speaker, numbers: range) -> list[Row]:
        """Chats are answered; of what is no chat, all before the first answer is the prompt, or the first half of a
        plain text."""
        chats, prompts = list[tuple[int, Chat]](), list[tuple[int, Tensor]]()
        for number in numbers:
            try:
                parsed = parse_record(self.records[number])
                if isinstance(parsed, Chat):
                    chats.append((number, parsed))
                else:
                    prompts += [
                        (number, row["input_ids"][: _end_of_prompt(row)])
                        for row in self.maker.rows(self.records[number], number)
                    ]
            except Skipped as refusal:
                self.skips.add(number, refusal)
        talks = on_policy.regenerate(
            speaker,
            [chat for _, chat in chats],
            lambda i, refusal: self.skips.add(chats[i][0], refusal),
            chat_template=self.maker.chat_template,
            **self.maker.template_options,
        )
        continued = on_policy.continue_texts(
            speaker, [prompt for _, prompt in prompts], lambda i, refusal: self.skips.add(prompts[i][0], refusal)
        )
        rows = [row for made in (*talks, *continued) for row in made]
        if self.mask == "all":
            rows = [row | {"answers": torch.ones_like(row["answers"])} for row in rows]
        return rows

    def _with_states(self, reader: TargetReader, rows: list[Row]) -> list[Row]:
        order = sorted(rows, key=lambda row: -len(row["input_ids"]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            ids = pad_sequence([row["input_ids"] for row in batch], batch_first=True)
            documents = pad_sequence([torch.ones_like(row["input_ids"]) for row in batch], batch_first=True)
            for row, *both in zip(batch, *reader.read(ids, documents), strict=True):
                row |= {
                    name: states[: len(row["input_ids"])]
                    for name, states in zip(("states", "last_states"), both, strict=True)
                }
        return rows


def rows_of_record(records: Records, number: int, maker: RowMaker, skips: Skips) -> list[Row]:
    """The rows of one record; none where it cannot be read or makes none, which is counted with its reason and goes no
    further."""
    try:
        return maker.rows(records[number], number)
    except Skipped as refusal:
        skips.add(number, refusal)
        return []


def _end_of_prompt(row: Row) -> int:
    return int(row["answers"].int().argmax()) or len(row["answers"]) // 2


def prepare_data(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    output: str | Path,
    *,
    max_length: int = MAX_LENGTH,
    states: bool = False,
    layer_ids: list[int] | None = None,
    dtype: str | None = None,
    regenerate: bool = False,
    max_new_tokens: int = MAX_NEW_TOKENS,
    generation: dict[str, Any] | None = None,
    batch_size: int = BATCH_SIZE,
    records_per_shard: int = RECORDS_PER_SHARD,
    part: tuple[int, int] = (0, 1),
    template_augmentation: float = 0.0,
    chat_template: str | None = None,
    template_options: dict[str, Any] | None = None,
    seed: int = 0,
    split: str = "train",
    mask: str = "answers",
    progress: Callable[[str], None] | None = None,
) -> Prepared:
    """Makes the shards of `output` that are missing, of them those whose number is part[0] modulo part[1]; run again,
    it goes on.

    `states`: with the target's, at `layer_ids` (by default where drafters read) and in `dtype`, one of STORED_DTYPES
    (by default the target's). `regenerate`: answers are the target's own, by generate() with the options `generation`.
    The others are RowMaker's. A record that makes no row is counted with its reason, and the first of each reason are
    told to `progress`, with file and line. Raises ValueError for options that do not go together, where `output` holds
    something else, and where no record makes a row.
    """
    _check(target, states, layer_ids, dtype, regenerate, template_augmentation, part)
    records = read_records(source, split)
    stops = on_policy.stop_ids(target, tokenizer)
    embedding = target.get_input_embeddings()
    if states:
        layer_ids = Eagle31Config(aux_hidden_state_layer_ids=layer_ids).resolve_layer_ids(len(decoder_layers(target)))
        dtype = dtype or str(target.dtype).removeprefix("torch.")
    maker = RowMaker(
        tokenizer,
        max_length,
        shape_of(embedding)[0],
        "answers" if regenerate else mask,
        template_augmentation,
        seed,
        chat_template,
        set(stops),
        template_options or {},
    )
    speaker = (
        on_policy.Speaker(target, tokenizer, max_length, max_new_tokens, batch_size, generation or {})
        if regenerate
        else None
    )
    reader = TargetReader(target, layer_ids) if states else None
    made_of = _made_of(source, split, mask, maker, speaker)
    open_store(output, _manifest(target, tokenizer, made_of, len(records), records_per_shard, layer_ids, dtype))
    if reader is not None and part[0] == 0:
        save_target_parts(output, target, reader.scoring.as_dict())
    skips = Skips(records.where, progress)
    workshop = _Workshop(records, records_per_shard, maker, speaker, reader, mask, seed, batch_size, skips)
    _make(workshop, output, part, progress or (lambda message: None))
    prepared = _summary(output)
    if prepared.shards == prepared.num_shards and not prepared.rows:
        raise _no_rows(source, records, skips, prepared.skipped)
    return prepared


def rows_in_memory(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    *,
    max_length: int,
    split: str = "train",
    seed: int = 0,
    template_options: dict[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Rows, dict[str, int]]:
    """Rows of a source as it is, and what made none, by reason; `progress` is told where the first of each reason are.

    Raises ValueError where no record makes a row.
    """
    records, rows = read_records(source, split), list[Row]()
    skips = Skips(records.where, progress)
    table: Any = target.get_input_embeddings()
    stops = set(on_policy.stop_ids(target, tokenizer))
    maker = RowMaker(
        tokenizer, max_length, shape_of(table)[0], seed=seed, stop_ids=stops, template_options=template_options or {}
    )
    for number in range(len(records)):
        rows += rows_of_record(records, number, maker, skips)
    skipped = dict(skips.taken())
    if not rows:
        raise _no_rows(source, records, skips, skipped)
    return Rows.from_rows(rows), skipped


def _no_rows(source: str, records: Records, skips: Skips, counts: dict[str, int]) -> ValueError:
    reasons = ", ".join(f"{count:,}: {reason}" for reason, count in sorted(counts.items())[:MOST_REASONS])
    first = "".join(f" {number}) {text}" for number, text in enumerate(skips.first, 1))
    return ValueError(
        f"{source}: none of its {len(records):,} records makes a row ({reasons}); expected some with answers."
        + (f" The first:{first}" if first else "")
    )


def _check(
    target: PreTrainedModel,
    states: bool,
    layer_ids: Any,
    dtype: Any,
    regenerate: bool,
    template_augmentation: float,
    part: tuple[int, int],
) -> None:
    """Raises ValueError for options that do not go together, and for a target whose processes depend on each other."""
    if not 0 <= part[0] < part[1]:
        raise ValueError(f"part is {part[0]}/{part[1]}; expected 0/n to n-1/n for n processes.")
    if not states and (layer_ids, dtype) != (None, None):
        raise ValueError(f"layer_ids is {layer_ids} and dtype {dtype!r} without states; expected neither, or states.")
    if regenerate and template_augmentation:
        raise ValueError(
            f"template_augmentation is {template_augmentation}; expected 0 with regenerate: prompts are as they are"
            " served."
        )
    if tensor_parallel_group(target) is not None:
        raise ValueError(
            "the target is tensor-parallel, whose processes cannot each make their own shards; expected a whole one in"
            " every process, or one that device_map spreads over devices."
        )


def _made_of(source: str, split: str, mask: str, maker: RowMaker, speaker: on_policy.Speaker | None) -> dict[str, Any]:
    """All that rows follow from besides the target and its tokenizer, as the manifest keeps it."""
    made_of: dict[str, Any] = {
        "data": identity(source, split),
        "max_length": maker.max_length,
        "mask": mask,
        "seed": maker.seed,
        "regenerate": speaker is not None,
        "template_augmentation": maker.template_augmentation,
        "chat_template": None if maker.chat_template is None else digest(maker.chat_template),
        "stop_ids": sorted(maker.stop_ids or ()),
    }
    if maker.template_options:
        made_of["template_options"] = maker.template_options
    if speaker is not None:
        own = digest(speaker.target.generation_config.to_json_string(use_diff=False))  # what is not given is as it says
        made_of |= {
            "max_new_tokens": speaker.max_new_tokens,
            "batch_size": speaker.batch_size,
            "generation": speaker.generation,
        }
        made_of["generation_config"] = own
    return made_of


def _manifest(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    made_of: dict[str, Any],
    num_records: int,
    records_per_shard: int,
    layer_ids: list[int] | None,
    dtype: str | None,
) -> Manifest:
    width = target.config.get_text_config(decoder=True).hidden_size
    commit = getattr(target.config, "_commit_hash", None)  # only those of the Hub have one
    return Manifest(
        target.name_or_path,
        weights_fingerprint(target),
        tokenizer_fingerprint(tokenizer),
        made_of,
        width,
        num_records,
        records_per_shard,
        commit,
        layer_ids,
        dtype,
    )


def _make(workshop: _Workshop, output: str | Path, part: tuple[int, int], progress: Callable[[str], None]) -> None:
    mine = [index for index in missing_shards(output) if index % part[1] == part[0]]
    for done, index in enumerate(mine, 1):
        rows, skipped = workshop.shard(index)
        write_shard(output, index, rows, skipped)
        progress(f"shard {done} of {len(mine)}: {len(rows)} rows, {sum(len(row['input_ids']) for row in rows)} tokens")


def _summary(output: str | Path) -> Prepared:
    store = HiddenStateStore(output, allow_partial=True)
    total = store.manifest.num_shards
    return Prepared(
        str(output), len(store), sum(store.lengths), dict(store.skipped), total - len(missing_shards(output)), total
    )
