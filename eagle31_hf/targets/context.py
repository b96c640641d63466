"""The context of a target: how many tokens it reads, and text that is too long for it; and long prompts read in pieces,
between which a call can be ended."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

# No text that a target can read whole has more characters for each token, and some tokens more. A longer one is refused
# before it is made into tokens, which takes seconds and gigabytes.
CHARACTERS_A_TOKEN = 16
MORE_TOKENS = 4096
SECONDS = 0.5  # that one piece may take: a call ends within one or two of them
LEAST, MOST = 32, 4096  # tokens of a piece
TRIED = 64  # tokens of the forward that is timed


def context_of(target: PreTrainedModel) -> int | None:
    """Returns how many tokens a target reads, its answer included; None where its config sets no end."""
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return context if isinstance(context, int) else None


def room_for(answer: int, prompt: int, context: int | None) -> int:
    """Returns how many tokens of an `answer` a context has room for after a `prompt` of so many. Raises ValueError for
    a prompt without tokens, and for one that fills the context."""
    if not prompt:
        raise ValueError("the prompt makes no tokens; expected text.")
    room = answer if context is None else min(answer, context - prompt)
    if room <= 0:
        raise ValueError(
            f"the prompt has {prompt} tokens; expected fewer than {context}, which is all that the target reads, its"
            " answer included."
        )
    return room


def why_too_long(characters: int, context: int | None) -> str | None:
    """Returns why a text of so many characters cannot fit into a context, None where it may."""
    most = None if context is None else CHARACTERS_A_TOKEN * (context + MORE_TOKENS)
    if most is None or characters <= most:
        return None
    return f"has {characters} characters; expected at most {most}: the target's context is {context} tokens."


def piece_of(target: PreTrainedModel, drafter: Any, **knobs: Any) -> int | None:
    """Returns how many tokens of a prompt the target reads in about SECONDS, a power of two, for `prefill_chunk_size`;
    None where prompts cannot be read in pieces. `knobs`: arguments of generate() that say how to draft. It takes a
    short generate() and two forwards of TRIED tokens."""
    ids = torch.tensor([[1, 2, 3]], device=target.device)
    trial: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 2}
    generate: Any = target.generate
    try:
        generate(ids, **trial, assistant_model=drafter, prefill_chunk_size=2, **knobs)
    except (ValueError, RuntimeError, TypeError, AttributeError, LookupError) as error:
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
