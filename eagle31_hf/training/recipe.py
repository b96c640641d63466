"""The parts of a training run: examples to train and to evaluate on, a draft vocabulary, the drafter to begin with, and
the lines that say how it goes.

`eagle31 train` and examples/train.py are made of these parts; each can be used alone.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, TrainerCallback

from ..checkpoints.sharing import folder_lock
from ..modeling import Eagle31DrafterModel
from ..storage.fingerprints import digest, tokenizer_fingerprint, weights_fingerprint
from ..storage.measured import cache_folder
from ..targets.ends import execution_device, shape_of
from ..version import __version__
from .answers import stop_ids
from .ends import TargetEnds, is_spread
from .engine_states import EngineStates, StreamedStates
from .fresh import choose_vocabulary, count_answers
from .output import once
from .packing import Part, tokens_at
from .preparation_options import PreparationOptions
from .prepare import prepare_data, records_of
from .records import identity
from .servers import Tell
from .store import MANIFEST, HiddenStateStore, read_manifest

EVAL_DATA = "eval-data"  # folder of what is evaluated on
WORTH_TELLING = 0.05  # of the time
FOR_UPGRADE = 16  # examples on which an EAGLE 3 drafter is calibrated
READER = 2  # of records: another number where they are read otherwise, so that what is cached is made anew
Upgrade = Callable[[Eagle31DrafterModel, Any, list[Tensor]], Eagle31DrafterModel]


@dataclass
class TrainingData:
    """Examples to train on, examples to evaluate on (None: there are none), and the facts that training.json keeps of
    them.

    `layer_ids`: the target layers whose states are stored with the examples, None where there are no states.
    """

    train: Any
    held_out: Any
    facts: dict[str, Any]
    layer_ids: list[int] | None = None


@dataclass(frozen=True)
class ExampleReader:
    """Reads sources of training data as examples for one target and its tokenizer.

    A source is a store that prepare-data wrote, or chats and texts, of which examples are made as `options` say. Those
    in the target's own words go into stores below `folder`, made by all processes together. Those of the data as it is
    go into the user's cache folder, for later runs, too. With `states_by`, examples bring the target's states, which
    are asked for as the examples are trained on.
    """

    target: Any  # the model, or a StoredTarget
    tokenizer: PreTrainedTokenizerBase
    options: PreparationOptions
    progress: Tell
    folder: Path
    states_by: EngineStates | None = None

    def training_data(self, source: str | None, eval_source: str | None, num_held_out: int) -> TrainingData:
        """Reads `source` to train on (None: self-prompted chats alone) and `eval_source` to evaluate on.

        Without the latter `num_held_out` examples of the data are held out, at most a tenth of them, drawn at random,
        whole chats where each turn is an example. Raises ValueError where no record gives an example, and for a store
        of another tokenizer.
        """
        examples, facts = self.read(source, "data")
        layer_ids = examples.manifest.layer_ids if self.states_by is None else self.states_by.layer_ids
        most = 0 if eval_source else min(num_held_out, len(examples) // 10)
        chosen = drawn_chats(examples, most, self.options.seed)
        facts |= _held_out(sorted(chosen))
        if eval_source:
            held_out = self._with_states(self.read(eval_source, EVAL_DATA)[0])
            return TrainingData(self._with_states(examples), held_out, facts, layer_ids)
        rest = [index for index in range(len(examples)) if index not in chosen]
        held_out = self._with_states(Part(examples, sorted(chosen))) if chosen else None
        return TrainingData(self._with_states(Part(examples, rest)), held_out, facts, layer_ids)

    def _with_states(self, examples: Any) -> Any:
        return examples if self.states_by is None else StreamedStates(examples, self.states_by)

    def read(self, source: str | None, name: str) -> tuple[HiddenStateStore, dict[str, Any]]:
        """Returns the examples of a source, and its facts; regenerated ones go into the subfolder `name`."""
        options = self.options
        if name == EVAL_DATA:  # all that the caller names, and no more
            options = replace(options, self_prompts=0, max_samples=None)
        if not is_store(source):
            store = self._made(source, self.folder / name, options)
            return store, self._facts(source or "self-prompted chats", store)
        store = HiddenStateStore(source)
        store.check(tokenizer_fingerprint(self.tokenizer))
        is_regenerated = options.regenerate and not store.manifest.source["regenerate"]
        asked = {"self_prompts": options.self_prompts, "max_samples": options.max_samples, "regenerate": is_regenerated}
        for option, value in asked.items():
            if value:
                raise ValueError(
                    f"{option} is {value} and {source} is a store, which is read as it is; expected the data it was"
                    f" made of, or a store made by prepare-data --{option.replace('_', '-')}."
                )
        return store, self._facts(source, store)

    def _made(self, source: str | None, folder: Path, options: PreparationOptions) -> HiddenStateStore:
        """Makes the store of a source, each process of a distributed run its share of the shards, or all together where
        the target is spread over them."""
        if not options.regenerate:
            return self._tokenized(source, options)
        state = PartialState()
        part = (0, 1) if is_spread(self.target) else (state.process_index, state.num_processes)
        prepare_data(self.target, self.tokenizer, source, folder, options, part=part, progress=self.progress)
        state.wait_for_everyone()
        return HiddenStateStore(folder)

    def _tokenized(self, source: str, options: PreparationOptions) -> HiddenStateStore:
        """Makes the store of a source as it is in the cache folder, or finds it there: the first process of each
        machine makes it, for one run at a time."""
        options = replace(options, engine=None)

        def made() -> Path:
            made_of = (
                identity(source, options.split, options.max_samples),
                repr(replace(options, processes=None, batch_size=1)),
                tokenizer_fingerprint(self.tokenizer),
                self.tokenizer.backend_tokenizer.to_str() if self.tokenizer.is_fast else "",
                weights_fingerprint(self.target, values=False),
                repr(stop_ids(self.target, self.tokenizer)),
                f"{__version__}, {READER}",
            )
            cached = self._writable(digest(*made_of)[:16])
            with folder_lock(cached, required=False):
                prepare_data(self.target, self.tokenizer, source, cached / "store", options, progress=self.progress)
            return cached / "store"

        return HiddenStateStore(once(made, each_machine=True))

    def _writable(self, name: str) -> Path:
        """Returns the folder `name` of the cache, or, where that cannot be written to, of the run."""
        cached = cache_folder("examples", name)
        try:
            cached.mkdir(parents=True, exist_ok=True)
            if os.access(cached, os.W_OK):
                return cached
        except OSError:
            pass
        own = self.folder / f"examples-{name}"
        self.progress(f"{cached} cannot be written to; examples go into {own}")
        own.mkdir(parents=True, exist_ok=True)
        return own

    def _facts(self, source: str, examples: HiddenStateStore) -> dict[str, Any]:
        """Counts examples (`rows`), tokens and skipped records, and tells them to `progress`."""
        skipped = dict(examples.skipped)
        facts = {"source": source, "rows": len(examples), "tokens": sum(examples.lengths), "skipped": skipped}
        left_out = "".join(f", {count:,} skipped ({reason})" for reason, count in sorted(skipped.items()))
        self.progress(f"{source}: {facts['rows']:,} rows of {facts['tokens']:,} tokens{left_out}")
        return facts | {"records_digest": _records_digest(examples.manifest.source, examples.manifest.num_records)}


def is_store(source: str | None) -> bool:
    """Returns True for a store that prepare-data wrote."""
    return source is not None and (Path(source) / MANIFEST).is_file()


def asked_data(source: str | None, eval_source: str | None, options: PreparationOptions) -> dict[str, str]:
    """Returns those of the facts of `ExampleReader.training_data` that are known before any example is made."""
    if is_store(source):
        manifest = read_manifest(source)
        made_of, num_records = manifest.source, manifest.num_records
    else:
        data = None if source is None else identity(source, options.split, options.max_samples)
        made_of, num_records = vars(options) | {"data": data}, len(records_of(source, options))
    return {"records_digest": _records_digest(made_of, num_records)} | (_held_out([]) if eval_source else {})


def _records_digest(made_of: Mapping[str, Any], num_records: int) -> str:
    """Returns a digest of records: the identity of the data they are of, their number, and where the target's words
    are in them, how these were drawn. `made_of`: as a store's manifest says it."""
    drawn = [made_of["seed"], made_of.get("self_prompts", 0)] if made_of["regenerate"] else None
    files = [made_of["images"]] if "images" in made_of else []  # which the data only names
    return digest(repr([made_of["data"], num_records, drawn, *files]))


def _held_out(indices: list[int]) -> dict[str, str]:
    return {"held_out_digest": digest(repr(indices))}


def drawn_chats(examples: Any, count: int, seed: int) -> set[int]:
    """Draws at most `count` examples by chats: examples that follow each other and are the same up to the first answer
    count as one chat, whose turns are examples of their own."""
    order = [*range(len(examples))]
    Random(seed).shuffle(order)
    chosen = set[int]()
    for index in order:
        if len(chosen) >= count:
            break
        if index not in chosen and len(chat := _chat_of(examples, index, count)) <= count - len(chosen):
            chosen |= chat
    return chosen or {*order[:count]}  # where all begin alike there are no chats to tell apart


def _chat_of(examples: Any, index: int, count: int) -> set[int]:
    """Returns the examples around one that are of its chat; of one with more than `count` some."""
    first = last = index
    while first > 0 and last - first <= count and _goes_on(examples, first - 1):
        first -= 1
    while last + 1 < len(examples) and last - first <= count and _goes_on(examples, last):
        last += 1
    return {*range(first, last + 1)}


def _goes_on(examples: Any, index: int) -> bool:
    """Returns whether the next example begins as this one does, up to its answer."""
    tokens, following = tokens_at(examples, index), tokens_at(examples, index + 1)
    length = int(tokens.answers.int().argmax())
    return length > 0 and torch.equal(tokens.input_ids[:length], following.input_ids[:length])


def draft_vocabulary(
    target: PreTrainedModel | TargetEnds,
    tokenizer: PreTrainedTokenizerBase,
    data: TrainingData,
    size: int | None,
    progress: Tell,
) -> tuple[Tensor | None, float | None]:
    """Chooses the `size` target ids (Vd,) that a new drafter can propose: the most frequent ones of the answers.

    Returns them with the share of the answers' tokens they cover; None for both where the drafter proposes every id
    (`size` None, or the target's vocabulary). Raises ValueError for a size that cannot be.
    """
    vocab_size = shape_of(target.get_input_embeddings())[0]
    if size is None or size == vocab_size:
        return None, None
    ids, share = choose_vocabulary(count_answers(data.train, vocab_size), size, stop_ids(target, tokenizer))
    progress(f"a draft vocabulary of {len(ids):,} covers {share:.2%} of the answers' tokens")
    return ids, share


def loaded_drafter(
    source: str,
    target: PreTrainedModel | TargetEnds,
    data: TrainingData,
    progress: Tell,
    fields: Mapping[str, Any] | None = None,
    upgrade: Upgrade | None = None,
) -> Eagle31DrafterModel:
    """Loads a drafter of any format in fp32, to train it further; `fields` of `Eagle31Config` win over its own.

    `upgrade`, if given, makes an EAGLE 3 drafter an EAGLE 3.1 one, by calibration on examples of the data. Raises
    OSError and ValueError as `from_pretrained` does.
    """
    drafter = Eagle31DrafterModel.from_pretrained(source, **dict(fields or {}))
    drafter = drafter.float().to(execution_device(target))
    if upgrade is None or drafter.config.is_eagle31:
        return drafter
    progress("making the EAGLE 3 drafter an EAGLE 3.1 one, by calibration")
    texts = [tokens_at(data.train, i).input_ids[None] for i in range(min(FOR_UPGRADE, len(data.train)))]
    drafter = upgrade(drafter, target, texts)
    progress(drafter.upgrade_report.summary().replace("\n", "; "))
    return drafter


class ProgressLines(TrainerCallback):
    """Tells `progress` a line for every log of the Trainer, from the main process only."""

    def __init__(self, progress: Tell):
        self.progress = progress
        self._began, self._first_step = 0.0, 0  # of this process's part of the run

    def on_train_begin(self, args, state, control, **kwargs):
        self._began, self._first_step = monotonic(), state.global_step
        if state.is_world_process_zero and state.global_step >= state.max_steps:
            self.progress(f"the run was finished after step {state.global_step:,}: there is nothing left to train")

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = line_of(logs or {})
        if not line or not state.is_world_process_zero:
            return
        done, left = state.global_step - self._first_step, state.max_steps - state.global_step
        if "tokens_per_second" in logs and done >= 1:
            minutes = (monotonic() - self._began) / done * left / 60  # evaluations included
            waiting = logs.get("waiting_for_data", 0.0)
            waits = f", {waiting:.0%} of the time waiting for data" if waiting >= WORTH_TELLING else ""
            line += f"; {logs['tokens_per_second']:,.0f} tokens/s{waits}, {minutes:,.0f} minutes left"
        self.progress(f"step {state.global_step:,} of {state.max_steps:,}: {line}")


def log_in_lines(trainer: Any, progress: Tell) -> None:
    """Replaces transformers' own callbacks, which print some sixty figures at a time, by `ProgressLines`.

    All figures are still in trainer_state.json, and where `report_to` sends them.
    """
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(ProgressLines(progress))


def line_of(logs: Mapping[str, float]) -> str:
    """Returns the figures one looks at, of training or of an evaluation, as a line; an empty one for other logs."""
    prefix = "eval_" if "eval_loss" in logs else ""
    if f"{prefix}loss" not in logs:
        return ""
    parts = [f"{'held out, ' if prefix else ''}loss {logs[f'{prefix}loss']:.3f}"]
    for figure in ("accuracy", "acceptance"):
        values = [logs[name] for k in range(1, len(logs)) if (name := f"{prefix}{figure}_{k}") in logs]
        parts += [f"{figure} " + " ".join(f"{value:.2f}" for value in values)] if values else []
    if "eval_accepted_length" in logs:
        parts.append(f"accepted length {logs['eval_accepted_length']:.2f}")
    if "eval_served_accepted_length" in logs:
        parts.append(f"in generate() {logs['eval_served_accepted_length']:.2f}")
    return "; ".join(parts)
