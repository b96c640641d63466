"""Training data made into a store: records become examples, in the target's own words and with its states where asked.

Shards are made one by one from the records that are theirs, and from nothing else: a run that was stopped goes on, and
several processes can make some each.
"""

import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..targets.ends import execution_device
from .ends import is_spread
from .engine_states import EngineStates
from .output import once
from .preparation_options import PreparationOptions
from .records import Joined, Records, read_records
from .self_prompts import SelfPrompts
from .servers import Tell
from .shard_builder import ShardBuilder
from .skipped import Skipped, Skips
from .store import MANIFEST, HiddenStateStore, missing_shards, open_store, read_manifest, save_target_parts, write_shard

MOST_REASONS = 5  # in an error
WATCH = 1.0  # seconds between looks at whether the process that asks is still there
QUOTA = "/sys/fs/cgroup/cpu.max"  # of a container: microseconds of all cores in a period, and the period
_builder: ShardBuilder  # of a process that makes shards, and the folder they go to
_folder: str | Path


@dataclass
class Prepared:
    """The contents of a store by now: examples (`rows`), their tokens, and by reason what gave none; `shards` of
    `num_shards` are there."""

    folder: str
    rows: int
    tokens: int
    skipped: dict[str, int]
    shards: int
    num_shards: int


def prepare_data(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    source: str | None,
    output: str | Path,
    options: PreparationOptions | None = None,
    *,
    part: tuple[int, int] = (0, 1),
    progress: Tell | None = None,
    states_by: EngineStates | None = None,
) -> Prepared:
    """Makes the shards that are missing in the store `output`; run again, it goes on.

    `tokenizer`: or the target's processor, which has it; with that and `states` in the options chats with images are
    read, too. `source`: what `read_records` reads, or None where all chats are self-prompted. `part`: makes only the
    shards whose number is part[0] modulo part[1]. A record that gives no example is counted with its reason, and the
    first ones of each reason are told to `progress`, with file and line. `states_by`: servers that give the states in
    the target's place; a target that neither answers nor gives states may be without weights, on the meta device. Where
    the target is spread over several processes, all of them call this with the same arguments: they make every shard
    together, and the first one writes it. Raises ValueError for a `part` of such a target, where `output` holds
    something else, where no record gives an example, and for an engine that does not give the target's answers;
    RuntimeError where its servers fail.
    """
    options = (options or PreparationOptions()).for_target(target)
    of_all, is_writer = _roles(target, options, part)
    records = records_of(source, options)
    skips = Skips(records.where, progress)
    tell = progress or (lambda line: None)
    builder = ShardBuilder(target, tokenizer, records, options, skips, tell, states_by)
    is_complete = (Path(output) / MANIFEST).is_file() and not missing_shards(output, part)
    builder.meet_engine(read_manifest(output) if is_complete else None)
    manifest = builder.manifest(source)

    def opened() -> list[int]:  # makes the store, or finds it, and returns the shards that it lacks of this part
        open_store(output, manifest, builder.earlier)
        if builder.reader is not None and part[0] == 0:
            save_target_parts(output, builder.reader.ends, asdict(builder.reader.scoring))
        return missing_shards(output, part)

    _make_shards(builder, output, of_all(opened), tell, is_writer)
    prepared = of_all(lambda: _summary(output))
    if prepared.shards == prepared.num_shards and not prepared.rows:
        most = Counter(prepared.skipped).most_common(MOST_REASONS)
        reasons = ", ".join(f"{count:,}: {reason}" for reason, count in most)
        first = "".join(f" {number}) {text}" for number, text in enumerate(skips.first, 1))
        raise ValueError(
            f"{source or 'self-prompts'}: none of its {len(records):,} records makes a row ({reasons}); expected some"
            " with answers." + (f" The first:{first}" if first else "")
        )
    return prepared


def records_of(source: str | None, options: PreparationOptions) -> Records:
    """Returns the records of a source, and after them those that the target is to write. Raises ValueError where there
    are none of either."""
    own = SelfPrompts(options.self_prompts, options.seed)
    if source is None:
        if not options.self_prompts:
            raise ValueError("there is no data and self_prompts is 0; expected one of the two, or both.")
        if options.max_samples is not None:
            raise ValueError(f"max_samples is {options.max_samples} and there is no data; expected data to read it of.")
        return own
    given = read_records(source, options.split, options.max_samples)
    return Joined([given, own]) if options.self_prompts else given


def _roles(
    target: PreTrainedModel, options: PreparationOptions, part: tuple[int, int]
) -> tuple[Callable[[Callable[[], Any]], Any], bool]:
    """Returns what calls a function once for all processes that make the same shards, and whether this one writes
    them. Raises ValueError for a part that there is not, and for an engine beside such a target."""
    if not 0 <= part[0] < part[1]:
        raise ValueError(f"part is {part[0]}/{part[1]}; expected 0/n to n-1/n for n processes.")
    if not (is_spread(target) and (options.regenerate or options.states)):
        return lambda make: make(), True
    if options.engine is not None:  # it may answer each process otherwise, and they run every text together
        raise ValueError(
            "an engine answers, and the target is spread over processes; expected answers of an earlier prepare-data,"
            " or a whole target in every process."
        )
    if part != (0, 1):
        raise ValueError(
            f"part is {part[0]}/{part[1]}, and the target is spread over processes, which make every shard together;"
            " expected no part."
        )
    return once, PartialState(cpu=execution_device(target).type == "cpu").is_main_process


def _make_shards(builder: ShardBuilder, output: str | Path, mine: list[int], progress: Tell, is_writer: bool) -> None:
    """Makes these shards: in several processes where the target is not needed, else one after the other, each written
    while the next is made, by the writer alone."""
    count = min(processes(builder.options), len(mine))
    is_split = count > 1 and not builder.needs_target
    made = in_processes(builder, output, mine, count) if is_split else _one_by_one(builder, output, mine, is_writer)
    begin, total = time.monotonic(), 0
    for done, (num_rows, num_tokens) in enumerate(made, 1):
        total += num_tokens
        seconds = max(time.monotonic() - begin, 1e-9)  # a clock may be coarse
        progress(
            f"shard {done} of {len(mine)}: {num_rows:,} rows, {num_tokens:,} tokens; {total / seconds:,.0f} tokens/s,"
            f" {seconds / done * (len(mine) - done) / 60:.0f} minutes left"
        )


def _one_by_one(
    builder: ShardBuilder, output: str | Path, indices: list[int], is_writer: bool
) -> Iterator[tuple[int, int]]:
    """Makes shards, and writes them where this process does; yields the examples and tokens of each once it is
    written."""
    with ThreadPoolExecutor(1) as writer:
        writing = list[Future[tuple[int, int]]]()  # at most one
        for index in indices:
            made = builder.build(index)
            yield from (written.result() for written in writing)
            writing = [writer.submit(write_shard, output, index, *made)] if is_writer else []
        yield from (written.result() for written in writing)


def _summary(output: str | Path) -> Prepared:
    store = HiddenStateStore(output, allow_partial=True)
    total = store.manifest.num_shards
    return Prepared(
        str(output), len(store), sum(store.lengths), dict(store.skipped), total - len(missing_shards(output)), total
    )


def processes(options: PreparationOptions) -> int:
    """Returns how many processes tokenize: as many as are asked for, or as there are cores for this process, in a
    container no more than it is allowed. One where processes cannot be forked."""
    if "fork" not in get_all_start_methods():
        return 1
    if options.processes is not None:
        return options.processes
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, Path(QUOTA).read_text().split())
    except (OSError, ValueError):  # there is none
        return cores
    return max(1, min(cores, quota // period))


def in_processes(
    builder: ShardBuilder, folder: str | Path, indices: list[int], count: int
) -> Iterator[tuple[int, int]]:
    """Makes and writes shards in `count` processes; yields the examples and tokens of each, in their order. Raises
    RuntimeError where one of the processes is killed.

    They are forked, as those of `datasets`: tokenizers, records and templates need not be sent. None of them touches a
    GPU.
    """
    left = iter(indices)
    pool = ProcessPoolExecutor(count, get_context("fork"), _begin, (builder, folder, os.getpid()))
    try:
        # no more than are made at once: a stop waits for all that are submitted
        making = deque(pool.submit(_make, index) for index in islice(left, count))
        while making:
            num_rows, num_tokens, refusals = making.popleft().result()
            making.extend(pool.submit(_make, index) for index in islice(left, 1))
            for number, refusal in refusals:
                builder.skips.add(number, refusal)
            yield num_rows, num_tokens
    except BrokenProcessPool:
        raise RuntimeError(
            "a process that tokenizes was killed, for want of memory maybe; shards that are complete are kept. The same"
            " command goes on; --processes 1 needs the least memory."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(builder: ShardBuilder, folder: str | Path, parent: int) -> None:
    """Begins a process that makes shards. Ctrl-C is left to the parent; when that ends, so does this."""
    global _builder, _folder
    _builder, _folder = builder, folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # a fork has no threads of the parent's pool
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(1)


def _make(index: int) -> tuple[int, int, list[tuple[int, Skipped]]]:
    """Makes and writes a shard; returns the numbers of its examples and tokens, and the first few records of each
    reason that gave none."""
    _builder.skips = Skips(_builder.skips.place_of)  # which tells nobody: the parent does
    num_rows, num_tokens = write_shard(_folder, index, *_builder.build(index))
    return num_rows, num_tokens, _builder.skips.shown
