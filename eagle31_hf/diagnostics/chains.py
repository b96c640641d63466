"""Drafted chains, recorded while a drafter serves: its states and attention by depth, and what the target says to each
token.

K depths, S keys of the text and the chain, V target vocabulary, h drafter width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from ..modeling import Eagle31DrafterModel, refuse_parallel
from .attention_mass import attention_entropy, state_norm


@dataclass
class Chain:
    """One drafted chain. It begins at key `begin` of the text, the last one read from the target.

    `inputs`: norms (root mean squares) of each aux hidden state at that key, and of the fused state they become. The
    others have an entry for each depth: `states`, the norm of the state that is scored and fed to the next step;
    `cosines`, between that state and the fused state; `entropies` in nats and `weights` (S,), of layer 0's attention,
    averaged over heads, a weight for every key since the text's first; `agreement`, whether the drafted token is the
    one that the target chooses after the drafted tokens before it, were they accepted or not.
    """

    begin: int
    inputs: list[float]
    states: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    agreement: list[bool] = field(default_factory=list)


class ChainRecorder:
    """Records the chains that a drafter drafts and its target verifies, one text at a time; see `recorded_chains`."""

    def __init__(self) -> None:
        self.chains = list[Chain]()
        self._cache: Any = None  # the drafter's, of the text at hand
        self._num_read = 0  # states of the target that the drafter has read of this text
        self._fused = torch.empty(0)  # (1, 1, h): where the open chain begins
        self._open: Any = None  # the chain that is drafted

    def begin(self, drafter: Eagle31DrafterModel, args: Any, kwargs: dict[str, Any]) -> None:
        """Begins a chain where the drafter reads states of the target. A forward pre-hook of the drafter."""
        states = kwargs.get("target_hidden_states")
        if states is None:
            return
        if kwargs["past_key_values"] is not self._cache:
            self._cache, self._num_read = kwargs["past_key_values"], 0
        self._num_read += states.shape[1]
        last = states[:, -1:]
        self._fused = drafter.fuse_target_states(last)
        parts = (*last.split(drafter.config.target_hidden_size, dim=-1), self._fused)
        self._open = Chain(self._num_read - 1, [float(state_norm(part)) for part in parts])

    def attend(self, module: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        """Adds the attention of the newest token. A forward hook of layer 0's attention."""
        weights = output[1][:, :, -1:].float()
        num_keys = self._open.begin + 1 + len(self._open.states)
        # keys that a window has left behind are not in the cache
        left = torch.zeros(max(0, num_keys - weights.shape[-1]), device=weights.device)
        self._open.weights.append(torch.cat((left, weights[0, :, 0].mean(0)))[-num_keys:].cpu())
        self._open.entropies.append(float(attention_entropy(weights)))

    def end(self, drafter: Eagle31DrafterModel, args: Any, output: Any) -> None:
        """Adds the newest state. A forward hook of the drafter."""
        state = output.last_hidden_state[:, -1:]
        self._open.states.append(float(state_norm(state)))
        self._open.cosines.append(float(cosine_similarity(state.float(), self._fused.float(), dim=-1)))

    def verify(self, target: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Compares the chain with the target's choices, and keeps it. A forward hook of the target."""
        ids = kwargs.get("input_ids")
        if self._open is None or ids is None or ids.shape[1] != len(self._open.states) + 1:
            return
        chain, self._open = self._open, None
        choices = output.logits[0, -ids.shape[1] : -1].argmax(-1)
        chain.agreement = (choices == ids[0, 1:].to(choices.device)).tolist()
        self.chains.append(chain)


@contextmanager
def recorded_chains(target: PreTrainedModel, drafter: Eagle31DrafterModel) -> Iterator[ChainRecorder]:
    """Records the chains the drafter drafts for the target in the block, one text at a time, greedily, without trees.

    Only the "eager" attention says what it attends to, so the drafter uses it in the block, in every thread.
    """
    refuse_parallel(drafter, "measured step by step")
    recorder, implementation = ChainRecorder(), drafter.config._attn_implementation
    drafter.set_attn_implementation("eager")
    with (
        drafter.register_forward_pre_hook(recorder.begin, with_kwargs=True),
        drafter.layers[0].self_attn.register_forward_hook(recorder.attend),
        drafter.register_forward_hook(recorder.end),
        target.register_forward_hook(recorder.verify, with_kwargs=True),
    ):
        try:
            yield recorder
        finally:
            drafter.set_attn_implementation(implementation)
