"""What kinds of logits processors there are: which may be shown a row at a time, and which may also shape a draft."""

from math import prod

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation import logits_process


def _named(suffix: str, *names: str) -> tuple[type, ...]:
    return tuple(getattr(logits_process, name + suffix) for name in names)


# Functions of the scores alone.
POINTWISE = _named("LogitsWarper", "Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta")
# Functions of their arguments alone may also shape a draft. Any draft is lossless; one that follows the target's processors is accepted
# more often. The others keep state or call the user's code, and see only the committed text.
DRAFT_PROCESSORS = POINTWISE + _named(
    "LogitsProcessor", "RepetitionPenalty", "NoRepeatNGram", "SequenceBias", "NoBadWords", "SuppressTokens", "MinLength",
    "MinNewTokensLength",
)  # fmt: skip
# Functions of one row's text and scores: rows may be shown to them one by one, at different lengths.
ROWWISE = (
    *DRAFT_PROCESSORS,
    *_named("LogitsProcessor", "ForcedBOSToken", "ForcedEOSToken", "InfNanRemove", "SuppressTokensAtBegin"),
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.LogitNormalization,
)


def are(processors: LogitsProcessorList, kinds: tuple[type, ...]) -> bool:
    """Whether every processor is of one of these very classes."""
    return all(type(processor) in kinds for processor in processors)


def of(processors: LogitsProcessorList, kinds: tuple[type, ...]) -> LogitsProcessorList:
    """Those of these very classes."""
    return LogitsProcessorList(processor for processor in processors if type(processor) in kinds)


def temperature(processors: LogitsProcessorList) -> float:
    """What the logits are divided by, all in all."""
    return prod(processor.temperature for processor in processors if isinstance(processor, TemperatureLogitsWarper))


def apply(processors: LogitsProcessorList, contexts: list[Tensor], logits: Tensor) -> Tensor:
    """Scores for every row of logits (R, V), whose text is `contexts[r]` (1, L_r)."""
    if not processors:
        return logits
    if are(processors, POINTWISE):
        return processors(contexts[0], logits)  # type: ignore[arg-type]
    return torch.cat([processors(context, logits[r : r + 1]) for r, context in enumerate(contexts)])  # type: ignore[arg-type]
