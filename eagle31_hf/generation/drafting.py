"""A drafter following the rows of a batch: it reads the target's accepted states, then proposes chains or trees of its
own.

B rows, V target vocabulary, Vd draft vocabulary. The drafter's row for slot p of a text holds the target's state there
and the token at p + 1, so what it has read of a text ends one before the token chosen last. Left padding is not read.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..modeling import Eagle31DrafterModel, Eagle31DrafterOutput
from ..vocab import scatter_logits
from . import cache, processors
from .masks import additive_mask
from .randomness import Draws
from .tree import Candidates, DraftTree, Paths, pick

READ_AT_ONCE = 1024  # prompt tokens a drafter's forward takes
# A drafter's logits are scored as if the target drew at this temperature: greedy text is drawn at 0 (and a sampled one,
# its noise given), but the drafter's guess of it is not certain. On the demo pair trees are deepest at 0.15 to 0.25; at
# 1, as in EAGLE-2, they are a third shallower than chains are long.
TREE_TEMPERATURE = 0.25


@dataclass
class Proposal:
    """Chains: drafted target ids (B, K) and, when they were drawn from logits of their own, those (B, K, V). Or trees."""

    ids: Tensor
    logits: Tensor | None = None
    tree: DraftTree | None = None
    log_probs: Tensor | None = None  # (B, 1 + drafts), the committed token's first, where they were scored
    # by row the likeliest next token and its log-probability, where nothing is drafted
    guesses: list[tuple[int, float]] | None = None
    # nothing is drafted, and no earlier draft is left in the cache: the scores are what plain decoding sees
    is_plain: bool = False

    @property
    def num_rows(self) -> int:
        """Tokens a row in the forward that verifies it: the one committed last and every draft."""
        return 1 + self.ids.shape[1]

    @property
    def depth(self) -> int:
        return self.ids.shape[1] if self.tree is None else self.tree.depth

    def children(self) -> list[list[dict[int, int]]]:
        """For every row and node, 0 being the committed token, its children: token id -> node."""
        if self.tree is not None:
            return self.tree.children()
        return [[{token: node + 1} for node, token in enumerate(row)] + [{}] for row in self.ids.tolist()]

    def to(self, device: torch.device) -> "Proposal":
        tree = None if self.tree is None else self.tree.to(device)
        return replace(
            self, ids=self.ids.to(device), logits=None if self.logits is None else self.logits.to(device), tree=tree
        )


class Policy(Protocol):
    """How far an expansion goes, decided as it goes."""

    @property
    def top_k(self) -> int:
        """Children a node may have."""
        ...

    @property
    def max_width(self) -> int:
        """Nodes a level may start from."""
        ...

    def scores(self, log_probs: Tensor, level: int) -> Tensor:
        """Log-probabilities (B, F, k) of the children of a level's nodes, the first level being 0 -> the logs of the
        children's chances to be accepted."""
        ...

    def width(self, scores: Tensor, level: int) -> int:
        """Log-chances (B, C) that a level's best candidates are reached and accepted, best first -> how many the next
        level starts from."""
        ...

    def count(self, scores: Tensor) -> int:
        """The same of all candidates, in any order -> how many are worth verifying."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The tree a user asked for: `depth` levels, `top_k` children a node and nodes a level, `total_tokens` nodes with
    the root."""

    depth: int
    top_k: int
    total_tokens: int

    @property
    def max_width(self) -> int:
        return self.top_k

    def scores(self, log_probs: Tensor, level: int) -> Tensor:
        return log_probs

    def width(self, scores: Tensor, level: int) -> int:
        return scores.shape[1] if level + 1 < self.depth else 0

    def count(self, scores: Tensor) -> int:
        return self.total_tokens - 1


@dataclass
class Reading:
    """Accepted states the drafter has not read: `states` (B, M, n*ht), the tokens after them (B, M), of which row b has
    `counts[b]`."""

    states: Tensor
    tokens: Tensor
    counts: list[int]

    @classmethod
    def joined(cls, parts: list["Reading"]) -> "Reading":
        """Parts one after the other, each row's valid entries first."""
        if len(parts) == 1:
            return parts[0]
        states, tokens = (
            torch.cat([part.states for part in parts], dim=1),
            torch.cat([part.tokens for part in parts], dim=1),
        )
        places: list[list[int]] = [[] for _ in parts[0].counts]
        offset = 0
        for part in parts:
            for b, count in enumerate(part.counts):
                places[b] += range(offset, offset + count)
            offset += part.tokens.shape[1]
        return cls(states, tokens, [offset] * len(places)).selected(places)

    def split(self, count: int) -> tuple["Reading", "Reading"]:
        """The first `count` entries of every row, and the rest."""
        head = Reading(self.states[:, :count], self.tokens[:, :count], [min(n, count) for n in self.counts])
        return head, Reading(self.states[:, count:], self.tokens[:, count:], [max(n - count, 0) for n in self.counts])

    def selected(self, places: list[list[int]]) -> "Reading":
        """Of row b only entries `places[b]`."""
        counts = [len(row) for row in places]
        longest = max(counts)
        if all(row == list(range(len(row))) for row in places):
            return Reading(self.states[:, :longest], self.tokens[:, :longest], counts)
        index = torch.tensor([row + [0] * (longest - len(row)) for row in places], device=self.states.device)
        states = self.states.gather(1, index[..., None].expand(-1, -1, self.states.shape[2]))
        return Reading(states, self.tokens.gather(1, index.to(self.tokens.device)), counts)


class DraftSession:
    """Owns the drafter's cache. Its keys always come from target states: its own speculation is dropped after every
    proposal.

    `lengths[b]`: what it has read of row b. `starts[b]`: the position of the first of it.
    """

    def __init__(
        self,
        drafter: Eagle31DrafterModel,
        vocab_size: int,
        logits_processor: LogitsProcessorList,
        draws: Draws | None,
        confidence_threshold: float,
        starts: list[int],
    ):
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.draws = draws
        own = processors.of(logits_processor, processors.DRAFT_PROCESSORS)
        self.processors = processors.by_row(own, len(starts))
        self.temperature = processors.temperature(own) if draws is not None else 1.0
        self.confidence_threshold = confidence_threshold
        self.past_key_values, self.placement = cache.slot_cache(drafter.config)
        self.starts, self.lengths = starts, [0] * len(starts)
        self.like = drafter.like  # of the device and dtype of the activations
        self.draft_ids = drafter.draft_to_target_ids()
        ids = torch.arange(drafter.config.draft_vocab_size) if self.draft_ids is None else self.draft_ids
        self.out_of_range = (ids >= vocab_size).to(self.like.device)  # padding rows of the drafter's vocabulary
        self.noise_ids = ids.clamp(max=vocab_size - 1).to(self.like.device)
        self.in_range = not bool(self.out_of_range.any())
        # Processors that read the text index by target id; logits a token was drawn from must be the target's size.
        self.reads_text = not processors.are(own, processors.POINTWISE)

    def read(self, reading: Reading) -> tuple[Tensor, Tensor]:
        """Every row reads what is new to it. Returns the state (B, 1, h) and the draft logits (B, 1, Vd) of each row's
        last token."""
        if reading.tokens.shape[1] > READ_AT_ONCE:
            head, rest = reading.split(READ_AT_ONCE)
            before, after = self.read(head), self.read(rest)
            goes_on = torch.tensor(rest.counts, device=self.like.device)[:, None, None] > 0
            return torch.where(goes_on, after[0], before[0]), torch.where(goes_on, after[1], before[1])
        num_new, counts = reading.tokens.shape[1], reading.counts
        keep: int | Tensor = 1
        if min(counts) < num_new:
            keep = torch.tensor(counts, device=self.like.device).clamp(min=1) - 1
        out = self._forward(
            reading.tokens.to(self.like.device),
            {"target_hidden_states": reading.states.to(self.like)},
            self.lengths,
            torch.arange(num_new, device=self.like.device).expand(len(counts), -1),
            logits_to_keep=keep,
        )
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._settle()
        state = out.last_hidden_state
        return (state[:, -1:] if isinstance(keep, int) else state[torch.arange(len(counts)), keep][:, None]), out.logits

    def propose_chain(self, reading: Reading, contexts: list[Tensor], depth: int) -> Proposal:
        """Reads, then drafts up to `depth` tokens after every text (1, L_b), each drawn from the drafter's own
        distribution."""
        contexts = [context.to(self.like.device) for context in contexts] if self.reads_text else contexts
        slots = [context.shape[1] for context in contexts]
        state, logits = self.read(reading)
        drafted, drawn_from = list[Tensor](), list[Tensor]()
        try:
            while True:
                tokens, scores, go_on = self._pick(logits[:, -1], contexts, [slot + len(drafted) for slot in slots])
                if tokens is None:
                    break
                drafted.append(tokens)
                drawn_from.append(scores)
                if len(drafted) == depth or not go_on:
                    break
                if self.reads_text:
                    contexts = [
                        torch.cat((context, token[None]), dim=1)
                        for context, token in zip(contexts, tokens, strict=True)
                    ]
                depth_of = torch.full_like(tokens, len(drafted) - 1)
                out = self._forward(
                    tokens, {"hidden_states": state}, [length + len(drafted) - 1 for length in self.lengths], depth_of
                )
                state, logits = out.last_hidden_state, out.logits
        finally:
            self._settle()
        ids = torch.cat(drafted, dim=1) if drafted else reading.tokens.new_empty((len(slots), 0))
        has_own = self.draws is not None and not self.draws.is_coupled and len(drafted) > 0
        return Proposal(ids, torch.stack(drawn_from, dim=1) if has_own else None)

    def propose_tree(
        self, reading: Reading, contexts: list[Tensor], policy: Policy, max_depth: int, max_nodes: int
    ) -> Proposal:
        """Reads, then drafts a tree after every text (1, L_b): the likeliest children of the likeliest nodes of every
        level, of all of which the best are kept. `max_nodes`: with the root.

        The tree is a function of the committed text, and of noise the target draws with, alone: taking the target's
        tokens is exact.
        """
        contexts = [context.to(self.like.device) for context in contexts]
        candidates = Candidates(torch.cat([context[:, -1:] for context in contexts]))
        paths, path_ids = Paths(len(contexts), self.like.device), candidates.ids[0].new_zeros(len(contexts), 1, 0)
        try:
            state, logits = self.read(reading)
            for level in range(max_depth):
                log_probs, ids = self._likeliest(logits, policy.top_k, contexts, level, path_ids)
                from_row = candidates.extend(log_probs, ids, policy.max_width, policy.scores(log_probs, level))
                width = policy.width(candidates.frontier_scores, level)
                if width == 0 or level + 1 == max_depth:
                    break
                from_row, frontier = from_row[:, :width], candidates.narrow(width)
                if self.reads_text:
                    path_ids = torch.cat((pick(path_ids, from_row), frontier[..., None]), dim=2)
                state, first = pick(state, from_row), paths.count
                own, own_depths = paths.extend(from_row)
                depths = torch.full_like(frontier, level)
                out = self._forward(
                    frontier,
                    {"hidden_states": state},
                    [length + first for length in self.lengths],
                    depths,
                    own,
                    own_depths,
                )
                state, logits = out.last_hidden_state, out.logits
        finally:
            self._settle()
        tree = candidates.best(min(policy.count(torch.cat(candidates.scores, dim=1)[:, 1:]), max_nodes - 1))
        guesses = None
        if tree.ids.shape[1] == 1:
            guesses = list(zip(candidates.ids[1][:, 0].tolist(), candidates.log_probs[1][:, 0].tolist(), strict=True))
        return Proposal(
            tree.ids[:, 1:], tree=None if tree.is_chain else tree, log_probs=tree.log_probs, guesses=guesses
        )

    def _forward(
        self,
        tokens: Tensor,
        source: dict[str, Tensor],
        starts: list[int],
        depths: Tensor,
        own: Tensor | None = None,
        own_depths: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> Eagle31DrafterOutput:
        """Tokens (B, R) written from slots `starts` on, standing `depths` (B, R) after what has been read.

        `own` (B, R, N): which of the N tokens after what has been read, standing at `own_depths` (B, N), they see;
        None: all before them.
        """
        num_new, mask = tokens.shape[1], None  # the drafter's own, of a sequence
        self.placement.rows(starts, num_new, tokens.device)
        if own is not None:
            self.placement.low = min(self.lengths)
            mask = self._masks(own, depths, own_depths, max(starts) + num_new)
        elif self.placement.slots is not None:
            num_own = starts[0] - self.lengths[0] + num_new
            own = (
                torch.ones(num_new, num_own, dtype=torch.bool, device=tokens.device)
                .tril(num_own - num_new)
                .expand(len(tokens), -1, -1)
            )
            own_depths = torch.arange(num_own, device=tokens.device).expand(len(tokens), -1)
            mask = self._masks(own, depths, own_depths, max(starts) + num_new)
        elif num_new == 1:  # sees all its cache returns
            mask = dict.fromkeys(self.drafter.config.layer_types)
        read = torch.tensor(
            [first + length for first, length in zip(self.starts, self.lengths, strict=True)], device=tokens.device
        )
        return self.drafter(
            tokens,
            **source,
            position_ids=read[:, None] + depths,
            attention_mask=mask,
            past_key_values=self.past_key_values,
            logits_to_keep=logits_to_keep,
            return_dict=True,
        )

    def _masks(self, own: Tensor, query_depths: Tensor, own_depths: Tensor, end: int) -> dict[str, Tensor]:
        """By layer type."""
        config, low = self.drafter.config, self.placement.low or 0
        windows = {"full_attention": None, "sliding_attention": config.sliding_window}
        return {
            kind: additive_mask(
                self.lengths,
                own,
                query_depths,
                own_depths,
                end,
                self.like.dtype,
                window=windows[kind],
                seen_from=0 if windows[kind] is None else max(0, low - windows[kind] + 1),
            )
            for kind in set(config.layer_types)
        }

    def _settle(self) -> None:
        """Forgets what no target state stands behind."""
        for layer in self.past_key_values.layers:
            layer.settle(max(self.lengths))

    def _pick(
        self, draft_logits: Tensor, contexts: list[Tensor], slots: list[int]
    ) -> tuple[Tensor | None, Tensor, bool]:
        """Draft logits (B, Vd) -> target ids (B, 1), the logits they were chosen by, and whether the drafter trusts any
        of them.

        The ids are None where the processors leave the drafter nothing to propose.
        """
        in_target_ids = self.draws is not None or self.reads_text or not self.in_range
        logits = scatter_logits(draft_logits, self.draft_ids, self.vocab_size) if in_target_ids else draft_logits
        if self.processors[0]:
            logits = processors.apply(self.processors, contexts, logits)
            if (logits.amax(-1) == float("-inf")).any():
                return None, logits, False
        if self.draws is None:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            device = self.draws.device
            tokens = torch.stack(
                [self.draws.pick(b, slots[b], logits[b : b + 1].float().to(device)) for b in range(len(slots))]
            )
            tokens = tokens.to(logits.device)
        trusted = True
        if self.confidence_threshold:
            trusted = bool((logits.float().softmax(-1).gather(1, tokens) >= self.confidence_threshold).any())
        if not in_target_ids and self.draft_ids is not None:
            tokens = self.draft_ids[tokens]
        return tokens, logits, trusted

    def _likeliest(
        self, logits: Tensor, top_k: int, contexts: list[Tensor], level: int, path_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draft logits (B, F, Vd) -> log-probabilities and target ids (B, F, k) of the tokens the target is likeliest
        to choose.

        `path_ids` (B, F, level), where processors read the text: what follows it up to every node.
        """
        rows, width, _ = logits.shape
        logits, ids = logits.float(), self.draft_ids
        if self.reads_text:
            logits, ids = scatter_logits(logits.flatten(0, 1), self.draft_ids, self.vocab_size), None
            texts = [torch.cat((contexts[b], path[None]), dim=1) for b in range(rows) for path in path_ids[b]]
            logits = processors.apply(self.processors, texts, logits).unflatten(0, (rows, width))
        else:
            if not self.in_range:
                logits = logits.masked_fill(self.out_of_range, float("-inf"))
            if self.processors[0]:
                logits = processors.apply(self.processors, contexts, logits.flatten(0, 1)).unflatten(0, (rows, width))
        if self.draws is not None:
            slots = [context.shape[1] + level for context in contexts]
            noise = torch.stack([self.draws.noise(b, slot) for b, slot in enumerate(slots)]).to(logits.device)
            # Times the temperature, so that the colder the draw, the less the noise counts: at 0 this is greedy text.
            if not self.reads_text:
                noise = noise[:, self.noise_ids]
            logits = (logits + noise[:, None]) * self.temperature
        log_probs = (logits / TREE_TEMPERATURE).log_softmax(-1)
        count = min(top_k, log_probs.shape[-1] if self.in_range else int((~self.out_of_range).sum()))
        best = log_probs.topk(count, dim=-1)
        # Where processors have left nothing, or the drafter's numbers overflow, it knows nothing.
        values = best.values.nan_to_num(nan=float("-inf"))
        return values, best.indices if ids is None else ids[best.indices]
