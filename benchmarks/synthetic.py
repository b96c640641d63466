"""Synthetic acceptance: the cost of the engine, measured without trained weights. The text that comes out is nobody's.

Source: vLLM's `rejection_sample_method="synthetic"` replaces the same comparison and leaves everything around it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle31_hf.generation.rejection_sampler import Accepted, RejectionSampler, Walk, likeliest
from eagle31_hf.generation.request import decode_with
from eagle31_hf.generation.sequences import Ends, Sequences
from eagle31_hf.generation.tree import DraftTokens
from eagle31_hf.modeling import Eagle31DrafterModel

MARK = "_eagle31_benchmark"  # on models built to be timed; no other may be decoded with
GOLDEN = 0.6180339887498949  # its multiples, less their whole parts, fill [0, 1) evenly
SEED_STEP = 37  # numbers between the beginnings of two seeds
NUM_DEPTHS = 64  # more than the depths of any draft


class Draws:
    """Numbers in [0, 1), one a sequence and round, that fill the interval evenly, so that a short run has the mean
    length of a long one; and the chances that drafts are kept to each depth. Both lie on a device, each in one tensor
    that stays where it is, so that captured rounds find them from call to call.

    `count` (1, 1) float64: the numbers drawn so far; `survival` (1, NUM_DEPTHS) float64.
    """

    def __init__(self, device: torch.device):
        self.count = torch.zeros(1, 1, dtype=torch.float64, device=device)
        self.survival = torch.zeros(1, NUM_DEPTHS, dtype=torch.float64, device=device)

    def start(self, survival: Sequence[float], count: int) -> None:
        """Begins anew, after `count` numbers."""
        chances = [*survival[: NUM_DEPTHS - 1], *[0.0] * NUM_DEPTHS]
        self.survival.copy_(torch.tensor(chances[:NUM_DEPTHS], dtype=torch.float64)[None])
        self.count.fill_(count)

    def next(self, num_sequences: int) -> Tensor:
        """The numbers (B, 1) of a round."""
        places = self.count + torch.arange(num_sequences, device=self.count.device)[:, None]
        self.count.add_(num_sequences)
        return places * GOLDEN % 1.0


_draws: WeakKeyDictionary[Eagle31DrafterModel, dict[torch.device, Draws]] = WeakKeyDictionary()


class SyntheticSampler(RejectionSampler):
    """Accepts a draft at depth d + 1 with chance `survival[d]`, all in all, whatever the target says; never one past
    the end of the list. Eager rounds take numbers from `draws`, captured ones from those `on_device`. Raises ValueError
    in place of a sampler that keeps a batch in lock-step."""

    def __init__(self, sampler: RejectionSampler, survival: Sequence[float], draws: Iterator[float], on_device: Draws):
        if sampler.is_lock_step:
            raise ValueError("the batch is in lock-step; expected one whose sequences advance at their own pace.")
        super().__init__(sampler.processors, sampler.noise, sampler.keeps_scores)
        self.survival = survival
        self.draws = draws
        self.on_device = on_device

    def choose_at_nodes(self, logits: Tensor, drafts: Any, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """The first child of a node, while this round's number is below the chance of its depth; else the target's
        choice, or where that is a draft the smallest id that is none. Otherwise as the sampler it stands in for."""
        chosen, lawful = super().choose_at_nodes(logits, drafts, noise)
        ids, num_nodes = drafts.ids, chosen.shape[1]
        if num_nodes == 1:
            return chosen, lawful
        last = ids.shape[1]  # of so many and one more ids one is no draft
        is_taken = torch.zeros(len(ids), last + 2, dtype=torch.uint8, device=ids.device)
        is_taken.scatter_(1, ids.clamp(max=last + 1), 1)
        free = is_taken[:, : last + 1].argmin(dim=1, keepdim=True)
        is_draft = (chosen[..., None] == ids[:, None]).any(-1)
        other = torch.where(is_draft, free, chosen)
        is_child = drafts.parents[:, None] == torch.arange(num_nodes, device=ids.device)[:, None]  # (B, N, K)
        first = ids.gather(1, is_child.to(torch.uint8).argmax(-1))
        chance = self.on_device.survival.expand(len(ids), -1).gather(1, drafts.depths)
        descends = is_child.any(-1) & (self.on_device.next(len(ids)) < chance)
        return torch.where(descends, first, other), lawful

    def accept(self, sequences: Sequences, drafts: DraftTokens, logits: Tensor, ends: Ends) -> Accepted:
        host, (chosen,) = drafts.on_host(likeliest(logits))
        walks = [
            None if sequences.finished[b] else self._walk_blindly(b, host.children[b], chosen[b], ends)
            for b in range(len(sequences))
        ]
        return Accepted.of(walks, ends.finished, host)

    def _walk_blindly(self, b: int, children: list[dict[int, int]], chosen: list[int], ends: Ends) -> Walk:
        """Accepts as many drafts as the next draw says, then adds a token that no draft proposes."""
        drawn, walk = next(self.draws), Walk([], [0], [])
        while True:
            node, depth = walk.path[-1], len(walk.path) - 1
            if not children[node] or depth >= len(self.survival) or drawn >= self.survival[depth]:
                others = (chosen[node], *range(len(children[node]) + 1))
                walk.tokens.append(next(token for token in others if token not in children[node]))
                ends.after(b, walk.tokens, [])
                return walk
            token, child = next(iter(children[node].items()))
            walk.tokens.append(token)
            walk.path.append(child)
            if ends.after(b, walk.tokens, []):
                return walk


def synthetic_decoding(
    drafter: Eagle31DrafterModel, knobs: dict[str, Any], survival: Sequence[float], seed: int = 0
) -> Callable[..., Any]:
    """A decoding method for `target.generate(custom_generate=...)` with synthetic acceptance.

    Only for targets built by `benchmarks/engine.py`: RuntimeError for any other. ValueError unless the chances
    `survival` fall from at most 1.
    """
    if not all(1 >= before >= after >= 0 for before, after in zip([1.0, *survival], survival, strict=False)):
        raise ValueError(
            f"got the survival schedule {list(survival)}; expected chances from 1 to 0, none above the one before."
        )

    def decode(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if not getattr(model, MARK, False):
            raise RuntimeError(
                "synthetic acceptance makes up the text; it is for benchmarks, on models built by benchmarks/engine.py."
            )
        draws = _evenly_spread(seed)
        on_device = _draws_of(drafter, model.device)
        on_device.start(survival, SEED_STEP * seed)
        return decode_with(
            model,
            drafter,
            *args,
            knobs=knobs,
            wrap_sampler=lambda sampler: SyntheticSampler(sampler, survival, draws, on_device),
            **kwargs,
        )

    return decode


def _draws_of(drafter: Eagle31DrafterModel, device: torch.device) -> Draws:
    """The numbers of a drafter's captured rounds, the same object whenever it is asked for."""
    by_device = _draws.setdefault(drafter, {})
    if device not in by_device:
        by_device[device] = Draws(device)
    return by_device[device]


def _evenly_spread(seed: int) -> Iterator[float]:
    """The numbers of `Draws`, on the host."""
    n = SEED_STEP * seed
    while True:
        yield n * GOLDEN % 1.0
        n += 1
