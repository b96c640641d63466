"""What a store was made with, in a few bytes that differ when it does, and files that know when they are not what was
written."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.files import CHUNK_BYTES, NAME_OF_DTYPE, tensor_chunks

SAMPLED = 32  # values at either end of a weight: training moves all of them
# a tensor: its dtype, its shape, and its parts along the first axis
Pieces = tuple[torch.dtype, tuple[int, ...], list[Tensor]]
NO_DIGEST = "0" * 64  # where a file's sha256 stands in its header, which counts too, while it is computed
FP8 = torch.float8_e4m3fn
NAMES = NAME_OF_DTYPE | {FP8: "F8_E4M3"}


def digest(*parts: str | bytes) -> str:
    """sha256 of the parts; where one ends and the next begins counts."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()


@torch.no_grad()
def weights_fingerprint(model: PreTrainedModel) -> str:
    """Names, shapes and a sample of the values of all parameters. A wider dtype of the same values has the same
    fingerprint.

    Of weights that are offloaded only name and shape count.
    """
    parts = list[str | bytes]()
    for name, parameter in sorted(model.named_parameters()):
        parts += [name, str(tuple(parameter.shape)), _sample(parameter.detach())]
    return digest(*parts)


def _sample(weight: Tensor) -> bytes:
    """Quantized weights are integers, and hashed as they are."""
    if weight.is_meta:
        return b""
    # a DTensor's values lie on several devices
    local = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    flat = local.reshape(-1)
    ends = torch.cat([flat[:SAMPLED], flat[-SAMPLED:]])
    ends = ends.float() if ends.is_floating_point() else ends
    return ends.cpu().view(torch.uint8).numpy().tobytes()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Vocabulary, added and special tokens, and the chat template."""
    added = [(i, token.content, token.special) for i, token in sorted(tokenizer.added_tokens_decoder.items())]
    special: dict[str, Any] = tokenizer.special_tokens_map
    parts = (sorted(tokenizer.get_vocab().items()), added, sorted(special.items()), tokenizer.chat_template)
    return digest(*(repr(part) for part in parts))


def write_sealed(path: Path, tensors: dict[str, Pieces], facts: dict[str, str]) -> None:
    """A safetensors file from pieces of its tensors, none of which is copied whole. One set of tensors has one file,
    byte for byte."""
    # readers want every tensor aligned to its dtype
    names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    header, end = dict[str, Any](__metadata__={"format": "pt", "sha256": NO_DIGEST} | facts), 0
    for name in names:
        dtype, shape, _ = tensors[name]
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sha = hashlib.sha256(text)
    for name in names:
        for chunk in _chunks(tensors[name][2]):
            sha.update(chunk)
    text = len(text).to_bytes(8, "little") + text.replace(NO_DIGEST.encode(), sha.hexdigest().encode(), 1)
    _replace(path, [text], *(_chunks(tensors[name][2]) for name in names))


def _chunks(pieces: list[Tensor]) -> Iterator[memoryview]:
    return (chunk for piece in pieces if piece.numel() for chunk in tensor_chunks(piece))


def _replace(path: Path, *parts: Iterable[bytes | memoryview]) -> None:
    """Writes beside, syncs, renames; removes what a killed writer of the same file has left."""
    for leftover in path.parent.glob(f"{path.name}.*.partial"):
        leftover.unlink(missing_ok=True)
    staged = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(staged, "wb") as file:
            for part in parts:
                file.writelines(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except OSError as error:
        reason = f"{path}: could not be written ({error.strerror}); expected room for it"
        raise OSError(
            error.errno, f"{reason}. Make some and run the same command again: finished files are kept"
        ) from error
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def open_sealed(path: Path, verify: bool) -> Iterator[Any]:
    """A file of `write_sealed`, open for reading. Raises ValueError, here or in the block, when it is damaged."""
    try:
        file = safe_open(path, "pt")
        if verify and _checksum(path, file.metadata()["sha256"]) != file.metadata()["sha256"]:
            raise ValueError("its checksum differs")
        yield file
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: is damaged ({error}). Delete it and run the same prepare-data command again."
        ) from None


def _checksum(path: Path, digest: str) -> str:
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        sha = hashlib.sha256(header.replace(digest.encode(), NO_DIGEST.encode(), 1))
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
    return sha.hexdigest()
