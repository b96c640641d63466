"""The drift report: states, attention and acceptance of drafters by depth, what happens to them where something is
changed, and in longer contexts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from ..configuration import Eagle31Config
from ..diagnostics.acceptance import chain_knobs, counts_of, measure_acceptance
from ..diagnostics.drift import measure_drift
from ..diagnostics.interventions import Install, applied, interventions, rope_fields, untouched, window_fields
from ..modeling import Eagle31DrafterModel
from .figures import Row, accepted_drafts
from .study import Load, Study

PLAIN = "as it is"
FALLEN = 0.9  # share of the drafts accepted in short contexts, below which remedies are tried in long ones
SLOWER_ROPE = 2.0


@dataclass(frozen=True)
class Settings:
    """What is measured: chains of `depth`, `max_new_tokens` of every prompt, contexts of these `lengths`, and
    interventions or not."""

    depth: int = 16
    max_new_tokens: int = 96
    lengths: tuple[int, ...] = ()
    has_interventions: bool = True


@dataclass
class Measured:
    """What was measured of a drafter: `rows` by condition, a row for each prompt; by length of the context those of
    PLAIN of the same prompts in `short`; `remedies`, by their names, at the longest context."""

    label: str
    config: Eagle31Config
    rows: dict[str, list[Row]] = field(default_factory=dict)
    contexts: dict[int, list[Row]] = field(default_factory=dict)
    short: dict[int, list[Row]] = field(default_factory=dict)
    remedies: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def plain(self) -> list[Row]:
        return self.rows[PLAIN]


@dataclass(frozen=True)
class DriftStudy(Study):
    """Measures the drift of drafters of one target on the same prompts."""

    settings: Settings

    def measure(self, label: str, load: Load) -> Measured:
        """Measures a drafter: as it is, with interventions, in longer contexts, and there with remedies."""
        drafter, prompts = load(), self.as_served()
        found = Measured(label, drafter.config)
        found.rows[PLAIN] = self.each(label, PLAIN, prompts, partial(self._watch, drafter))
        if not any(row["chains"] for row in found.plain):
            raise ValueError(
                f"{label}: no chain of {self.settings.depth} in {len(prompts)} prompts, whose texts end before;"
                " expected a smaller --depth, or prompts with longer answers."
            )
        for one in interventions() if self.settings.has_interventions else []:
            found.rows[one.name] = self.each(label, one.name, prompts, partial(self._count, drafter, one.install))
        for length in self.settings.lengths:
            longer = self.lengthened(length)
            if longer:
                name, count = f"{length} tokens", partial(self._count, drafter, untouched)
                found.contexts[length] = self.each(label, name, longer, count)
                found.short[length] = [found.plain[number] for number in longer]
        if found.contexts:
            self._try_remedies(found, load)
        return found

    def _try_remedies(self, found: Measured, load: Load) -> None:
        """Measures remedies at the longest context, where less is accepted than in short ones."""
        length = max(found.contexts)
        now, before = (accepted_drafts(rows).value for rows in (found.contexts[length], found.short[length]))
        if now is None or before is None or now >= FALLEN * before:
            return
        longer = self.lengthened(length)
        for remedy, fields in remedies_of(found.config, length, self.settings.lengths).items():
            count = partial(self._count, load(**fields), untouched)
            found.remedies[remedy] = self.each(found.label, f"{length} tokens, {remedy}", longer, count)

    def _watch(self, drafter: Eagle31DrafterModel, ids: Tensor) -> Row:
        settings = self.settings
        return measure_drift(self.target, drafter, self._batch(ids), settings.depth, settings.max_new_tokens)

    def _count(self, drafter: Eagle31DrafterModel, install: Install, ids: Tensor) -> Row:
        knobs, new_tokens = chain_knobs(self.settings.depth), self.settings.max_new_tokens
        with applied(drafter, install):
            return counts_of(measure_acceptance(self.target, drafter, [self._batch(ids)], knobs, new_tokens))

    def _batch(self, ids: Tensor) -> Tensor:
        return ids[None].to(self.target.device)


def remedies_of(config: Eagle31Config, length: int, lengths: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Returns what may help at a context of that length, by name: fields of the drafter's config. Windows of the
    shorter lengths, and of a quarter of it; slower rope, where it is the plain one."""
    windows = sorted({shorter for shorter in lengths if shorter < length} | {length // 4})
    found = {f"window of {window}": window_fields(window, config.num_hidden_layers) for window in windows}
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    if rope.get("rope_type") == "default":
        found[f"rope {SLOWER_ROPE:g} times as slow"] = rope_fields(rope, SLOWER_ROPE)
    return found


def default_lengths(longest_prompt: int, room: int, max_new_tokens: int) -> tuple[int, ...]:
    """Returns powers of 4 times 256 above the longest prompt and within the target's context."""
    lengths = (256 * 4**power for power in range(8))
    return tuple(length for length in lengths if longest_prompt < length <= room - max_new_tokens)
