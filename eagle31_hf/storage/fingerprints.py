"""Fingerprints: hashes by which a store knows the target, the tokenizer and the options that its data was made with."""

import hashlib
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLED = 32  # values at either end of a weight: training moves all of them


def digest(*parts: str | bytes) -> str:
    """Returns the sha256 of the parts, in hexadecimal; where one ends and the next begins counts."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()


@torch.no_grad()
def weights_fingerprint(model: PreTrainedModel, values: bool = True) -> str:
    """Returns the digest of the names and shapes of all parameters and of a sample of their values.

    The same values in a wider dtype have the same fingerprint. Of offloaded weights only name and shape count, and of
    all of them without `values`.
    """
    parts = list[str | bytes]()
    for name, parameter in sorted(model.named_parameters()):
        parts += [name, str(tuple(parameter.shape)), _sample(parameter.detach()) if values else b""]
    return digest(*parts)


def _sample(weight: Tensor) -> bytes:
    """Returns the first and last values of a weight, floats as fp32. Quantized weights are integers, and stay as they
    are."""
    if weight.is_meta:
        return b""
    # a DTensor's values lie on several devices
    local = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    flat = local.reshape(-1)
    ends = torch.cat([flat[:SAMPLED], flat[-SAMPLED:]])
    ends = ends.float() if ends.is_floating_point() else ends
    return ends.cpu().view(torch.uint8).numpy().tobytes()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the digest of the vocabulary, the added and special tokens, and the chat template."""
    added = [(i, token.content, token.special) for i, token in sorted(tokenizer.added_tokens_decoder.items())]
    special: dict[str, Any] = tokenizer.special_tokens_map
    parts = (sorted(tokenizer.get_vocab().items()), added, sorted(special.items()), tokenizer.chat_template)
    return digest(*(repr(part) for part in parts))
