"""What studies have in common: prompts are decoded one after the other, and figures kept as they come."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..modeling import Eagle31DrafterModel
from .figures import Row
from .journal import Journal
from .prompts import Prompts

Load = Callable[..., Eagle31DrafterModel]  # takes fields of the config to change
# how a report says what `lengthened` makes
LENGTHENED = (
    "Texts go on for as many tokens; chats have the words of other prompts in front of their question. Prompts that are"
    " longer already, or for which there is not as much text, are left out."
)
Counted = Callable[[Iterable[int], str], Iterable[int]]  # shows how far a loop is


@dataclass(frozen=True)
class Study:
    """A target, the prompts it is given, and the figures found so far. `counted` shows the progress over prompts."""

    target: PreTrainedModel
    prompts: Prompts
    journal: Journal
    counted: Counted

    def each(self, label: str, condition: str, prompts: Mapping[int, Any], measure: Callable[[Any], Row]) -> list[Row]:
        """Measures prompts by their numbers, those that the journal does not know."""
        return [
            self.journal.once(f"{label}: {condition}: prompt {number}", partial(measure, prompts[number]))
            for number in self.counted([*prompts], f"{label}, {condition}")
        ]

    def as_served(self) -> dict[int, Tensor]:
        """Returns the ids (T,) of the prompts by their numbers."""
        return dict(enumerate(self.prompts.ids))

    def lengthened(self, length: int) -> dict[int, Tensor]:
        """Returns the ids (T,) of the prompts that can be made so long, by their numbers."""
        pairs = {number: self.prompts.lengthened(number, length) for number in range(len(self.prompts))}
        return {number: ids for number, ids in pairs.items() if ids is not None}
