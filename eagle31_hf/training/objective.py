"""What is trained: a drafter, and the loss of a batch as one forward, which DDP, FSDP and autocast can wrap.

B rows of packed texts, T tokens, K depths, N supervised rows of all depths, n captured states, ht target width, Vd
draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..diagnostics.drift import state_norm
from ..modeling import Eagle31DrafterModel
from .chunked import RowFigures, chunked_loss
from .drift import Alignment, MassObserver, growth_penalty
from .losses import Goal
from .rows import NORMALISATIONS, places, total_shares
from .unroll import unroll

# four times as deep as anything drafts; each depth takes time and memory, and of thousands no step ever ends
MAX_DEPTH = 64


@dataclass(frozen=True)
class Settings:
    """The loss in figures: K `depth`s, each weighted `depth_weights[k]`; a `mixture` of distances; which rows count
    (`convention`) and how they are averaged (`normalisation`); weights of attention alignment and of the drift
    regulariser. Raises ValueError for a depth that cannot be unrolled."""

    depth: int
    depth_weights: tuple[float, ...]
    mixture: dict[str, float] = field(default_factory=lambda: {"kl": 1.0})
    convention: str = "serving"
    normalisation: str = "token"
    attention_alignment: float = 0.0
    drift_regulariser: float = 0.0

    def __post_init__(self):
        if not 1 <= self.depth <= MAX_DEPTH:
            raise ValueError(f"depth is {self.depth}; expected 1 to {MAX_DEPTH}.")


CLOSER = ("greedy_acceptance", "sink_mass", "prompt_mass", "own_mass", "self_mass")


@dataclass
class Sums:
    """Over the supervised rows of each depth, each (K,): `rows` their number, `watched` the number of those looked at
    more closely (guesses, attention); the others are sums, see `RowFigures` and `drift`."""

    rows: Tensor
    watched: Tensor
    distance: Tensor
    accuracy: Tensor
    acceptance: Tensor
    coverage: Tensor
    state_norm: Tensor
    greedy_acceptance: Tensor
    sink_mass: Tensor
    prompt_mass: Tensor
    own_mass: Tensor
    self_mass: Tensor

    def stacked(self) -> Tensor:
        """(figures, K) in fp64, as processes add them up."""
        return torch.stack([getattr(self, f.name).double() for f in fields(self)])

    @classmethod
    def means(cls, stacked: Tensor) -> dict[str, list[float]]:
        """Added-up sums -> the mean of every figure by depth, 0 where there was no row."""
        columns = dict(zip((f.name for f in fields(cls)), stacked, strict=True))
        rows, watched = columns.pop("rows"), columns.pop("watched")
        counts = {name: watched if name in CLOSER else rows for name in columns}
        return {
            name: (column / counts[name].clamp(min=1)).tolist()
            for name, column in columns.items()
            if counts[name].any()
        }


class Batch:
    """Tokens, answer mask and document numbers (B, T), 0 padding; captured states (B, T, n*ht), the states the target's
    head reads (B, T, ht), and its attention where it is to be aligned with.

    No dataclass: FSDP would look into it, and round what the target said to the dtype it trains in.
    """

    def __init__(
        self,
        input_ids: Tensor,
        answers: Tensor,
        documents: Tensor,
        states: Tensor,
        last_states: Tensor,
        alignment: Alignment | None = None,
    ):
        self.input_ids = input_ids
        self.answers = answers
        self.documents = documents
        self.states = states
        self.last_states = last_states
        self.alignment = alignment

    def without_broken(self) -> tuple["Batch", Tensor]:
        """Texts with a state that is not finite lose their answers, and all their states are zero; and how many there
        were."""
        is_broken = ~(self.states.isfinite().all(-1) & self.last_states.isfinite().all(-1))  # (B, T)
        numbers = self.documents
        by_text = torch.zeros(len(numbers), int(numbers.max()) + 1, device=numbers.device)
        by_text = by_text.scatter_reduce(1, numbers, is_broken.float(), "amax")
        dropped = by_text.gather(1, numbers).bool()
        states, last_states = (x.masked_fill(dropped[..., None], 0.0) for x in (self.states, self.last_states))
        answers = self.answers & ~dropped
        return Batch(self.input_ids, answers, self.documents, states, last_states, self.alignment), by_text.sum()

    def padded(self, length: int) -> "Batch":
        """At least `length` tokens long, so that every batch unrolls all depths."""
        missing = max(0, length - self.input_ids.shape[1])
        ids, answers, documents = (pad(x, (0, missing)) for x in (self.input_ids, self.answers, self.documents))
        states, last_states = (pad(x, (0, 0, 0, missing)) for x in (self.states, self.last_states))
        return Batch(ids, answers, documents, states, last_states, self.alignment)


class DraftingObjective(nn.Module):
    """The drafter and its loss, exact whatever the batch is a part of.

    `logits_of`: the states the target's head reads (N, ht) -> the target's logits (N, V).
    """

    accepts_loss_kwargs = True  # it is given what to divide by: the Trainer need not

    def __init__(self, drafter: Eagle31DrafterModel, settings: Settings, logits_of: Callable[[Tensor], Tensor]):
        super().__init__()
        self.drafter, self.settings = drafter, settings
        self.logits_of = (logits_of,)  # a tuple, so that a target is no part of what is trained
        # computes depths again in the backward pass; looks at guesses and attention
        self.recomputes, self.watches = False, False
        self._no_split_modules = drafter._no_split_modules

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """The backward pass computes each depth again; what transformers' Trainer calls."""
        self.recomputes = True

    gradient_checkpointing_enable = activation_checkpointing_enable  # its name in transformers 5.17

    def forward(self, batch: Batch, totals: Tensor | None = None, settings: Settings | None = None) -> dict[str, Any]:
        """-> `loss`, a scalar; `sums` (figures, K), see `Sums`; `found` and `figures`, row by row.

        `totals` (K,): the shares at each depth of everything averaged over, this batch only by default. `settings`
        instead of its own.
        """
        settings = settings or self.settings
        batch = batch.padded(settings.depth + 2)
        if totals is None:
            totals = total_shares(
                batch.answers, batch.documents, settings.depth, settings.convention, settings.normalisation
            )
        found = self._found(batch, totals, settings)
        loss, figures = self._distances(batch, found, settings.mixture)
        for weight, extra in (
            (settings.attention_alignment, found.alignment),
            (settings.drift_regulariser, found.growth),
        ):
            if weight:
                loss = loss + weight * extra
        return {"loss": loss, "sums": found.sums(figures).stacked(), "found": found, "figures": figures}

    def _found(self, batch: Batch, totals: Tensor, settings: Settings) -> "Found":
        """Unrolls, and keeps of each depth what is supervised."""
        found = Found()
        is_packed = bool((batch.documents > 1).any())
        mass = MassObserver(batch.documents[:, :-1]) if self.watches else None
        observers = [watcher.observe for watcher in (mass, batch.alignment) if watcher is not None]
        packed = batch.documents if is_packed else None
        first_norm = None
        for k, (normed, state) in enumerate(
            unroll(
                self.drafter,
                batch.input_ids,
                batch.states,
                settings.depth,
                packed,
                self.recomputes and self.training,
                observers,
            )
        ):
            row, slot = places(batch.answers, k, settings.convention, batch.documents)
            shares, _ = NORMALISATIONS[settings.normalisation](row, slot, batch.documents)
            weights = shares * (settings.depth_weights[k] / max(1.0, float(totals[k])))
            norms = state_norm(state)
            first_norm = norms if first_norm is None else first_norm
            if settings.drift_regulariser and k > 0:
                found.growth = found.growth + (weights * growth_penalty(norms, first_norm)[row, slot]).sum()
            if batch.alignment is not None:
                found.alignment = found.alignment + weights.sum() * batch.alignment.loss(k)
            found.add(normed[row, slot], weights, row, slot, norms[row, slot].detach())
            if mass is not None:
                found.masses.append(mass.of(k, row, slot))
        return found

    def _distances(self, batch: Batch, found: "Found", mixture: dict[str, float]) -> tuple[Tensor, RowFigures]:
        """The chunked sum of distances over everything supervised."""
        drafter, ids = self.drafter, self.drafter.draft_to_target_ids()
        targets = batch.last_states.flatten(0, 1)
        logits_of, head = self.logits_of[0], drafter.get_output_embeddings()

        def goal_of(asked: Tensor) -> Goal:
            return Goal.of(logits_of(targets[asked])[..., : drafter.config.vocab_size], ids)

        return chunked_loss(
            mixture,
            torch.cat(found.states),
            torch.cat(found.weights),
            found.places(batch.input_ids.shape[1]),
            goal_of,
            drafter.score,
            list(head.parameters()),
            drafter.config.draft_vocab_size,
            with_guesses=self.watches,
        )


class Found:
    """What the unroll found at the supervised rows, depth by depth: states to score (N, h), weights (N,), row and slot
    (N,)."""

    def __init__(self):
        self.states: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.row: list[Tensor] = []
        self.slot: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.masses: list[Tensor] = []
        self.growth: Tensor | float = 0.0
        self.alignment: Tensor | float = 0.0

    def add(self, states: Tensor, weights: Tensor, row: Tensor, slot: Tensor, norms: Tensor) -> None:
        parts = (self.states, self.weights, self.row, self.slot, self.norms)
        for column, value in zip(parts, (states, weights, row, slot, norms), strict=True):
            column.append(value)

    def places(self, length: int) -> Tensor:
        """Index (N,) among B*T of the state whose logits a row is compared with: that of the last token embedded."""
        return torch.cat(
            [row * length + slot + 1 + k for k, (row, slot) in enumerate(zip(self.row, self.slot, strict=True))]
        )

    def by_depth(self, figure: Tensor) -> list[Tensor]:
        """A figure of all rows (N,), depth by depth."""
        return list(figure.split([len(row) for row in self.row]))

    def sums(self, figures: RowFigures) -> Sums:
        def total(figure: Tensor) -> Tensor:
            return torch.stack([part.double().sum() for part in self.by_depth(figure)])

        columns = (figures.loss, figures.is_right, figures.acceptance, figures.coverage, torch.cat(self.norms))
        rows = torch.tensor([float(len(row)) for row in self.row], device=figures.loss.device)
        watched, closer = torch.zeros_like(rows), figures.loss.new_zeros(5, len(figures.loss))
        if self.masses:
            watched, closer = rows, torch.cat([figures.greedy_acceptance[None], torch.cat(self.masses).T])
        return Sums(rows, watched, *(total(column) for column in (*columns, *closer)))
