"""The choice of draft tokens from the drafter's logits, as the target is expected to choose from its own.

B sequences, F nodes of a level, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..modeling import Eagle31DrafterModel
from ..vocab import scatter_logits
from . import processors
from .noise import Noise

# A drafter's logits are scored as if the target drew at this temperature: greedy text is drawn at 0 (and a sampled one,
# its noise given), but the drafter's guess of it is not certain. On the demo pair trees are deepest at 0.15 to 0.25; at
# 1, as in EAGLE-2, they are a third shallower than chains are long.
SCORE_TEMPERATURE = 0.25
IMPOSSIBLE = float("-inf")


class DraftSampler:
    """Chooses draft tokens for B sequences by the logits processors that may shape a draft, and by the noise that the
    target will draw with. `threshold`: the probability below which a drafted token is not trusted."""

    def __init__(
        self,
        drafter: Eagle31DrafterModel,
        vocab_size: int,
        logits_processor: LogitsProcessorList,
        noise: Noise | None,
        threshold: float,
        num_sequences: int,
    ):
        self.vocab_size = vocab_size
        self.num_sequences = num_sequences
        self.noise = noise
        self.threshold = threshold
        self.shape_by(logits_processor)
        self.device = drafter.like.device
        self.draft_ids = drafter.draft_to_target_ids()  # None: the drafter's columns are target ids
        ids = self.draft_ids
        if ids is None:
            ids = torch.arange(drafter.config.draft_vocab_size, device=self.device)
        self.columns: Tensor | None = None  # of the drafter's logits, where some are padding of its vocabulary
        if bool((ids >= vocab_size).any()):
            self.columns = (ids < vocab_size).nonzero()[:, 0].to(self.device)
            ids = self.draft_ids = ids.to(self.device)[self.columns]
        self.ids = ids.to(self.device)
        # Processors that read the text index by target id; logits a token was drawn from must be the target's size.
        self.reads_text = not processors.are(self.processors[0], processors.POINTWISE)

    def shape_by(self, logits_processor: LogitsProcessorList) -> None:
        """Has these processors shape drafts, those of them that may."""
        shaping = processors.of(logits_processor, processors.DRAFT_PROCESSORS)
        self.processors = processors.by_sequence(shaping, self.num_sequences)

    @property
    def is_plain(self) -> bool:
        """Returns whether it reads the drafter's logits as they are."""
        return self.noise is None and not self.processors[0] and self.columns is None

    def noise_after(self, prefixes: list[Tensor], level: int) -> Tensor | None:
        """The noise (B, V) of the slot `level` tokens after every sequence (1, L_b); None where nothing is drawn."""
        if self.noise is None:
            return None
        noise = [self.noise.at(b, prefix.shape[1] + level) for b, prefix in enumerate(prefixes)]
        return torch.stack(noise).to(self.device)

    def draw(
        self, logits: Tensor, noise: Tensor | None, prefixes: Sequence[Tensor] = (), path_ids: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor, bool]:
        """Draft logits (B, Vd) and the noise (B, V) of their slot -> one target id of each sequence (B, 1), the logits
        it was chosen by, and whether it is trusted in any sequence.

        Where processors read the text: `prefixes`, every sequence (1, L_b) so far; `path_ids` (B, 1, level), the tokens
        that have been drafted after it. The ids are None where the processors leave the drafter nothing to propose.
        """
        in_target_ids = noise is not None or self.reads_text
        logits, ids = self._processed(logits[:, None], prefixes, path_ids, in_target_ids)
        logits = logits[:, 0]
        if self.reads_text and bool((logits.amax(-1) == IMPOSSIBLE).any()):
            return None, logits, False
        tokens = (logits if noise is None else logits.float() + noise).argmax(-1, keepdim=True)
        is_trusted = True
        if self.threshold:
            is_trusted = bool((logits.float().softmax(-1).gather(1, tokens) >= self.threshold).any())
        return tokens if ids is None else ids[tokens], logits, is_trusted

    def scored(
        self,
        logits: Tensor,
        top_k: int,
        noise: Tensor | None,
        prefixes: Sequence[Tensor] = (),
        path_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draft logits (B, F, Vd) and the noise (B, V) of their slot -> log-probabilities and target ids (B, F, k) of
        the tokens that the target is likeliest to choose. `prefixes` and `path_ids` (B, F, level) as in `draw`: the
        tokens drafted up to every node."""
        logits, ids = self._processed(logits.float(), prefixes, path_ids, in_target_ids=self.reads_text)
        if noise is not None:
            # Times the temperature, so that the colder the draw, the less the noise counts: at 0 this is greedy text.
            if not self.reads_text:
                noise = noise[:, self.ids]
            logits = (logits + noise[:, None]) * processors.temperature(self.processors[0])
        log_probs = (logits / SCORE_TEMPERATURE).log_softmax(-1)
        best = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1)
        # Where processors have left nothing, or the drafter's numbers overflow, it knows nothing.
        values = best.values.nan_to_num(nan=IMPOSSIBLE)
        return values, best.indices if ids is None else ids[best.indices]

    def _processed(
        self, logits: Tensor, prefixes: Sequence[Tensor], path_ids: Tensor | None, in_target_ids: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Draft logits (B, F, Vd) as the processors leave them, and the target ids of their columns, None where the
        columns are target ids, as all of V are with `in_target_ids`."""
        shape = logits.shape[:2]
        ids = self.draft_ids
        logits = logits.flatten(0, 1)
        if self.columns is not None:
            logits = logits[:, self.columns]
        if in_target_ids:
            logits, ids = scatter_logits(logits, ids, self.vocab_size), None
        if self.processors[0]:
            texts = self._texts(prefixes or [logits], path_ids)
            home = texts[0].device if self.reads_text else logits.device  # those hold tensors beside the text
            logits = processors.apply(self.processors, texts, logits.to(home)).to(logits.device)
        return logits.unflatten(0, shape), ids

    def _texts(self, prefixes: Sequence[Tensor], path_ids: Tensor | None) -> Sequence[Tensor]:
        """The text (1, L) up to every node (B F in all); the prefixes themselves where no processor reads them."""
        if not self.reads_text:
            return prefixes
        assert path_ids is not None
        return [
            torch.cat((prefix, path[None].to(prefix.device)), dim=1)
            for prefix, paths in zip(prefixes, path_ids, strict=True)
            for path in paths
        ]
