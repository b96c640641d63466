"""The report of `eagle31 bench acceptance`, decoded by vLLM (0.32 or later) with the exported drafters.

    python benchmarks/vllm_acceptance.py --python VLLM/bin/python --target T --drafter D --prompts P ...

`--python` is the Python that vLLM is installed for; all else is as the command takes it, but for rivals. vLLM drafts
chains of one depth, so there is an engine for every drafter and depth, one after another: speed-ups are of one start
over another.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import vllm_worker

from eagle31_hf.checkpoints import export_checkpoint
from eagle31_hf.checkpoints.export import vllm_speculation
from eagle31_hf.cli import diagnosing
from eagle31_hf.cli import main as eagle31
from eagle31_hf.reports.acceptance_study import TARGET_ALONE, WARM_UP, AcceptanceStudy, Condition, Who, label_of, row_of
from eagle31_hf.reports.document import Generation
from eagle31_hf.reports.figures import Row
from eagle31_hf.reports.journal import counted, place
from eagle31_hf.storage.fingerprints import digest
from eagle31_hf.training.answers import stop_ids
from eagle31_hf.training.engines import sampling_of

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
                " (--python PYTHON runs that of another environment)."
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

    def generations(self) -> list[Generation]:
        """None: vLLM does not tell what it drafted and refused."""
        return []

    def _decode_all(self, conditions: Sequence[Condition]) -> None:
        """Starts an engine for everybody of whom something is not in the journal, and keeps it there as it comes."""
        missing: dict[Who, list[tuple[Condition, int]]] = {}
        for condition in conditions:
            for who in self._everybody(condition):
                names = {number: place(label_of(who), condition.name, number) for number in condition.batches}
                new = [(condition, number) for number, name in names.items() if name not in self.journal]
                missing.setdefault(who, []).extend(new)
        with TemporaryDirectory() as folder:
            for who, batches in missing.items():
                if batches:
                    self._run(who, self._plan(who, conditions, Path(folder)), batches)

    def _run(self, who: Who, plan: Mapping[str, Any], batches: list[tuple[Condition, int]]) -> None:
        """Starts an engine for the batches, each the number of one of a condition."""
        with closing(Worker(self.python, plan)) as worker:
            self._ask(worker, *batches[0], WARM_UP)
            for index in counted(range(len(batches)), " ".join(filter(None, (*who, "in vLLM")))):
                condition, number = batches[index]
                decode = partial(self._row, worker, who, condition, number)
                self.journal.once(place(label_of(who), condition.name, number), decode)

    def _plan(self, who: Who, conditions: Sequence[Condition], folder: Path) -> dict[str, Any]:
        """Returns how the engine of the target alone, or of a drafter at one depth, is started."""
        batches = [batch for condition in conditions for batch in condition.batches.values()]
        longest = max(len(ids) for batch in batches for ids in batch)
        depth = {way.name: way.depth for condition in conditions for way in condition.ways}.get(who[1], 0)
        # vLLM drafts nothing where the chain under verification and the next one would leave max_model_len
        wanted = longest + self.settings.max_new_tokens + 3 * depth + 1
        return {
            "target": self.source,
            "speculation": None if who == TARGET_ALONE else self._speculation(folder, who[0], depth),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "max_model_len": min(wanted, self.prompts.room),
            "max_num_seqs": max(map(len, batches)),
        }

    def _speculation(self, folder: Path, label: str, depth: int) -> dict[str, Any]:
        return vllm_speculation(self.drafters[label].config, str(self._exported(folder, label)), depth)

    def _exported(self, folder: Path, label: str) -> Path:
        """Returns the folder of a drafter as vLLM reads it; it is written where it is not there yet."""
        native, exported = (folder / digest(label)[:16] / name for name in ("native", "vllm"))
        if not exported.exists():
            self.drafters[label].save_pretrained(native)
            export_checkpoint(native, exported, format="vllm")
        return exported

    def _row(self, worker: Worker, who: Who, condition: Condition, number: int) -> Row:
        found = self._ask(worker, condition, number, self.settings.max_new_tokens)
        return row_of(found["tokens"], found["seconds"]) | ({} if who == TARGET_ALONE else rounds_of(found))

    def _ask(self, worker: Worker, condition: Condition, number: int, max_new_tokens: int) -> dict[str, Any]:
        """Has the engine decode a batch of a condition, whose number is the seed of sampling."""
        return worker.ask(
            {
                "prompts": [ids.tolist() for ids in condition.batches[number]],
                "max_new_tokens": max_new_tokens,
                "sampling": sampling_of(dict(condition.options), self.target.generation_config),
                "seed": number,
                "ends": stop_ids(self.target, None),
            }
        )


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="eagle31 bench acceptance, decoded by vLLM", allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable, help="which vLLM is installed for (default: this)")
    parser.add_argument("--target", required=True, help="folder or Hub repository of the target")
    own, rest = parser.parse_known_args(arguments)
    if any(word.startswith("--rivals") for word in rest):
        parser.error("--rivals are ways of transformers; expected none")

    def study(*about: Any) -> VllmStudy:
        return VllmStudy(*about, own.target, own.python)

    with patch.object(diagnosing, "bench", partial(diagnosing.bench, make_study=study, engine="vllm")):
        return eagle31(["bench", "acceptance", "--target", own.target, *rest])


if __name__ == "__main__":
    sys.exit(main())
