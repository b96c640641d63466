"""The target's attention on chosen tokens, read while it runs: what `drift.Alignment` pulls the drafter's attention
toward.

B sequences of packed texts, T tokens, S = T - 1 positions, R chosen ones of each sequence, K depths. M chosen positions
of a group of texts, L the longest of these, H heads, D width of a head.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..targets.layers import decoder_layers
from .documents import Text
from .drift import Alignment
from .loss_mask import loss_mask

SDPA = "sdpa"


class _SdpaObserver(TorchFunctionMode):
    """Shows `see` the arguments of torch's scaled_dot_product_attention, in this thread, while `is_open`."""

    def __init__(self, see: Callable[..., None]):
        super().__init__()
        self.see = see
        self.is_open = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.is_open and func is scaled_dot_product_attention:
            self.see(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def observed_attention(target: PreTrainedModel, layers: set[int], see: Callable[..., None]) -> Iterator[None]:
    """Calls `see` with the arguments of every scaled_dot_product_attention that these layers (from 0) of the target run
    in the block.

    Forwards of other threads are not seen, and no setting of the target changes. Raises ValueError for a target that is
    not run with sdpa.
    """
    implementation = target.config.get_text_config(decoder=True)._attn_implementation
    if implementation != SDPA:
        raise ValueError(
            f"attention alignment reads a target run with sdpa; this one is run with {implementation}."
            " Load it with attn_implementation='sdpa', or leave attention_alignment at 0."
        )
    observer, thread = _SdpaObserver(see), threading.get_ident()

    def enter(*_: Any) -> None:
        if threading.get_ident() == thread:
            observer.is_open = True

    def leave(*_: Any) -> None:
        if threading.get_ident() == thread:
            observer.is_open = False

    handles = []
    for index, layer in enumerate(decoder_layers(target)):
        if index in layers:
            handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)]
    try:
        with observer:
            yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Chosen:
    """Chosen positions in a group of texts, each (M,): their text in the group, its start and length; their sequence,
    their number among the sequence's chosen ones, and their offset in the text."""

    text: Tensor
    start: Tensor
    length: Tensor
    sequence: Tensor
    number: Tensor
    offset: Tensor


class AlignmentReader:
    """Chooses positions of a batch, and gathers the target's attention from the tokens their chains embed.

    `layer_ids`: the aux hidden states; the attention read is that of the layers they come out of. `num_chosen`: R.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int], depth: int, num_chosen: int):
        self.target = target
        self.depth = depth
        self.num_chosen = num_chosen
        self.layers = {layer_id - 1 for layer_id in layer_ids if layer_id > 0}

    def choose(self, answers: Tensor, documents: Tensor, convention: str) -> Alignment:
        """Chooses supervised positions at random, with torch's generator; their attention is still to be read.

        `answers`, `documents` (B, T).
        """
        batch, length = answers.shape
        may = torch.zeros(batch, length - 1, device=answers.device)
        mask = loss_mask(answers, 0, convention, documents)
        may[:, : mask.shape[1]] = mask.float()
        # a sequence without any is left without attention to align with, whatever is chosen
        chances = torch.where(may.any(1, keepdim=True), may, 1.0)
        self.positions = torch.multinomial(chances, self.num_chosen, replacement=True)
        self.is_supervised = may.gather(1, self.positions).bool()
        self.attention = torch.zeros(batch, self.num_chosen, self.depth, length - 1, device=answers.device)
        return Alignment(self.positions, self.attention)

    @contextmanager
    def watch(self, group: list[Text]) -> Iterator[None]:
        """Reads the attention in the target's forward over a group of texts, one of them a sequence of the forward."""
        chosen = self._chosen(group)
        if chosen is None:
            yield
            return
        embedded = chosen.offset[:, None] + 1 + torch.arange(self.depth, device=chosen.offset.device)
        num_seen = 0

        def see(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
            nonlocal num_seen
            num_seen += 1
            found = attention_from(query, key, attn_mask, is_causal, scale, chosen.text, embedded).to(self.attention)
            for m in range(len(found)):
                begin, count = int(chosen.start[m]), int(chosen.offset[m]) + 1
                self.attention[chosen.sequence[m], chosen.number[m], :, begin : begin + count] += found[m, :, :count]

        with observed_attention(self.target, self.layers, see):
            yield
        has_token = embedded < chosen.length[:, None] - 1  # to be predicted
        self.attention[chosen.sequence, chosen.number] *= has_token[:, :, None] / max(1, num_seen)

    def _chosen(self, group: list[Text]) -> _Chosen | None:
        """Returns the chosen positions that lie in the group, None where none does."""
        positions, is_supervised = self.positions.tolist(), self.is_supervised.tolist()
        found = [
            (index, text.start, text.length, text.sequence, number, position - text.start)
            for index, text in enumerate(group)
            for number, position in enumerate(positions[text.sequence])
            if is_supervised[text.sequence][number] and text.start <= position < text.end
        ]
        return _Chosen(*torch.tensor(found, device=self.positions.device).T) if found else None


def attention_from(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, text: Tensor, at: Tensor
) -> Tensor:
    """Returns the attention weights (M, K, L), averaged over heads, that the tokens `at` (M, K) of each `text` (M,)
    give; a token past the end of its text is taken for the last.

    The others are what scaled_dot_product_attention was called with: queries (texts, H, L, D), keys (texts, H or
    fewer, L, D), a mask of booleans or of numbers to be added.
    """
    text = text.to(query.device)[:, None]
    at = at.to(query.device).clamp(max=query.shape[2] - 1)
    chosen = query[text, :, at].transpose(1, 2).float()  # (M, H, K, D)
    keys = key[text[:, 0]].repeat_interleave(query.shape[1] // key.shape[1], dim=1).float()
    scores = (chosen @ keys.mT) * (scale or query.shape[-1] ** -0.5)  # (M, H, K, L)
    if is_causal:
        scores = scores.masked_fill(torch.arange(keys.shape[2], device=at.device) > at[:, None, :, None], float("-inf"))
    if mask is not None:
        lines = mask.expand(len(query), -1, -1, -1)[text, :, at].transpose(1, 2)  # (M, 1 or H, K, L)
        scores = scores.masked_fill(~lines, float("-inf")) if lines.dtype == torch.bool else scores + lines
    return scores.softmax(-1).mean(1)
