"""The library's one decoding loop, entered by the hook and by `custom_generate=drafter.decode`, and what runs its
rounds: drafts, verifies, accepts and commits. The loop knows it by a few members only, so that another executor can
stand in its place. What `return_dict_in_generate` asks for is cut from multi-token forwards into the pieces plain
generate returns, one per token.

B sequences, L tokens, N nodes, V target vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..acceptance import PREFILL, Recorder
from ..cache import adopt as cache
from ..cache.transfer import Commit
from ..cache_names import CACHE
from ..clock import Clock
from .planning.plan import UNLIMITED, Plan, Planner
from .proposer import Proposer
from .rejection_sampler import Accepted, RejectionSampler
from .sequences import Ends, Sequences, Stopping
from .target_runner import TargetRunner, last_logits
from .tree import DraftTokens
from .unread_states import UnreadStates


class OutputCollector:
    """Collects scores, logits, hidden states and attentions as far as the generation config asks for them. (B is 1 or
    rows keep step; where attentions are asked for nothing is drafted.) `layers_read`: of which layer of the cache each
    entry of attentions is, empty: entry i of layer i; `are_streams_first`: whether hidden states may be of shape
    (streams, B, T, ht).

    `logits` are the very tensors the processors were handed: one that writes to them writes to these, as in plain
    generate.
    """

    def __init__(
        self,
        generation_config: GenerationConfig,
        past_key_values: Cache,
        layers_read: list[int],
        are_streams_first: bool,
    ):
        self.past_key_values = past_key_values
        self.layers_read = layers_read
        self.are_streams_first = are_streams_first
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
            dims = [layer.dim() - 2 if self.are_streams_first else 1 for layer in layers]
            cut = list(zip(layers, dims, strict=True))
            rows = (tuple(layer.narrow(dim, i, 1) for layer, dim in cut) for i in range(num_tokens))
            self.hidden_states += (layers,) if is_prefill else tuple(rows)
        if self.attentions is not None:
            layers = outputs.attentions
            is_there = bool(layers) and layers[0] is not None  # some implementations return none
            self.attentions += (self._cut(layers) if is_there else layers,)

    def _cut(self, layers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The attentions (B, H, R, keys) of a forward over the keys that stock layers show."""
        held = cache.attention_layers(self.past_key_values)
        held = [held[i] for i in self.layers_read] or held
        return tuple(cache.shown_attentions(*pair) for pair in zip(held, layers, strict=True))

    def result(self, sequences: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Returns what generate() returns."""
        if not self.wanted:
            return sequences
        names = ("scores", "logits", "attentions", "hidden_states")
        collected: dict[str, Any] = {name: getattr(self, name) for name in names} | {CACHE: self.past_key_values}
        return GenerateDecoderOnlyOutput(sequences=sequences, **collected)  # type: ignore[arg-type]


@dataclass(eq=False)
class EagerExecutor:
    """Runs rounds operation by operation; serves every target and every request."""

    runner: TargetRunner
    proposer: Proposer
    unread: UnreadStates
    sampler: RejectionSampler
    sequences: Sequences
    stopping: Stopping
    collector: OutputCollector
    was_short: bool = False  # drafts may have made the last round's logits NaN: the next does without
    holds_drafts: bool = False  # the cache may hold rejected ones, masked or past its end

    def __post_init__(self):
        self.clock = Clock(self.sequences.device)
        self.recorder = Recorder(self.clock)

    def prefill(self) -> Accepted:
        """Runs the prompt; commits the first token of every sequence."""
        self.recorder.begin()
        with self.unread.reading_prompt(self.sequences.padded()):
            outputs = self.runner.prefill(self.sequences.padded())
            logits = self._logits(outputs, 1)
        self.recorder.end("prefill")
        drafts = DraftTokens.none(self.sequences.padded(), is_plain=True)
        return self._accept(outputs, logits, drafts, is_prefill=True)

    def room(self) -> tuple[int, int, int]:
        """Returns how far the next round may draft, in levels, and in nodes of a tree, the root included; and how many
        tokens of each sequence the drafter reads first, at most."""
        sequences, capacity = self.sequences, cache.capacity(self.runner.past_key_values)
        depth, nodes = self.stopping.max_length - sequences.longest - 1, UNLIMITED
        if capacity is not None:  # a static cache's last slots
            nodes = capacity - (self.runner.num_before + sequences.longest - 1)
            depth = min(depth, nodes - 1)
        return 0 if self.was_short else depth, nodes, len(self.unread)

    def round(self, plan: Plan) -> Accepted:
        """Drafts as planned, verifies, and commits what is accepted."""
        recorder = self.recorder
        recorder.begin()
        drafts = self._propose(plan)
        recorder.end("draft")
        outputs = self.runner.verify(self.sequences, drafts)
        logits = self._logits(outputs, drafts.num_nodes)
        recorder.end("verify")
        accepted = self._accept(outputs, logits, drafts)
        recorder.end("accept")
        return accepted

    def result(self) -> Any:
        """Returns what `generate` returns."""
        if self.stopping.streamer is not None:
            self.stopping.streamer.end()
        return self.collector.result(self.sequences.padded().clone())

    def settle(self) -> None:
        """Has the caches of both models hold what is committed and nothing else, also after an error."""
        self.proposer.runner.settle()

    def _logits(self, outputs: CausalLMOutputWithPast, num_nodes: int) -> Tensor:
        """The last nodes' logits (B, num_nodes, V), in fp32 unless the largest of them is all that matters."""
        are_read_only = self.sampler.only_compares and not self.sampler.is_lock_step and self.collector.logits is None
        return last_logits(outputs, num_nodes, self.sequences.device, are_read_only)

    def _propose(self, plan: Plan) -> DraftTokens:
        """The drafts of a round."""
        sequences = self.sequences
        if plan.depth < 1:
            if self.holds_drafts:
                self.runner.wipe(sequences)
                self.holds_drafts = False
            return DraftTokens.none(sequences.last(), is_plain=True)
        self.holds_drafts = True
        if plan.drafts is not None:
            return DraftTokens(torch.tensor(plan.drafts, device=sequences.device), plan.depth)
        drafts = self.proposer.propose(self.unread.take(), sequences.prefixes(), plan).to(sequences.device)
        if self.sampler.is_lock_step and self.stopping.eos_token_ids:  # plain decoding feeds padding to ended sequences
            ended = [b for b, finished in enumerate(sequences.finished) if finished]
            drafts.ids[ended] = sequences.pad_token_id
        return drafts

    def _accept(
        self, outputs: CausalLMOutputWithPast, logits: Tensor, drafts: DraftTokens, is_prefill: bool = False
    ) -> Accepted:
        """Commits what the target's logits (B, N, V) accept of the drafts: to cache, drafter, sequences and results."""
        sequences = self.sequences
        ends = Ends(self.stopping, sequences, self.collector.scores)
        accepted = self.sampler.accept(sequences, drafts, logits, ends)
        commit = Commit(sequences.device, accepted.tokens, accepted.paths, accepted.finished)
        self.runner.keep(sequences, commit, drafts.num_nodes)
        self.unread.queue(commit)
        sequences.append(commit, accepted.finished)
        self.was_short = accepted.is_short
        if self.sampler.noise is not None:
            self.sampler.noise.forget(sequences.lengths.host)
        self.collector.add(outputs, logits, accepted, is_prefill)
        return accepted


def decode(executor: Any, planner: Planner) -> Any:
    """Decodes one call: the prompt, then rounds of drafting, verifying and accepting until every sequence has ended.
    `executor`: an `EagerExecutor`, or what stands in its place. Returns what `generate` returns."""
    recorder = executor.recorder
    first = executor.prefill()
    recorder.show(PREFILL, first)
    planner.begin(first.tokens)
    while not all(executor.sequences.finished):
        depth, nodes, num_unread = executor.room()
        plan = planner.plan(depth, nodes, executor.sequences.going, num_unread)
        accepted = executor.round(plan)
        seconds = recorder.show(accepted.kind, accepted)
        planner.observe(1 + len(accepted.drafts.ids[0]), accepted, seconds)
    recorder.choices(planner.choices, planner.explain())
    planner.end()
    return executor.result()
