"""The frozen target as training reads it: the states the drafter is fed, the state its own head reads, and what it
says.

B rows of packed texts, T tokens, n captured states, ht target width, V target vocabulary.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from ..features import capture_states, decoder_layers
from ..modeling import Eagle31DrafterModel
from ..tying import execution_device, scores_of
from .packing import PackedRows, Part
from .rows import runs
from .store import HiddenStateStore, load_target_parts, parts_of

PROBE_TOKENS = 24
CLOSE = {torch.float32: 5e-3, torch.float64: 5e-3}  # of the logits' spread; others round more
CLOSE_IN_HALF = 0.05


@dataclass(frozen=True)
class Scoring:
    """What a target does to its head's output y: cap * tanh(scale y / cap), or scale y without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        scores = scores.float() * self.scale
        return scores if self.cap is None else torch.tanh(scores / self.cap) * self.cap

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def find_scoring(target: PreTrainedModel) -> Scoring:
    """How logits follow from the decoder's last state: found on a probe, not looked up by family.

    Raises ValueError for a target whose logits are no function of its head's output of this form.
    """
    head, config = target.get_output_embeddings(), target.config.get_text_config(decoder=True)
    name = type(target).__name__
    if head is None:
        raise ValueError(f"{name} has no output head; expected a causal language model.")
    tokens = torch.arange(PROBE_TOKENS, device=execution_device(target))[None] % config.vocab_size
    logits = target(input_ids=tokens, use_cache=False).logits.double()
    if not logits.isfinite().all():
        raise ValueError(
            f"{name}: its logits are not finite on a probe in {target.dtype}; load it in another dtype, or mend its"
            " weights."
        )
    scores = scores_of(head, last_state(target, tokens)).double().to(logits.device)
    cap = getattr(config, "final_logit_softcapping", None)
    uncapped = logits if cap is None else cap * torch.atanh((logits / cap).clamp(-0.999999, 0.999999))
    scale = ((uncapped * scores).sum() / scores.square().sum()).item()
    found = Scoring(1.0 if abs(scale - 1) < 1e-3 else scale, cap)
    away = (found(scores) - logits).abs().max() / logits.std()
    if not away < CLOSE.get(target.dtype, CLOSE_IN_HALF):
        raise ValueError(
            f"{name}: its logits do not follow from its last state by head, scale and cap (off by {away:.2g} of their"
            " spread); training cannot ask it what it would say without all logits at once. It does not work with this"
            " architecture."
        )
    return found


def last_state(target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """What enters the head (B, T, ht), after the target's final norm."""
    owner: Any = target
    decoder = next((part for part in (owner.get_decoder(), owner.base_model) if part is not owner), None) or owner.model
    return decoder(input_ids=tokens, use_cache=False).last_hidden_state


def texts_of(documents: Tensor) -> list[tuple[int, int, int]]:
    """Numbers of packed texts (B, T), 0 padding, -> row, start and end of each."""
    return [(row, start, end) for row, number, start, end in runs(documents) if number > 0]


def groups_of(texts: list[tuple[int, int, int]], num_tokens: int) -> list[list[tuple[int, int, int]]]:
    """Texts of like length together, at most `num_tokens` tokens a group, padding included."""
    groups = list[list[tuple[int, int, int]]]()
    for text in sorted(texts, key=lambda text: text[1] - text[2]):
        longest = groups[-1][0][2] - groups[-1][0][1] if groups else 0
        if groups and 2 * (text[2] - text[1]) >= longest and (len(groups[-1]) + 1) * longest <= num_tokens:
            groups[-1].append(text)
        else:
            groups.append([text])
    return groups


class TargetReader:
    """Runs the target over packed texts, each as a row of its own: every architecture can do that, and none sees its
    neighbour.

    `in_step`: other processes hold parts of the target, so all have to run it equally often. A tensor-parallel one
    wants more: all of its processes run the texts of each in turn. `ends`: what a drafter is tied to, the target, or
    whole copies of what is spread.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int], in_step: bool = False):
        self.target = target
        self.layer_ids = layer_ids
        self.group = tensor_parallel_group(target)
        self.device = execution_device(target)
        self.in_step = in_step or self.group is not None
        self.scoring = find_scoring(target)
        self.ends = ends_of(target)
        probe = torch.zeros(1, 2, dtype=torch.long)
        # whether its layers have states to read shows before anything is trained
        self.read(probe, torch.ones_like(probe))

    @torch.no_grad()
    def read(
        self, input_ids: Tensor, documents: Tensor, watch: Callable[[list[tuple[int, int, int]]], Any] | None = None
    ):
        """Tokens (B, T) and the numbers of their texts (B, T), 0 padding -> captured states (B, T, n*ht), last states
        (B, T, ht).

        Padding has states of zero. `watch(group)`: a context around the forward of those texts (row, start, end).
        """
        groups = groups_of(texts_of(documents), documents.numel())
        states = last = None
        for group in self._same_number(groups):
            length = max((end - start for _, start, end in group), default=1)
            tokens = input_ids.new_zeros(max(1, len(group)), length)
            for i, (row, start, end) in enumerate(group):
                tokens[i, : end - start] = input_ids[row, start:end]
            with watch(group) if watch and group else torch.no_grad():
                found, final = (x.to(input_ids.device) for x in self._run(tokens))
            if states is None:
                states = found.new_zeros(*input_ids.shape, found.shape[-1])
                last = final.new_zeros(*input_ids.shape, final.shape[-1])
            for i, (row, start, end) in enumerate(group):
                states[row, start:end], last[row, start:end] = found[i, : end - start], final[i, : end - start]
        return states, last

    def _run(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Texts (M, L) -> captured states (M, L, n*ht), last states (M, L, ht). Others' texts are run too where they
        have to be."""
        own, of_all = 0, [tokens]
        if self.group is not None:
            own, of_all = (
                torch.distributed.get_rank(self.group),
                [tokens] * torch.distributed.get_world_size(self.group),
            )
            torch.distributed.all_gather_object(of_all, tokens.cpu(), self.group)
        for rank, texts in enumerate(of_all):
            with capture_states(self.target, self.layer_ids) as captured:
                final = last_state(self.target, texts.to(self.device))
            if rank == own:
                found = captured.take(), final
        return found

    def _same_number(self, groups: list) -> list:
        """The groups, and as many empty ones as another process has more."""
        count = torch.tensor(max(1, len(groups)), device=self.device)
        if self.in_step:
            torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX, group=self.group)
        return groups + [[]] * (int(count) - len(groups))

    @torch.no_grad()
    def logits(self, last_states: Tensor) -> Tensor:
        """Last states (N, ht) -> the target's logits (N, V) in fp32."""
        # FSDP gives them in its own precision.
        return self.scoring(scores_of(self.ends.get_output_embeddings(), last_states)).to(last_states.device)


class TargetEnds(nn.Module):
    """A target's configs, embedding and head, without what lies between: a drafter is made from it and tied to it as to
    the target.

    `parts` as `store.parts_of` gives them.
    """

    def __init__(self, name: str, config: Any, generation_config: Any, parts: dict[str, Tensor], scoring: Scoring):
        super().__init__()
        self.name_or_path = name
        self.config = config
        self.generation_config = generation_config
        self.scoring = scoring
        self.embedding = nn.Embedding.from_pretrained(parts["embedding"], freeze=True)
        weight = parts.get("head", parts["embedding"])
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias="head_bias" in parts, device="meta")
        self.head.weight = nn.Parameter(weight, requires_grad=False)
        if "head_bias" in parts:
            self.head.bias = nn.Parameter(parts["head_bias"], requires_grad=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def logits(self, last_states: Tensor) -> Tensor:
        """Last states (N, ht) -> the target's logits (N, V) in fp32."""
        return self.scoring(linear(last_states.to(self.head.weight), self.head.weight, self.head.bias))


class StoredTarget(TargetEnds):
    """What a store has kept of a target."""

    def __init__(self, folder: str | Path, name: str):
        parts, scoring = load_target_parts(folder)
        configs = AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
        super().__init__(name, *configs, parts, Scoring(**scoring))


def tensor_parallel_group(target: PreTrainedModel) -> Any:
    """The processes that hold a part of every weight of the target and run it together, or None."""
    if (getattr(target, "tp_size", None) or 1) == 1:
        return None
    return next(weight for weight in target.parameters() if isinstance(weight, DTensor)).device_mesh.get_group()


def ends_of(target: Any) -> Any:
    """The target itself, or whole copies of the embedding and head that its processes share."""
    if isinstance(target, TargetEnds) or tensor_parallel_group(target) is None:
        return target
    return TargetEnds(target.name_or_path, target.config, target.generation_config, parts_of(target), Scoring())


def shard(target: PreTrainedModel) -> None:
    """Each process keeps its part of every decoder layer, gathered while the layer runs; embedding and head stay whole,
    as the drafter reads them. Raises RuntimeError without several processes, ValueError for a target that is in parts
    already."""
    from torch.distributed.fsdp import fully_shard

    if tensor_parallel_group(target) is not None:
        raise ValueError("shard_target is set and the target is tensor-parallel; expected one of the two.")
    if not torch.distributed.is_initialized():
        raise RuntimeError("shard_target needs several processes; start with `accelerate launch`, or leave it off.")
    for layer in decoder_layers(target):
        fully_shard(layer, reshard_after_forward=True)  # by default what is sharded by itself stays gathered


def stored_target(drafter: Eagle31DrafterModel, rows: Any) -> StoredTarget:
    """The head and embedding kept beside stored states. Raises ValueError where there are none, or they are not what
    the drafter reads."""
    store = rows
    while isinstance(store, PackedRows | Part):
        store = store.rows
    if not isinstance(store, HiddenStateStore) or store.manifest.layer_ids is None:
        raise ValueError(
            "there is neither a target nor a store with its states; pass target=, or data that prepare-data wrote with"
            " --states."
        )
    store.check(layer_ids=drafter.config.aux_hidden_state_layer_ids)
    if drafter.config.num_aux_states != len(store.manifest.layer_ids):
        raise ValueError(
            f"{store.folder}: has {len(store.manifest.layer_ids)} states a token, the drafter reads"
            f" {drafter.config.num_aux_states}. Prepare the data with what you train with."
        )
    drafter.config.aux_hidden_state_layer_ids = store.manifest.layer_ids  # serving must not take defaults for them
    kept = StoredTarget(store.folder, store.manifest.target)
    drafter.load_target_embeddings(kept)
    return kept
