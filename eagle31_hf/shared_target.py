"""The embedding and head that a drafter shares with its target, beside those it has of its own.

B batch, T tokens, h drafter width, V target vocabulary, Vd draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers.utils import logging

from . import vocab
from .configuration import Eagle31Config
from .targets.ends import TargetTie, check_loaded, execution_device, rows_of, scores_of, shape_of

logger = logging.get_logger(__name__)


class SharesTarget(nn.Module):
    """The part of a drafter that embeds tokens and scores states, by its own modules or by those of its target."""

    config: Eagle31Config
    embed_tokens: Any
    lm_head: Any
    norm: nn.RMSNorm
    tie: TargetTie

    def get_input_embeddings(self) -> nn.Module | None:
        """Returns the drafter's own embedding, else the target's; None while no target has been seen, or when it is
        gone."""
        return self.tie.get()[0] if self.embed_tokens is None else self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Gives the drafter a table (V, h) of its own."""
        self.embed_tokens = value
        self.config.share_target_embeddings = False

    def get_output_embeddings(self) -> nn.Module | None:
        """Returns the drafter's own head, else the target's; None while no target has been seen, or when it is gone."""
        return self.tie.get()[1] if self.lm_head is None else self.lm_head

    def load_target_embeddings(self, target: Any) -> None:
        """Ties the drafter to the target's input embedding, and to its head where the checkpoint has none, without a
        copy.

        Both are held weakly, for this thread and for those that have tied no other: keep the target yourself. They may
        be quantized, offloaded, or wrapped by an adapter. Raises ValueError when the target's width or vocabulary is
        not the one the drafter was made for, and when weights that are needed are on the meta device with nothing to
        load them.
        """
        embedding: Any = target.get_input_embeddings()
        head = target.get_output_embeddings()
        check_fits(self.config, target)
        check_loaded(self, "the drafter")
        own = self.embed_tokens
        if own is None:
            check_loaded(embedding, "the target's embedding, which the drafter shares,")
        if self.lm_head is None and head is not None:
            check_loaded(head, "the target's head, which the drafter shares,")
        before, _ = self.tie.get()
        self.tie.set(embedding, head)
        if before is not embedding and own is not None and unrelated(own.weight, embedding.weight):
            logger.warning(
                "the drafter's own embedding has nothing in common with the target's, as in checkpoints of TorchSpec"
                " before March 2026, where it is random. If it was not trained from scratch, load with"
                " share_target_embeddings=True."
            )

    @property
    def like(self) -> Tensor:
        """A tensor of the device and dtype that the drafter's activations have, quantized or offloaded as it may be."""
        weight = self.norm.weight  # a norm is never quantized
        return weight if not weight.is_meta else weight.new_empty(0, device=execution_device(self))

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) -> embeddings (B, T, h) on the drafter's device, unscaled even where the target scales its
        own."""
        return rows_of(_present(self.get_input_embeddings(), "embedding"), input_ids).to(self.like)

    def score(self, normed: Tensor) -> Tensor:
        """Post-norm states (B, T, h) -> draft logits (B, T, Vd)."""
        logits = scores_of(_present(self.get_output_embeddings(), "head"), normed).to(normed)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale


def check_fits(config: Eagle31Config, target: Any) -> None:
    """Raises ValueError when a target's width or vocabulary is not the one the drafter was made for."""
    rows, width = shape_of(target.get_input_embeddings())
    trained_for = f"the drafter was made for {config.target_model or 'a target it does not name'}; pass that target."
    target_width = target.config.get_text_config(decoder=True).hidden_size
    if target_width != config.target_hidden_size:
        raise ValueError(
            f"the target's width is {target_width}, the drafter expects {config.target_hidden_size}: {trained_for}"
        )
    if config.share_target_embeddings and width != config.hidden_size:
        raise ValueError(
            f"the target's embedding is {width} wide, the drafter that shares it {config.hidden_size}: {trained_for}"
        )
    if not vocab.same_vocabulary(config.vocab_size, rows):
        raise ValueError(
            f"the target's vocabulary has {rows} ids, the drafter's {config.vocab_size} (more than padding apart):"
            f" {trained_for}"
        )
    mask = config.mask_token_id
    if config.share_target_embeddings and mask is not None and mask >= rows:
        raise ValueError(
            f"the target's embedding, which the drafter shares, has {rows} rows, none for its mask_token_id {mask}:"
            f" {trained_for}"
        )


def _present(module: Any, what: str) -> Any:
    """Returns the module. Raises RuntimeError where there is none, as before a target has been seen."""
    if module is None:
        raise RuntimeError(
            f"the drafter has no {what} yet, or no longer: its checkpoint shares the target's, which has to be kept. "
            "Call drafter.load_target_embeddings(target)."
        )
    return module


@torch.no_grad()
def unrelated(table: Tensor, other: Tensor) -> bool:
    """Returns whether rows of two embeddings (V, h) of one width point in unrelated directions, seen on up to 256
    rows."""
    if table.shape[1] != other.shape[1] or not other.is_floating_point() or table.is_meta or other.is_meta:
        return False
    rows = torch.linspace(0, min(len(table), len(other)) - 1, 256, dtype=torch.long).unique()
    similarity = cosine_similarity(
        table[rows.to(table.device)].float(), other[rows.to(other.device)].float().to(table.device)
    )
    # four standard deviations of random directions
    return bool(similarity.mean() < 4 / (len(rows) * table.shape[1]) ** 0.5)
