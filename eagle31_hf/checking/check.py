"""`check_target`: what will work with a target and a drafter, and why not, from configs, headers and a few forwards of
a tiny model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from ..generation.refusals import why_no_target
from ..targets.layers import decoder_layers, num_layers_of
from .drafters import DrafterReport, check_drafter
from .source import CONTRADICTIONS, TargetSource, read_target
from .trial import (
    CAPABILITIES,
    DIFFERENT,
    OTHERWISE,
    REFUSED,
    UNTRIED,
    WORKS,
    CannotTryError,
    Capability,
    Trial,
    build_drafter,
    build_tiny,
)


@dataclass(frozen=True)
class TargetReport:
    """The answer of `check_target`; `as_dict()` is what `eagle31 check --json` prints, under these names.

    `works`: whether the target decodes with a drafter, and with this one where one was named; `verdict` says it in a
    sentence. `architecture`: the class in transformers; `num_parameters`, `num_bytes`, `dtype`: of the whole target,
    None where they are not known; `tried`: what was run; `capabilities`: in the order of CAPABILITIES; `drafter`: None
    where none was named; `notes`: what else to know.
    """

    target: str
    works: bool
    verdict: str
    architecture: str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_parameters: int | None = None
    num_bytes: int | None = None
    dtype: str | None = None
    tried: str | None = None
    capabilities: list[Capability] = field(default_factory=list)
    drafter: DrafterReport | None = None
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Capability:
        """The capability of that name. Raises KeyError for another."""
        return {capability.name: capability for capability in self.capabilities}[name]

    def as_dict(self) -> dict[str, Any]:
        """Returns what can be written as JSON: `capabilities` is {name: {"answer", "text"}}, `drafter` {"name", "fits",
        "num_parameters", "num_bytes", "config", "findings": [{"name", "fits", "text"}]} or null, the rest as the
        fields."""
        found = dict(vars(self))
        found["capabilities"] = {each.name: {"answer": each.answer, "text": each.text} for each in self.capabilities}
        if self.drafter is not None:
            config, findings = self.drafter.config, [vars(each) for each in self.drafter.findings]
            found["drafter"] = vars(self.drafter) | {"fits": self.drafter.fits, "findings": findings}
            found["drafter"]["config"] = None if config is None else config.to_dict()
        return found


def check_target(
    target: Any,
    drafter: Any = None,
    *,
    revision: str | None = None,
    drafter_revision: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    aux_layer_convention: str | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> TargetReport:
    """Says what will work with a target, before its weights are downloaded, and whether a drafter fits it.

    `target`: a Hub repository (only its config.json is fetched), a folder, a config.json, a config, or a model, whose
    attention implementation is then the one tried. `drafter`: a folder or Hub repository of any EAGLE 3 format (config
    and headers are read), or an `Eagle31DrafterModel`; `overrides` and `aux_layer_convention` settle what its
    checkpoint leaves open, as in `read_checkpoint`.

    A tiny model of the target's very class, with its kinds of layers and random weights, is decoded with a tiny EAGLE
    3.1 drafter in every way and compared with itself alone, on the CPU in fp32. Takes seconds; `progress` is called
    with what is being done. Raises OSError for what is not there or cannot be fetched, ValueError for a config that is
    unsound.

        report = check_target("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3")
        report.works, report.verdict, report["tree"].answer
    """
    progress(f"reading the config of {target if isinstance(target, str) else type(target).__name__}")
    source = read_target(target, revision)
    found = None
    if drafter is not None:
        progress(f"reading config and headers of {drafter if isinstance(drafter, str) else type(drafter).__name__}")
        found = check_drafter(drafter, source, overrides, aux_layer_convention, drafter_revision)
    notes, tried = list(source.notes), None
    if source.model_class is None:
        capabilities = [Capability(name, REFUSED, source.why_unknown or "") for name in CAPABILITIES]
    else:
        progress(f"trying a tiny {source.model_class.__name__}")
        capabilities, tried = _try(source, notes)
    works, verdict = _verdict(capabilities, found)
    facts = _facts(source) | {"tried": tried, "capabilities": capabilities, "drafter": found, "notes": notes}
    return TargetReport(source.name, works, verdict, **facts)


def _facts(source: TargetSource) -> dict[str, Any]:
    """Sizes of the whole target."""
    if source.model_class is None:
        return {}
    config, count = source.decoder, source.num_parameters
    dtype = str(source.config.dtype or config.dtype or "").removeprefix("torch.") or None
    kind = getattr(torch, dtype or "", None)
    is_quantized = getattr(source.config, "quantization_config", None)
    num_bytes = source.num_bytes
    if num_bytes is None and count is not None and isinstance(kind, torch.dtype) and not is_quantized:
        num_bytes = count * kind.itemsize
    return {
        "architecture": source.model_class.__name__,
        "num_layers": num_layers_of(config) if hasattr(config, "num_hidden_layers") else None,
        "hidden_size": getattr(config, "hidden_size", None),
        "vocab_size": getattr(config, "vocab_size", None),
        "num_parameters": count,
        "num_bytes": num_bytes,
        "dtype": dtype,
    }


def _try(source: TargetSource, notes: list[str]) -> tuple[list[Capability], str | None]:
    """Tries a tiny model of the target. Returns every capability and a description of the model that was run, None
    where the config alone answers; adds to `notes`."""
    refusal = why_no_target(source.model_class, source.config)
    if source.config.is_encoder_decoder:
        return [Capability(name, REFUSED, refusal or "") for name in CAPABILITIES], None
    try:
        tiny, small = build_tiny(source)
        notes += small
        if not getattr(source.decoder, "use_cache", True):
            notes.append(
                "its config says use_cache false, and generate would refuse to draft: tried with use_cache=True, which"
                " you pass, too"
            )
        trial = Trial(tiny, build_drafter(tiny))
    except (CannotTryError, *CONTRADICTIONS) as error:
        reason = f"cannot be tried in small: {error}"
        *ways, last = [Capability(name, UNTRIED, reason) for name in CAPABILITIES]
        return [*(each if refusal is None else Capability(each.name, REFUSED, refusal) for each in ways), last], None
    tried = (
        f"{type(tiny).__name__} of {len(decoder_layers(tiny))} layers with random weights, fp32,"
        f" {tiny.config._attn_implementation}, transformers {transformers.__version__}"
    )
    return trial.capabilities(refusal), tried


def _verdict(capabilities: list[Capability], drafter: DrafterReport | None) -> tuple[bool, str]:
    """Returns whether the target decodes with a drafter, with this one where one was named, and the sentence that
    says so."""
    by_answer: dict[str, list[str]] = {}
    for each in capabilities:
        by_answer.setdefault(each.answer, []).append(each.name.replace("_", " "))
    first, wrong = capabilities[0], by_answer.get(DIFFERENT, [])
    if wrong and wrong != ["training"]:
        return False, f"does not work: wrong in {', '.join(wrong)}; please report it"
    if first.answer == UNTRIED:
        return False, f"not known: {first.text}"
    if first.answer == REFUSED:
        trains = (
            " (a drafter for it can be trained, for engines that serve it)" if capabilities[-1].answer == WORKS else ""
        )
        return False, f"does not work: {first.text.rstrip('.')}{trains}"
    if drafter is not None and drafter.fits is False:
        problem = next(finding for finding in drafter.findings if finding.fits is False)
        return False, f"this drafter does not fit: {problem.text.rstrip('.')}"
    if drafter is not None and drafter.fits is None:
        return False, "not known: whether this drafter fits"
    said = {OTHERWISE: "in another way", REFUSED: "but not", UNTRIED: "not tried", DIFFERENT: "wrong, please report it"}
    limits = [f"{words}: {', '.join(by_answer[answer])}" for answer, words in said.items() if answer in by_answer]
    with_whom = "" if drafter is None else ", and the drafter fits"
    return True, f"works{with_whom}" + (f" ({'; '.join(limits)})" if limits else "")
