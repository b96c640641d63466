"""One round of tensors: drafting, and the second half, in which the target reads the drafts and what it accepts is
committed. No value is read on the host. Recurrent states are committed a round later, by `keep`, when the host knows
how many tokens were accepted.

B sequences, M tokens a round commits at most, K drafts, N = K + 1 nodes, V target vocabulary.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...cache.states import Scratch
from ...cache_names import cache_argument
from ...kernels.drafts import accepted_path, move_path
from ...targets.fused import fused_layers
from ...targets.masks import span_masks
from ...targets.recurrent import Unsettled
from ...targets.tree_attention import attention_of_rounds
from ..planning.plan import Plan
from ..rejection_sampler import AtAllNodes, are_spoiled
from ..tree import HostDrafts
from .carry import Carry
from .drafting import Drafting, Drafts
from .proof import Verified

Part = tuple[str, Plan, Callable[[], None]]  # its name, the plan it is of, and what is captured


class Round(Drafting):
    """Drafts and verifies; `verify` takes the drafts of the same plan and moves the carry on. It serves calls that
    choose tokens in the same way, and holds what was captured of it.

    Recurrent states lag one round behind: the host reads how many tokens a round accepted while the next draft is under
    way, and before the next verification `keep`, captured for each such count, advances them: see `keep_due`.
    """

    def __init__(self, carry: Carry):
        super().__init__(carry)
        self.out: dict[Plan, Tensor] = {}  # what the host reads of a round, see `packed`
        self.verified: dict[Plan, Verified] = {}
        self.num_proved = Counter[Plan]()  # rounds that were compared with the target's own forwards
        self.unproved_rows: set[int] = set()  # whose states were kept by a part that is new
        # Of each plan's last verification: what mixers were called with, and the states after all its tokens.
        self.unsettled: dict[Plan, Unsettled | None] = {}
        # The last verification's plan, and how many tokens of each sequence it accepted, while states are not advanced.
        self.due: tuple[Plan, list[int]] | None = None
        self.captured: dict[Plan, dict[str, Callable[[], None]]] = {}  # what runs each part of a plan, by its name
        self.samplers: dict[Plan, list[Any]] = {}  # those captured with: graphs read their tensors
        self.numbers_of_processors: dict[int, Tensor] = {}  # of logits processors, see `processors.tuned`

    def forget_plans(self, most: int) -> None:
        """Drops the plans that were captured first, of more than `most`: clients may ask for ever others."""
        of_rounds = self.drafts, self.out, self.verified, self.num_proved, self.unsettled
        for plan in [*self.captured][:-most]:
            for made in (*of_rounds, self.captured, self.samplers):
                made.pop(plan, None)

    def verify(self, plan: Plan) -> None:
        """The target reads the last token and the drafts; what it accepts is committed."""
        carry, drafts = self.carry, self.drafts[plan]
        slots = carry.length + self.from_end
        starts = slots[:, :1]
        ids = torch.cat((carry.text.gather(1, starts), drafts.ids), dim=1)
        places = slots[:, : ids.shape[1]] if drafts.is_chain else starts + drafts.depths
        logits, states = self._run_target(ids, starts, places, drafts)
        self.unsettled[plan] = self.parts.target.mixers.take_unsettled()
        if self.unsettled[plan] is not None:
            carry.is_behind.fill_(True)
        chosen, lawful = self.parts.sampler.choose_at_nodes(logits, drafts, self.noise_of(drafts.depths))
        spoiled = are_spoiled(logits) if plan.depth else torch.zeros_like(chosen, dtype=torch.bool)
        self.verified[plan] = Verified(logits, states, chosen, spoiled)
        path, tokens, count = accepted_path(
            drafts.ids, drafts.parents, drafts.depths, drafts.bits, chosen, spoiled, carry.going, carry.width
        )
        if not drafts.is_chain:
            move_path(self.parts.target.arena.stacks, starts, path, count)
        # What pads a path is the root's: a rejected draft's state may not be finite, and the drafter reads all of it.
        on_path = path * (self.numbers[:, : carry.width] < count)
        carry.text.scatter_(1, slots[:, 1 : carry.width + 1], tokens)
        torch.gather(states, 1, on_path[..., None].expand(-1, -1, states.shape[2]), out=carry.states)
        carry.tokens.copy_(tokens)
        carry.count.copy_(count)
        carry.length.add_(count)
        self.out[plan] = packed(chosen, spoiled, lawful, drafts)

    def keep(self, plan: Plan, count: int) -> None:
        """Advances the recurrent states of the rows that accepted `count` tokens of this plan's last verification.
        Where drafts were rejected, mixers run again, over the accepted tokens: in all rows, since shapes are fixed."""
        unsettled, side = self.unsettled[plan], self.parts.target
        scratch = unsettled.after_all
        if count < plan.depth + 1:
            scratch = Scratch(side.arena.states)
            for module, call in unsettled.calls:
                side.mixers.run_again(module(), call.first(count), scratch)
        is_row = (self.carry.count == count) & self.carry.is_behind
        side.arena.states.advance(scratch, is_row)
        self.carry.is_behind.logical_and_(~is_row)  # a part that is run again, after an error, does nothing

    def note_accepted(self, plan: Plan, counts: list[int]) -> None:
        """Notes how many tokens each sequence accepted in a verification, 0 where its states are not to be advanced."""
        if self.unsettled[plan] is not None:
            self.due = plan, list(counts)

    def parts_due(self) -> list[Part]:
        """The parts that `keep_due` is about to run; none where there are no states."""
        if self.due is None:
            return []
        plan, counts = self.due
        return [(f"keep {count}", plan, partial(self.keep, plan, count)) for count in sorted({*counts} - {0})]

    def keep_due(self, run: Callable[[Part], None]) -> None:
        """Advances the states over all tokens that are committed; `run` runs each part."""
        for part in self.parts_due():
            run(part)
        self.due = None

    def _run_target(self, ids: Tensor, starts: Tensor, places: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        """Returns the target's logits (B, N, V) and captured states (B, N, n*ht) for nodes (B, N)."""
        side = self.parts.target
        carry = self.carry
        side.placement.on_device = starts
        mixers = side.mixers
        with (
            attention_of_rounds(side.model),
            fused_layers(side.model, self.parts.not_fused),
            mixers.verifying(carry.num_rows, ids.shape[1], states=side.arena.states),
        ):
            out = side.model(
                input_ids=ids,
                attention_mask=span_masks(side.model, starts, carry.padding, places, drafts.bits, mixers.is_needed),
                position_ids=torch.minimum(places + carry.position, carry.most_position),
                use_cache=True,
                return_dict=True,
                **cache_argument(side.model.forward, side.cache),
            )
        return out.logits, side.states.take()


def packed(chosen: Tensor, spoiled: Tensor, lawful: Tensor, drafts: Drafts) -> Tensor:
    """Packs all that the host reads of a round into one tensor of int64 (B, 3 N + 3 K), so that it is copied at once:
    of each node the token chosen after it, whether its logits decide nothing, and whether its scores are a
    distribution; then the drafts."""
    log_probs = drafts.log_probs.float().view(torch.int32).long()
    return torch.cat((chosen, spoiled.long(), lawful, drafts.ids, drafts.parents, log_probs), dim=1)


def unpacked(packed: Tensor, is_chain: bool) -> tuple[HostDrafts, list[list[bool]], AtAllNodes]:
    """Takes apart on the host what `packed` made: the drafts, which nodes are spoiled, and the tokens chosen."""
    num_drafts = (packed.shape[1] - 3) // 6
    sizes = [num_drafts + 1] * 3 + [num_drafts] * 3
    chosen, spoiled, lawful, ids, parents, log_probs = packed.split(sizes, dim=1)
    log_probs = log_probs.int().view(torch.float32)
    drafts = HostDrafts(ids.tolist(), None if is_chain else parents.tolist(), log_probs.tolist())
    no_scores = packed.new_empty(*chosen.shape, 0)  # nobody asks for them
    return drafts, spoiled.tolist(), AtAllNodes([], no_scores, [chosen.tolist(), lawful.tolist()])
