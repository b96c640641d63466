"""The frozen target as training reads it: the states the drafter is fed, the state its own head reads, and its logits.

B sequences of packed texts, T tokens, n aux hidden states, ht target width, V target vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from ..modeling import Eagle31DrafterModel
from ..targets.ends import execution_device, scores_of
from ..targets.fused_norms import fused_norms, usual_norms
from ..targets.layers import capture_states, decoder_layers
from .documents import Text, texts_of
from .ends import Scoring, TargetEnds, ends_of, find_scoring, is_spread, last_state, tensor_parallel_group
from .engine_states import StreamedStates
from .images import Pixels, on_target
from .packing import PackedExamples, Part
from .store import HiddenStateStore, load_target_parts


def groups_of(texts: list[Text], num_tokens: int) -> list[list[Text]]:
    """Groups texts of like length, with at most `num_tokens` tokens a group, padding included."""
    groups = list[list[Text]]()
    for text in sorted(texts, key=lambda text: -text.length):
        longest = groups[-1][0].length if groups else 0
        if groups and 2 * text.length >= longest and (len(groups[-1]) + 1) * longest <= num_tokens:
            groups[-1].append(text)
        else:
            groups.append([text])
    return groups


class TargetReader:
    """Runs the target over packed texts, each as a sequence of its own: every architecture can do that, and none sees
    its neighbour.

    `in_lockstep`: other processes hold parts of the target, so all have to run it equally often; found by itself for
    a target that was loaded in parts. A tensor-parallel one needs more: all of its processes run the texts of each, one
    process after the other, unless `reads_alike`, all read the same texts. `learnt_on`: the drafter's device; the
    target `is_apart` if it is on another and needs no other process, so that it can be read ahead. `ends`: what a
    drafter is tied to, see `ends_of`; then copies on the drafter's device, where that is possible, as the target's is
    busy with the next texts.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        layer_ids: list[int],
        in_lockstep: bool = False,
        reads_alike: bool = False,
        learnt_on: torch.device | None = None,
    ):
        self.target = target
        self.layer_ids = layer_ids
        self.group = None if reads_alike else tensor_parallel_group(target)
        self.device = execution_device(target)
        self.in_lockstep = in_lockstep or is_spread(target)
        # as tensors name it: "cuda" and "mps" have no number
        drafters = self.device if learnt_on is None else torch.empty(0, device=learnt_on).device
        self.is_apart = drafters != self.device and not self.in_lockstep
        self.scoring = find_scoring(target)
        self._norms = usual_norms(target)
        self.ends = ends_of(target, drafters if self.is_apart else None)
        probe = torch.zeros(1, 2, dtype=torch.long)
        # fails here, before training, if its layers have no states to read
        self.read(probe, torch.ones_like(probe))

    @torch.no_grad()
    def read(self, input_ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the aux hidden states (B, T, n*ht) and the states that enter the head (B, T, ht) of tokens (B, T).

        `documents` (B, T): the numbers of their texts, 0 padding, whose states are zero.
        """
        groups = groups_of(texts_of(documents), documents.numel()) or [[]]
        if self.in_lockstep:  # as many as the process with most: empty ones are run, too
            count = torch.tensor(len(groups), device=self.device)
            torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX, group=self.group)
            groups += [[]] * (int(count) - len(groups))
        states = last = None
        for group in groups:
            tokens = input_ids.new_zeros(max(1, len(group)), max((text.length for text in group), default=1))
            for i, text in enumerate(group):
                tokens[i, : text.length] = input_ids[text.sequence, text.start : text.end]
            found, final = (x.to(input_ids.device) for x in self._run(tokens))
            if states is None:
                states = found.new_zeros(*input_ids.shape, found.shape[-1])
                last = final.new_zeros(*input_ids.shape, final.shape[-1])
            for i, text in enumerate(group):
                at = (text.sequence, slice(text.start, text.end))
                states[at], last[at] = found[i, : text.length], final[i, : text.length]
        return states, last

    def of_texts(self, texts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns the aux hidden states (T, n*ht) and the states that enter the head (T, ht) of each text (T,)."""
        ids = pad_sequence(texts, batch_first=True)
        documents = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        found = zip(texts, *self.read(ids, documents), strict=True)
        return [(states[: len(text)], last[: len(text)]) for text, states, last in found]

    @torch.no_grad()
    def of_images(self, text: Tensor, pixels: Pixels) -> tuple[Tensor, Tensor]:
        """Returns the states of one text (T,) with images, as `of_texts` does of others. What `pixels` have for each
        token is cut to its length."""
        given = on_target(pixels, self.device, self.target.dtype, len(text))
        states, last = (found[0].to(text.device) for found in self._run(text[None], given))
        return states, last

    def _run(self, tokens: Tensor, pixels: Pixels | None = None) -> tuple[Tensor, Tensor]:
        """Returns the aux hidden states (M, L, n*ht) and last states (M, L, ht) of texts (M, L); runs other processes'
        texts, too, where it has to."""
        own, of_all = 0, [tokens]
        if self.group is not None:
            own = torch.distributed.get_rank(self.group)
            of_all = [tokens] * torch.distributed.get_world_size(self.group)
            torch.distributed.all_gather_object(of_all, tokens.cpu(), self.group)
        for rank, texts in enumerate(of_all):
            norms = fused_norms(self.target, self._norms)
            with norms, capture_states(self.target, self.layer_ids) as captured:
                final = last_state(self.target, texts.to(self.device), pixels)
            if rank == own:
                found = captured.take(), final
        return found

    @torch.no_grad()
    def logits(self, last_states: Tensor) -> Tensor:
        """Returns the target's logits (N, V), in fp32, from states that enter its head (N, ht)."""
        # FSDP gives them in its own precision.
        return self.scoring(scores_of(self.ends.get_output_embeddings(), last_states)).to(last_states.device)


class StoredTarget(TargetEnds):
    """The embedding, head and configs of a target that are kept in a store."""

    def __init__(self, folder: str | Path, name: str):
        parts, scoring = load_target_parts(folder)
        configs = AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
        super().__init__(name, *configs, parts, Scoring(**scoring))


def shard(target: PreTrainedModel) -> None:
    """Leaves each process its part of every decoder layer, gathered while the layer runs; embedding and head stay
    whole, as the drafter reads them. One that was loaded in parts, as `eagle31 train` does, is left as it is. Raises
    RuntimeError without several processes, ValueError for a tensor-parallel target."""
    from torch.distributed.fsdp import fully_shard

    if tensor_parallel_group(target) is not None:
        raise ValueError("shard_target is set and the target is tensor-parallel; expected one of the two.")
    if not torch.distributed.is_initialized():
        raise RuntimeError("shard_target needs several processes; start with `accelerate launch`, or leave it off.")
    if is_spread(target):
        return
    for layer in decoder_layers(target):
        fully_shard(layer, reshard_after_forward=True)  # by default what is sharded by itself stays gathered


def ends_behind(drafter: Eagle31DrafterModel, examples: Any) -> TargetEnds:
    """Returns the ends of the target that gave the states of `examples`, kept beside stored ones or read by whoever
    streams them, and ties the drafter to them.

    Raises ValueError where the examples have no states, or not those that the drafter reads.
    """
    store = examples
    while isinstance(store, PackedExamples | Part):
        store = store.examples
    if isinstance(store, StreamedStates):
        source: Any = store.source.servers.name
        ends, layer_ids = store.source.ends, store.source.layer_ids
    elif isinstance(store, HiddenStateStore) and store.manifest.layer_ids is not None:
        source = store.folder
        ends, layer_ids = StoredTarget(source, store.manifest.target), store.manifest.layer_ids
    else:
        raise ValueError(
            "there is neither a target nor a store with its states; pass target=, or data that prepare-data wrote with"
            " --states."
        )
    asked = drafter.config.aux_hidden_state_layer_ids
    if asked not in (None, layer_ids) or drafter.config.num_aux_states != len(layer_ids):
        reads = f"{drafter.config.num_aux_states} of any" if asked is None else str(asked)
        raise ValueError(
            f"{source}: has states of the layers {layer_ids}, the drafter reads {reads}; expected the same. Prepare the"
            " data with what you train with."
        )
    drafter.config.aux_hidden_state_layer_ids = layer_ids  # serving must not take defaults for them
    drafter.load_target_embeddings(ends)
    return ends
