"""The kinds of logits processors: those that may be shown one sequence at a time, those that may shape a draft, and
those whose numbers captured rounds read from tensors."""

import copy
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation import logits_process


def _named(suffix: str, *names: str) -> tuple[type, ...]:
    return tuple(getattr(logits_process, name + suffix) for name in names)


# Functions of the scores alone.
POINTWISE = _named("LogitsWarper", "Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta")
# Functions of their arguments alone may also shape a draft. Any draft is lossless; one that follows the target's
# processors is accepted more often. The others keep state or call the user's code, and see only the committed text.
DRAFT_PROCESSORS = POINTWISE + _named(
    "LogitsProcessor",
    "RepetitionPenalty",
    "NoRepeatNGram",
    "SequenceBias",
    "NoBadWords",
    "SuppressTokens",
    "MinLength",
    "MinNewTokensLength",
)
# Functions of one sequence's text and scores: sequences may be shown to them one by one, at different lengths.
PER_SEQUENCE = (
    *DRAFT_PROCESSORS,
    *_named("LogitsProcessor", "ForcedBOSToken", "ForcedEOSToken", "InfNanRemove", "SuppressTokensAtBegin"),
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.LogitNormalization,
)


# Numbers that captured rounds read from tensors, so that calls which differ in these alone share what was captured.
NUMBERS = {"Temperature": "temperature", "TopP": "top_p", "MinP": "min_p"}
TUNABLE = dict(zip(_named("LogitsWarper", *NUMBERS), NUMBERS.values(), strict=True))


def are(processors: LogitsProcessorList, kinds: tuple[type, ...]) -> bool:
    """Returns whether every processor is of one of these very classes."""
    return all(type(processor) in kinds for processor in processors)


def of(processors: LogitsProcessorList, kinds: tuple[type, ...]) -> LogitsProcessorList:
    """Returns the processors that are of one of these very classes."""
    return LogitsProcessorList(processor for processor in processors if type(processor) in kinds)


def temperature(processors: LogitsProcessorList) -> float | Tensor:
    """Returns what the logits are divided by, all in all."""
    return prod(processor.temperature for processor in processors if isinstance(processor, TemperatureLogitsWarper))


def tuned(processors: LogitsProcessorList, numbers: dict[int, Tensor], device: torch.device) -> LogitsProcessorList:
    """Returns copies of the processors that read their numbers from `numbers`, by their place in the list: tensors of
    fp64 on a device, made where there are none, which now hold the processors' own."""
    copies = LogitsProcessorList()
    for place, processor in enumerate(processors):
        name = TUNABLE.get(type(processor))
        if name is not None:
            if place not in numbers:
                with torch.inference_mode(False):  # another call may write to it in another mode
                    numbers[place] = torch.zeros((), dtype=torch.float64, device=device)
            number = numbers[place].fill_(getattr(processor, name))
            processor = copy.copy(processor)
            setattr(processor, name, number)
        copies.append(processor)
    return copies


def by_sequence(processors: LogitsProcessorList, num_sequences: int) -> list[LogitsProcessorList]:
    """Processors of PER_SEQUENCE for each sequence of a batch, where they keep something for every one of them."""
    each = [LogitsProcessorList(processors) for _ in range(num_sequences)]
    for place, processor in enumerate(processors):
        ignored = getattr(processor, "prompt_ignore_length", None)  # the repetition penalty's: of padding
        if num_sequences > 1 and isinstance(ignored, Tensor):
            for b, own in enumerate(each):
                own[place] = copy.copy(processor)
                own[place].prompt_ignore_length = ignored[b : b + 1]
    return each


def apply(processors: list[LogitsProcessorList], contexts: Sequence[Tensor], logits: Tensor) -> Tensor:
    """Scores for logits (R, V), whose texts are `contexts[r]` (1, L_r): as many of each sequence, one sequence after
    the other."""
    if not processors[0]:
        return logits
    if are(processors[0], POINTWISE):
        return processors[0](contexts[0], logits)  # type: ignore[arg-type]
    count = len(contexts) // len(processors)
    scores = [processors[r // count](context, logits[r : r + 1]) for r, context in enumerate(contexts)]  # type: ignore[arg-type]
    return torch.cat(scores)
