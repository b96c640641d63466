"""One run of the soak: drawn from a seed and a number, generated with the drafter and without, compared in everything a
caller can see."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationMixin

from eagle31_hf import AcceptanceStats, acceptance, clock, track_acceptance
from eagle31_hf.generation.planning import knowledge
from eagle31_hf.targets import probe
from eagle31_hf.targets.layers import decoder_layers

from . import axes
from .callbacks import ERRORS, LAYERS, PLACES, Fuse, Notes, Setting
from .compare import Difference, differences
from .models import bare_target, conftest, drafter_of, target_of

FAULTS = 0.3  # of the runs fail on purpose
REFUSALS = ("use_cache is False", "has layers that are not attention's")  # of ours, before anything is generated


@dataclass
class Trial:
    """What is tried. `seed`: of all that is drawn, a number or a name; `choices`: an entry of every axis; `fault`:
    place, kind and call of a failure, or None."""

    seed: int | str
    number: int
    choices: dict[str, str] = field(default_factory=dict)
    batch: int = 1
    fault: tuple[str, str, int] | None = None

    def rng(self, purpose: str) -> random.Random:
        """The same for every call with this purpose."""
        return random.Random(f"{self.seed}/{self.number}/{purpose}")

    def __str__(self) -> str:
        told = [f"{axis}={entry}" for axis, entry in self.choices.items() if axis == "family" or entry != usual(axis)]
        told += [f"batch={self.batch}"] * (self.batch > 1)
        told += [f"fault={'/'.join(map(str, self.fault))}"] if self.fault else []
        return "; ".join(told)

    @property
    def is_sampled(self) -> bool:
        return self.choices["choice"] != "greedy"

    @property
    def num_turns(self) -> int:
        return 1 + self.rng("turns").randrange(1, 3) if self.choices["cache"].startswith("conversation") else 1


def usual(axis: str) -> str:
    return next(iter(axes.AXES[axis]))


def drawn(axis: str) -> list[str]:
    """The entries that are drawn from."""
    return [entry for entry in axes.AXES[axis] if entry not in axes.UNDRAWN.get(axis, ())]


def draw(seed: int, number: int) -> Trial:
    """The usual entry of every axis every second time, else any."""
    trial = Trial(seed, number)
    rng = trial.rng("axes")
    trial.choices = {axis: usual(axis) if rng.random() < 0.5 else rng.choice(drawn(axis)) for axis in axes.AXES}
    trial.choices |= {axis: rng.choice(drawn(axis)) for axis in ("family", "drafting", "drafter", "attention")}
    for axis, entry in trial.choices.items():
        if entry in axes.SELDOM.get(axis, ()) and rng.random() < 0.9:
            trial.choices[axis] = usual(axis)
    trial.batch = 1 if rng.random() < 0.5 else rng.randrange(2, 5)
    if rng.random() < FAULTS:
        trial.fault = rng.choice(list(PLACES)), rng.choice(list(ERRORS)), rng.randrange(1, 14)
    return without_contradictions(trial)


def without_contradictions(trial: Trial) -> Trial:
    """Nothing plain generate refuses, or a callback of ours cannot do."""
    choices, place = trial.choices, trial.fault[0] if trial.fault else ""
    if place == "streamer":
        choices["streamer"] = "notes"
    if "GPT-Neo," in choices["family"] and "static" in choices["cache"]:
        # what transformers 5.23 makes of it depends on the buffer's length, with no drafter too
        choices["cache"] = "default"
    if "V4" in choices["family"] and "static" in choices["cache"]:
        choices["cache"] = "default"  # there are no static layers that compress
    if ("sparse" in choices["family"] or "V4" in choices["family"]) and choices["cache"] == "own, no config":
        choices["cache"] = "own"  # it has no layers that can hold an index, or compress
    if "LongCat" in choices["family"] and "offloaded" in choices["wrapper"]:
        choices["wrapper"] = "none"  # its text is another every time with transformers 5.23, with no drafter too
    if choices["cache"] == "conversation, chunks" and conftest.REREADS_IN_CHUNKS:
        choices["cache"] = "conversation"
    if trial.batch > 1 or choices["choice"] == "returned twice":
        choices["streamer"] = "none" if choices["streamer"] == "text" else choices["streamer"]  # takes one text
    if choices["extra"] == "decode" and choices["stop"].startswith("stop string"):
        choices["extra"] = "none"  # it is not handed the tokenizer
    if "Mamba" in choices["family"] and choices["outputs"] in ("attentions", "everything"):
        choices["outputs"] = "states"  # they have no attentions
    if choices["extra"] == "no cache":
        choices["cache"] = "default"
    if choices["choice"] == "returned twice" and choices["cache"].startswith("conversation"):
        choices["choice"] = "sampled"
    return trial


def forget_positions(target: Any) -> None:
    """Drops the offsets Qwen's multimodal targets keep of an earlier call, which another batch size does not fit."""
    for module in target.modules():
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None


@dataclass
class Outcome:
    """`outputs`: of every turn; `error`: what ended it; `past`: the caller's cache, if it has one."""

    outputs: list[Any]
    error: BaseException | None
    past: Any
    notes: Notes
    stats: AcceptanceStats | None = None
    spoilt: list[str] = field(default_factory=list)


class Run:
    """A trial and its models."""

    def __init__(self, trial: Trial):
        choices = trial.choices
        self.trial = trial
        self.target = target_of(choices["family"], choices["attention"], choices["wrapper"])
        forget_positions(self.target)
        self.drafter = drafter_of(choices["family"], choices["drafter"], choices["drafter attention"])
        self.bare = bare_target(choices["family"], "eager")
        self.vocab_size = self.bare.config.get_text_config().vocab_size
        self.given: dict[str, Tensor] = {}
        self.given = axes.prompts(self.setting("prompts"), conftest.greedy_text(self.bare))

    def padding(self) -> list[int]:
        """Tokens before every sequence of the output that are not attended to: generate() takes its padding token for
        padding where no mask is given, a prompt's first token too."""
        ids = self.given["input_ids"]
        mask = self.given.get("attention_mask", ids != self.setting("calls").token())  # drawn first, as in `asked`
        times = 2 if self.trial.choices["choice"] == "returned twice" else 1
        return (mask.cumsum(1) == 0).sum(1).repeat_interleave(times).tolist()

    def setting(self, purpose: str, notes: Notes | None = None) -> Setting:
        rng, batch = self.trial.rng(purpose), self.trial.batch
        return Setting(self.target, self.drafter, rng, notes or Notes(), self.vocab_size, batch, self.given)

    def converse(self, drafting: str | None, fails: bool = True, is_reference: bool = False, **more) -> Outcome:
        """All turns, with the drafter or (`drafting` None) without; `fails`: where the trial has a fault, in a layer
        not of a reference."""
        trial, notes = self.trial, Notes()
        setting = self.setting("calls", notes)
        kwargs = self.asked(setting) | more
        with ExitStack() as stack:
            if trial.fault:
                stack.enter_context(
                    self.failing(kwargs, setting, fails and not (is_reference and trial.fault[0] in LAYERS))
                )
            if drafting is not None:
                kwargs |= self.assistance(drafting, kwargs)
                stack.enter_context(own_clock(trial.rng(f"clock of {drafting}")))
            stats = stack.enter_context(track_acceptance())
            return self.turns(kwargs, notes, stats)

    def asked(self, setting: Setting) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"pad_token_id": setting.token(), "max_new_tokens": setting.rng.randrange(1, 25)}
        for axis, table in axes.OF_CALLS.items():
            kwargs |= table[self.trial.choices[axis]](setting)
        return axes.as_object(kwargs) if self.trial.choices["extra"] == "config object" else kwargs

    def assistance(self, drafting: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        knobs = axes.DRAFTINGS[drafting.removeprefix("other ")](self.setting(drafting))
        if self.trial.choices["extra"] != "decode":
            return {"assistant_model": self.drafter} | knobs
        streamer = kwargs.pop("streamer", None)
        return {
            "custom_generate": partial(self.drafter.decode, streamer=streamer) if streamer else self.drafter.decode
        } | knobs

    @contextmanager
    def failing(self, kwargs: dict[str, Any], setting: Setting, fails: bool) -> Iterator[None]:
        """Within it the trial's fault happens, if it `fails` this time; a callback that may fail is added where there
        is none."""
        place, kind, call = self.trial.fault
        for name, value in PLACES[place](setting).items():
            kwargs[name] = (
                type(value)([*kwargs.get(name, ()), *value]) if isinstance(value, list) else kwargs.get(name, value)
            )
        fuse = Fuse(call if fails else 0, ERRORS[kind]())  # one of 0 calls never blows
        if fails:
            setting.notes.fuses[place] = fuse
        if place not in LAYERS:
            yield
            return
        layer = self.drafter.layers[0] if place == "drafter" else decoder_layers(self.target)[1]
        handle = layer.register_forward_pre_hook(fuse)  # of both sides: beside a hook some trees are chains
        try:
            yield
        finally:
            handle.remove()

    def turns(self, kwargs: dict[str, Any], notes: Notes, stats: AcceptanceStats) -> Outcome:
        given = self.given
        outcome = Outcome([], None, kwargs.get("past_key_values"), notes, stats)
        torch.manual_seed(self.trial.number)
        for turn in range(self.trial.num_turns):
            before, past = self.state(kwargs, given), kwargs.get("past_key_values")
            layers = layers_of(past)
            try:
                outcome.outputs.append(self.target.generate(**given, **kwargs))
            except BaseException as error:  # KeyboardInterrupt too: it is among the faults
                if isinstance(error, KeyboardInterrupt) and "keyboard" not in (self.trial.fault or ()):
                    raise
                outcome.error = error.with_traceback(None) if notes.fuses else error
            after = self.state(kwargs, given)
            outcome.spoilt += [f"turn {turn}: {name} changed" for name, was in before.items() if after[name] != was]
            if layers_of(past)[: len(layers)] != layers:  # it may have made layers that were not there
                outcome.spoilt.append(f"turn {turn}: the layers of the caller's cache are others")
            if outcome.error:
                break
            given, past = self.next_turn(turn, given, outcome.outputs[-1])
            if self.trial.choices["cache"] == "conversation, dict":
                kwargs["past_key_values"] = outcome.past = past
        return outcome

    def next_turn(self, turn: int, given: dict[str, Tensor], output: Any) -> tuple[dict[str, Tensor], Any]:
        """What was said, and a few tokens more."""
        setting = self.setting(f"turn {turn}")
        ids = output if isinstance(output, Tensor) else output.sequences
        more = torch.tensor([[setting.token() for _ in range(setting.rng.randrange(1, 5))]]).expand(len(ids), -1)
        mask = given.get("attention_mask")
        goes_on = {"input_ids": torch.cat((ids, more), dim=1)}
        if mask is not None:
            goes_on["attention_mask"] = torch.cat(
                (mask, mask.new_ones(len(mask), goes_on["input_ids"].shape[1] - mask.shape[1])), dim=1
            )
        return goes_on, None if isinstance(output, Tensor) else output.past_key_values

    def state(self, kwargs: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Any]:
        """All a call must leave as it found it."""
        found: dict[str, Any] = {
            "what was given": [(name, value.tolist()) for name, value in given.items()],
            "the lists of callbacks": [list(value) for value in kwargs.values() if isinstance(value, list)],
            "the generation config given": (
                kwargs["generation_config"].to_dict() if "generation_config" in kwargs else None
            ),
            "methods of GenerationMixin": [id(value) for value in vars(GenerationMixin).values()],
            "whether gradients are on": torch.is_grad_enabled(),
            "open trackers": len(acceptance._trackers.get()),
        }
        if not self.trial.is_sampled:
            found["random numbers"] = torch.get_rng_state().numpy().tobytes()
        for name, model in (("target", self.target), ("drafter", self.drafter)):
            found[f"config of the {name}"] = [
                json.dumps(model.config.to_dict(), default=str),
                model.config._attn_implementation,
            ]
            found[f"generation config of the {name}"] = str(model.generation_config.to_dict())
            found[f"modules of the {name}"] = [module_state(module) for module in model.modules()]
        return found


def layers_of(past: Any) -> list[tuple]:
    """Which layers a cache has, of which kinds, and whether they keep what their window has passed."""
    layers = [] if past is None else past.layers
    return [(id(layer), type(layer), getattr(layer, "record_past", None)) for layer in layers]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def module_state(module: torch.nn.Module) -> tuple:
    """Its hooks (transformers leaves some where states were asked for), whether it is in training, and which forwards
    it has of its own."""
    hooks = [
        [
            key
            for key, hook in getattr(module, name).items()
            if not getattr(hook, "__module__", "").startswith("transformers")
        ]
        for name in HOOKS
    ]
    return *hooks, module.training, id(vars(module).get("forward")), id(vars(module).get("_old_forward"))


@contextmanager
def own_clock(rng: random.Random) -> Iterator[None]:
    """Time of its own, and nothing known of earlier calls: what auto drafts is then erratic, and the same whenever it
    is drawn again."""
    now = [0.0]

    def read() -> float:
        now[0] += rng.lognormvariate(-4, 1.5)
        return now[0]

    with ExitStack() as stack:
        stack.enter_context(patch.object(clock, "time", SimpleNamespace(perf_counter=read)))
        stack.enter_context(patch.object(knowledge, "_known", WeakKeyDictionary()))
        stack.enter_context(patch.dict(probe._verdicts, clear=True))
        yield


@dataclass
class Result:
    """`differences`: what went wrong, [] where nothing did; `outcome`: of the side with the drafter; `word`: what kind
    of result it is."""

    differences: list[Difference]
    outcome: Outcome
    word: str
    seconds: float


def run(trial: Trial) -> Result:
    began = time.perf_counter()
    each = Run(trial)
    drafting = trial.choices["drafting"]
    ours = each.converse(drafting)
    if any(refusal in str(ours.error) for refusal in REFUSALS):
        told = [
            Difference(f"refused after {who} was called") for who in ours.notes.seen if not who.startswith("streamer")
        ]  # put the prompt
        return Result(told + spoilt(ours), ours, "refused", time.perf_counter() - began)
    reference = each.converse(partner(drafting, trial), is_reference=True)
    found = differences(each, reference, ours) + spoilt(ours)
    word = "same"
    if trial.fault and ours.error is not None:
        word = "failed alike"
        again = each.converse(drafting, fails=False)
        if any(refusal in str(again.error) for refusal in REFUSALS):
            return Result(found, ours, "refused", time.perf_counter() - began)
        whole = each.converse(partner(drafting, trial), fails=False)
        found += [
            Difference(f"after the failure: {one}", one.is_tie)
            for one in differences(each, whole, again) + spoilt(again)
        ]
        if not goes_on(each, reference, whole):  # a few families do not, on static caches, with no drafter either
            found += goes_on(each, ours, whole)
    if trial.choices["wrapper"].startswith("compiled"):
        torch._dynamo.reset()
    return Result(found, ours, word, time.perf_counter() - began)


def spoilt(outcome: Outcome) -> list[Difference]:
    return [Difference(what) for what in outcome.spoilt]


def partner(drafting: str, trial: Trial) -> str | None:
    """What the other side does: nothing with the drafter when greedy; when sampling it drafts otherwise, where the text
    may not depend on it, else the same again.
    """
    if not trial.is_sampled:
        return None
    if drafting.startswith("auto") or trial.batch > 1 or trial.choices["choice"] == "returned twice":
        return "auto" if drafting != "auto" else "auto, chains"
    return drafting


def goes_on(each: Run, ours: Outcome, whole: Outcome) -> list[Difference]:
    """The caller's cache after a failure holds a beginning of what was to be said, and nothing else: the target alone
    goes on from it as from a cache that has just read as much."""
    if ours.past is None or whole.error or each.trial.is_sampled or each.trial.num_turns > 1:
        return []
    said = whole.outputs[0] if isinstance(whole.outputs[0], Tensor) else whole.outputs[0].sequences
    length = int(ours.past.get_seq_length())
    ids, (place, _, call) = each.given["input_ids"], each.trial.fault
    least, most = (0, said.shape[1]) if place in LAYERS else (ids.shape[1], ids.shape[1] + call)
    if (place, call) == ("streamer", 1):  # it is shown the prompt before this is read
        least = 0
    if not least <= length <= most:
        return [Difference(f"after the failure: the cache holds {length} tokens, expected {least} to {most}")]
    whole_mask = torch.cat((each.given.get("attention_mask", torch.ones_like(ids)), torch.ones_like(said)), dim=1)
    kwargs = {"do_sample": False, "pad_token_id": 0}

    def after(past: Any) -> Tensor:
        more, _ = each.next_turn(0, {"attention_mask": whole_mask[:, : length + 1]}, said[:, : length + 1])
        return each.target.generate(**more, **kwargs, past_key_values=past, max_new_tokens=4)

    fresh = axes.CACHES[each.trial.choices["cache"]](each.setting("calls"))["past_key_values"]
    if length > int(fresh.get_seq_length()):
        each.target.generate(
            said[:, :length], attention_mask=whole_mask[:, :length], past_key_values=fresh, max_new_tokens=1, **kwargs
        )
    mine, other = after(ours.past), after(fresh)
    return (
        []
        if torch.equal(mine, other)
        else [Difference(f"after the failure: the target goes on {mine.tolist()}, alone {other.tolist()}")]
    )
