"""The least time of a round: the bytes it has to read, at the speed that a copy moves bytes.

    round = (target's weights + keys and values of the context + drafter's weights x steps) / bandwidth

A forward reads all weights but those of the embedding, of which it looks up a few rows. Activations are not counted.
"""

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from eagle31_hf.modeling import Eagle31DrafterModel


@dataclass(frozen=True)
class Floor:
    """Bytes that forwards read: of the target its `target_weights` and, for each token of the context, `target_token`
    of keys and values; of the drafter `drafter_weights` and `drafter_token`, and once a round `drafter_fusion`, what
    fuses the target's states."""

    target_weights: int
    target_token: int
    drafter_weights: int
    drafter_token: int
    drafter_fusion: int

    @classmethod
    def of(cls, target: PreTrainedModel, drafter: Eagle31DrafterModel) -> "Floor":
        head = drafter.lm_head if drafter.lm_head is not None else target.get_output_embeddings()
        own = {name: _bytes(weight) for name, weight in drafter.named_parameters() if "embed_tokens" not in name}
        fusion = sum(size for name, size in own.items() if name.startswith(("fc.", "fc_norm.")))
        shared = 0 if drafter.lm_head is not None else _bytes(head.weight)
        return cls(
            target_weights=_read_by(target),
            target_token=_bytes_of_token(target),
            drafter_weights=sum(own.values()) - fusion + shared,
            drafter_token=_bytes_of_token(drafter),
            drafter_fusion=fusion,
        )

    def verify(self, context: float, num_sequences: int = 1) -> float:
        """Bytes of a verification after contexts of so many tokens."""
        return self.target_weights + num_sequences * context * self.target_token

    def draft(self, context: float, steps: int, num_sequences: int = 1) -> float:
        """Bytes of drafting by so many forwards of the drafter."""
        return self.drafter_fusion + steps * (self.drafter_weights + num_sequences * context * self.drafter_token)

    def milliseconds(self, context: float, steps: int, num_sequences: int, bandwidth: float) -> dict[str, float]:
        """The floors of a round and its parts, in ms; `bandwidth` in bytes a second."""
        verify = 1000 * self.verify(context, num_sequences) / bandwidth
        draft = 1000 * self.draft(context, steps, num_sequences) / bandwidth
        step = 1000 * (self.drafter_weights + num_sequences * context * self.drafter_token) / bandwidth
        return {"round": verify + draft, "verify": verify, "draft": draft, "step": step}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _bytes(weight: Any) -> int:
    return weight.numel() * weight.element_size()


def _read_by(target: PreTrainedModel) -> int:
    """Bytes of the weights that a forward reads whole; an embedding that is the head, too, is read by the head."""
    embedding: Any = target.get_input_embeddings()
    head: Any = target.get_output_embeddings()
    is_looked_up = embedding.weight is not head.weight
    return sum(map(_bytes, target.parameters())) - is_looked_up * _bytes(embedding.weight)


def _bytes_of_token(model: Any) -> int:
    """Bytes of a token's keys and values in all layers."""
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = next(model.parameters()).element_size()
    return 2 * config.num_hidden_layers * config.num_key_value_heads * width * size
