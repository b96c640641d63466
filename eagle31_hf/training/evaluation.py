"""The figures of training between two logs, and those of an evaluation: losses by depth, accepted lengths of walked
answers, and what generate() accepts.

Answers are walked without generating, as serving would: draft, count hits, go on after the bonus token. That is exact
for greedy decoding where the text is the target's own greedy text.
K depths, B sequences, T tokens, L tokens of an answer, N predictions of all depths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset
from transformers import PreTrainedModel
from transformers.utils import logging

from ..acceptance import AcceptanceStats
from ..diagnostics.acceptance import chain_knobs, measure_acceptance
from ..errors import DraftingRefusedError
from ..modeling import Eagle31DrafterModel
from ..targets.ends import execution_device
from .arguments import Eagle31TrainingArguments
from .documents import Text, runs
from .flop import FlopCounter
from .kinds import tokens_of
from .objective import Batch, Settings, means_of, sum_dtype
from .packing import STATE_COLUMNS

logger = logging.get_logger(__name__)
PROMPT_SHARE = 4  # of plain text, which has no prompt, the first quarter serves as one


class TrainingFigures:
    """Adds up the figures of batches on their device, counts tokens, and texts that are left out because the target
    gives them states that are NaN or infinite."""

    def __init__(self, device: torch.device):
        self._sums: Tensor | None = None
        self._num_tokens, self._began = 0, 0.0
        self._waited = 0.0  # since the last call of `take`
        self._taken_at: float | None = None
        self.num_broken = torch.zeros((), device=device)  # texts that are left out, from the start of the run
        self.flop_of_token: float | None = None  # of this process, in a batch like the first

    def add(self, sums: Tensor) -> None:
        """Adds the sums of a batch, see `UnrollRecord.sums`."""
        self._sums = sums if self._sums is None else self._sums + sums

    def begin(self, documents: Tensor) -> None:
        """Counts the tokens of a batch (B, T) that is about to be trained on, padding (0) left out."""
        if not self._num_tokens:
            self._began = monotonic()
        self._num_tokens += int(documents.count_nonzero())

    @contextmanager
    def counting(self, documents: Tensor) -> Iterator[None]:
        """A context in which a batch (B, T) is trained on: of the first one the FLOP of products and attention are
        counted, forward and back, what is computed again included, and what another thread reads ahead left out."""
        if self.flop_of_token is not None:
            yield
            return
        with FlopCounter() as counter:
            yield
        self.flop_of_token = counter.total / max(1, int(documents.count_nonzero()))

    def add_waiting(self, seconds: float) -> None:
        """Adds the seconds for which a step's batches were waited for."""
        if self._taken_at is None:  # the first batches are read when nothing else is to be done
            self._taken_at = monotonic()
        else:
            self._waited += seconds

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Returns the means since the last call over all processes, by depth (`accuracy_1` is of the first drafted
        token), the tokens trained on a second since the first batch after that call, the TFLOP a second that they take
        on each device, the share of this process's time in which it waited for data, and the number of texts left out,
        if there were any."""
        if self._sums is None:
            return {}
        means = means_of(accelerator.reduce(self._sums, "sum").cpu())
        self._sums = None
        logs = {f"{name}_{k + 1}": round(value, 5) for name, values in means.items() for k, value in enumerate(values)}
        num_tokens = int(accelerator.reduce(torch.tensor(self._num_tokens, device=accelerator.device), "sum"))
        now = monotonic()
        logs["tokens_per_second"] = round(num_tokens / max(1e-9, now - self._began), 1)
        of_a_device = logs["tokens_per_second"] / accelerator.num_processes
        logs["tflops"] = round(of_a_device * (self.flop_of_token or 0.0) / 1e12, 4)
        logs["waiting_for_data"] = round(self._waited / max(1e-9, now - (self._taken_at or now)), 4)
        self._num_tokens, self._waited = 0, 0.0
        self._taken_at = now
        num_broken = int(accelerator.reduce(self.num_broken.clone(), "sum"))
        return logs | ({"texts_with_broken_states": num_broken} if num_broken else {})


def share_of(examples: Any, index: int, count: int) -> Dataset:
    """Returns the examples that one of `count` processes evaluates: every `count`-th from `index` on. Where other
    processes have one more, a blank one is added, of which nothing is counted; it has states where the examples do."""
    share: Any = Subset(examples, range(index, len(examples), count))
    if len(share) < -(-len(examples) // count):
        first = examples[0]
        states = {name: torch.as_tensor(first[name])[:1].repeat(3, 1) for name in STATE_COLUMNS if name in first}
        blanks: Any = [{"input_ids": [0, 0, 0], "answers": [False] * 3} | states]
        share = ConcatDataset([share, blanks])
    share.examples = examples
    return share


class Evaluation:
    """Adds up the figures of batches; `metrics` adds up those of all processes.

    `draft_to_target` (Vd,): the target id of every draft id, None where the vocabularies are one. `stop_ids`: the ids
    that end a text.
    """

    def __init__(self, settings: Settings, draft_to_target: Tensor | None, stop_ids: set[int]):
        self.settings = settings
        self.draft_to_target = draft_to_target
        self.stop_ids = stop_ids
        self.sums: Tensor | None = None
        self.walked = torch.zeros(2 + settings.depth, dtype=torch.float64)

    def add(self, batch: Batch, outputs: dict[str, Any]) -> None:
        """Adds a batch and what the objective returned for it."""
        self.sums = outputs["sums"] if self.sums is None else self.sums + outputs["sums"]
        record, guesses = outputs["record"], outputs["figures"].guess
        if self.draft_to_target is not None:
            guesses = self.draft_to_target[guesses]
        # by depth and chain, whether the draft is the text's token: (K, B, T)
        hits = guesses.new_zeros(self.settings.depth, *batch.input_ids.shape, dtype=torch.bool)
        by_depth = guesses.split([len(sequence) for sequence, _ in record.at])
        for k, (sequence, position) in enumerate(record.at):
            hits[k, sequence, position] = by_depth[k] == batch.input_ids[sequence, position + 2 + k]
        for sequence, start, end in answers_of(batch.answers, batch.documents):
            stops = int(batch.input_ids[sequence, end - 1]) in self.stop_ids
            chains = slice(start - 1, end - 2)  # the chain that begins with a token is that of the position before it
            self.walked += walk(hits[:, sequence, chains], stops)

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Returns `loss`, every figure by depth (`accuracy_1` is of the first drafted token), and the accepted lengths
        of `walk_metrics`, over all processes."""
        assert self.sums is not None
        sums = accelerator.reduce(self.sums, "sum").cpu()
        walked = accelerator.reduce(self.walked.to(self.sums), "sum")
        figures = means_of(sums)
        distances = zip(self.settings.depth_weights, figures.get("distance", []), strict=False)
        metrics = {"loss": sum(weight * distance for weight, distance in distances)}
        metrics |= {f"{name}_{k + 1}": value for name, values in figures.items() for k, value in enumerate(values)}
        return metrics | walk_metrics(walked)


def prompt_of(example: Any) -> Tensor:
    """Returns the tokens before an example's first answer, (1, T); of plain text its first quarter."""
    tokens = tokens_of(example)
    first = int(tokens.answers.int().argmax())
    return tokens.input_ids[None, : first or max(1, len(tokens.input_ids) // PROMPT_SHARE)]


def served(
    target: PreTrainedModel,
    drafter: Eagle31DrafterModel,
    examples: Any,
    args: Eagle31TrainingArguments,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Measures what a greedy generate() accepts of chains after the first prompts, as deep, as many and as long as
    `args` say, over all processes: `served_accepted_length`, the bonus token included, and the share of rounds that
    accept each position, `served_acceptance_1` on; nothing for a target that generate() cannot draft for: another
    server may."""
    depth = args.eval_settings().depth
    mine = range(accelerator.process_index, min(args.eval_prompts, len(examples)), accelerator.num_processes)
    prompts = (prompt_of(examples[index]).to(execution_device(target)) for index in mine)
    stats, ends = AcceptanceStats(), drafter.tie.get()
    try:
        stats = measure_acceptance(target, drafter, prompts, chain_knobs(depth), args.eval_max_new_tokens)
    except DraftingRefusedError as error:  # processes without a prompt are refused nothing, and wait below
        logger.warning_once("there are no served_ figures, as generate() refuses to draft for this target: %s", error)
    finally:
        drafter.tie.set(*ends)  # generate() ties it to the target's own, which may lie on another device
    per_position = [*stats.accepted_per_position, *[0] * depth][:depth]
    counts = torch.tensor(
        [stats.target_forwards, stats.generated_tokens - stats.prefills, *per_position],
        dtype=sum_dtype(accelerator.device),
        device=accelerator.device,
    )
    rounds, tokens, *accepted = accelerator.reduce(counts, "sum").cpu().tolist()
    if not rounds:
        return {}
    shares = {f"served_acceptance_{k + 1}": n / rounds for k, n in enumerate(accepted)}
    return {"served_accepted_length": tokens / rounds} | shares


def walk(hits: Tensor, stops: bool = True) -> Tensor:
    """Walks one answer. Returns counts (2 + K,) in fp64, which add up over answers, see `walk_metrics`: the rounds; the
    tokens they brought, bonus tokens included, without the answer's first, which the prompt's forward gives; and how
    many rounds accepted the draft of each depth.

    `hits` (K, L - 1) bool: the draft of depth k in a chain that begins at token i is token i + 1 + k. `stops`: the last
    token ends the text, rather than a limit of length. Entries past the end of the answer are not looked at.
    """
    depth, left = hits.shape
    leading = hits.int().cumprod(dim=0).sum(dim=0).tolist()  # hits before the first miss
    at, accepted = 0, list[int]()  # of each round
    while at < left:
        remaining = left - at
        # A limit of length leaves room for the bonus token; an end of the text may itself be a draft.
        accepted.append(min(leading[at], remaining if stops else remaining - 1))
        at += min(accepted[-1] + 1, remaining)
    per_position = [sum(count > k for count in accepted) for k in range(depth)]
    return torch.tensor([len(accepted), at, *per_position], dtype=torch.float64)


def walk_metrics(counts: Tensor) -> dict[str, float]:
    """Returns the figures of an evaluation from the counts of `walk` (2 + K,), all 0 where there was no round.

    `accepted_length`: tokens per target forward, the bonus token included, as `stats.mean_accepted_length` has it;
    `_no_bonus`: without it. `walked_acceptance_1` on: the share of rounds that accept each position.
    """
    rounds, tokens, *accepted = counts.tolist()
    rounds = max(1.0, rounds)
    return {
        "accepted_length": tokens / rounds,
        "accepted_length_no_bonus": sum(accepted) / rounds,
        **{f"walked_acceptance_{k}": count / rounds for k, count in enumerate(accepted, 1)},
    }


def answers_of(answers: Tensor, documents: Tensor) -> Iterator[Text]:
    """Yields every answer that has at least one token to draft, as `walk` takes it; answer mask and document numbers
    are (B, T).

    A text without a prompt begins with a token that no drafter has a state before: there the second token counts as the
    answer's first.
    """
    for number, (sequence, start, end) in runs(torch.where(answers.bool(), documents, 0)):
        has_prompt = start > 0 and int(documents[sequence, start - 1]) == number
        if number > 0 and end - start > 1 + (not has_prompt):
            yield Text(sequence, start + (not has_prompt), end)
