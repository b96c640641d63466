"""Chats answered by the target: every answer is replaced by its own, and quoted in the prompts that follow. Plain
texts are continued.

T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .answers import AnswerSource
from .chats import SAID
from .kinds import Chat
from .packing import Example
from .self_prompts import REPEATING, Ask, Reply, SelfPrompt, Turns, asking, question, repeats_itself
from .skipped import Skipped

LEAST_ANSWER = 2  # tokens: the first is never drafted
Refuse = Callable[[int, Skipped | str], None]  # is told the index of what could not go on, and why


@dataclass(frozen=True)
class Beginning:
    """A text to be: the ids that it begins with (T,), and the temperature of what follows them (None: as the source
    samples)."""

    ids: Tensor
    temperature: float | None = None


def regenerate(
    source: AnswerSource, chats: Sequence[Chat | SelfPrompt | Beginning], refuse: Refuse
) -> list[list[Example]]:
    """Returns, chat by chat, examples of every turn of the assistant, and of one after a last message of the user's, in
    the target's words; of a text that begins, an example of it and of what the target goes on with.

    A turn is a prompt as it is served and the target's answer to it, whose words replace the original in later prompts.
    Turns whose prompts begin with the turns before, token for token, are one example. After an answer that was cut at
    its limit the chat is not continued. `refuse` is told of chats that could not go on and of answers not to learn
    from.
    """
    asked = set[str]()
    talks = [_Talk(source, chat, partial(refuse, index), asked) for index, chat in enumerate(chats)]
    own_first = sorted(talks, key=lambda talk: not isinstance(talk.chat, SelfPrompt))
    waiting = {talk: talk.go_on() for talk in own_first}
    while asks := {talk: ask for talk, ask in waiting.items() if ask is not None}:
        # While a user is to speak all others wait: their answers and the one to this user are asked for together.
        asks = {talk: ask for talk, ask in asks.items() if ask.after is not None} or asks
        ends = {ask.after for ask in asks.values() if ask.after is not None}
        asked_of = asking(source, ends) if ends else source
        answers = asked_of.answers([ask.prompt for ask in asks.values()], [ask.temperature for ask in asks.values()])
        for talk, answer in zip(asks, answers, strict=True):
            waiting[talk] = talk.go_on((answer, asked_of.is_ended(answer)))
    return [talk.examples for talk in talks]


def first_prompt(source: AnswerSource, chat: Chat | Beginning) -> list[Tensor]:
    """Returns the prompt (T,) of the first turn that the target would answer, in a list; an empty list where there is
    none."""
    ask = _Talk(source, chat, lambda refusal: None, set()).go_on()
    return [] if ask is None else [ask.prompt]


@dataclass(eq=False)
class _Talk:
    """A chat under way: `said` are its messages so far, `examples` those of its turns. `refuse` is told why it could
    not go on, and of answers not to learn from; `asked` are the first questions of all chats, see `question`."""

    source: AnswerSource
    chat: Chat | SelfPrompt | Beginning
    refuse: Callable[[Skipped | str], None]
    asked: set[str]
    said: list[dict[str, Any]] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)

    def __post_init__(self):
        chat = self.chat
        if isinstance(chat, Chat):
            self._turns = self._chat(chat)
        elif isinstance(chat, SelfPrompt):
            self._turns = self._self_prompt(chat)
        else:
            self._turns = self._turn(chat.ids, chat.temperature, is_last=True)

    def go_on(self, reply: Reply | None = None) -> Ask | None:
        """Tells the chat what the target said to what it last asked for; returns what it asks for next, None where it
        has ended."""
        try:
            return self._turns.send(reply)
        except StopIteration:
            return None
        except Skipped as refusal:
            self.refuse(refusal)
            return None

    def _chat(self, chat: Chat) -> Turns:
        """Takes over the messages of others, and has the target say its own. Calls of tools stay as they are: what
        follows answers them."""
        for number, message in enumerate(chat.messages, 1):
            has_words = not message.get("tool_calls") and any(map(message.get, SAID))
            is_turn = bool(self.said) and message["role"] == "assistant" and has_words
            is_last = number == len(chat.messages)
            if not is_turn:
                self.said.append(message)
            if is_turn or (is_last and message["role"] == "user"):
                yield from self._turn(self._prompt(chat.tools), None, is_last)

    def _self_prompt(self, plan: SelfPrompt) -> Turns:
        self.said += [] if plan.system is None else [{"role": "system", "content": plan.system}]
        for number in range(plan.num_turns):
            words = yield from question(self.source, self.said, "" if number else plan.opening, self.asked)
            self.said.append({"role": "user", "content": words})
            yield from self._turn(self._prompt(), plan.temperature, number + 1 == plan.num_turns)

    def _prompt(self, tools: list[Any] | None = None) -> Tensor:
        rendered = self.source.rendered(self.said, tools=tools, add_generation_prompt=True, return_dict=True)
        return torch.tensor(rendered["input_ids"], dtype=torch.long)

    def _turn(self, prompt: Tensor, temperature: float | None, is_last: bool) -> Turns:
        """Has the target answer a prompt (T,), and makes an example of it where there is something to learn from. Only
        answers of self-prompts have a temperature; they may not repeat themselves.

        Raises Skipped where there is no room for an answer, and where one is cut that is not the last: a thought or a
        list that is broken off would stand in every later prompt.
        """
        most = self.source.options.max_length
        if not len(prompt) or len(prompt) + LEAST_ANSWER > most:
            raise Skipped("over-long prompt" if len(prompt) else "empty prompt")
        answer, is_ended = yield Ask(prompt, temperature)
        if temperature is not None and not is_ended and repeats_itself(answer):
            self.refuse(REPEATING)
        elif len(answer) < LEAST_ANSWER:
            self.refuse("too short")
        else:
            ids = torch.cat([prompt, answer])[:most]
            self._add({"input_ids": ids, "answers": torch.arange(len(ids)) >= len(prompt)})
        if is_ended:
            self.said.append(self.source.message(answer))
        elif not is_last:
            raise Skipped("turns after an answer that was cut")

    def _add(self, example: Example) -> None:
        """Adds a turn: to the example of the turns before where its prompt begins with that one's tokens, else as an
        example of its own."""
        last = self.examples[-1] if self.examples else None
        if last is not None:
            length = len(last["input_ids"])
            if torch.equal(example["input_ids"][:length], last["input_ids"]) and not example["answers"][:length].any():
                example["answers"][:length] = last["answers"]
                self.examples.pop()
        self.examples.append(example)
