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
    """Owns the keyword arguments of the target's forward, its cache among them, as tokens are committed.

    `num_padding`: left-padding tokens of the prompt; `num_cached`: tokens of the prompt its cache already holds.
    """

    def __init__(self, target: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]):
        self.target, self.generation_config, self.model_kwargs = target, generation_config, model_kwargs
        self.past_key_values: Cache = model_kwargs["past_key_values"]
        mask = model_kwargs.get("attention_mask")
        # Beside a cache from an earlier turn the prompt is the whole text or only what is new; the mask always covers all of it.
        is_whole = input_ids.shape[1] == (getattr(generation_config, "_mask_length", 0) if mask is None else mask.shape[1])
        self.num_padding = int((mask[0].cumsum(-1) == 0).sum()) if is_whole and mask is not None else 0
        self.num_cached = int(self.past_key_values.get_seq_length()) if is_whole else 0

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
        # transformers lengthens token types by repeating as many of the last ones as there are new tokens: right one at a time only.
        step = num_tokens if model_kwargs.get("token_type_ids") is None else 1
        for _ in range(num_tokens // step if num_tokens else 0):
            model_kwargs = self.target._update_model_kwargs_for_generation(ModelOutput(), copy.copy(model_kwargs), num_new_tokens=step)
        return model_kwargs


def last_logits(outputs: CausalLMOutputWithPast, num_rows: int, device: torch.device) -> Tensor:
    """The logits of the last `num_rows` rows as a fresh fp32 tensor (1, num_rows, V), safe to write to."""
    return outputs.logits[:, -num_rows:].to(copy=True, dtype=torch.float32, device=device)
