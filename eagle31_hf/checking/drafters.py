"""A drafter read from its config and headers, and whether it fits a target; from the Hub no weights are downloaded if
it can be avoided."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import vocab
from ..checkpoints.headers import read_headers
from ..checkpoints.read import FIELDS
from ..configuration import Eagle31Config
from ..hub import kind
from ..modeling import Eagle31DrafterModel
from ..names import refuse_unknown
from .source import TargetSource


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
    def fits(self) -> bool:
        return all(finding.fits is not False for finding in self.findings)


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
        parameters, config = list(drafter.parameters()), drafter.config
        assert isinstance(config, Eagle31Config)
        report = DrafterReport(
            drafter.name_or_path or type(drafter).__name__,
            config,
            sum(p.numel() for p in parameters),
            sum(p.numel() * p.element_size() for p in parameters),
        )
        return replace(report, findings=_findings(config, source, drafter.draft_to_target_ids()))
    name = os.path.expanduser(str(drafter))
    try:
        checkpoint = read_headers(name, overrides, convention, revision)
    except ValueError as error:
        return DrafterReport(name, findings=[Finding("format", False, " ".join(str(error).split()))])
    num_bytes = sum(stored.nbytes for stored in checkpoint.tensors.values())
    about = "; ".join(checkpoint.reasons)
    d2t = checkpoint.made.get("d2t")
    findings = [
        Finding(
            "format",
            True,
            f"{kind(checkpoint.config)}, {'native' if checkpoint.is_native else 'converted while loading'}: {about}",
        ),
        *(Finding("note", None, note) for note in checkpoint.notes),
        *_findings(checkpoint.config, source, None if d2t is None else vocab.target_ids(d2t)),
    ]
    return DrafterReport(name, checkpoint.config, checkpoint.num_parameters, num_bytes, findings)


def _findings(config: Eagle31Config, source: TargetSource, draft_ids: Tensor | None) -> list[Finding]:
    """Lines on how the drafter's config fits the target's. Configs of transformers need not have the fields that are
    compared."""
    if source.model_class is None:
        return []
    decoder = source.decoder
    return [
        _made_for(config, source),
        _width(config, decoder),
        _layers(config, decoder),
        _vocabulary(config, decoder),
        _ends(config, decoder, draft_ids),
        _shared(config),
        _positions(config, decoder),
    ]


def _size(decoder: Any, name: str) -> int | None:
    """A size that the target's config states, or None."""
    value = getattr(decoder, name, None)
    return value if type(value) is int else None


def _unstated(name: str, what: str, field: str) -> Finding:
    """A line that decides nothing, as the target's config does not state `field`."""
    return Finding(name, None, f"{what}; the target's config does not state its {field}")


def _made_for(config: Eagle31Config, source: TargetSource) -> Finding:
    """The line on the target that the drafter names: the same name is a good sign, another decides nothing."""
    named, given = config.target_model, source.name
    if named is None:
        return Finding("made for", None, "a target it does not name")
    folder = Path(given).parent if given.endswith(".json") else Path(given)
    if Path(named).name.lower() == folder.name.lower():
        return Finding("made for", True, named)
    return Finding(
        "made for", None, f"{named}; this is {given}: with another model's weights fewer drafts are accepted"
    )


def _width(config: Eagle31Config, decoder: Any) -> Finding:
    """The line on the width of the states that the drafter reads."""
    reads, has = config.target_hidden_size, _size(decoder, "hidden_size")
    if has is None:
        return _unstated("width", f"reads states of width {reads}", "hidden_size")
    if reads != has:
        return Finding(
            "width",
            False,
            f"reads states of width {reads}, the target's are {has} wide: pass the target it was made for",
        )
    own = "" if config.hidden_size == has else f", its own is {config.hidden_size}"
    return Finding("width", True, f"reads {config.num_aux_states} states of width {reads}{own}")


def _layers(config: Eagle31Config, decoder: Any) -> Finding:
    """The line on the layers whose states the drafter reads."""
    num_layers = _size(decoder, "num_hidden_layers")
    if num_layers is None:
        return _unstated(
            "layers", f"reads hidden_states {config.aux_hidden_state_layer_ids or 'by default'}", "num_hidden_layers"
        )
    try:
        ids = config.resolve_layer_ids(num_layers)
    except ValueError as error:
        return Finding("layers", False, str(error))
    said = "" if config.aux_hidden_state_layer_ids else ", the default: it names none"
    return Finding("layers", True, f"reads hidden_states {ids} of the target's 0 to {num_layers}{said}")


def _vocabulary(config: Eagle31Config, decoder: Any) -> Finding:
    """The line on the two vocabularies, which are the same where they differ by padding only."""
    num_ids = _size(decoder, "vocab_size")
    if num_ids is None:
        return _unstated("vocabulary", f"made for {config.vocab_size:,} ids", "vocab_size")
    if not vocab.same_vocabulary(config.vocab_size, num_ids):
        text = (
            f"made for {config.vocab_size:,} ids, the target has {num_ids:,}, more than padding apart: another"
            " tokenizer"
        )
        return Finding("vocabulary", False, text)
    share = config.draft_vocab_size / max(num_ids, 1)
    return Finding(
        "vocabulary", True, f"proposes {config.draft_vocab_size:,} of {num_ids:,} ids ({min(share, 1.0):.0%})"
    )


def _ends(config: Eagle31Config, decoder: Any, draft_ids: Tensor | None) -> Finding:
    """The line on the tokens that end a text, which a pruned draft vocabulary may lack."""
    ends = getattr(decoder, "eos_token_id", None)
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if draft_ids is None or not ends:
        return Finding(
            "ends",
            None,
            "it can propose what ends a text" if ends else "the target's config names no token that ends a text",
        )
    missing = [token for token in ends if token not in set(draft_ids.tolist())]
    if len(missing) == len(ends):
        return Finding(
            "ends",
            None,
            f"it never proposes the target's end of text ({ends}): the last token of a text is the target's own",
        )
    return Finding("ends", None, "it can propose what ends a text")


def _shared(config: Eagle31Config) -> Finding:
    """The line on the weights that the drafter takes from the target."""
    parts = {"embedding": config.share_target_embeddings, "head": config.share_target_head}
    return Finding(
        "weights",
        None,
        ", ".join(f"{part} {'of the target' if shared else 'of its own'}" for part, shared in parts.items()),
    )


def _positions(config: Eagle31Config, decoder: Any) -> Finding:
    """The line on the lengths of texts that drafter and target are made for."""
    own, its = config.max_position_embeddings, _size(decoder, "max_position_embeddings")
    text = f"made for texts of {own:,} tokens"
    if its is not None and own < its:
        text += f", the target for {its:,}: past its own length it is accepted less, the text stays the target's"
    return Finding("positions", None, text)
