"""The drift report: states, attention and acceptance of drafters by depth, what happens to them where something is
changed, and in longer contexts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from ..configuration import Eagle31Config
from ..diagnostics.acceptance import chain_knobs, counts_of, measure_acceptance
from ..diagnostics.drift import measure_drift
from ..diagnostics.interventions import INTERVENTIONS, Install, applied
from ..modeling import Eagle31DrafterModel
from .figures import Row, accepted_drafts
from .journal import Study, counted, place

PLAIN = "as it is"
FALLEN = 0.9  # share of the drafts accepted in short contexts, below which remedies are tried in long ones
SLOWER_ROPE = 2.0
Load = Callable[..., Eagle31DrafterModel]  # takes fields of the config to change


@dataclass(frozen=True)
class Context:
    """Prompts in a context of `length` tokens, with a `remedy` or none (""): a row for each, and in `short` those of
    PLAIN of the same prompts."""

    length: int
    remedy: str
    rows: list[Row]
    short: list[Row]


@dataclass
class Measured:
    """The figures of a drafter: `rows` by condition, a row for each prompt, and the same in longer `contexts`,
    with remedies at the longest one."""

    label: str
    config: Eagle31Config
    rows: dict[str, list[Row]] = field(default_factory=dict)
    contexts: list[Context] = field(default_factory=list)

    @property
    def plain(self) -> list[Row]:
        return self.rows[PLAIN]

    @property
    def longest(self) -> Context:
        """The longest context, without a remedy."""
        return max((one for one in self.contexts if not one.remedy), key=lambda one: one.length)


@dataclass(frozen=True)
class DriftStudy(Study):
    """Measures the drift of drafters of one target on the same prompts, by chains of `depth`: `max_new_tokens` of every
    prompt, contexts of these `lengths`, and interventions or not."""

    depth: int
    max_new_tokens: int
    lengths: tuple[int, ...]
    has_interventions: bool

    def measure(self, label: str, load: Load) -> Measured:
        """Measures a drafter: as it is, with interventions, in longer contexts, and in the longest with remedies, where
        less is accepted there than in short ones."""
        drafter, prompts = load(), dict(enumerate(self.prompts.ids))
        found = Measured(label, drafter.config)
        found.rows[PLAIN] = self._each(label, PLAIN, prompts, partial(self._watch, drafter))
        if not any(row["chains"] for row in found.plain):
            said = f"{label}: no chain of {self.depth} in {len(prompts)} prompts, whose texts end before"
            raise ValueError(f"{said}; expected a smaller --depth, or prompts with longer answers.")
        for name, install in INTERVENTIONS.items() if self.has_interventions else []:
            found.rows[name] = self._each(label, name, prompts, partial(self._count, drafter, install))
        for length in self.lengths:
            self._lengthen(found, length, "", drafter)
        if not found.contexts:
            return found
        longest = found.longest
        now, before = (accepted_drafts(rows).value for rows in (longest.rows, longest.short))
        if now is not None and before is not None and now < FALLEN * before:
            for remedy, fields in remedies_of(found.config, longest.length, self.lengths).items():
                self._lengthen(found, longest.length, remedy, load(**fields))
        return found

    def _lengthen(self, found: Measured, length: int, remedy: str, drafter: Eagle31DrafterModel) -> None:
        """Measures the prompts that can be put in a context of that length, where there are any."""
        longer = dict(self.prompts.lengthened(length))
        if longer:
            name, count = context_name(length, remedy), partial(self._count, drafter, None)
            rows = self._each(found.label, name, longer, count)
            found.contexts.append(Context(length, remedy, rows, [found.plain[number] for number in longer]))

    def _each(
        self, label: str, condition: str, prompts: Mapping[int, Tensor], measure: Callable[[Tensor], Row]
    ) -> list[Row]:
        """Measures prompts by their numbers, those that the journal does not know."""
        return [
            self.journal.once(place(label, condition, number), partial(measure, prompts[number]))
            for number in counted([*prompts], f"{label}, {condition}")
        ]

    def _watch(self, drafter: Eagle31DrafterModel, ids: Tensor) -> Row:
        return measure_drift(self.target, drafter, self._batch(ids), self.depth, self.max_new_tokens)

    def _count(self, drafter: Eagle31DrafterModel, install: Install | None, ids: Tensor) -> Row:
        prompts, knobs = [self._batch(ids)], chain_knobs(self.depth)
        with applied(drafter, install):
            return counts_of(measure_acceptance(self.target, drafter, prompts, knobs, self.max_new_tokens))

    def _batch(self, ids: Tensor) -> Tensor:
        return ids[None].to(self.target.device)


def context_name(length: int, remedy: str) -> str:
    """Returns the name of the condition."""
    return f"{length} tokens, {remedy}" if remedy else f"{length} tokens"


def remedies_of(config: Eagle31Config, length: int, lengths: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Returns what may help at a context of that length, by name: fields of the drafter's config. Windows of the
    shorter lengths, and of a quarter of it; slower rope, by which positions lie closer together (position
    interpolation, arXiv 2306.15595), where it is the plain one."""
    layers = ["sliding_attention"] * config.num_hidden_layers
    windows = sorted({shorter for shorter in lengths if shorter < length} | {length // 4})
    found: dict[str, dict[str, Any]] = {
        f"window of {window}": {"layer_types": layers, "sliding_window": window} for window in windows
    }
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    if rope.get("rope_type") == "default":
        slower = {**rope, "rope_type": "linear", "factor": SLOWER_ROPE}
        found[f"rope {SLOWER_ROPE:g} times as slow"] = {"rope_parameters": slower}
    return found


def default_lengths(longest_prompt: int, room: int, max_new_tokens: int) -> tuple[int, ...]:
    """Returns powers of 4 times 256 above the longest prompt and within the target's context."""
    lengths = (256 * 4**power for power in range(8))
    return tuple(length for length in lengths if longest_prompt < length <= room - max_new_tokens)
