"""A drafter read from its config and headers, and whether it fits a target; from the Hub no weights are downloaded if
it can be avoided."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .. import vocab
from ..checkpoints.headers import read_headers
from ..configuration import FIELDS, Eagle31Config
from ..hub import kind
from ..modeling import Eagle31DrafterModel
from ..names import refuse_unknown
from ..shared_target import check_fits
from ..targets.ends import shape_of
from ..targets.layers import decoder_layers
from ..targets.probe import FAILURES
from .source import TargetSource
from .trial import named

FITS = "fits"  # the line that says whether `generate` takes the two together


@dataclass(frozen=True)
class Finding:
    """One line on how a drafter fits its target. `fits` is None where the line does not decide that."""

    name: str
    fits: bool | None
    text: str


@dataclass(frozen=True)
class DrafterReport:
    """A drafter's kind, and whether it fits. `config` is None where its checkpoint could not be read, as `findings`
    then say."""

    name: str
    config: Eagle31Config | None = None
    num_parameters: int | None = None
    num_bytes: int | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def fits(self) -> bool | None:
        """Returns whether no finding speaks against it; None where the one that decides is not known."""
        answers = {finding.name: finding.fits for finding in self.findings}
        return False if False in answers.values() else answers.get(FITS, True)


def check_drafter(
    drafter: Any,
    source: TargetSource,
    overrides: Mapping[str, Any] | None = None,
    convention: str | None = None,
    revision: str | None = None,
) -> DrafterReport:
    """Returns what the drafter is, and every way in which it fits the target or does not; nothing of that where
    transformers has no model for the target.

    `drafter`: a folder, a Hub repository, or an `Eagle31DrafterModel`. A checkpoint that cannot be read or is ambiguous
    gives a finding, not an error. Raises OSError where there is no drafter, ValueError for `overrides` that are no
    fields of Eagle31Config.
    """
    refuse_unknown(overrides or {}, FIELDS, "fields of Eagle31Config")
    if isinstance(drafter, Eagle31DrafterModel):
        name, config = drafter.name_or_path or type(drafter).__name__, drafter.config
        assert isinstance(config, Eagle31Config)
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in drafter.parameters())
        findings = [*_findings(config, source, drafter.draft_to_target_ids())]
        return DrafterReport(name, config, drafter.num_parameters(), num_bytes, findings)
    name = os.path.expanduser(str(drafter))
    try:
        checkpoint = read_headers(name, overrides, convention, revision)
    except ValueError as error:
        return DrafterReport(name, findings=[Finding("format", False, " ".join(str(error).split()))])
    config, d2t = checkpoint.config, checkpoint.made.get("d2t")
    how = "native" if checkpoint.is_native else "converted while loading"
    findings = [
        Finding("format", True, f"{kind(config)}, {how}: {'; '.join(checkpoint.reasons)}"),
        *(Finding("note", None, note) for note in checkpoint.notes),
        *_findings(config, source, None if d2t is None else vocab.target_ids(d2t)),
    ]
    num_bytes = sum(stored.entry().nbytes for stored in checkpoint.tensors.values())
    return DrafterReport(name, config, checkpoint.num_parameters, num_bytes, findings)


def _findings(config: Eagle31Config, source: TargetSource, draft_ids: Tensor | None) -> Iterator[Finding]:
    """Lines on how the drafter fits the target. `draft_ids`: the target's ids in a pruned draft vocabulary."""
    if source.model_class is None:
        return
    yield Finding(FITS, *_fits(config, source.outline))
    ends = getattr(source.decoder, "eos_token_id", None)
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    text = "it can propose what ends a text"
    if not ends:
        text = "the target's config names no token that ends a text"
    elif draft_ids is not None and not set(ends) & set(draft_ids.tolist()):
        text = f"it never proposes the target's end of text ({ends}): the last token of a text is the target's own"
    yield Finding("ends", None, text)
    longest, its = config.max_position_embeddings, getattr(source.decoder, "max_position_embeddings", None)
    text = f"made for texts of {longest:,} tokens"
    if type(its) is int and longest < its:
        text += f", the target for {its:,}: past its own length it is accepted less, the text stays the target's"
    yield Finding("positions", None, text)


def _fits(config: Eagle31Config, target: Any) -> tuple[bool | None, str]:
    """Returns whether `generate` takes a drafter of this config with the target, None where that is not known, and the
    line that says it. `target`: its outline."""
    if target is None:
        return None, "not known: the target cannot be built by its config alone"
    try:
        check_fits(config, target)
        num_layers = len(decoder_layers(target))
        ids = config.resolve_layer_ids(num_layers)
    except ValueError as error:
        return False, str(error)
    except FAILURES as error:  # of a class that lacks what is compared
        return None, f"not known: {named(error)}"
    rows, drafted = shape_of(target.get_input_embeddings())[0], config.draft_vocab_size
    return True, f"reads hidden_states {ids} of the target's 0 to {num_layers}, proposes {drafted:,} of {rows:,} ids"
