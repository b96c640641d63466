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
from .drafting import Proposal
from .tree import DraftTree


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

    def verify(self, input_ids: Tensor, proposal: Proposal) -> CausalLMOutputWithPast:
        """Runs the last token of (1, L) and the drafts after it. A tree's nodes see the text and their own ancestors only."""
        num_rows, tree = proposal.num_rows, proposal.tree
        kwargs = self._grown(self.model_kwargs, num_rows - 1)
        candidate_ids = torch.cat((input_ids, proposal.ids), dim=1)
        inputs = self.target.prepare_inputs_for_generation(candidate_ids, next_sequence_length=num_rows, **kwargs)
        if tree is not None:
            positions, num_cached = inputs["position_ids"], int(self.past_key_values.get_seq_length())
            inputs["position_ids"] = positions[..., :1] + tree.depths.to(positions)
            inputs["attention_mask"] = tree_masks(self.target, tree, num_cached, self.model_kwargs.get("attention_mask"))
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_rows
        return self.target(**inputs, return_dict=True)

    def commit(self, path: list[int], num_rows: int) -> None:
        """Keeps these of the last forward's rows in the cache, drops the others, and makes room for as many tokens just committed."""
        cache.keep_path(self.past_key_values, path, num_rows)
        self.model_kwargs = self._grown(self.model_kwargs, len(path))

    def _grown(self, model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """The keyword arguments for that many more tokens: longer masks and positions."""
        # transformers lengthens token types by repeating as many of the last ones as there are new tokens: right one at a time only.
        step = num_tokens if model_kwargs.get("token_type_ids") is None else 1
        for _ in range(num_tokens // step if num_tokens else 0):
            model_kwargs = self.target._update_model_kwargs_for_generation(ModelOutput(), copy.copy(model_kwargs), num_new_tokens=step)
        return model_kwargs


def tree_masks(target: PreTrainedModel, tree: DraftTree, num_cached: int, padding: Tensor | None) -> Tensor | dict[str, Tensor]:
    """Additive masks (1, 1, N, keys) in the form the target takes: by layer type where its config has them, else one.

    A windowed layer holds the last window - 1 cached tokens and looks back from a node's position, not from its row.
    """
    config = target.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return _tree_mask(target, tree, num_cached, padding, window)
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: _tree_mask(target, tree, num_cached, padding, windows[kind]) for kind in set(kinds)}


def _tree_mask(target: PreTrainedModel, tree: DraftTree, num_cached: int, padding: Tensor | None, window: int | None) -> Tensor:
    device = tree.ids.device
    held = num_cached if window is None else min(num_cached, window - 1)
    cached = torch.arange(num_cached - held, num_cached, device=device)
    seen = torch.ones(len(tree.ids), held, dtype=torch.bool, device=device)
    own = tree.ancestors
    if window is not None:
        seen = cached[None] > num_cached + tree.depths[:, None] - window
        own = own & (tree.depths[None] > tree.depths[:, None] - window)
    if padding is not None:
        seen = seen & padding[0, :num_cached].bool().to(device)[cached]
    allowed = torch.cat((seen, own), dim=1)
    dtype = target.dtype
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill(~allowed, torch.finfo(dtype).min)[None, None]


def last_logits(outputs: CausalLMOutputWithPast, num_rows: int, device: torch.device) -> Tensor:
    """The logits of the last `num_rows` rows as a fresh fp32 tensor (1, num_rows, V), safe to write to."""
    return outputs.logits[:, -num_rows:].to(copy=True, dtype=torch.float32, device=device)
