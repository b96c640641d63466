"""The acceptance report of vLLM: the same prompts, decoded by an installed vLLM with the exported drafters.

vLLM drafts chains of one depth, so there is an engine for every drafter and depth, one after another.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..bench import Shape
from ..checkpoints import export_checkpoint
from ..modeling import Eagle31DrafterModel
from ..storage.fingerprints import digest
from ..training.engines import sampling_of
from . import vllm_worker
from .acceptance import TARGET_ALONE, WARM_UP, AcceptanceStudy, Batch, Condition, Decoded, Who, name_of
from .document import Generation
from .figures import Row

VERSION = "0.32"  # the first that tells what each round accepted


class Worker:
    """An engine of vLLM in a process of its own. Raises RuntimeError where it cannot be started."""

    def __init__(self, python: str, plan: Mapping[str, Any]):
        self._process = subprocess.Popen(
            [python, vllm_worker.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.versions: dict[str, str] = self.ask(plan)["versions"]
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request, and returns its answer. Raises RuntimeError with vLLM's error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": f"its process ended with status {self._process.wait()}"}
        if "error" in answer:
            raise RuntimeError(
                f"vLLM: {answer['error']}; expected vLLM {VERSION} or later, and a pair that it serves"
                " (--engine-python PYTHON runs that of another environment)."
            )
        return answer

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class VllmStudy(AcceptanceStudy):
    """Measures drafters as chains in vLLM, of the Python `python`; `source` is the target's folder or repository."""

    source: str
    python: str

    def measure(self) -> dict[str, Decoded]:
        """Measures all conditions, by their names; an engine is started for whatever is not known yet."""
        conditions = [condition for condition in self.conditions() if condition.batches]
        with TemporaryDirectory() as folder:
            for who, drafter, way in self._engines(conditions):
                decoded = [each for each in conditions if self._decodes(who, each, way)]
                pairs = [(each, number) for each in decoded for number in each.batches]
                missing = [pair for pair in pairs if name_of(who, *pair) not in self.journal]
                if missing:
                    self._run(who, drafter, way, missing, Path(folder))
        return {condition.name: self._collected(condition) for condition in conditions}

    def generations(self) -> list[Generation]:
        """None: vLLM does not tell what it drafted and refused."""
        return []

    def _engines(self, conditions: list[Condition]) -> Iterator[tuple[Who, Eagle31DrafterModel | None, Shape]]:
        """Yields who decodes: the target alone, and every drafter at every depth."""
        yield TARGET_ALONE, None, Shape(0)
        ways = {way.name: way for condition in conditions for way in condition.ways}
        for label, drafter in self.drafters.items():
            for way in ways.values():
                yield (label, way.name), drafter, way

    def _decodes(self, who: Who, condition: Condition, way: Shape) -> bool:
        return condition.is_timed if who == TARGET_ALONE else way in condition.ways

    def _run(
        self,
        who: Who,
        drafter: Eagle31DrafterModel | None,
        way: Shape,
        missing: list[tuple[Condition, int]],
        folder: Path,
    ) -> None:
        """Starts an engine, and keeps the figures of the prompts as they come."""
        exported = None if drafter is None else str(exported_to(folder, who[0], drafter))
        with self._worker(exported, way.depth) as worker:
            condition, number = missing[0]
            worker.ask(self._request(condition.batches[number], {}, 0, WARM_UP))
            for index in self.counted(range(len(missing)), " ".join(filter(None, (*who, "in vLLM")))):
                condition, number = missing[index]
                decode = partial(self._row, worker, condition, number, is_drafted=drafter is not None)
                self.journal.once(name_of(who, condition, number), decode)

    @contextmanager
    def _worker(self, drafter: str | None, depth: int) -> Iterator[Worker]:
        batches = [batch for condition in self.conditions() for batch in condition.batches.values()]
        longest = max(len(ids) for batch in batches for ids in batch)
        # vLLM drafts nothing where the chain under verification and the next one would leave max_model_len
        wanted = longest + self.settings.max_new_tokens + 3 * depth + 1
        plan = {
            "target": self.source,
            "drafter": drafter,
            "depth": depth,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "max_model_len": min(wanted, self.prompts.room),
            "max_num_seqs": max(map(len, batches)),
        }
        worker = Worker(self.python, plan)
        try:
            yield worker
        finally:
            worker.close()

    def _request(self, batch: Batch, options: Mapping[str, Any], seed: int, max_new_tokens: int) -> dict[str, Any]:
        return {
            "prompts": [ids.tolist() for ids in batch],
            "max_new_tokens": max_new_tokens,
            "sampling": sampling_of(dict(options), self.target.generation_config),
            "seed": seed,
            "ends": sorted(self._ends()),
        }

    def _row(self, worker: Worker, condition: Condition, number: int, is_drafted: bool) -> Row:
        request = self._request(condition.batches[number], condition.options, number, self.settings.max_new_tokens)
        found = worker.ask(request)
        ids = found["tokens"]
        row = {"seconds": found["seconds"], "new_tokens": sum(map(len, ids)), "text": digest(repr(ids))[:16]}
        return row | (rounds_of(found) if is_drafted else {})

    def _collected(self, condition: Condition) -> Decoded:
        """Returns what the journal has of a condition."""
        whos = [TARGET_ALONE] if condition.is_timed else []
        whos += [(label, way.name) for label in self.drafters for way in condition.ways]
        rows = {who: [self.journal[name_of(who, condition, number)] for number in condition.batches] for who in whos}
        return Decoded(condition.kind, [*condition.batches], rows, condition.num_prompts)


def rounds_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the counts of a batch as `counts_of` does: a round that the length limit cut counts in full, as vLLM
    counts it."""
    drafted, accepted = ([count for rounds in found[name] for count in rounds] for name in ("drafted", "accepted"))
    depths = range(max(drafted, default=0))
    return {
        "tokens": sum(accepted) + len(accepted),
        "rounds": len(accepted),
        "drafted": [sum(count > k for count in drafted) for k in depths],
        "accepted": [sum(count > k for count in accepted) for k in depths],
    }


def exported_to(folder: Path, label: str, drafter: Eagle31DrafterModel) -> Path:
    """Returns the folder of a drafter as vLLM reads it; it is written where it is not there yet."""
    place = folder / digest(label)[:16]
    if not (place / "vllm").exists():
        drafter.save_pretrained(place / "native")
        export_checkpoint(place / "native", place / "vllm", format="vllm")
    return place / "vllm"
