"""A conversation with a target whose answers are drafted: its turns, how they are made, and what was accepted of them.

An answer is told round by round, as `Piece`s of text.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..acceptance import AcceptanceStats, Round, track_acceptance, watch_rounds
from ..modeling import Eagle31DrafterModel
from .detokenizer import Detokenizer

# of trees, where nothing else is chosen
TREE_DEPTH = 7
TREE_TOP_K = 4
TREE_NODES = 24
MOST_DEPTH = 16
LEAST_NODES, MOST_NODES = 2, 64


@dataclass(frozen=True)
class Piece:
    """What one token added to the text; `is_accepted`: the drafter proposed it, else the target added it."""

    text: str
    is_accepted: bool


@dataclass
class Figures:
    """What an answer took so far: `tokens`, those of them that were `accepted` of `drafted` ones, `forwards` of the
    target behind the prompt's, and `seconds`, the prompt's forward included."""

    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    forwards: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens over seconds; 0.0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens per forward of the target behind the prompt's, the target's own token included; 0.0 before it."""
        return (self.tokens - 1) / self.forwards if self.forwards else 0.0

    @property
    def line(self) -> str:
        """All of them in a line, for people."""
        words = f"{self.tokens} tokens, {self.tokens_per_second:.1f} a second"
        if not self.drafted:
            return f"{words}, nothing drafted"
        return (
            f"{words}; {self.accepted_length:.2f} a forward, {self.accepted} of {self.drafted} drafted tokens accepted"
        )

    def as_dict(self) -> dict[str, float]:
        """All of them, for JSON."""
        derived = {"tokens_per_second": self.tokens_per_second, "accepted_length": self.accepted_length}
        return asdict(self) | derived


Show = Callable[[list[Piece], Figures], None]


@dataclass
class Answer:
    """An answer: its text, as pieces, its token ids (T,), and what it took; `was_stopped`: before its end."""

    pieces: list[Piece] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)
    was_stopped: bool = False

    @property
    def text(self) -> str:
        """The pieces' text."""
        return "".join(piece.text for piece in self.pieces)


class _StopError(Exception):
    """Ends generate(): the answer was asked to stop."""


class Conversation:
    """Messages of a user and the target's answers.

    `knobs` are the arguments of generate() that say how to draft, `options` all others, max_new_tokens among them;
    both may change between turns. `template_options`: variables of the chat template. Without a template the words of
    all messages are one text, which the target goes on with. `stop`, an event, ends the answer that is being made at
    the end of its round.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Eagle31DrafterModel,
        knobs: dict[str, Any],
        options: dict[str, Any],
        template_options: dict[str, Any],
        system: str | None = None,
    ):
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.knobs = knobs
        self.options = options
        self.template_options = template_options
        self.system = system
        self.stop = threading.Event()
        self.is_answering = False
        self.clear()

    def clear(self) -> None:
        """Forgets all turns."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.answers = list[Answer]()

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    @property
    def samples(self) -> bool:
        """True where answers are drawn, and so differ from one time to the next."""
        return bool(self.options.get("do_sample", self.target.generation_config.do_sample))

    def ask(self, words: str, show: Show) -> Answer:
        """Says words to the target; `show` gets the answer's pieces round by round. Raises ValueError, and forgets the
        words, where they are no text or the target's context has no room for them and an answer."""
        check_text(words)
        self.messages.append({"role": "user", "content": words})
        try:
            answer = self.answered(self.messages, show)
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer)
        return answer

    def again(self, show: Show, with_drafter: bool) -> Answer:
        """Has the last words answered once more, beside the answer that is there. Raises ValueError where there are
        none."""
        if not self.answers:
            raise ValueError("nothing has been asked yet; expected a question before it.")
        return self.answered(self.messages[:-1], show, with_drafter)

    def answered(self, messages: list[dict[str, str]], show: Show, with_drafter: bool = True) -> Answer:
        """Answers messages, by the target with its drafter or alone."""
        ids = self.prompt(messages).to(self.target.device)
        options = {**self.options, "max_new_tokens": self._room(ids)}
        if with_drafter:
            options |= {"assistant_model": self.drafter, **self.knobs}
        told = _Told(Detokenizer(self.tokenizer), show, self.stop)
        self.stop.clear()
        self.is_answering = True
        try:
            self._generate(ids, options, told, with_drafter)
        finally:
            self.is_answering = False
        return told.ended()

    def _generate(self, ids: Tensor, options: dict[str, Any], told: "_Told", with_drafter: bool) -> None:
        target: Any = self.target
        try:
            if with_drafter:
                with watch_rounds(told.round), track_acceptance(told.stats):
                    target.generate(ids, attention_mask=torch.ones_like(ids), **options)
            else:
                target.generate(ids, attention_mask=torch.ones_like(ids), streamer=_Plain(told), **options)
        except _StopError:
            told.answer.was_stopped = True

    def compared(self, alone: Answer) -> str:
        """Says what the drafter gained in the last answer, beside the one by the target alone."""
        before = self.answers[-1]
        if before.was_stopped or alone.was_stopped:
            return "an answer was stopped: there is nothing to compare"
        ratio = before.figures.tokens_per_second / alone.figures.tokens_per_second
        same = "the same text" if before.ids == alone.ids else self._why_another_text()
        return f"with the drafter {ratio:.2f} times as fast; {same}"

    def _why_another_text(self) -> str:
        if self.samples:
            return "another text, as it is sampled"
        dtype = str(self.target.dtype).removeprefix("torch.")
        if dtype != "float32":
            return f"another text: {dtype} rounds a forward of one token and of several differently (--dtype float32)"
        return "ANOTHER TEXT, though nothing is sampled: please report it"

    def prompt(self, messages: list[dict[str, str]]) -> Tensor:
        """Returns the ids (1, T) of messages, as the target is asked."""
        if not self.has_template:
            text = "".join(message["content"] for message in messages)
            return torch.tensor([self.tokenizer(text)["input_ids"]], dtype=torch.long)
        try:
            rendered: Any = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, **self.template_options
            )
        except Exception as error:  # a template is a program of its author's, and may raise anything
            said = " ".join(str(error).split())[:300]
            raise ValueError(f"the target's chat template refuses the conversation: {said}") from error
        return torch.tensor([rendered["input_ids"]], dtype=torch.long)

    def _room(self, ids: Tensor) -> int:
        """Returns how many tokens an answer may have, at most `max_new_tokens`."""
        wanted, length = self.options["max_new_tokens"], ids.shape[1]
        context = getattr(self.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if not length:
            raise ValueError("the words make no tokens; expected text.")
        if not isinstance(context, int):
            return wanted
        if length >= context:
            raise ValueError(f"the conversation has {length} tokens; the target reads {context}, the answer included.")
        return min(wanted, context - length)

    def record(self) -> dict[str, Any]:
        """Returns the conversation for JSON: messages, each answer with its figures and pieces, and how it was made."""
        answers = iter(self.answers)
        turns = []
        for message in self.messages:
            turn: dict[str, Any] = dict(message)
            if message["role"] == "assistant":
                answer = next(answers)
                pieces = [[piece.text, piece.is_accepted] for piece in answer.pieces]
                turn |= {"figures": answer.figures.as_dict(), "was_stopped": answer.was_stopped, "pieces": pieces}
            turns.append(turn)
        return {"messages": turns, "drafting": self.knobs, "generation": self.options}


def check_text(words: str) -> None:
    """Raises ValueError for words that were no UTF-8 where they came from: they hold lone surrogates, which no
    tokenizer reads."""
    try:
        words.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start + 1} of the words is no UTF-8; expected text in UTF-8.") from None


class _Told:
    """An answer that is being made: rounds come in, pieces go out."""

    def __init__(self, detokenizer: Detokenizer, show: Show, stop: threading.Event):
        self.answer = Answer()
        self.stats = AcceptanceStats()
        self._detokenizer = detokenizer
        self._show = show
        self._stop = stop
        self._began = time.perf_counter()

    def round(self, found: Round) -> None:
        """Takes a round of the only sequence of a batch. Raises _StopError where that was asked for."""
        [tokens], [num_accepted] = found.tokens, found.num_accepted
        is_prompt = not self.answer.ids
        self.add(tokens, num_accepted or 0, 0 if is_prompt else 1)

    def add(self, tokens: list[int], num_accepted: int, forwards: int) -> None:
        """Takes tokens, the first of which were accepted drafts."""
        answer, figures = self.answer, self.answer.figures
        pieces = [Piece(self._detokenizer.add(token), i < num_accepted) for i, token in enumerate(tokens)]
        answer.ids += tokens
        answer.pieces += pieces
        figures.tokens += len(tokens)
        figures.accepted += num_accepted
        figures.forwards += forwards
        figures.drafted = sum(self.stats.drafted_per_position)
        figures.seconds = time.perf_counter() - self._began
        self._show(pieces, figures)
        if self._stop.is_set():
            raise _StopError

    def ended(self) -> Answer:
        """Returns the answer, complete."""
        self.answer.figures.drafted = sum(self.stats.drafted_per_position)
        rest = self._detokenizer.end()
        if rest:
            self.answer.pieces.append(Piece(rest, False))
            self._show(self.answer.pieces[-1:], self.answer.figures)
        return self.answer


class _Plain(BaseStreamer):
    """Tells what the target generates alone, as rounds of one token."""

    def __init__(self, told: _Told):
        self._told = told
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Takes the prompt first, then a token at a time."""
        if not self._is_prompt:
            self._told.add(value.flatten().tolist(), 0, 1 if self._told.answer.ids else 0)
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is left: what came was told at once."""
