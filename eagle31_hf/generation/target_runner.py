"""The target's side of a round: the same forwards `generate` makes, over several tokens at once."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from ..cache import adopt as cache
from ..cache.masks import SlotMask
from ..cache.transfer import Commit, Mirrored
from ..cache_names import CACHE, cache_in
from ..errors import DraftingRefusedError
from ..targets.few_rows import in_drafted_call
from ..targets.layers import add_loops
from ..targets.masks import slot_masks
from ..targets.recurrent import Mixers
from .sequences import Sequences
from .tree import DraftTokens

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class TargetRunner:
    """Runs the target's forwards and owns their keyword arguments, the cache among them, as tokens are committed.

    A slot is a position in the cache, a node a token of a verifying forward: a row's last token or a draft after it.
    `num_padding`: left-padding tokens of each row; `num_cached`: tokens of the prompt its cache already holds;
    `seen` (B, L): which tokens of the prompt are attended to, None: all; `last_position`: of the prompt's last token,
    (B, 1), or (axes, B, 1) where images take several axes, None where the model is told none.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self.target = target
        self.generation_config = generation_config
        self.model_kwargs = model_kwargs
        self.past_key_values: Cache = cache_in(model_kwargs)
        add_loops(self.past_key_values, target.config.get_text_config(decoder=True))
        self.mixers = Mixers(target, self.past_key_values)
        mask = model_kwargs.get("attention_mask")
        # With a cache from an earlier turn the prompt is the whole text or only its new part; the mask covers the whole
        # text either way.
        num_covered = getattr(generation_config, "_mask_length", 0) if mask is None else mask.shape[1]
        is_whole = input_ids.shape[1] == num_covered
        has_padding = is_whole and mask is not None
        self.num_padding = (mask.cumsum(-1) == 0).sum(-1).tolist() if has_padding else [0] * len(input_ids)
        num_held = cache.length(self.past_key_values) or 0
        self.num_cached, self.num_before = (num_held, 0) if is_whole else (0, num_held)  # before: not of the prompt
        self.placement: cache.Placement | None = None  # set within `cache.slots`; None: no trees, equally long rows
        self.seen = None if mask is None or bool(mask.all()) else mask.bool()
        self._covered = input_ids.shape[1]  # tokens that masks and positions among the keyword arguments cover
        positions = model_kwargs.get("position_ids")
        self.last_position: Any = None if positions is None else positions[..., -1:]
        self.is_exact = False  # whether a row's logits are the same, to the last bit, whatever is run beside it

    @property
    def first_slots(self) -> list[int]:
        """The first slot of each row that the drafter reads: neither padding nor a cached token."""
        return [max(padding, self.num_cached) for padding in self.num_padding]

    def passes_positions(self, input_ids: Tensor) -> bool:
        """Returns whether `generate` passes position ids to the model. A model that gets none derives them by a rule
        of its own, which is right for plain sequences, but not for trees and rows of different lengths."""
        if self.last_position is None:
            return False
        inputs = self.target.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **self.model_kwargs)
        return inputs.get("position_ids") is not None

    @property
    def cache_outlives_call(self) -> bool:
        """Returns whether the caller keeps the cache: rows that end before others must then leave in it what plain
        decoding writes."""
        return getattr(self.past_key_values, "_is_user_defined", False)

    def prefill(self, input_ids: Tensor) -> CausalLMOutputWithPast:
        """Runs the prompt (B, L), less what the cache already holds. Raises ValueError where nothing of it is left to
        run, and where the cache then holds anything else than it."""
        if self.num_cached >= input_ids.shape[1]:  # generate alone would read the whole prompt again, after itself
            num_tokens = input_ids.shape[1]
            raise DraftingRefusedError(
                f"EAGLE drafting: the cache handed in already holds {self.num_cached} tokens, and the prompt has"
                f" {num_tokens}; expected a prompt of which at least one token is not in the cache. Add what is new to"
                f" the prompt, or crop the cache: {CACHE}.crop({num_tokens - 1 - self.num_cached})."
            )
        if self.placement is not None:
            self.placement.is_final = True
        try:
            with in_drafted_call(), self.mixers.finding():
                outputs = self.target._prefill(input_ids, self.generation_config, self.model_kwargs)
        finally:
            if self.placement is not None:
                self.placement.is_final = False
        if not self.target.training:  # else gradient checkpointing may have kept the cache empty
            self.mixers.check()
        found, expected = cache_in(outputs), self.num_before + input_ids.shape[1]
        num_held = 0 if found is None else cache.length(found)
        if found is not self.past_key_values or num_held not in (expected, None):
            if num_held == 0:
                raise DraftingRefusedError(
                    f"EAGLE drafting: {type(self.target).__name__} kept nothing in a cache; expected one, to take"
                    " rejected tokens back from. Gradient checkpointing switches it off in training mode"
                    " (target.eval() switches it on); a model that never keeps one cannot be drafted for: drop"
                    " assistant_model."
                )
            raise DraftingRefusedError(
                f"EAGLE drafting: after a prompt of {expected} tokens the target's cache holds {num_held}; expected the"
                " prompt and nothing else, in the cache that generate handed in. Tokens that no text knows of, as of"
                " PEFT's prompt tuning, p-tuning and prefix tuning, cannot be drafted from: drop assistant_model, or"
                " use an adapter that changes weights (LoRA, IA3). An earlier turn's cache and prefill_chunk_size"
                " together need transformers 5.23, others read the prompt twice."
            )
        self.mixers.check()
        if self.placement is not None:
            cache.settle(self.past_key_values, expected)
            self.placement.has_accepted = True
        else:
            cache.crop(self.past_key_values, 0)
        return outputs

    def verify(self, sequences: Sequences, drafts: DraftTokens) -> CausalLMOutputWithPast:
        """Runs the last token of every sequence and the drafts after it, whatever the sequences' lengths.

        For chains of equally long sequences the model makes masks and positions itself; else each node is given a mask
        that shows it its text and its ancestors only.
        """
        if drafts.is_chain and sequences.lengths.is_uniform:
            return self._verify_chains(sequences.padded(), drafts)
        num_nodes, commit = drafts.num_nodes, sequences.commit
        ids = torch.cat((sequences.last(), drafts.ids), dim=1)
        starts = self.starts(sequences)
        depths, visible = drafts.depths, drafts.ancestors
        if depths is None or visible is None:
            depths = torch.arange(num_nodes, device=ids.device)[None]
            visible = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=ids.device).tril()
            visible = visible.expand(len(ids), -1, -1)
        kwargs = {**self.model_kwargs, "attention_mask": None}
        for name in TOKEN_TYPES:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][:, -1:].expand(-1, num_nodes)
        if self.last_position is not None:
            kwargs["position_ids"] = self._positions(sequences, depths)
        assert self.placement is not None
        self.placement.place(starts, num_nodes, ids.device, commit)
        try:
            inputs = self.target.prepare_inputs_for_generation(ids, next_sequence_length=num_nodes, **kwargs)
            device = inputs["input_ids"].device  # transformers moves inputs that lie elsewhere than the target
            shared = SlotMask(starts, visible.to(device), depths.to(device), depths.to(device), self.seen)
            inputs["attention_mask"] = slot_masks(self.target, self.past_key_values, shared, commit.going)
            return self._run(inputs, drafts)
        finally:
            self.placement.clear()

    def starts(self, sequences: Sequences) -> Mirrored:
        """The slot of each sequence's last token in the cache; 0 for one that has ended: nothing of it is written or
        read, so any slot does."""
        starts = sequences.lengths + (self.num_before - 1)
        if not any(sequences.finished):
            return starts
        host = [0 if finished else s for s, finished in zip(starts.host, sequences.finished, strict=True)]
        return Mirrored(host, starts.on(sequences.device) * sequences.commit.is_going)

    def _positions(self, sequences: Sequences, depths: Tensor) -> Tensor:
        """Positions of nodes that stand `depths` (B, N) after each sequence's last token. The last position that
        `generate` was given is (B, 1), or (axes, B, 1) where images take several axes; a text token advances every
        axis by one."""
        new = sequences.lengths - sequences.prompt_length
        if new.is_uniform and not any(sequences.finished):
            return self.last_position + (depths + new.host[0]).to(self.last_position)
        since = (new.on(depths.device) + depths) * sequences.commit.is_going
        return self.last_position + since.to(self.last_position)

    def _verify_chains(self, ids: Tensor, drafts: DraftTokens) -> CausalLMOutputWithPast:
        self.model_kwargs = self._grown(self.model_kwargs, ids.shape[1] - self._covered)
        self._covered = ids.shape[1]
        kwargs = self._grown(self.model_kwargs, drafts.num_nodes - 1)
        ids = torch.cat((ids, drafts.ids), dim=1)
        inputs = self.target.prepare_inputs_for_generation(ids, next_sequence_length=drafts.num_nodes, **kwargs)
        num_before = self.num_before + ids.shape[1] - drafts.num_nodes
        return self._run(inputs, drafts, num_before if self.is_exact else None)

    def _run(
        self, inputs: dict[str, Any], drafts: DraftTokens, num_before: int | None = None
    ) -> CausalLMOutputWithPast:
        """Verifies drafts; `num_before`: keys before them, where attention is to give each position what it gives it
        alone."""
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = drafts.num_nodes
        parents = drafts.on_host()[0].parents if self.mixers.is_needed else None
        verifying = self.mixers.verifying(len(inputs["input_ids"]), drafts.num_nodes, parents)
        with in_drafted_call(num_before), verifying:
            return self.target(**inputs, return_dict=True)

    def keep(self, sequences: Sequences, commit: Commit, num_nodes: int) -> None:
        """Keeps the nodes of the commit's paths in the cache, of the last forward's `num_nodes`, and drops the
        others; the sequences lack the new tokens yet."""
        self.mixers.commit(commit.paths)
        if self.placement is None:
            cache.crop(self.past_key_values, num_nodes - len(commit.paths[0]))
        else:
            cache.keep_paths(self.past_key_values, sequences.lengths + (self.num_before - 1), commit)

    def wipe(self, sequences: Sequences) -> None:
        """Leaves nothing of rejected tokens in the cache. One that can only crop keeps nothing of them anyway."""
        if self.placement is not None:
            cache.wipe(self.past_key_values, (sequences.lengths + (self.num_before - 1)).host)

    def _grown(self, model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """The keyword arguments extended by that many tokens: masks, positions, token types."""
        # transformers lengthens token types by repeating as many of the last ones as there are new tokens: right one at
        # a time only.
        step = num_tokens if model_kwargs.get("token_type_ids") is None else 1
        for _ in range(num_tokens // step if num_tokens else 0):
            model_kwargs = self.target._update_model_kwargs_for_generation(
                ModelOutput(), copy.copy(model_kwargs), num_new_tokens=step
            )
        return model_kwargs


def last_logits(
    outputs: CausalLMOutputWithPast, num_rows: int, device: torch.device, are_read_only: bool = False
) -> Tensor:
    """The logits of the last `num_rows` nodes: a fresh fp32 tensor (B, num_rows, V), safe to write to, or,
    `are_read_only`, as they are."""
    logits = outputs.logits[:, -num_rows:]
    return logits.to(device) if are_read_only else logits.to(copy=True, dtype=torch.float32, device=device)
