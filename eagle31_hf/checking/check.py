"""`check_target`: what will work with a target and a drafter, and why not, from configs, headers and a few forwards of
a tiny model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from ..configuration import default_layer_ids
from ..generation.refusals import why_no_target
from ..targets.layers import decoder_layers
from .drafters import DrafterReport, check_drafter
from .source import CONTRADICTIONS, TargetSource, count_parameters, read_target
from .trial import (
    CHAINS,
    DIFFERENT,
    IN_STEP,
    REFUSED,
    SAME_TEXT,
    UNTRIED,
    WAYS,
    CannotTryError,
    Outcome,
    Trial,
    build_drafter,
    build_tiny,
)

WORKS, OTHERWISE = "works", "works otherwise"
ANSWERS = {
    SAME_TEXT: WORKS,
    CHAINS: OTHERWISE,
    IN_STEP: OTHERWISE,
    REFUSED: REFUSED,
    DIFFERENT: DIFFERENT,
    UNTRIED: UNTRIED,
}
CAPABILITIES = (*WAYS, "sampling", "training")
SAID_OF_SAME_TEXT = {
    "batch": "rows of different lengths each at its own pace, same text as the target alone",
    "sampling": "one text for one seed, whatever is drafted",
    "training": "a first step has a loss and finite gradients",
}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Capability:
    """One thing to do with a target, and whether it works. `name`: one of CAPABILITIES. `answer`: "works", "works
    otherwise" (the same text in another way), "refused" (generate or the trainer says so before anything is done),
    "different" (it went wrong: please report) or "not tried". `text`: how, or why not."""

    name: str
    answer: str
    text: str


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
        found = {name: value for name, value in vars(self).items() if name not in ("capabilities", "drafter")}
        found["capabilities"] = {each.name: {"answer": each.answer, "text": each.text} for each in self.capabilities}
        drafter = self.drafter
        found["drafter"] = (
            None
            if drafter is None
            else {
                "name": drafter.name,
                "fits": drafter.fits,
                "num_parameters": drafter.num_parameters,
                "num_bytes": drafter.num_bytes,
                "config": None if drafter.config is None else drafter.config.to_dict(),
                "findings": [vars(each) for each in drafter.findings],
            }
        )
        return found


def check_target(
    target: Any,
    drafter: Any = None,
    *,
    revision: str | None = None,
    drafter_revision: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    aux_layer_convention: str | None = None,
    progress: Progress = lambda message: None,
) -> TargetReport:
    """Says what will work with a target, before its weights are downloaded, and whether a drafter fits it.

    `target`: a Hub repository (only its config.json is fetched), a folder, a config.json, a config, or a model, whose
    attention implementation is then the one tried. `drafter`: a folder or Hub repository of any EAGLE 3 format (config
    and headers are read), or an `Eagle31DrafterModel`; `overrides` and `aux_layer_convention` settle what its
    checkpoint leaves open, as in `read_checkpoint`.

    A tiny model of the target's very class, with its kinds of layers and random weights, is decoded with a tiny drafter
    in every way and compared with itself alone, on the CPU in fp32. Takes seconds; `progress` is called with what is
    being done. Raises OSError for what is not there or cannot be fetched, ValueError for a config that is unsound.

        report = check_target("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3")
        report.works, report.verdict, report["tree"].answer
    """
    progress(f"reading the config of {target if isinstance(target, str) else type(target).__name__}")
    source = read_target(target, revision)
    found = None
    if drafter is not None:
        progress(f"reading config and headers of {drafter if isinstance(drafter, str) else type(drafter).__name__}")
        found = check_drafter(drafter, source, overrides, aux_layer_convention, drafter_revision)
    if source.model_class is None:
        refused = [Capability(name, REFUSED, source.why_unknown or "") for name in CAPABILITIES]
        return TargetReport(
            source.name, False, f"does not work: {source.why_unknown}", capabilities=refused, drafter=found
        )
    progress(f"trying a tiny {source.model_class.__name__}")
    notes = list(source.notes)
    capabilities, tried = _try(source, found, notes)
    works, verdict = _verdict(capabilities, found)
    return TargetReport(
        source.name,
        works,
        verdict,
        **_facts(source),
        tried=tried,
        capabilities=capabilities,
        drafter=found,
        notes=notes,
    )


def _facts(source: TargetSource) -> dict[str, Any]:
    """Sizes of the whole target."""
    config, count = source.decoder, count_parameters(source)
    dtype = str(source.config.dtype or config.dtype or "").removeprefix("torch.") or None
    num_bytes, kind = source.num_bytes, getattr(torch, dtype or "", None)
    is_known = (
        count is not None and isinstance(kind, torch.dtype) and not getattr(source.config, "quantization_config", None)
    )
    if num_bytes is None and is_known:
        num_bytes = count * kind.itemsize
    return {
        "architecture": source.model_class.__name__,
        "num_layers": getattr(config, "num_hidden_layers", None),
        "hidden_size": getattr(config, "hidden_size", None),
        "vocab_size": getattr(config, "vocab_size", None),
        "num_parameters": count,
        "num_bytes": num_bytes,
        "dtype": dtype,
    }


def _try(source: TargetSource, drafter: DrafterReport | None, notes: list[str]) -> tuple[list[Capability], str | None]:
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
        like = None if drafter is None else drafter.config
        trial = Trial(tiny, build_drafter(tiny, like, tiny_layer_ids(source, tiny, like)))
    except (CannotTryError, *CONTRADICTIONS) as error:
        reason = f"cannot be tried in small: {error}"
        answer, text = (UNTRIED, reason) if refusal is None else (REFUSED, refusal)
        return [
            Capability(name, answer if name != "training" else UNTRIED, text if name != "training" else reason)
            for name in CAPABILITIES
        ], None
    outcomes = _outcomes(trial, refusal)
    layers = len(decoder_layers(tiny))
    attention = tiny.config._attn_implementation
    tried = (
        f"{type(tiny).__name__} of {layers} layers with random weights, fp32, {attention}, transformers"
        f" {transformers.__version__}"
    )
    return [_capability(name, outcome) for name, outcome in outcomes.items()], tried


def _outcomes(trial: Trial, refusal: str | None) -> dict[str, Outcome]:
    """The outcome of each capability. Where chains are refused, so is all other decoding."""
    refusal = refusal or trial.why_no_drafts()
    first = Outcome(REFUSED, refusal) if refusal else trial.greedy("chain")
    if first.word == REFUSED:
        return dict.fromkeys((*WAYS, "sampling"), first) | {"training": trial.training()}
    outcomes = {"chain": first} | {way: trial.greedy(way) for way in WAYS if way != "chain"}
    if outcomes["tree"].word == CHAINS and outcomes["auto"].word == SAME_TEXT:
        outcomes["auto"] = outcomes["tree"]
    return outcomes | {"sampling": trial.sampling(), "training": trial.training()}


def _capability(name: str, outcome: Outcome) -> Capability:
    text = {
        SAME_TEXT: SAID_OF_SAME_TEXT.get(name, "same text as the target alone"),
        CHAINS: f"chains instead of trees: {outcome.reason}",
        IN_STEP: f"rows keep step, in chains: {outcome.reason}",
    }.get(outcome.word, outcome.reason)
    return Capability(name, ANSWERS[outcome.word], text)


def tiny_layer_ids(source: TargetSource, tiny: Any, like: Any) -> list[int] | None:
    """Layer ids of the tiny target for those that the drafter, or a default one, reads in the large target: at the same
    share of the depth. [2, 18, 33] of 36 layers become [0, 2, 4] of 4. Layers that share others' keys are scaled apart:
    where these are the last 12 and the last 2, ids 24 and 25 become 2 and 3.

    None where ids cannot be resolved, or there are more than the tiny target has.
    """
    config, small = source.decoder, tiny.config.get_text_config(decoder=True)
    whole, count = config.num_hidden_layers, small.num_hidden_layers
    try:
        ids = like.resolve_layer_ids(whole) if like is not None else default_layer_ids(whole)
    except ValueError:
        return None
    shared, tiny_shared = (getattr(each, "num_kv_shared_layers", 0) or 0 for each in (config, small))
    front, tiny_front = whole - shared, count - tiny_shared
    found: list[int] = []
    for n, i in enumerate(ids):
        scaled = (
            round(i * tiny_front / (front or 1))
            if i <= front
            else tiny_front + max(1, round((i - front) * tiny_shared / shared))
        )
        # ascending, with room for those that come after
        least, most = found[-1] + 1 if found else 0, count - (len(ids) - 1 - n)
        found.append(min(max(scaled, least), most))
    return found if found[0] >= 0 else None


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
    if drafter is not None and not drafter.fits:
        problem = next(finding for finding in drafter.findings if finding.fits is False)
        return False, f"this drafter does not fit: {problem.name}: {problem.text.rstrip('.')}"
    said = {OTHERWISE: "in another way", REFUSED: "but not", UNTRIED: "not tried", DIFFERENT: "wrong, please report it"}
    limits = [f"{words}: {', '.join(by_answer[answer])}" for answer, words in said.items() if answer in by_answer]
    with_whom = "" if drafter is None else ", and the drafter fits"
    return True, f"works{with_whom}" + (f" ({'; '.join(limits)})" if limits else "")
