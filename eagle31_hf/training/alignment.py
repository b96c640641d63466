"""Attention alignment: the target's attention on chosen tokens, read while it runs, and the loss that pulls the
drafter's attention toward it. Source: Attention Drift (arXiv 2605.09992).

B sequences of packed texts, T tokens, S = T - 1 positions, R chosen ones of each sequence, K depths. M chosen positions
of a group of texts, L the longest of these, H heads, D width of a head.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..targets.layers import decoder_layers
from .attention import Attended
from .documents import Text
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


class Alignment:
    """Pulls the drafter's attention over the prompt toward the target's, at every depth, on R supervised positions of a
    sequence, drawn with torch's generator.

    `positions` (B, R); `target_attention` (B, R, K, S), read by `watch`: averaged over heads and layers, from the token
    that the position's chain embeds at depth k, on positions up to its own; all zero where there is none. What it lacks
    to 1 the target gives to the tokens after the position; the drafter is to give it to the keys it made, whichever of
    them.

    `answers`, `documents` (B, T); `convention`: which positions are supervised, see `loss_mask`; `num_chosen`: R.
    """

    def __init__(self, answers: Tensor, documents: Tensor, convention: str, depth: int, num_chosen: int):
        batch, length = answers.shape
        may = torch.zeros(batch, length - 1, device=answers.device)
        mask = loss_mask(answers, 0, convention, documents)
        may[:, : mask.shape[1]] = mask.float()
        # a sequence without any is left without attention to align with, whatever is chosen
        chances = torch.where(may.any(1, keepdim=True), may, 1.0)
        self.positions = torch.multinomial(chances, num_chosen, replacement=True)
        self.is_supervised = may.gather(1, self.positions).bool()
        self.target_attention = torch.zeros(batch, num_chosen, depth, length - 1, device=answers.device)
        self._losses: dict[int, Tensor] = {}

    @contextmanager
    def watch(self, target: PreTrainedModel, layer_ids: list[int], group: list[Text]) -> Iterator[None]:
        """Reads the attention in the target's forward over a group of texts, one of them a sequence of the forward, of
        the layers that the aux hidden states `layer_ids` come out of."""
        chosen = self._chosen(group)
        if not chosen:
            yield
            return
        device, depth = self.positions.device, self.target_attention.shape[2]
        which = torch.tensor([index for index, *_ in chosen], device=device)
        offsets = torch.tensor([offset for *_, offset in chosen], device=device)
        embedded = offsets[:, None] + 1 + torch.arange(depth, device=device)
        attentions = list[Tensor]()

        def see(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
            found = attention_from(query, key, attn_mask, is_causal, scale, which, embedded)
            attentions.append(found.to(self.target_attention))

        with observed_attention(target, {layer_id - 1 for layer_id in layer_ids if layer_id > 0}, see):
            yield
        if attentions:
            mean = torch.stack(attentions).mean(0)
            for m, (_, text, number, offset) in enumerate(chosen):
                seen = slice(text.start, text.start + offset + 1)
                has_token = embedded[m] < text.length - 1  # to be predicted
                self.target_attention[text.sequence, number, :, seen] = mean[m, :, : offset + 1] * has_token[:, None]

    def _chosen(self, group: list[Text]) -> list[tuple[int, Text, int, int]]:
        """Returns the chosen positions that lie in the group: which of its texts they lie in, this text, their number
        among the sequence's chosen ones, and their offset in the text."""
        positions, is_supervised = self.positions.tolist(), self.is_supervised.tolist()
        return [
            (index, text, number, position - text.start)
            for index, text in enumerate(group)
            for number, position in enumerate(positions[text.sequence])
            if is_supervised[text.sequence][number] and text.start <= position < text.end
        ]

    def observe(self, seen: Attended) -> None:
        """Keeps the divergences (B, R) of the drafter's attention from the target's over the keys of depth 0, and over
        all the keys that the drafter made as if they were one."""
        scores, made = self._scores(seen)
        wanted = self.target_attention[:, :, seen.depth]
        rest = (1 - wanted.sum(-1, keepdim=True)).clamp(min=0)
        wanted = pad(wanted, (0, scores.shape[-1] - wanted.shape[-1]))
        is_seen = self._is_seen(seen) & (wanted > 0)  # what the target cannot see, another text, is left out
        scores, wanted = scores.masked_fill(~is_seen[:, None], -1e30), wanted * is_seen
        if made is not None:
            scores, wanted = torch.cat([scores, made], dim=-1), torch.cat([wanted, rest], dim=-1)
        wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=1e-30)
        log_mean = scores.log_softmax(-1).logsumexp(1) - math.log(scores.shape[1])  # of the heads
        terms = torch.where(wanted > 0, wanted * (wanted.clamp(min=1e-30).log() - log_mean), 0.0)
        self._losses[seen.depth] = terms.sum(-1)

    def _scores(self, seen: Attended) -> tuple[Tensor, Tensor | None]:
        """Returns the drafter's scores of the keys of depth 0 (B, H, R, S) and, if any, of the keys it made together
        (B, H, R, 1)."""
        index = self.positions[:, None, :, None].expand(-1, seen.queries.shape[1], -1, seen.queries.shape[3])
        queries = seen.queries.gather(2, index).float()
        with torch.autocast(queries.device.type, enabled=False):
            scores = (queries @ seen.first_keys.float().mT) * seen.scale
            made = [(queries * keys.gather(2, index).float()).sum(-1) * seen.scale for keys in seen.later_keys]
        return scores, torch.stack(made, dim=-1).logsumexp(-1, keepdim=True) if made else None

    def _is_seen(self, seen: Attended) -> Tensor:
        """Returns which keys of depth 0 the drafter sees from the positions: (B, R, S) bool."""
        num_keys = seen.first_keys.shape[2]
        is_seen = torch.arange(num_keys, device=self.positions.device) <= self.positions[:, :, None]
        if seen.mask is None:
            return is_seen
        mask = seen.mask.expand(len(self.positions), 1, -1, -1)[:, 0]
        return is_seen & mask.gather(1, self.positions[:, :, None].expand(-1, -1, num_keys))

    def loss(self, depth: int) -> Tensor:
        """Returns the mean divergence (nats) at this depth, over the positions whose chain has a token to predict."""
        counts = self.target_attention[:, :, depth].any(-1)
        return (self._losses[depth] * counts).sum() / counts.sum().clamp(min=1)


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
