"""What an evaluation measures: figures by depth, walked answers, and generate() itself. K depths, B rows, T tokens."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from ..diagnostics.acceptance import measure_acceptance
from ..modeling import Eagle31DrafterModel
from ..tying import execution_device
from .chunked import RowFigures
from .objective import Batch, Found, Settings, Sums
from .packing import tokens_of
from .walk import Walk, answers_of, walk

BLANK = {"input_ids": [0, 0, 0], "answers": [False] * 3}  # a row that nothing is counted of
SHARE_OF_TEXT = 4  # of plain text, which has no prompt, the first quarter is one


class EvalShare(Dataset):
    """Every `count`-th row from `index` on, and a blank one where other processes have one more."""

    def __init__(self, rows: Any, index: int, count: int):
        self.rows = rows
        self.index = index
        self.count = count

    def __len__(self) -> int:
        return -(-len(self.rows) // self.count)

    def __getitem__(self, i: int) -> Any:
        at = self.index + range(len(self))[i] * self.count
        if at < len(self.rows):
            return self.rows[at]
        return blank_like(self.rows[0])


def blank_like(row: Any) -> dict[str, Any]:
    states = {name: torch.as_tensor(row[name])[:1].repeat(3, 1) for name in ("states", "last_states") if name in row}
    return BLANK | states


class Evaluation:
    """Adds up batches; `metrics` adds up processes."""

    def __init__(self, settings: Settings, draft_to_target: Tensor | None, stop_ids: set[int]):
        self.settings = settings
        self.draft_to_target = draft_to_target
        self.stop_ids = stop_ids
        self.sums: Tensor | None = None
        self.walk = Walk(accepted_per_position=[0] * settings.depth)

    def add(self, batch: Batch, outputs: dict[str, Any]) -> None:
        self.sums = outputs["sums"] if self.sums is None else self.sums + outputs["sums"]
        hits, chances = self.drafts_of(batch, outputs["found"], outputs["figures"])
        for row, start, end in answers_of(batch.answers, batch.documents):
            stops = int(batch.input_ids[row, end - 1]) in self.stop_ids
            chains = slice(start - 1, end - 2)  # a chain that begins at a token is that of the slot before
            self.walk.add(walk(hits[:, row, chains], chances[:, row, chains], stops))

    def drafts_of(self, batch: Batch, found: Found, figures: RowFigures) -> tuple[Tensor, Tensor]:
        """Whether each slot's guess at each depth is the text's token, and the chance that it is kept if drawn: (K, B,
        T)."""
        shape = (self.settings.depth, *batch.input_ids.shape)
        hits, chances = (
            torch.zeros(shape, dtype=torch.bool, device=batch.input_ids.device),
            torch.zeros(shape, device=batch.input_ids.device),
        )
        guesses = figures.guess if self.draft_to_target is None else self.draft_to_target[figures.guess]
        columns = zip(found.row, found.slot, found.by_depth(guesses), found.by_depth(figures.acceptance), strict=True)
        for k, (row, slot, guess, acceptance) in enumerate(columns):
            hits[k, row, slot] = guess == batch.input_ids[row, slot + 2 + k]
            chances[k, row, slot] = acceptance
        return hits, chances

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """`loss`; every figure by depth; accepted lengths, see `Walk`."""
        sums, counts = self.sums, self.walk
        assert sums is not None
        walked = torch.tensor(
            [counts.rounds, counts.tokens, counts.accepted, counts.expected_rounds, *counts.accepted_per_position],
            dtype=torch.float64,
            device=sums.device,
        )
        sums, walked = accelerator.reduce(sums, "sum").cpu(), accelerator.reduce(walked, "sum").cpu().tolist()
        figures = Sums.means(sums)
        metrics = {
            "loss": sum(w * d for w, d in zip(self.settings.depth_weights, figures.get("distance", []), strict=False))
        }
        metrics |= {f"{name}_{k + 1}": value for name, values in figures.items() for k, value in enumerate(values)}
        total = Walk(int(walked[0]), int(walked[1]), int(walked[2]), [int(n) for n in walked[4:]], walked[3])
        return metrics | total.metrics()


def prompt_of(row: Any) -> Tensor:
    """What comes before a row's first answer, (1, T); of plain text its first quarter."""
    tokens = tokens_of(row)
    first = int(tokens.answers.int().argmax())
    return tokens.input_ids[None, : first or max(1, len(tokens.input_ids) // SHARE_OF_TEXT)]


def served(
    target: PreTrainedModel,
    drafter: Eagle31DrafterModel,
    rows: Any,
    num_prompts: int,
    depth: int,
    max_new_tokens: int,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Chains of `depth` in a greedy generate() after the prompts of the first rows: `served_accepted_length`, bonus
    included, and the share of rounds that accept each position, `served_acceptance_1` on."""
    mine = range(accelerator.process_index, min(num_prompts, len(rows)), accelerator.num_processes)
    prompts = (prompt_of(rows[index]).to(execution_device(target)) for index in mine)
    stats = measure_acceptance(target, drafter, prompts, depth, max_new_tokens)
    per_position = [*stats.accepted_per_position, *[0] * depth][:depth]
    counts = torch.tensor(
        [stats.target_forwards, stats.generated_tokens - stats.prefills, *per_position],
        dtype=torch.float64,
        device=accelerator.device,
    )
    rounds, tokens, *accepted = accelerator.reduce(counts, "sum").cpu().tolist()
    if not rounds:
        return {}
    shares = {f"served_acceptance_{k + 1}": n / rounds for k, n in enumerate(accepted)}
    return {"served_accepted_length": tokens / rounds} | shares
