"""Parts that the tests plug into generate to see what it does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from eagle31_hf import Eagle31DrafterModel, track_acceptance
from eagle31_hf.generation.rejection_sampler import RejectionSampler
from eagle31_hf.generation.sequences import Sequences
from eagle31_hf.generation.tree import DraftTokens


def speculate(target: PreTrainedModel, drafter: Eagle31DrafterModel, prompt: Tensor, **kwargs):
    """What generate returns with the drafter, and the statistics."""
    with track_acceptance() as stats:
        output = target.generate(prompt, assistant_model=drafter, **kwargs)
    return output, stats


def as_tree(drafts: DraftTokens) -> DraftTokens:
    """The drafts with their parents, depths and ancestors written out, those of a chain too."""
    if not drafts.is_chain:
        return drafts
    num_drafts = drafts.ids.shape[1]
    return DraftTokens.tree(drafts.ids, torch.arange(num_drafts).expand_as(drafts.ids), num_drafts, drafts.log_probs)


@contextmanager
def noting(note: Callable[[Sequences, DraftTokens, Tensor], Any]) -> Iterator[list]:
    """A context in which `note` is called with what every `RejectionSampler.accept` is given, the prompt's too, and its
    answers are listed. A `LockStepSampler` is not watched."""
    notes: list = []
    accept = RejectionSampler.accept

    def noted(self, sequences, drafts, logits, ends):
        notes.append(note(sequences, drafts, logits))
        return accept(self, sequences, drafts, logits, ends)

    with patch.object(RejectionSampler, "accept", noted):
        yield notes


def num_hooks(target: PreTrainedModel) -> int:
    """How many hooks of this library are on the target; transformers may have hooks of its own there."""
    hooks = [
        hook
        for module in target.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return sum(hook.__module__.startswith("eagle31_hf") for hook in hooks)


class Diary(LogitsProcessor):
    """Keeps state of its own, as a grammar does: what it does next depends on how often it was called, and with which
    prefixes."""

    def __init__(self, vocab_size: int):
        self.prefixes: list[list[int]] = []
        self.favours = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids[0].tolist())
        return scores + self.favours[len(self.prefixes)]


class Puts(BaseStreamer):
    """Every call it gets, in order."""

    def __init__(self):
        self.calls: list = []

    def put(self, value: Tensor) -> None:
        self.calls.append((tuple(value.shape), value.dtype, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


class Countdown(StoppingCriteria):
    """Stops after the `count`-th token it is shown, and notes every text it is shown."""

    def __init__(self, count: int):
        self.count, self.texts = count, []

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        self.texts.append(input_ids[0].tolist())
        return torch.full((len(input_ids),), len(self.texts) >= self.count)


class InterruptError(Exception):
    """What the user's code raises in the middle of a generate."""


def raise_at(call: int, result=None):
    """A function to use as a processor, criterion or streamer method: raises at the `call`-th call, else returns
    `result(args)`."""
    calls = []

    def function(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise InterruptError
        return result(*args) if result else None

    return function
