"""The target's attention on chosen tokens, read while it runs: what `drift.Alignment` pulls the drafter's attention
toward.

B rows of packed texts, T tokens, R chosen slots a row, K depths, H heads, M chosen slots of a group of texts, L its
longest text.
"""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .drift import Alignment
from .rows import supervised

OBSERVED, DELEGATE = "eagle31_observed", "sdpa"
_watching = threading.local()


def observed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
):
    """sdpa, after the watcher of this thread has seen queries and keys (B, H, T, D), rotated."""
    watcher: Callable | None = getattr(_watching, "call", None)
    if watcher is not None:
        watcher(module, query, key, options)
    return ALL_ATTENTION_FUNCTIONS[DELEGATE](module, query, key, value, attention_mask, **options)


@contextmanager
def observing(target: PreTrainedModel, watcher: Callable):
    """Within it every attention of the target goes past `watcher`. Raises ValueError for a target that is not run with
    sdpa."""
    config = target.config.get_text_config(decoder=True)
    if config._attn_implementation != DELEGATE:
        raise ValueError(
            f"attention alignment reads a target run with sdpa; this one is run with {config._attn_implementation}."
            " Load it with attn_implementation='sdpa', or leave attention_alignment at 0."
        )
    ALL_ATTENTION_FUNCTIONS.register(OBSERVED, observed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(OBSERVED, ALL_MASK_ATTENTION_FUNCTIONS[DELEGATE])
    config._attn_implementation, _watching.call = OBSERVED, watcher
    try:
        yield
    finally:
        config._attn_implementation, _watching.call = DELEGATE, None


class AlignmentReader:
    """Chooses slots of a batch, and gathers the target's attention on what their chains embed."""

    def __init__(self, target: PreTrainedModel, layer_ids: list[int], depth: int, slots_a_row: int):
        self.target = target
        self.depth = depth
        self.slots_a_row = slots_a_row
        self.layers = {layer_id - 1 for layer_id in layer_ids if layer_id > 0}  # those the captured states come out of

    def choose(self, answers: Tensor, documents: Tensor, convention: str) -> Alignment:
        """Supervised slots at random, with torch's generator; the goals are still to be read."""
        batch, length = answers.shape
        may = torch.zeros(batch, length - 1, device=answers.device)
        kept = supervised(answers, 0, convention, documents)
        may[:, : kept.shape[1]] = kept.float()
        chances = torch.where(may.any(1, keepdim=True), may, 1.0)  # a row without any has no goal, whatever is chosen
        self.slots = torch.multinomial(chances, self.slots_a_row, replacement=True)
        self.has_goal = may.gather(1, self.slots).bool()
        self.documents = documents
        self.goal = torch.zeros(batch, self.slots_a_row, self.depth, length - 1, device=answers.device)
        return Alignment(self.slots, self.goal)

    @contextmanager
    def watch(self, group: list[tuple[int, int, int]]):
        """Around the target's forward over a group of texts (row, start, end), one a row."""
        index = self._index(group)
        if not index:
            yield
            return
        text, row, chosen, offset = (
            torch.tensor(column, device=self.slots.device) for column in zip(*index, strict=True)
        )
        starts = torch.tensor([start for _, start, _ in group], device=self.slots.device)[text]
        lengths = torch.tensor([end - start for _, start, end in group], device=self.slots.device)[text]
        seen = set[int]()

        def see(module: Any, query: Tensor, key: Tensor, options: dict[str, Any]) -> None:
            if module.layer_idx in self.layers:
                seen.add(module.layer_idx)
                found = attention_rows(query, key, options, text, offset, self.depth).to(self.goal)  # (M, K, L)
                for m in range(len(text)):
                    begin, count = int(starts[m]), int(offset[m]) + 1
                    self.goal[row[m], chosen[m], :, begin : begin + count] += found[m, :, :count]

        with observing(self.target, see):
            yield
        # its guess has a token
        reaches = offset[:, None] + 1 + torch.arange(self.depth, device=offset.device) < lengths[:, None] - 1
        self.goal[row, chosen] *= reaches[:, :, None] / max(1, len(seen))

    def _index(self, group: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
        """Of every chosen slot in the group: text, row, which of the row's slots, offset in the text."""
        slots, has_goal = self.slots.tolist(), self.has_goal.tolist()
        return [
            (text, row, i, slot - start)
            for text, (row, start, end) in enumerate(group)
            for i, (slot, kept) in enumerate(zip(slots[row], has_goal[row], strict=True))
            if kept and start <= slot < end
        ]


def attention_rows(
    query: Tensor, key: Tensor, options: dict[str, Any], text: Tensor, offset: Tensor, depth: int
) -> Tensor:
    """Attention (M, K, L), the mean over heads, of the tokens at `offset` + 1 + k of each `text` (M,)."""
    # (M, K)
    at = (
        (offset[:, None] + 1 + torch.arange(depth, device=offset.device)).clamp(max=query.shape[2] - 1).to(query.device)
    )
    text = text.to(query.device)
    chosen = query[text[:, None], :, at].transpose(1, 2).float()  # (M, H, K, D)
    keys = key[text].repeat_interleave(query.shape[1] // key.shape[1], dim=1).float()
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    scores = (chosen @ keys.mT) * scale  # (M, H, K, L)
    places = torch.arange(keys.shape[2], device=query.device)
    seen = places <= at[:, :, None]
    if options.get("sliding_window"):
        seen = seen & (places > at[:, :, None] - options["sliding_window"])
    return scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).mean(1)
