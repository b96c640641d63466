"""One drafter following one sequence: it reads the target's accepted states, then proposes a chain of its own.

L committed tokens, V target vocabulary. Row p of the drafter holds the state at position p and the token at p + 1, so the target's
states at positions 0 .. L-2 are what it can have read when the token at L-1 has been chosen.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation import logits_process

from ..modeling import Eagle31DrafterModel
from ..vocab import scatter_logits
from . import cache
from .tree import Candidates, DraftTree

# Processors that are functions of their arguments alone may also shape the draft. Any draft distribution is lossless; one that follows
# the target's processors is accepted more often. The others keep state or call the user's code, and see only the committed text.
DRAFT_PROCESSORS = tuple(
    getattr(logits_process, f"{name}LogitsWarper") for name in ("Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta")
) + tuple(
    getattr(logits_process, f"{name}LogitsProcessor")
    for name in ("RepetitionPenalty", "NoRepeatNGram", "SequenceBias", "NoBadWords", "SuppressTokens", "MinLength", "MinNewTokensLength")
)


@dataclass
class Proposal:
    """A chain: drafted target ids (1, K) and, when sampled, the target-sized logits (1, K, V) each was drawn from. Or a tree."""

    ids: Tensor
    logits: Tensor | None = None
    tree: DraftTree | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the forward that verifies it: the token committed last and every draft."""
        return 1 + self.ids.shape[1]

    @property
    def depth(self) -> int:
        return self.ids.shape[1] if self.tree is None else self.tree.depth

    def to(self, device: torch.device) -> "Proposal":
        tree = None if self.tree is None else self.tree.to(device)
        return Proposal(self.ids.to(device), None if self.logits is None else self.logits.to(device), tree)


class DraftSession:
    """Owns the drafter's cache. Its keys always come from target states: its own speculation is dropped after every proposal."""

    def __init__(
        self, drafter: Eagle31DrafterModel, vocab_size: int, processors: LogitsProcessorList, do_sample: bool, confidence_threshold: float
    ):
        self.drafter, self.vocab_size, self.do_sample = drafter, vocab_size, do_sample
        self.processors = LogitsProcessorList(p for p in processors if isinstance(p, DRAFT_PROCESSORS))
        self.confidence_threshold = confidence_threshold
        self.past_key_values = DynamicCache()
        self.draft_ids = drafter.draft_to_target_ids()
        ids = torch.arange(drafter.config.draft_vocab_size) if self.draft_ids is None else self.draft_ids
        self.out_of_range = (ids >= vocab_size).to(drafter.norm.weight.device)  # padding rows of the drafter's vocabulary
        self.num_in_range = len(ids) - int(self.out_of_range.sum())
        self.in_range = self.num_in_range == len(ids)
        # An argmax needs target-sized logits only where processors index by target id, or some drafts have no target id.
        self.needs_target_logits = do_sample or len(self.processors) > 0 or not self.in_range

    def propose_chain(self, sequence: Tensor, states: Tensor, start: int, depth: int) -> Proposal:
        """Reads `states` (1, S, n*ht) of positions L-1-S .. L-2 of `sequence` (1, L), then drafts up to `depth` tokens.

        `start` is the rope position of the first of those rows.
        """
        like = self.drafter.norm.weight  # never quantized: its device and dtype are the activations'
        sequence = sequence.to(like.device)
        num_rows, num_own = states.shape[1], 0
        tokens = sequence[:, -num_rows:]
        source = {"target_hidden_states": states.to(like)}
        position_ids = torch.arange(start, start + num_rows, device=like.device)[None]
        drafted, drawn_from = [], []
        try:
            while True:
                out = self.drafter(tokens, **source, position_ids=position_ids, past_key_values=self.past_key_values, logits_to_keep=1)
                token, logits, confident = self._pick(out.logits[:, -1], sequence)
                if token is None:
                    break
                drafted.append(token)
                drawn_from.append(logits)
                if len(drafted) == depth or not confident:
                    break
                if self.processors:
                    sequence = torch.cat((sequence, token), dim=1)
                tokens, source = token, {"hidden_states": out.last_hidden_state[:, -1:]}
                position_ids, num_own = position_ids[:, -1:] + 1, num_own + 1
        finally:
            cache.crop(self.past_key_values, num_own)
        ids = torch.cat(drafted, dim=1) if drafted else sequence.new_empty((1, 0))
        return Proposal(ids, torch.stack(drawn_from, dim=1) if self.do_sample and drafted else None)

    def propose_tree(
        self, sequence: Tensor, states: Tensor, start: int, depth: int, top_k: int, total_tokens: int, temperature: float = 1.0
    ) -> Proposal:
        """Reads `states` as `propose_chain` does, then drafts a tree of up to `depth` levels: the `top_k` likeliest children of each of the
        `top_k` likeliest nodes of a level, of all of which the best are kept, `total_tokens` nodes with the root. Likelihoods are those
        at `temperature`; 1 is EAGLE-2's.

        The tree is a function of the committed text alone, so that drawing from the target at every node is exact.
        """
        like = self.drafter.norm.weight
        sequence = sequence.to(like.device)
        num_rows, num_own = states.shape[1], 0
        position_ids = torch.arange(start, start + num_rows, device=like.device)[None]
        candidates, paths = Candidates(sequence[0, -1]), torch.zeros(1, 0, dtype=torch.bool, device=like.device)
        try:
            out = self.drafter(
                sequence[:, -num_rows:], target_hidden_states=states.to(like), position_ids=position_ids,
                past_key_values=self.past_key_values, logits_to_keep=1,
            )  # fmt: skip
            state, num_read = out.last_hidden_state[:, -1:], self.past_key_values.get_seq_length()
            for level in range(depth):
                log_probs, ids = self._likeliest(out.logits[0] / temperature, top_k)
                from_row = candidates.extend(log_probs, ids, top_k)
                if level == depth - 1:
                    break
                frontier = candidates.frontier_ids
                own = torch.eye(len(frontier), dtype=torch.bool, device=like.device)
                paths = torch.cat((paths[from_row], own), dim=1)  # which of the drafter's own rows each frontier node descends from
                position_ids = position_ids[:, -1:] + 1
                out = self.drafter(
                    frontier[None], hidden_states=state[:, from_row], position_ids=position_ids.expand(1, len(frontier)),
                    attention_mask=self._tree_masks(paths, num_read), past_key_values=self.past_key_values,
                )  # fmt: skip
                state, num_own = out.last_hidden_state, num_own + len(frontier)
        finally:
            cache.crop(self.past_key_values, num_own)
        tree = candidates.best(total_tokens - 1)
        return Proposal(tree.ids[None, 1:], tree=tree)

    def _likeliest(self, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Draft logits (F, Vd) -> log-probabilities and target ids (F, k) of the likeliest tokens the target has."""
        log_probs = logits.float().log_softmax(-1)
        if not self.in_range:
            log_probs = log_probs.masked_fill(self.out_of_range, float("-inf"))
        best = log_probs.topk(min(top_k, self.num_in_range), dim=-1)
        return best.values, best.indices if self.draft_ids is None else self.draft_ids[best.indices]

    def _tree_masks(self, paths: Tensor, num_read: int) -> dict[str, Tensor]:
        """Additive masks by layer type for frontier nodes (F) over the `num_read` committed rows and their own (F, R)."""
        config, like = self.drafter.config, self.drafter.norm.weight
        hidden, masks = torch.finfo(like.dtype).min, {}
        for kind in set(config.layer_types):
            mask = like.new_zeros(len(paths), num_read + paths.shape[1])
            own = paths
            if kind == "sliding_attention":
                seen_from = num_read + paths.sum(1, keepdim=True) - config.sliding_window
                mask[:, :num_read].masked_fill_(torch.arange(num_read, device=paths.device) < seen_from, hidden)
                rank = paths.flip(1).cumsum(1).flip(1)  # how many rows of its own path come no earlier
                own = paths & (rank <= config.sliding_window)
            mask[:, num_read:].masked_fill_(~own, hidden)
            masks[kind] = mask[None, None]
        return masks

    def _pick(self, draft_logits: Tensor, sequence: Tensor) -> tuple[Tensor | None, Tensor, bool]:
        """Draft logits (1, Vd) -> a target id (1, 1), the logits it was chosen by, and whether the drafter trusts it.

        The id is None where the processors leave the drafter nothing to propose.
        """
        logits = scatter_logits(draft_logits, self.draft_ids, self.vocab_size) if self.needs_target_logits else draft_logits
        if self.processors:
            logits = self.processors(sequence, logits)  # type: ignore[arg-type]
            if logits.max() == float("-inf"):
                return None, logits, False
        token = torch.multinomial(logits.softmax(-1), 1) if self.do_sample else logits.argmax(-1, keepdim=True)
        confident = not self.confidence_threshold or bool(logits.float().softmax(-1).gather(1, token) >= self.confidence_threshold)
        if not self.needs_target_logits and self.draft_ids is not None:
            token = self.draft_ids[token]
        return token, logits, confident
