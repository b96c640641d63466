"""What studies have in common: prompts are decoded one after the other, and figures kept as they come."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel

from .journal import Journal
from .prompts import Prompts

Counted = Callable[[Iterable[int], str], Iterable[int]]  # shows how far a loop is


@dataclass(frozen=True)
class Study:
    """A target, the prompts it is given, and the figures found so far. `counted` shows the progress over prompts."""

    target: PreTrainedModel
    prompts: Prompts
    journal: Journal
    counted: Counted


def place(who: str, condition: str, number: int) -> str:
    """Returns the name under which the journal keeps the figures of a prompt or a batch, by its number."""
    return f"{who}: {condition}: prompt {number}"
