"""A conversation with a target whose answers are drafted: its turns, how they are made, and what was accepted of them.

An answer is told round by round, as `Piece`s of text.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ..acceptance import AcceptanceStats, Round, track_acceptance, watch_rounds
from ..bench import TREE_SHAPE, Shape
from ..cache.prefix_cache import PrefixCache
from ..chat_template import as_read, message_of
from ..modeling import Eagle31DrafterModel
from ..targets.context import checking_forwards, context_of, room_for, why_too_long

MIN_NODES, MAX_NODES = 2, 64  # of a tree that a user of a chat chooses
UNFINISHED = "\ufffd"  # what the bytes of a character are shown as that is not complete


@dataclass(frozen=True)
class Piece:
    """The text that one token added; `is_accepted`: the drafter proposed it, else the target added it."""

    text: str
    is_accepted: bool


@dataclass
class Figures:
    """Counts and times of an answer so far: `tokens`, how many of them are `accepted` drafts, how many were `drafted`,
    `forwards` of the target after the prompt's, and `seconds`, of them `prompt_seconds` up to the first token.
    `reused`: tokens of the prompt that an earlier turn had read."""

    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    forwards: int = 0
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    reused: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens over seconds; 0.0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decoding_speed(self) -> float:
        """Tokens a second after the first; 0.0 where there are none."""
        seconds = self.seconds - self.prompt_seconds
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds else 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens per forward of the target after the prompt's, the target's own token included; 0.0 before it."""
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
    """An answer: its text, as pieces, its token ids (T,), and what it took; `was_stopped`: before its end. `drafting`:
    the arguments of generate() that said how to draft it, empty where the target answered alone."""

    drafting: dict[str, Any] = field(default_factory=dict)
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


@dataclass(eq=False, repr=False)
class Conversation:
    """Messages of a user and the target's answers. `system`: the system prompt, None: none.

    `knobs` are the arguments of generate() that say how to draft, `options` all others, max_new_tokens among them;
    both may change between turns. `prefix_cache` keeps what the target has read: a turn reads what is new since the
    last one. With the option `prefill_chunk_size` prompts are read in pieces of so many tokens.
    `template_options`: variables of the chat template. Without a template the words of all messages are one text, which
    the target goes on with.

    Methods that answer take `show`, which gets an answer's new pieces and its figures so far, round by round, and
    `stop`, an event that ends the answer at the end of its round, or before the next piece of its prompt. An event is
    for one answer: set before the answer is begun, it ends it after the first round or piece.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: Eagle31DrafterModel
    knobs: dict[str, Any]
    options: dict[str, Any]
    template_options: dict[str, Any]
    system: str | None
    prefix_cache: PrefixCache

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all turns."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.answers = list[Answer]()

    def ask(self, words: str, show: Show, stop: threading.Event) -> Answer:
        """Says words to the target, and returns its answer. Raises ValueError where they are no text, or the target's
        context has no room for them and an answer. After any error the words are no part of the conversation."""
        check_text(words)
        self.messages.append({"role": "user", "content": words})
        try:
            answer = self.generate_answer(self.messages, show, stop)
        except BaseException:
            self.messages.pop()
            raise
        self.answers.append(answer)  # before its message: `as_json` of another thread takes an answer for each
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def answer_alone(self, show: Show, stop: threading.Event) -> Answer:
        """Has the target alone answer the last words once more; the conversation keeps the answer that it has. Raises
        ValueError where nothing was asked."""
        if not self.answers:
            raise ValueError("nothing has been asked yet; expected a question before it.")
        return self.generate_answer(self.messages[:-1], show, stop, with_drafter=False)

    def generate_answer(
        self, messages: list[dict[str, str]], show: Show, stop: threading.Event, with_drafter: bool = True
    ) -> Answer:
        """Answers messages, by the target with its drafter or, reading the whole prompt, alone."""
        ids = self.prompt_ids(messages).to(self.target.device)
        room = room_for(self.options["max_new_tokens"], ids.shape[1], context_of(self.target))
        options = {**self.options, "max_new_tokens": room, "attention_mask": torch.ones_like(ids)}
        answer = Answer(dict(self.knobs) if with_drafter else {})
        building = _AnswerBuilder(answer, Detokenizer(self.tokenizer), show, stop)
        try:
            (self._draft if with_drafter else self._decode_alone)(ids, options, building)
        except _StopError:
            answer.was_stopped = True
        return building.finish()

    def _draft(self, ids: Tensor, options: dict[str, Any], building: "_AnswerBuilder") -> None:
        target: Any = self.target
        with self.prefix_cache.text(ids, options.get("prefill_chunk_size")) as text:
            building.answer.figures.reused = text.num_reused
            pieces = self._checking_pieces(options, ids.shape[1] - text.num_reused, building)
            options |= {"assistant_model": self.drafter, **self.knobs, **text.argument}
            try:
                with watch_rounds(building.add_round), pieces, track_acceptance(building.stats):
                    target.generate(ids, **options)
            finally:
                text.ids += building.answer.ids

    def _decode_alone(self, ids: Tensor, options: dict[str, Any], building: "_AnswerBuilder") -> None:
        target: Any = self.target
        with self._checking_pieces(options, ids.shape[1], building):
            target.generate(ids, **options, stopping_criteria=StoppingCriteriaList([building.add_last]))

    def _checking_pieces(
        self, options: dict[str, Any], num_new: int, building: "_AnswerBuilder"
    ) -> AbstractContextManager:
        """Leaves the size of pieces in `options` where a prompt of `num_new` unread tokens has several; returns a
        context in which the answer may be stopped between two of them."""
        piece = options.pop("prefill_chunk_size", None)
        if piece is None or num_new <= piece:
            return nullcontext()
        options["prefill_chunk_size"] = piece
        return checking_forwards(self.target, building.check)

    def describe_speedup(self, alone: Answer) -> str:
        """Says what the drafter gained in the last answer, beside the one by the target alone."""
        before = self.answers[-1]
        if before.was_stopped or alone.was_stopped:
            return "an answer was stopped: there is nothing to compare"
        same = "the same text" if before.ids == alone.ids else self._why_another_text()
        if not before.figures.decoding_speed or not alone.figures.decoding_speed:
            return f"an answer has one token, which tells no speed; {same}"
        ratio = before.figures.decoding_speed / alone.figures.decoding_speed
        return f"after the prompt, with the drafter {ratio:.2f} times as fast; {same}"

    def _why_another_text(self) -> str:
        if self.options.get("do_sample", self.target.generation_config.do_sample):
            return "another text, as it is sampled"
        dtype = str(self.target.dtype).removeprefix("torch.")
        if dtype != "float32":
            return f"another text: {dtype} rounds a forward of one token and of several differently (--dtype float32)"
        return "ANOTHER TEXT, though nothing is sampled: please report it"

    def prompt_ids(self, messages: list[dict[str, str]]) -> Tensor:
        """Returns the ids (1, T) of messages, as the target is asked. Raises ValueError where they are far too long,
        and where the chat template refuses them."""
        why = why_too_long(sum(len(message["content"]) for message in messages), context_of(self.target))
        if why is not None:
            raise ValueError(f"the conversation {why}")
        if self.tokenizer.chat_template is None:
            # nothing between them: the answer has gone on where the words before it ended
            text = "".join(message["content"] for message in messages)
            return torch.tensor([self.tokenizer(text)["input_ids"]], dtype=torch.long)
        try:
            read = as_read(self.tokenizer, self._with_thoughts_apart(messages), self.template_options)
            rendered: Any = self.tokenizer.apply_chat_template(
                read, add_generation_prompt=True, tokenize=True, return_dict=True, **self.template_options
            )
        except Exception as error:  # a template is a program of its author's, and may raise anything
            said = " ".join(str(error).split())[:300]
            raise ValueError(f"the target's chat template refuses the conversation: {said}") from error
        return torch.tensor([rendered["input_ids"]], dtype=torch.long)

    def _with_thoughts_apart(self, messages: list[dict[str, str]]) -> list[dict[str, Any]]:
        """Returns messages with the thoughts of answers in a field of their own, where templates leave them out."""
        answers = iter(self.answers)
        return [
            message_of(str(self.tokenizer.decode(next(answers).ids)), message["content"])
            if message["role"] == "assistant"
            else message
            for message in messages
        ]

    def as_json(self) -> str:
        """Returns the conversation as JSON: its messages, each answer with its pieces, its figures and how it was
        drafted, and the other arguments of generate()."""
        answers = iter(self.answers)
        turns = []
        for message in self.messages:
            turn: dict[str, Any] = dict(message)
            if message["role"] == "assistant":
                answer = next(answers)
                pieces = [[piece.text, piece.is_accepted] for piece in answer.pieces]
                turn |= {"figures": answer.figures.as_dict(), "drafting": answer.drafting, "pieces": pieces}
                turn["was_stopped"] = answer.was_stopped
            turns.append(turn)
        record = {"messages": turns, "generation": self.options}
        return json.dumps(record, indent=2, ensure_ascii=False, default=str)


def check_text(words: str) -> None:
    """Raises ValueError for words that were no UTF-8 where they came from: they hold lone surrogates, which no
    tokenizer reads."""
    try:
        words.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start + 1} of the words is no UTF-8; expected text in UTF-8.") from None


def trees(depth: int, nodes: int, begun: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments for trees of that depth and of so many nodes, the root included. How many children a node
    has is kept from `begun`, the arguments of the command line, where these draft trees."""
    top_k = begun.get("draft_tree_top_k")
    is_tree = isinstance(top_k, int) and top_k > 1
    return Shape(depth, top_k if is_tree else TREE_SHAPE.top_k, nodes).knobs


class Detokenizer:
    """Returns the text that each token adds. Put together that is the text of all of them, although a token's text may
    depend on the token before it, and a character may take several tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        # those of the text returned last, which the next one's may depend on, and those after them
        self._ids = list[int]()
        self._known = 0  # how many of them are of the text returned last

    def add(self, token: int) -> str:
        """Returns what the token adds to the text; nothing while a character is not complete."""
        self._ids.append(token)
        text = self._new_text()
        if text.endswith(UNFINISHED):
            return ""
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return text

    def end(self) -> str:
        """Returns the text that is left: the beginning of a character that never was completed."""
        return self._new_text() if len(self._ids) > self._known else ""

    def _new_text(self) -> str:
        return self._text(self._ids)[len(self._text(self._ids[: self._known])) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


class _AnswerBuilder:
    """Fills an answer while it is generated, and shows what is new of it. Raises _StopError once that is asked for."""

    def __init__(self, answer: Answer, detokenizer: Detokenizer, show: Show, stop: threading.Event):
        self.answer = answer
        self.stats = AcceptanceStats()
        self._detokenizer = detokenizer
        self._show = show
        self._stop = stop
        self._began = time.perf_counter()

    def add_round(self, found: Round) -> None:
        """Takes a round of the only sequence of a batch."""
        [tokens], [num_accepted] = found.tokens, found.num_accepted
        self.add(tokens, num_accepted or 0)

    def add_last(self, ids: Tensor, scores: Any, **_: Any) -> bool:
        """Takes the last of ids (1, T), which the target generates alone. A stopping criterion, by which none ends."""
        self.add(ids[0, -1:].tolist())
        return False

    def add(self, tokens: list[int], num_accepted: int = 0) -> None:
        """Takes the tokens of a forward of the target, the first of which were accepted drafts."""
        answer, figures = self.answer, self.answer.figures
        is_prompt = not answer.ids  # the first token is the prompt's forward's
        pieces = [Piece(self._detokenizer.add(token), i < num_accepted) for i, token in enumerate(tokens)]
        answer.ids += tokens
        answer.pieces += pieces
        figures.tokens += len(tokens)
        figures.accepted += num_accepted
        figures.forwards += 0 if is_prompt else 1
        figures.drafted = sum(self.stats.drafted_per_position)
        figures.seconds = time.perf_counter() - self._began
        if is_prompt:
            figures.prompt_seconds = figures.seconds
        self._show(pieces, figures)
        self.check()

    def check(self) -> None:
        """Raises _StopError once the answer is asked to stop."""
        if self._stop.is_set():
            raise _StopError

    def finish(self) -> Answer:
        """Returns the answer, with what is left of its text."""
        self.answer.figures.drafted = sum(self.stats.drafted_per_position)
        rest = self._detokenizer.end()
        if rest:
            self.answer.pieces.append(Piece(rest, False))
            self._show(self.answer.pieces[-1:], self.answer.figures)
        return self.answer
