"""What users hand to generate: processors, criteria and streamers. They keep notes of what they were shown, and fail on
demand."""

from dataclasses import dataclass, field
from typing import Any

import torch
from conftest import letters
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer


@dataclass
class Notes:
    """What the callbacks of one conversation saw, call by call. `fuses`: places where a failure is still to come."""

    seen: dict[str, list] = field(default_factory=dict)
    fuses: dict[str, "Fuse"] = field(default_factory=dict)

    def note(self, who: str, what: Any) -> None:
        self.seen.setdefault(who, []).append(what)


class InterruptError(Exception):
    """Of the user's own."""


class Fuse:
    """Raises `error` at the `call`-th call."""

    def __init__(self, call: int, error: BaseException):
        self.left, self.error = call, error

    def __call__(self, *args) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    @property
    def has_blown(self) -> bool:
        return self.left <= 0


@dataclass
class Setting:
    """What the builders of callbacks go by. `rng` draws the same for both sides of a comparison; `given`: the prompts,
    once they are drawn."""

    target: Any
    drafter: Any
    rng: Any
    notes: Notes
    vocab_size: int
    batch: int
    given: dict[str, Tensor] = field(default_factory=dict)

    def token(self) -> int:
        return self.rng.randrange(self.vocab_size)


class Processor(LogitsProcessor):
    """Does nothing but take notes."""

    def __init__(self, setting: Setting):
        self.setting, self.name = setting, type(self).__name__

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.setting.notes.note(self.name, input_ids.tolist())
        if "processor" in self.setting.notes.fuses:
            self.setting.notes.fuses["processor"]()
        return self.processed(input_ids, scores)

    def processed(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class Diary(Processor):
    """Keeps state, as a grammar does: what it favours depends on how often it was called."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self.calls = 0
        self.favours = torch.randn(256, setting.vocab_size, generator=torch.Generator().manual_seed(0))

    def processed(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + self.favours[self.calls]


class InPlace(Processor):
    """Writes to the scores it is given."""

    def processed(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, int(input_ids[0, -1])] = -float("inf")
        return scores


class AsksTarget(Processor):
    """Runs the target itself, as classifier-free guidance does."""

    @torch.no_grad()
    def processed(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 0.1 * self.setting.target(input_ids=input_ids[:, -3:], use_cache=False).logits[:, -1].float()


class Generates(Processor):
    """Generates in the midst of generating, with no drafter."""

    assistant = False

    def processed(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        kwargs = {"assistant_model": self.setting.drafter, "num_assistant_tokens": 2} if self.assistant else {}
        ids = input_ids[:1, -2:]
        more = self.setting.target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, **kwargs
        )
        scores[:, int(more[0, -1])] += 1.5
        return scores


class GeneratesDrafted(Generates):
    """The same with the drafter that is drafting."""

    assistant = True


class Criterion(StoppingCriteria):
    """Never stops, takes notes."""

    def __init__(self, setting: Setting):
        self.setting, self.name = setting, type(self).__name__

    def __call__(self, input_ids: Tensor, scores, **kwargs) -> Tensor:
        self.setting.notes.note(self.name, (input_ids.tolist(), None if scores is None else len(scores)))
        if "criterion" in self.setting.notes.fuses:
            self.setting.notes.fuses["criterion"]()
        return self.met(input_ids)

    def met(self, input_ids: Tensor) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class EndsAt(Criterion):
    """Stops every sequence at a token of its own."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self.tokens = torch.tensor([setting.token() for _ in range(setting.batch * 2)])

    def met(self, input_ids: Tensor) -> Tensor:
        return input_ids[:, -1] == self.tokens[: len(input_ids)]


class Countdown(Criterion):
    """Stops all sequences after so many tokens."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self.left = setting.rng.randrange(1, 12)

    def met(self, input_ids: Tensor) -> Tensor:
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0)


class CriterionAsksTarget(Criterion):
    """Stops where the target, asked about the last tokens, says a token of its choice."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self.token = setting.token()

    @torch.no_grad()
    def met(self, input_ids: Tensor) -> Tensor:
        return self.setting.target(input_ids=input_ids[:, -2:], use_cache=False).logits[:, -1].argmax(-1) == self.token


class Streamer(BaseStreamer):
    """Takes notes of every call."""

    def __init__(self, setting: Setting):
        self.setting = setting

    def put(self, value: Tensor) -> None:
        self.setting.notes.note("streamer", value.tolist())
        if "streamer" in self.setting.notes.fuses:
            self.setting.notes.fuses["streamer"]()

    def end(self) -> None:
        self.setting.notes.note("streamer", "end")


class StreamerAsksTarget(Streamer):
    """Runs the target on what it is shown."""

    @torch.no_grad()
    def put(self, value: Tensor) -> None:
        super().put(value)
        logits = self.setting.target(input_ids=value.reshape(1, -1), use_cache=False).logits
        self.setting.notes.note("streamer's own", logits.argmax(-1).tolist())


class TextStreamer(TextIteratorStreamer):
    """transformers' own; every piece of text it hands on is noted."""

    def __init__(self, setting: Setting):
        super().__init__(letters(setting.vocab_size))
        self.setting = setting

    def put(self, value: Tensor) -> None:
        super().put(value)
        if "streamer" in self.setting.notes.fuses:
            self.setting.notes.fuses["streamer"]()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.setting.notes.note("streamer", (text, stream_end))
        super().on_finalized_text(text, stream_end)


def processors(*kinds: type[Processor]):
    return lambda setting: {"logits_processor": LogitsProcessorList([kind(setting) for kind in kinds])}


def criteria(*kinds: type[Criterion]):
    return lambda setting: {"stopping_criteria": StoppingCriteriaList([kind(setting) for kind in kinds])}


def allowed_tokens(setting: Setting) -> dict:
    """A third of the vocabulary after every token."""

    def allowed(b: int, text: Tensor) -> list[int]:
        setting.notes.note("prefix function", (b, text.tolist()))
        if "prefix function" in setting.notes.fuses:
            setting.notes.fuses["prefix function"]()
        return [(int(text[-1]) * 5 + step) % setting.vocab_size for step in range(1, setting.vocab_size // 3 + 1)]

    return {"prefix_allowed_tokens_fn": allowed}


PROCESSORS = {
    "none": lambda setting: {},
    "repetition penalty": lambda setting: {"repetition_penalty": 1.4},
    "no repeated bigram": lambda setting: {"no_repeat_ngram_size": 2},
    "bad words": lambda setting: {"bad_words_ids": [[setting.token()], [setting.token(), setting.token()]]},
    "sequence bias": lambda setting: {
        "sequence_bias": [[[setting.token()], -4.0], [[setting.token(), setting.token()], 3.0]]
    },
    "min new tokens": lambda setting: {"min_new_tokens": setting.rng.randrange(1, 8), "eos_token_id": setting.token()},
    "min length": lambda setting: {"min_length": setting.rng.randrange(1, 16), "eos_token_id": setting.token()},
    "suppressed": lambda setting: {"suppress_tokens": [setting.token()], "begin_suppress_tokens": [setting.token()]},
    "forced end": lambda setting: {"forced_eos_token_id": setting.token()},
    "decaying": lambda setting: {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": setting.token()},
    "several": lambda setting: {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 3},
    "renormalized": lambda setting: {"repetition_penalty": 0.8, "renormalize_logits": True},
    "infinities removed": lambda setting: {"remove_invalid_values": True, "suppress_tokens": [setting.token()]},
    "allowed tokens": allowed_tokens,
    "notes": processors(Processor),
    "diary": processors(Diary),
    "in place": processors(InPlace),
    "two of its own": processors(Diary, InPlace),
    "asks the target": processors(AsksTarget),
    "generates": processors(Generates),
    "generates drafted": processors(GeneratesDrafted),
}
STOPS = {
    "length": lambda setting: {},
    "end": lambda setting: {"eos_token_id": setting.token()},
    "several ends": lambda setting: {"eos_token_id": sorted({setting.token() for _ in range(3)})},
    "stop string": lambda setting: {
        "stop_strings": [
            chr(ord("a") + setting.token()) + chr(ord("a") + setting.token()),
            chr(ord("a") + setting.token()),
        ],
        "tokenizer": letters(setting.vocab_size),
    },
    "stop string and end": lambda setting: STOPS["stop string"](setting) | {"eos_token_id": setting.token()},
    "time": lambda setting: {"max_time": 3600.0},
    "notes": criteria(Criterion),
    "ends at": criteria(EndsAt),
    "ends at, and end": lambda setting: criteria(EndsAt)(setting) | {"eos_token_id": setting.token()},
    "countdown": criteria(Countdown),
    "asks the target": criteria(CriterionAsksTarget),
}
STREAMERS = {
    "none": lambda setting: {},
    "notes": lambda setting: {"streamer": Streamer(setting)},
    "text": lambda setting: {"streamer": TextStreamer(setting)},
    "asks the target": lambda setting: {"streamer": StreamerAsksTarget(setting)},
}
ERRORS = {
    "own error": lambda: InterruptError("of the user's own"),
    "keyboard": lambda: KeyboardInterrupt(),
    "stop iteration": lambda: StopIteration("no more"),
    "value error": lambda: ValueError("not this token"),
    "out of memory": lambda: torch.OutOfMemoryError("none left"),
}
# In a place of the caller's own both sides fail alike; in a layer there is no such place in the other side's count of
# calls.
PLACES = {
    "processor": processors(Processor),
    "criterion": criteria(Criterion),
    "streamer": lambda setting: {"streamer": Streamer(setting)},
    "prefix function": allowed_tokens,
    "target": lambda setting: {},
    "drafter": lambda setting: {},
}
LAYERS = ("target", "drafter")
