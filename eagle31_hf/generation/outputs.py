"""What `return_dict_in_generate` asks for, cut from multi-token forwards into the pieces plain generate returns, one per token."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from .cache import windows
from .verify import Verdict


class OutputCollector:
    """Collects scores, logits, hidden states and attentions as far as the generation config asks for them. (B is 1 or rows keep step.)"""

    def __init__(self, generation_config: GenerationConfig, past_key_values: Cache):
        self.past_key_values = past_key_values
        self.wanted = generation_config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if self.wanted and generation_config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if self.wanted and generation_config.output_logits else None
        self.hidden_states: tuple[Any, ...] | None = () if self.wanted and generation_config.output_hidden_states else None
        self.attentions: tuple[Any, ...] | None = () if self.wanted and generation_config.output_attentions else None

    def add(self, outputs: CausalLMOutputWithPast, raw_logits: Tensor | None, verdict: Verdict, is_prefill: bool) -> None:
        """One forward of whose R tokens a row those of `verdict` were committed, as many in every row; `raw_logits` (B, R, V)."""
        num_tokens, path = len(verdict.tokens[0]), verdict.paths[0]
        if self.scores is not None:
            self.scores += tuple(torch.cat(step) for step in zip(*verdict.scores, strict=True))
        if self.logits is not None and raw_logits is not None:
            self.logits += tuple(raw_logits[:, row] for row in path)
        if self.hidden_states is not None:
            layers = outputs.hidden_states
            rows = (tuple(layer[:, i : i + 1] for layer in layers) for i in range(num_tokens))
            self.hidden_states += (layers,) if is_prefill else tuple(rows)
        if self.attentions is not None:
            self.attentions += (
                (outputs.attentions,) if is_prefill else _attention_rows(outputs.attentions, num_tokens, windows(self.past_key_values))
            )

    def result(self, sequences: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """What generate() returns."""
        if not self.wanted:
            return sequences
        collected: dict[str, Any] = {name: getattr(self, name) for name in ("scores", "logits", "attentions", "hidden_states")}
        return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=self.past_key_values, **collected)  # type: ignore[arg-type]


def _attention_rows(layers: tuple, num_tokens: int, layer_windows: list[int | None]) -> tuple[tuple, ...]:
    """Layers (1, H, R, keys) -> per token (1, H, 1, keys it saw).

    The keys after a token's own belong to the tokens after it; a windowed layer still holds keys that have left its window.
    """
    if not layers or layers[0] is None:  # an attention implementation that returns none
        return (layers,) * num_tokens
    tokens = []
    for i in range(num_tokens):
        ends = [layer.shape[3] - (layer.shape[2] - 1 - i) for layer in layers]
        starts = [max(0, end - window) if window else 0 for end, window in zip(ends, layer_windows, strict=True)]
        tokens.append(tuple(layer[:, :, i : i + 1, start:end] for layer, start, end in zip(layers, starts, ends, strict=True)))
    return tuple(tokens)
