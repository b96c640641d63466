"""The target's side of a round: the same forwards `generate` makes, over several tokens at once.

With `hook.py` and `cache.py` the only file that names private symbols of transformers.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from . import cache


class TargetRunner:
    """Owns the keyword arguments of the target's forward, its cache among them, as tokens are committed."""

    def __init__(self, target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]):
        self.target, self.generation_config, self.model_kwargs = target, generation_config, model_kwargs
        self.past_key_values: Cache = model_kwargs["past_key_values"]
        mask = model_kwargs.get("attention_mask")
        self.num_padding = 0 if mask is None else int((mask[0].cumsum(-1) == 0).sum())
        self.num_cached = int(self.past_key_values.get_seq_length())

    def prefill(self, input_ids: Tensor) -> CausalLMOutputWithPast:
        """Runs the prompt (1, L), less what the cache already holds."""
        return self.target._prefill(input_ids, self.generation_config, self.model_kwargs)

    def verify(self, candidate_ids: Tensor, num_rows: int) -> CausalLMOutputWithPast:
        """Runs the last `num_rows` of (1, L + K): the token committed last and the drafts after it."""
        kwargs = self._grown(self.model_kwargs, num_rows - 1)
        inputs = self.target.prepare_inputs_for_generation(candidate_ids, next_sequence_length=num_rows, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_rows
        return self.target(**inputs, return_dict=True)

    def commit(self, num_tokens: int, num_rejected: int) -> None:
        """Drops the rejected rows from the cache and makes room for the tokens just committed."""
        cache.crop(self.past_key_values, num_rejected)
        self.model_kwargs = self._grown(self.model_kwargs, num_tokens)

    def _grown(self, model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """The keyword arguments for that many more tokens: longer masks and positions."""
        if num_tokens == 0:
            return model_kwargs
        return self.target._update_model_kwargs_for_generation(ModelOutput(), copy.copy(model_kwargs), num_new_tokens=num_tokens)


def last_logits(outputs: CausalLMOutputWithPast, num_rows: int, device: torch.device) -> Tensor:
    """The logits of the last `num_rows` rows as a fresh fp32 tensor (1, num_rows, V), safe to write to."""
    return outputs.logits[:, -num_rows:].to(copy=True, dtype=torch.float32, device=device)
