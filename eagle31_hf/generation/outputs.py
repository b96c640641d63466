"""The outputs that `return_dict_in_generate` asks for, cut from multi-token forwards into the pieces plain generate
returns, one per token."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache.adopt import static_spans, windows
from ..cache_names import CACHE
from .rejection_sampler import Accepted


class OutputCollector:
    """Collects scores, logits, hidden states and attentions as far as the generation config asks for them. (B is 1 or
    rows keep step.)

    `logits` are the very tensors the processors were handed: one that writes to them writes to these, as in plain
    generate.
    """

    def __init__(self, generation_config: GenerationConfig, past_key_values: Cache):
        self.past_key_values = past_key_values
        self.wanted = generation_config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if self.wanted and generation_config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if self.wanted and generation_config.output_logits else None
        self.hidden_states: tuple[Any, ...] | None = (
            () if self.wanted and generation_config.output_hidden_states else None
        )
        self.attentions: tuple[Any, ...] | None = () if self.wanted and generation_config.output_attentions else None

    def add(self, outputs: CausalLMOutputWithPast, logits: Tensor, accepted: Accepted, is_prefill: bool) -> None:
        """One forward of whose R tokens a row those of `accepted` were committed, as many in every row; `logits` (B, R,
        V)."""
        num_tokens, path = len(accepted.tokens[0]), accepted.paths[0]
        if self.scores is not None:
            self.scores += tuple(torch.cat(step) for step in zip(*accepted.scores, strict=True))
        if self.logits is not None:
            self.logits += tuple(logits[:, row] for row in path)
        if self.hidden_states is not None:
            layers = outputs.hidden_states
            rows = (tuple(layer[:, i : i + 1] for layer in layers) for i in range(num_tokens))
            self.hidden_states += (layers,) if is_prefill else tuple(rows)
        if self.attentions is not None:
            cut = _prompt_attention if is_prefill else _attention_rows
            self.attentions += cut(outputs.attentions, num_tokens, self.past_key_values)

    def result(self, sequences: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Returns what generate() returns."""
        if not self.wanted:
            return sequences
        collected: dict[str, Any] = {
            name: getattr(self, name) for name in ("scores", "logits", "attentions", "hidden_states")
        }
        collected[CACHE] = self.past_key_values
        return GenerateDecoderOnlyOutput(sequences=sequences, **collected)  # type: ignore[arg-type]


def _prompt_attention(layers: tuple, num_tokens: int, cache: Cache) -> tuple[tuple]:
    """Layers (B, H, R, keys) -> the same, of static layers the slots that stock ones show."""
    if not layers or layers[0] is None:  # an attention implementation that returns none
        return (layers,)
    spans = static_spans(cache, 0, layers[0].shape[2])
    return (tuple(layer if span is None else layer[..., span] for layer, span in zip(layers, spans, strict=True)),)


def _attention_rows(layers: tuple, num_tokens: int, cache: Cache) -> tuple[tuple, ...]:
    """Layers (B, H, R, keys) -> per token (B, H, 1, keys it saw).

    The keys after a token's own belong to the tokens after it; a windowed layer still holds keys that have left its
    window. Static layers show all their slots.
    """
    if not layers or layers[0] is None:
        return (layers,) * num_tokens
    tokens, layer_windows = [], windows(cache)
    for i in range(num_tokens):
        ends = [layer.shape[3] - (layer.shape[2] - 1 - i) for layer in layers]
        spans = [
            slice(max(0, end - window) if window else 0, end) for end, window in zip(ends, layer_windows, strict=True)
        ]
        static = static_spans(cache, num_tokens - 1 - i, 1)
        spans = [span if fixed is None else fixed for span, fixed in zip(spans, static, strict=True)]
        tokens.append(tuple(layer[:, :, i : i + 1, span] for layer, span in zip(layers, spans, strict=True)))
    return tuple(tokens)
