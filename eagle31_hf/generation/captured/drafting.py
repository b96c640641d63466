"""The first half of a round of tensors: the drafter reads accepted states and proposes a chain or a tree.

No value is read on the host, and every shape is known before. B sequences, M tokens a round commits at most, K drafts,
N = K + 1 nodes, F nodes of a level, k children of a node, h drafter width, V target vocabulary, Vd draft vocabulary.
Bits are int64: bit j says whether token j is seen.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ...cache.arena import Arena, ArenaPlacement
from ...cache.masks import windows_by_kind
from ...kernels.drafts import best_tree, likeliest_tokens, next_level
from ...kernels.tree_attention import MOST_NEW
from ...targets.masks import spans_of
from ...targets.recurrent import Mixers
from ..draft_sampler import SCORE_TEMPERATURE, DraftSampler
from ..planning.plan import Plan
from ..rejection_sampler import RejectionSampler
from ..unread_states import gathered
from .carry import Carry
from .fused_drafter import Layout, can_fuse, run_alone, run_fused

MOST_CANDIDATES = 1024  # of a tree, before the best are taken


def fitted(plan: Plan) -> Plan:
    """Returns a plan as kernels take it. A larger tree keeps fewer of its nodes, and runs fewer of each level, the
    likeliest."""
    if plan.top_k == 1:
        return plan
    most_run = min(MOST_NEW - 1, MOST_CANDIDATES // plan.top_k - 1)
    width = min(plan.max_width, most_run // max(1, plan.depth - 1))
    return replace(plan, max_width=width, max_nodes=min(plan.max_nodes, MOST_NEW - 1))


def can_fit(plan: Plan) -> bool:
    """Returns whether `fitted` can make a plan one that kernels take."""
    return fitted(plan).max_width > 0 and plan.depth + 1 < MOST_NEW


@dataclass
class Side:
    """A model and its cache in an arena. Of the target, `states`: the `CapturedStates` that the drafter reads;
    `mixers`: its modules with recurrent states."""

    model: Any
    cache: Cache
    placement: ArenaPlacement
    arena: Arena
    states: Any = None
    mixers: Mixers | None = None


@dataclass
class Parts:
    """The parts of a round that one call of `generate` provides: its models with their caches, and its samplers of
    drafts and of the target's tokens."""

    target: Side
    drafter: Side
    draft_sampler: DraftSampler
    sampler: RejectionSampler
    not_fused: list[str | None]  # why each layer of the target is not, see `why_not_fused`
    has_no_memory: bool = False  # for comparing a round with the target's own forward: it ran out once


@dataclass
class Drafts:
    """The drafts of a round: ids (B, K), parents (B, K), depths and bits (B, N) as `best_tree` returns them, and the
    log-probability of each draft (B, K)."""

    ids: Tensor
    parents: Tensor
    depths: Tensor
    bits: Tensor
    log_probs: Tensor
    is_chain: bool

    @property
    def ones(self) -> Tensor:
        """A 1 for every node (B, N): the bits of the root, which sees itself alone. A view: no operation."""
        return self.bits[:, :1].expand_as(self.depths)


class Drafting:
    """Drafts by plans of fixed depth. `draft` reads the carry and changes nothing in it, so it may be run again, by
    another plan."""

    def __init__(self, carry: Carry):
        self.carry = carry
        self.drafts: dict[Plan, Drafts] = {}
        self.parts: Parts | None = None  # of the call under way
        # What never changes is made once: every operation of a round is a node of its graph.
        self.numbers = torch.arange(MOST_NEW, device=carry.text.device)[None]
        self.from_end = self.numbers - 1  # slots, counted from a text's length: of its last token and those after it
        self.below = (2 << self.numbers[:, :-1]) - 1  # of a chain's tokens: bits 0 to i
        self.zero = torch.zeros_like(carry.length)
        self.offsets: dict[int, tuple[Tensor, ...]] = {}  # by the tokens of a layout, see `_offsets`

    def draft(self, plan: Plan) -> None:
        """The drafter reads what the carry holds, then drafts as planned."""
        width = self.carry.width
        layout = self._layout(plan.depth if plan.top_k == 1 else MOST_NEW - 1)
        state, logits = self._read(layout.part(slice(width)))
        after = layout.part(slice(width, None))
        if plan.depth == 0:
            self.drafts[plan] = self._chain([], [])
        elif plan.top_k == 1:
            self.drafts[plan] = self._drafted_chain(plan, after, state, logits)
        else:
            self.drafts[plan] = self._drafted_tree(plan, after, state, logits)

    def _layout(self, num_after: int) -> Layout:
        """The layout of the M tokens that the carry holds for the drafter and, beside them, of `num_after` places from
        the text's last token on. All of it is computed at once: every operation of a round is a node of its graph."""
        carry = self.carry
        if num_after not in self.offsets:
            self.offsets[num_after] = self._offsets(num_after)
        from_end, is_unread, bits = self.offsets[num_after]
        slots = torch.addcmul(carry.length + from_end, carry.count, is_unread, value=-1)
        places, starts = (slots - carry.first_slot).chunk(2, dim=1)
        positions = slots[:, : places.shape[1]] - carry.padding
        model = self.parts.drafter.model
        if carry.rope is None:
            every = torch.arange(carry.text.shape[1], device=carry.text.device)[None]
            carry.rope = torch.cat(model.rotary_emb(model.like, every), dim=-1)[0]
        rope = torch.nn.functional.embedding(positions, carry.rope).chunk(2, dim=-1)
        windows = windows_by_kind(model.config.layer_types, model.config.sliding_window)
        begins = {
            kind: self.zero.expand_as(places) if window is None else (places - (window - 1)).clamp(min=0)
            for kind, window in windows.items()
        }
        spans = {kind: spans_of(starts, begin, places, bits, None) for kind, begin in begins.items()}
        return Layout(places, begins, spans, list(rope))

    def _offsets(self, num_after: int) -> tuple[Tensor, ...]:
        """The constants of a layout of W = M + `num_after` places. Two of (1, 2W), whose first W entries are of the
        places and whose others are of the slot that each place's forward starts to write at: what is added to the
        length of a text to give the slot; and 1 for the M places of unread tokens, which lie `count` slots earlier.
        Last, the bits (1, W) of tokens that see all before them."""
        device = self.carry.text.device
        numbers = torch.cat([torch.arange(size, device=device) for size in (self.carry.width, num_after)])[None]
        is_unread = (torch.arange(numbers.shape[1], device=device) < self.carry.width).long()[None]
        from_end = torch.cat((numbers, torch.zeros_like(numbers)), dim=1) - 1
        return from_end, is_unread.repeat(1, 2), (2 << numbers) - 1

    def _read(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Returns the state (B, 1, h) and draft logits (B, 1, Vd) of each sequence's last unread token."""
        carry = self.carry
        source, last = {"target_hidden_states": carry.states}, (carry.count - 1).clamp(min=0)
        return self._run_drafter(carry.tokens, source, layout.places[:, :1], layout, last)

    def _drafted_chain(self, plan: Plan, layout: Layout, state: Tensor, logits: Tensor) -> Drafts:
        """A chain of `plan.depth` tokens; the last of them is not run."""
        ids, log_probs = [], []
        for level in range(plan.depth):
            chosen, log_prob = self._likeliest(logits, 1, level) if plan.is_scored else self._drawn(logits, level)
            ids.append(chosen[:, 0])
            log_probs.append(log_prob[:, 0])
            if level + 1 < plan.depth:
                here = layout.part(slice(level, level + 1))
                state, logits = self._run_drafter(chosen[:, 0], {"hidden_states": state}, here.places, here)
        return self._chain(ids, log_probs)

    def _chain(self, ids: list[Tensor], log_probs: list[Tensor]) -> Drafts:
        """The drafts that tokens (B, 1) and their log-probabilities (B, 1) make."""
        num_sequences, count = len(self.carry.text), len(ids)
        none = self.carry.tokens[:, :0]
        order = self.numbers[:, : count + 1].expand(num_sequences, -1)
        return Drafts(
            torch.cat(ids, dim=1) if ids else none,
            order[:, :count],
            order,
            self.below[:, : count + 1].expand(num_sequences, -1),
            torch.cat(log_probs, dim=1) if ids else none.float(),
            is_chain=True,
        )

    def _drafted_tree(self, plan: Plan, layout: Layout, state: Tensor, logits: Tensor) -> Drafts:
        """The best `plan.max_nodes` - 1 of the candidates: of every level, the likeliest children of the best nodes."""
        scores, bits = logits.new_zeros(len(logits), 1, dtype=torch.float32), self.zero
        num_run = num_found = 0
        found = list[tuple[Tensor, ...]]()  # by level, of its candidates: scores, ids, log-probabilities
        parents = [self.from_end[:, :1].expand_as(self.zero)]  # by level, of its candidates, -1: the root
        for level in range(plan.depth):
            ids, log_probs = self._likeliest(logits, plan.top_k, level)
            k = ids.shape[2]
            width = min(plan.max_width, ids.shape[1] * k)
            totals, scores, best, bits = next_level(log_probs, scores, bits, width, num_run)
            found.append((totals, ids.flatten(1), log_probs.flatten(1)))
            if level + 1 == plan.depth:
                break
            parents.append(best + num_found)
            num_found += totals.shape[1]
            source = {"hidden_states": gathered(state, best // k)}
            starts = layout.places[:, num_run : num_run + 1]  # nodes lie side by side, whatever their level
            state, logits = self._run_drafter(
                found[-1][1].gather(1, best), source, starts, layout.of_level(level, bits)
            )
            num_run += width
        scores, ids, log_probs = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        of_each = torch.cat(parents, dim=1)[..., None].expand(-1, -1, k).flatten(1)  # a node has k children
        kept, hangs_on, depths, bits = best_tree(scores, of_each, min(plan.max_nodes - 1, scores.shape[1]))
        return Drafts(ids.gather(1, kept), hangs_on, depths, bits, log_probs.gather(1, kept), is_chain=False)

    def _likeliest(self, logits: Tensor, k: int, level: int) -> tuple[Tensor, Tensor]:
        """Draft logits (B, F, Vd) -> the likeliest children's ids and log-probabilities, (B, F, k)."""
        sampler = self.parts.draft_sampler
        if sampler.is_plain:
            k = min(k, logits.shape[-1])
            log_probs, ids = likeliest_tokens(logits, k, SCORE_TEMPERATURE, sampler.draft_ids)
        else:
            log_probs, ids = sampler.scored(logits, k, self.noise_of(level))
        return ids, log_probs

    def _drawn(self, logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Draft logits (B, 1, Vd) -> one child, as the target would choose it, and its log-probability, (B, 1, 1): 0
        where it was drawn, since nobody asks for it."""
        if self.parts.draft_sampler.is_plain:
            return self._likeliest(logits, 1, level)
        ids, _, _ = self.parts.draft_sampler.draw(logits[:, 0], self.noise_of(level))
        assert ids is not None  # no processor reads the text
        ids = ids[:, None]
        return ids, torch.zeros_like(ids, dtype=torch.float32)

    def noise_of(self, depths: int | Tensor) -> Tensor | None:
        """The noise of the slot `depths` tokens after each text (B, V), or of those (B, N) after it (B, N, V)."""
        carry = self.carry
        if carry.noise is None or self.parts.sampler.noise is None:
            return None
        slots = (carry.length + depths) % carry.noise.shape[1]
        noise = carry.noise.gather(1, slots[..., None].expand(-1, -1, carry.noise.shape[2]))
        return noise[:, 0] if isinstance(depths, int) else noise

    # -- the drafter's forwards

    def _run_drafter(
        self, ids: Tensor, source: dict[str, Tensor], starts: Tensor, layout: Layout, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the states (B, T, h) and draft logits (B, T, Vd) of tokens (B, T), which go to the slots from
        `starts` (B, 1) on; with `last` (B, 1) those of that token alone."""
        side = self.parts.drafter
        side.placement.on_device = starts
        run = run_fused if can_fuse(side.model) else run_alone
        return run(side.model, ids, source, layout, side.cache, last)
