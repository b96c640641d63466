"""The outputs that `return_dict_in_generate` asks for, cut from multi-token forwards into the pieces plain generate
returns, one per token. Where attentions are asked for nothing is drafted."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache.adopt import attention_layers, attention_span
from ..cache_names import CACHE
from .rejection_sampler import Accepted


class OutputCollector:
    """Collects scores, logits, hidden states and attentions as far as the generation config asks for them. (B is 1 or
    rows keep step.) `shared`: the layers whose keys the last ones read, one for each of these.

    `logits` are the very tensors the processors were handed: one that writes to them writes to these, as in plain
    generate.
    """

    def __init__(self, generation_config: GenerationConfig, past_key_values: Cache, shared: list[int]):
        self.past_key_values = past_key_values
        self.shared = shared
        config = generation_config
        self.wanted = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if self.wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if self.wanted and config.output_logits else None
        self.hidden_states: tuple[Any, ...] | None = () if self.wanted and config.output_hidden_states else None
        self.attentions: tuple[Any, ...] | None = () if self.wanted and config.output_attentions else None

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
        if self.attentions is not None:
            layers = outputs.attentions
            is_there = bool(layers) and layers[0] is not None  # some implementations return none
            self.attentions += (self._cut(layers) if is_there else layers,)

    def _cut(self, layers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The attentions (B, H, R, keys) of a forward over the keys that stock layers show."""
        held = attention_layers(self.past_key_values)
        held += [held[i] for i in self.shared]
        pairs = zip(held, layers, strict=True)
        return tuple(layer[..., attention_span(of_layer, layer.shape[3], layer.shape[2])] for of_layer, layer in pairs)

    def result(self, sequences: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Returns what generate() returns."""
        if not self.wanted:
            return sequences
        names = ("scores", "logits", "attentions", "hidden_states")
        collected: dict[str, Any] = {name: getattr(self, name) for name in names} | {CACHE: self.past_key_values}
        return GenerateDecoderOnlyOutput(sequences=sequences, **collected)  # type: ignore[arg-type]
