"""The outputs that `return_dict_in_generate` asks for, cut from multi-token forwards into the pieces plain generate
returns, one per token."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache_names import CACHE
from .rejection_sampler import Accepted


class OutputCollector:
    """Collects scores, logits and hidden states as far as the generation config asks for them. (B is 1 or rows keep
    step.)

    `logits` are what the processors have left of those they were handed: one that writes to them writes to these, as in
    plain generate.
    """

    def __init__(self, generation_config: GenerationConfig, past_key_values: Cache):
        self.past_key_values = past_key_values
        self.wanted = generation_config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if self.wanted and generation_config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if self.wanted and generation_config.output_logits else None
        self.hidden_states: tuple[Any, ...] | None = (
            () if self.wanted and generation_config.output_hidden_states else None
        )

    def add(self, outputs: CausalLMOutputWithPast, logits: Tensor, accepted: Accepted, is_prefill: bool) -> None:
        """One forward of whose R tokens a row those of `accepted` were committed, as many in every row; `logits` (B, R,
        V)."""
        num_tokens, path = len(accepted.tokens[0]), accepted.paths[0]
        if self.scores is not None:
            self.scores += tuple(torch.cat(step) for step in zip(*accepted.scores, strict=True))
        if self.logits is not None:
            self.logits += tuple(logits[:, row].clone() for row in path)  # a view would keep all nodes' logits
        if self.hidden_states is not None:
            layers = outputs.hidden_states
            rows = (tuple(layer[..., i : i + 1, :] for layer in layers) for i in range(num_tokens))
            self.hidden_states += (layers,) if is_prefill else tuple(rows)

    def result(self, sequences: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Returns what generate() returns."""
        if not self.wanted:
            return sequences
        collected: dict[str, Any] = {name: getattr(self, name) for name in ("scores", "logits", "hidden_states")}
        collected[CACHE] = self.past_key_values
        return GenerateDecoderOnlyOutput(sequences=sequences, **collected)  # type: ignore[arg-type]
