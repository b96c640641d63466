"""Long prompts read in pieces, between which a call can be ended."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .context import context_of

logger = logging.get_logger(__name__)
SECONDS = 0.5  # that one piece may take: a call ends within one or two of them
LEAST, MOST = 32, 4096  # tokens of a piece
TRIED = 64  # tokens of the forward that is timed


def piece_of(target: PreTrainedModel, drafter: Any, **knobs: Any) -> int | None:
    """Returns how many tokens of a prompt the target reads in about SECONDS, a power of two, for `prefill_chunk_size`;
    None where prompts cannot be read in pieces. `knobs`: arguments of generate() that say how to draft. It takes a
    short generate() and two forwards of TRIED tokens."""
    ids = torch.tensor([[1, 2, 3]], device=target.device)
    trial: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 2}
    generate: Any = target.generate
    try:
        generate(ids, **trial, assistant_model=drafter, prefill_chunk_size=2, **knobs)
    except (ValueError, RuntimeError, TypeError) as error:
        logger.warning_once(
            f"{type(target).__name__}: prompts are read whole, as the trial of two pieces failed: {error}"
        )
        return None
    affordable = SECONDS / min(_seconds_a_token(target) for _ in range(2))  # the first forward prepares more
    tokens = int(min(MOST, max(LEAST, affordable)))
    return 1 << (tokens.bit_length() - 1)


@torch.no_grad()
def _seconds_a_token(target: PreTrainedModel) -> float:
    ids = torch.ones(1, min(TRIED, context_of(target) or TRIED), dtype=torch.long, device=target.device)
    began = time.perf_counter()
    target(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1].argmax().item()
    return (time.perf_counter() - began) / ids.shape[1]


@contextmanager
def checking_forwards(target: PreTrainedModel, check: Callable[[], None]) -> Iterator[None]:
    """A context in which `check` is called before every forward of the target, with a drafter or without, and so
    between the pieces of a long prompt (`prefill_chunk_size`); what it raises ends the call. Forwards of captured
    rounds are replayed, and not told. It is for calls of one thread at a time."""
    with target.register_forward_pre_hook(lambda *_: check()):
        yield
