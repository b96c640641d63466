"""The drafter and its loss on a batch as one module, which DDP, FSDP and autocast can wrap.

B sequences of packed texts, T tokens, K depths, N predictions of all depths, n aux hidden states, ht target width, h
drafter width, V and Vd the vocabularies of target and draft.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..diagnostics.attention_mass import state_norm
from ..modeling import Eagle31DrafterModel
from .attention import MassObserver
from .chunked import PredictionFigures, Predictions, chunked_loss
from .loss_mask import NORMALISATIONS, loss_denominators, supervised_positions
from .losses import DEFAULT_LOSS, TargetDistribution, parse_mixture
from .unroll import unroll

# four times as deep as anything drafts; each depth takes time and memory, and of thousands no step ever ends
MAX_DEPTH = 64


@dataclass(frozen=True)
class Settings:
    """Settings of the loss: K `depth`s, each weighted `depth_weights[k]`; a `mixture` of distances, see `losses`; which
    chains are supervised (`convention`) and how they are averaged (`normalisation`), see `loss_mask`. Raises ValueError
    for a depth that cannot be unrolled."""

    depth: int
    depth_weights: tuple[float, ...]
    mixture: dict[str, float] = field(default_factory=lambda: parse_mixture(DEFAULT_LOSS))
    convention: str = "serving"
    normalisation: str = "token"

    def __post_init__(self):
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ValueError(f"depth is {self.depth}; expected 1 to {MAX_DEPTH}.")


# Names of figures: those of every prediction (`PredictionFigures`), and those of the watched ones alone (explained in
# `diagnostics`).
OF_ALL = ("distance", "accuracy", "acceptance", "coverage", "state_norm")
OF_WATCHED = ("greedy_acceptance", "sink_mass", "prompt_mass", "own_mass", "self_mass")


def sum_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype in which a device adds up figures: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def means_of(sums: Tensor) -> dict[str, list[float]]:
    """Returns the mean of every figure by depth, from sums (2 + figures, K) as `UnrollRecord.sums` gives them; 0 at a
    depth without predictions, no figure where all are."""
    predictions, watched, *columns = sums
    counts = [predictions] * len(OF_ALL) + [watched] * len(OF_WATCHED)
    return {
        name: (column / count.clamp(min=1)).tolist()
        for name, column, count in zip((*OF_ALL, *OF_WATCHED), columns, counts, strict=True)
        if count.any()
    }


class Batch:
    """A batch with the target's states: token ids, answer mask and numbers of packed texts (B, T), 0 padding; aux
    hidden states (B, T, n*ht), the states that enter the target's head (B, T, ht); what is added to positions (B, T)
    where they are spread, as `position_skips` draws it.

    No dataclass: FSDP would look into it, and round the target's states to the dtype it trains in.
    """

    def __init__(
        self,
        input_ids: Tensor,
        answers: Tensor,
        documents: Tensor,
        states: Tensor,
        last_states: Tensor,
        skips: Tensor | None = None,
    ):
        self.input_ids = input_ids
        self.answers = answers
        self.documents = documents
        self.states = states
        self.last_states = last_states
        self.skips = skips

    def without_broken(self) -> tuple["Batch", Tensor]:
        """Returns the batch without the answers and states of texts with a state that is not finite, and the number of
        these texts, a scalar."""
        is_broken = ~(self.states.isfinite().all(-1) & self.last_states.isfinite().all(-1))  # (B, T)
        numbers = self.documents
        by_text = torch.zeros(len(numbers), int(numbers.max()) + 1, device=numbers.device)
        by_text = by_text.scatter_reduce(1, numbers, is_broken.float(), "amax")
        dropped = by_text.gather(1, numbers).bool()
        if not dropped.any():  # a copy of all states may be of gigabytes
            return self, by_text.sum()
        states, last_states = (x.masked_fill(dropped[..., None], 0.0) for x in (self.states, self.last_states))
        answers = self.answers & ~dropped
        kept = Batch(self.input_ids, answers, self.documents, states, last_states, self.skips)
        return kept, by_text.sum()

    def padded(self, length: int) -> "Batch":
        """Returns the batch padded to at least `length` tokens, so that all depths can be unrolled."""
        missing = length - self.input_ids.shape[1]
        if missing <= 0:
            return self
        ids, answers, documents = (pad(x, (0, missing)) for x in (self.input_ids, self.answers, self.documents))
        states, last_states = (pad(x, (0, 0, 0, missing)) for x in (self.states, self.last_states))
        skips = None if self.skips is None else pad(self.skips, (0, missing))
        return Batch(ids, answers, documents, states, last_states, skips)


class DraftingObjective(nn.Module):
    """A drafter and its loss, exact whatever part of a larger batch it is computed on.

    `logits_of`: states that enter the target's head (N, ht) -> the target's logits (N, V).
    """

    accepts_loss_kwargs = True  # it is given what to divide by: the Trainer need not

    def __init__(self, drafter: Eagle31DrafterModel, settings: Settings, logits_of: Callable[[Tensor], Tensor]):
        super().__init__()
        self.drafter = drafter
        self.settings = settings
        self.logits_of = (logits_of,)  # a tuple, so that a target is no part of what is trained
        self.recomputes = False  # the backward pass computes each depth again
        self.watches = False  # guesses and attention are looked at, too
        self._no_split_modules = drafter._no_split_modules

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Makes the backward pass compute each depth again; transformers' Trainer calls it."""
        self.recomputes = True

    gradient_checkpointing_enable = activation_checkpointing_enable  # its name in transformers 5.17

    def forward(self, batch: Batch, totals: Tensor | None = None, settings: Settings | None = None) -> dict[str, Any]:
        """Returns `loss`, a scalar; `sums` (2 + figures, K), see `UnrollRecord.sums`; and of every prediction its
        `record` in the unroll and its `figures`.

        `totals` (K,): the denominators of the sums of each depth, this batch's own by default. `settings` instead of
        those of the objective.
        """
        settings = settings or self.settings
        batch = batch.padded(settings.depth + 2)
        if totals is None:
            totals = loss_denominators(
                batch.answers, batch.documents, settings.depth, settings.convention, settings.normalisation
            )
        record = self._record(batch, totals, settings)
        loss, figures = self._distances(batch, record, settings.mixture)
        return {"loss": loss, "sums": record.sums(figures), "record": record, "figures": figures}

    def _record(self, batch: Batch, totals: Tensor, settings: Settings) -> "UnrollRecord":
        """Unrolls the drafter, and keeps what is supervised of each depth."""
        record = UnrollRecord()
        mass = MassObserver(batch.documents[:, :-1]) if self.watches else None
        observe = None if mass is None else mass.observe
        packed = batch.documents if bool((batch.documents > 1).any()) else None
        recomputes = self.recomputes and self.training
        steps = unroll(
            self.drafter, batch.input_ids, batch.states, settings.depth, packed, recomputes, observe, batch.skips
        )
        for k, (normed, state) in enumerate(steps):
            at = supervised_positions(batch.answers, k, settings.convention, batch.documents)
            weights, _ = NORMALISATIONS[settings.normalisation](*at, batch.documents)
            weights = weights * (settings.depth_weights[k] / max(1.0, float(totals[k])))
            record.states.append(normed[at])
            record.weights.append(weights)
            record.at.append(at)
            record.norms.append(state_norm(state.detach())[at])
            if mass is not None:
                record.masses.append(mass.masses[k][at])
        return record

    def _distances(
        self, batch: Batch, record: "UnrollRecord", mixture: dict[str, float]
    ) -> tuple[Tensor, PredictionFigures]:
        """Returns the weighted sum of the distances of all predictions, and their figures."""
        drafter, ids = self.drafter, self.drafter.draft_to_target_ids()
        target_states = batch.last_states.flatten(0, 1)

        def target_at(at: Tensor) -> TargetDistribution:
            logits = self.logits_of[0](target_states[at])
            # cut to the drafter's ids; or filled: its table may be padded further
            missing = drafter.config.vocab_size - logits.shape[-1]
            logits = pad(logits, (0, missing), value=float("-inf")) if missing else logits
            return TargetDistribution.from_logits(logits, ids)

        predictions = record.predictions(batch.input_ids.shape[1])
        return chunked_loss(mixture, predictions, drafter, target_at, with_guesses=self.watches)


class UnrollRecord:
    """The unroll at the supervised positions, each a list by depth: states to score (N, h), weights (N,), `at`, which
    is sequence and position, both (N,), norms of the states (N,), attention masses (N, 4) where they are observed."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.at: list[tuple[Tensor, Tensor]] = []
        self.norms: list[Tensor] = []
        self.masses: list[Tensor] = []

    def predictions(self, length: int) -> Predictions:
        """Returns the predictions of all depths, each compared with the target's state at the last token embedded, of
        B * `length` states. The states to score are handed over, so that no second copy is held."""
        at = [sequence * length + position + 1 + k for k, (sequence, position) in enumerate(self.at)]
        states, self.states = torch.cat(self.states), []
        return Predictions(states, torch.cat(self.weights), torch.cat(at))

    def sums(self, figures: PredictionFigures) -> Tensor:
        """Returns by depth the number of predictions, the number of those that are watched, and the sums of OF_ALL and
        OF_WATCHED: (2 + figures, K) in `sum_dtype`, which processes and batches add up."""
        lengths, dtype = [len(norms) for norms in self.norms], sum_dtype(figures.loss.device)
        counts = torch.tensor(lengths, dtype=dtype, device=figures.loss.device)
        watched, of_watched = torch.zeros_like(counts), figures.loss.new_zeros(len(OF_WATCHED), len(figures.loss))
        if self.masses:
            watched = counts
            of_watched = torch.cat([figures.greedy_acceptance[None], torch.cat(self.masses).T])
        columns = (figures.loss, figures.is_right, figures.acceptance, figures.coverage, torch.cat(self.norms))
        values = torch.stack([column.to(dtype) for column in (*columns, *of_watched)])
        by_depth = torch.stack([part.sum(1) for part in values.split(lengths, dim=1)], dim=1)
        return torch.cat([counts[None], watched[None], by_depth])
