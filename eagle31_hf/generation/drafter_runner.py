"""The drafter's side of a round: its forwards over accepted target states and over its own drafts.

B sequences, F nodes of a level, h drafter width, Vd draft vocabulary. The drafter's token for slot p of a text holds
the target's state there and the id at p + 1, so what it has read of a text ends one before the token committed last.
Left padding is not read.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cache import adopt as cache
from ..cache.layer import SlotLayer
from ..cache.masks import SlotMask, windows_by_kind
from ..cache.transfer import Mirrored
from ..modeling import Eagle31DrafterModel, Eagle31DrafterOutput
from ..targets.few_rows import in_drafted_call
from .tree import Expansion
from .unread_states import AuxStates, gathered

LEVELS_AT_ONCE = 16
MOST_LEVELS = 8  # that auto drafts by P-EAGLE: such drafters are trained for about as many
FEW = 64  # new tokens for which a mask is made here, in a few operations; the model's own takes many
MASKED = ("eager", "sdpa")  # attention implementations that take an additive mask


class DrafterRunner:
    """Runs the drafter and owns its cache, whose keys always come from target states: `settle` drops those of drafts.

    `lengths`: tokens it has read of every sequence; `first_positions`: the position of the first of them.
    """

    def __init__(self, drafter: Eagle31DrafterModel, first_positions: list[int]):
        self.drafter = drafter
        self.like = drafter.like  # of the device and dtype of the activations
        self.past_key_values, self.placement = cache.slot_cache(drafter.config)
        self.first_positions = first_positions
        self.lengths = Mirrored([0] * len(first_positions))
        self._positions = Mirrored(first_positions)  # of the next token it reads
        self._takes_masks = drafter.config._attn_implementation in MASKED
        self._windows = windows_by_kind(drafter.config.layer_types, drafter.config.sliding_window)
        self._has_windows = set(self._windows.values()) != {None}
        self._rope_of_drafts: tuple[Tensor, Tensor] | None = None  # after what has been read
        self._below: Tensor | None = None  # which tokens of a sequence each one sees: those before it, and itself

    def read(self, unread: AuxStates, depth: int = 1) -> tuple[Tensor, Tensor]:
        """Reads states that are new to it. Returns the state (B, 1, h) and the draft logits (B, 1, Vd) of each
        sequence's last token. `depth`: levels to be drafted next, which only some drafters need to know."""
        last = None if unread.is_full else (unread.counts.on(self.like.device) - 1).clamp_(min=0)
        source = {"target_hidden_states": unread.states.to(self.like)}
        out = self._forward(unread.tokens.to(self.like.device), source, 1 if last is None else last[:, 0])
        self._note_read(unread)
        state = out.last_hidden_state
        return (state[:, -1:] if last is None else gathered(state, last)), out.logits

    def _note_read(self, unread: AuxStates) -> None:
        """Goes on after states that it has read; drops the keys of all else."""
        self.lengths = self.lengths + unread.counts
        self._positions = self._positions + unread.counts
        self.settle()
        self._rope_of_drafts = None

    def step(self, ids: Tensor, state: Tensor, nodes: Expansion) -> tuple[Tensor, Tensor]:
        """Runs one level of drafts (B, F) on the states (B, F, h) before them, the last one that `nodes` runs. Returns
        states (B, F, h) and draft logits (B, F, Vd)."""
        width = ids.shape[1]
        level = len(nodes.widths) - 1
        starts = self.lengths + (nodes.num_run - width)
        self.placement.place(starts, width, ids.device)
        if nodes.visible is not None:
            self.placement.low = min(self.lengths.host)
        mask = self._mask_of_nodes(nodes, width)
        out = self._forward(ids, {"hidden_states": state}, rope=self._rope_at(level), mask=mask)
        return out.last_hidden_state, out.logits

    def held(self) -> list[list[Tensor]]:
        """Copies of the keys and values (B, H, T, D) of every layer; with a window, of the last tokens."""
        layers: list[Any] = self.past_key_values.layers
        return [[states.clone() for states in layer.held(layer.end - layer.first)] for layer in layers if layer.buffers]

    def go_on_with(self, layers: list[list[Tensor]], lengths: list[int]) -> None:
        """Goes on after tokens that an earlier call has read, whose keys and values are `layers`."""
        if max(lengths) > 0:
            for ours, (keys, values) in zip(self.past_key_values.layers, layers, strict=True):
                cast(SlotLayer, ours).hold(keys.to(self.like), values.to(self.like), max(lengths))
        self.go_on_from(lengths)

    def go_on_from(self, lengths: list[int]) -> None:
        """Goes on after so many tokens of every sequence, which its cache holds."""
        self.lengths = Mirrored(lengths)
        self._positions = Mirrored([a + b for a, b in zip(lengths, self.first_positions, strict=True)])
        self.settle()

    def settle(self) -> None:
        """Drops what no target state stands behind."""
        cache.settle(self.past_key_values, max(self.lengths.host))

    def _forward(
        self, ids: Tensor, source: dict[str, Tensor], keep: int | Tensor = 0, rope: Any = None, mask: Any = None
    ) -> Eagle31DrafterOutput:
        """Runs the drafter; without `rope` over tokens (B, T) that follow what it has read."""
        if rope is None:
            rope, mask = self._rope(ids.shape[1]), self._mask_of_text(ids.shape[1])
        with in_drafted_call():
            return self.drafter(
                ids,
                **source,
                position_embeddings=rope,
                attention_mask=mask,
                past_key_values=self.past_key_values,
                logits_to_keep=keep,
                return_dict=True,
            )

    def _rope(self, count: int) -> tuple[Tensor, Tensor]:
        """The rotary embeddings, cos and sin (B or 1, count, D), of the tokens after what has been read."""
        device = self.like.device
        if self._positions.is_uniform:
            begin = self._positions.host[0]
            positions = torch.arange(begin, begin + count, device=device)[None]
        else:
            positions = self._positions.on(device) + torch.arange(count, device=device)
        return self.drafter.rotary_emb(self.like, positions)

    def _rope_at(self, level: int) -> tuple[Tensor, Tensor]:
        """The rotary embeddings (B or 1, 1, D) of a level of drafts; computed for several levels at once, since each
        call takes many operations."""
        if self._rope_of_drafts is None or level >= self._rope_of_drafts[0].shape[1]:
            self._rope_of_drafts = self._rope(max(LEVELS_AT_ONCE, level + 1))
        cos, sin = self._rope_of_drafts
        return cos[:, level : level + 1], sin[:, level : level + 1]

    def _mask_of_text(self, num_new: int) -> dict[str, Tensor | None] | None:
        """The masks by layer type for tokens to be read; None: the drafter's own, of a sequence."""
        self.placement.place(self.lengths, num_new, self.like.device)
        if num_new == 1 and self.placement.slots is None:
            return dict.fromkeys(self._windows)  # sees all its cache returns
        if self.placement.slots is None and (num_new > FEW or not self._takes_masks):
            return None
        if self._below is None or num_new > len(self._below):
            shape = max(num_new, FEW), max(num_new, FEW)
            self._below = torch.ones(shape, dtype=torch.bool, device=self.like.device).tril()
        visible = self._below[:num_new, :num_new].expand(len(self.lengths.host), -1, -1)
        depths = torch.arange(num_new, device=self.like.device)[None] if self._has_windows else None
        return self._masks(visible, depths, depths)

    def _mask_of_nodes(self, nodes: Expansion, width: int) -> dict[str, Tensor | None]:
        """The masks by layer type for a level of drafts."""
        visible = nodes.visible
        if visible is None:
            if self.placement.slots is None:
                return dict.fromkeys(self._windows)  # sees all its cache returns
            shape = (len(self.lengths.host), width, nodes.num_run)
            visible = torch.ones(shape, dtype=torch.bool, device=self.like.device)
        depths = nodes.depths_run() if self._has_windows else None
        return self._masks(visible, None if depths is None else depths[:, -width:], depths)

    def _masks(self, visible: Tensor, query_depths: Tensor | None, depths: Tensor | None) -> dict[str, Tensor | None]:
        low = self.placement.low or 0
        end = max(self.lengths.host) + visible.shape[2]
        shared = SlotMask(self.lengths, visible, query_depths, depths)
        return {
            kind: shared.additive(end, self.like.dtype, 0 if window is None else max(0, low - window + 1), window)
            for kind, window in self._windows.items()
        }


class ParallelRunner(DrafterRunner):
    """Runs a P-EAGLE drafter, which drafts all K levels in one forward: reading scores every level, and a step has
    nothing to run.

    After a sequence's last token it reads masks, one for each further level: the mask token, with a learnt state in the
    place of the target's. The logits after each of them are those of a level, whatever was drafted before. Sources:
    P-EAGLE (arXiv 2602.01469), vLLM's `mask_hidden`.
    """

    def __init__(self, drafter: Eagle31DrafterModel, first_positions: list[int]):
        super().__init__(drafter, first_positions)
        self._logits = torch.empty(0)  # of all levels (B, K, Vd), scored when states were read last

    def read(self, unread: AuxStates, depth: int = 1) -> tuple[Tensor, Tensor]:
        """Reads states that are new to it, and a mask for each level after the first of `depth`, which it scores, too.
        Returns what `DrafterRunner.read` does."""
        if depth == 1:
            return super().read(unread)
        device, length = self.like.device, len(unread) + depth - 1
        counts = unread.counts.on(device)
        is_mask = torch.arange(length, device=device) >= counts  # also what pads shorter sequences: these have more
        tokens = pad(unread.tokens.to(device), (0, depth - 1)).masked_fill(is_mask, self.drafter.config.mask_token_id)
        last = (counts - 1).clamp_(min=0)
        states = pad(unread.states.to(self.like), (0, 0, 0, depth - 1))
        source = {"target_hidden_states": states, "is_mask": is_mask}
        out = self._forward(tokens, source, last + torch.arange(depth, device=device))
        self._note_read(unread)
        self._logits = out.logits
        return gathered(out.last_hidden_state, last), out.logits[:, :1]

    def step(self, ids: Tensor, state: Tensor, nodes: Expansion) -> tuple[Tensor, Tensor]:
        """The states as given, and the logits (B, F, Vd) after the level that `nodes` ends with, which were scored when
        states were read: 0 are those that `read` returned."""
        level = len(nodes.widths)
        return state, self._logits[:, level : level + 1].expand(-1, ids.shape[1], -1)


def runner_of(drafter: Eagle31DrafterModel, first_positions: list[int]) -> DrafterRunner:
    """The runner that serves a drafter."""
    runner_class = ParallelRunner if drafter.config.is_parallel else DrafterRunner
    return runner_class(drafter, first_positions)
