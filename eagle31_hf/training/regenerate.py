"""Chats answered by the target: every answer is replaced by its own, and quoted in the prompts that follow. Texts are
gone on with.

B prompts, T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .answers import LEAST_ANSWER, AnswerSource
from .chats import SAID
from .kinds import Chat
from .packing import Example
from .self_prompts import REPEATING, Questioner, SelfPrompt, repeats_itself
from .skipped import Skipped

OVER_LONG = "over-long prompt"
TOO_SHORT = "too short"
CUT = "turns after an answer that was cut"
Refuse = Callable[[int, Skipped | str], None]  # is told the index of what could not go on, and why


@dataclass(frozen=True)
class Beginning:
    """A text to be: the ids that it begins with (T,), and the temperature of what follows them (None: as the source
    samples)."""

    ids: Tensor
    temperature: float | None = None


@dataclass
class _Conversation:
    """A chat under way: `said` is what the next prompt is made of, `ahead` the messages of the original yet to come,
    `to_ask` how many more the user is to write, `opening` how the first of them begins. `temperature` of its answers:
    None, as the source samples. A text is a chat of one turn, whose prompt is `begun` (T,)."""

    index: int
    begun: Tensor | None = None
    ahead: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    to_ask: int = 0
    opening: str = ""
    temperature: float | None = None
    said: list[dict[str, Any]] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)

    @classmethod
    def of(cls, index: int, chat: Chat | SelfPrompt | Beginning) -> "_Conversation":
        if isinstance(chat, Beginning):
            return cls(index, begun=chat.ids, temperature=chat.temperature)
        if isinstance(chat, Chat):
            return cls(index, ahead=[*chat.messages], tools=chat.tools)
        system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
        return cls(index, to_ask=chat.num_turns, opening=chat.opening, temperature=chat.temperature, said=system)

    def goes_on(self) -> bool:
        """Takes over the messages of others, up to the target's next turn; returns False where it has none.

        Calls of tools stay as they are: what follows answers them.
        """
        while self.ahead:
            message = self.ahead.pop(0)
            is_turn = message["role"] == "assistant" and not message.get("tool_calls") and any(map(message.get, SAID))
            if is_turn and self.said:
                return True
            self.said.append(message)
            if message["role"] == "user" and not self.ahead:
                return True
        return self.begun is not None

    def end(self) -> None:
        """Leaves out all that was yet to come."""
        self.ahead.clear()
        self.to_ask = 0

    def add(self, example: Example) -> None:
        """Adds a turn: to the example of the turns before where its prompt begins with that one's tokens, else as an
        example of its own."""
        last = self.examples[-1] if self.examples else None
        if last is not None:
            length = len(last["input_ids"])
            if torch.equal(example["input_ids"][:length], last["input_ids"]) and not example["answers"][:length].any():
                example["answers"][:length] = last["answers"]
                self.examples.pop()
        self.examples.append(example)


def regenerate(
    source: AnswerSource, chats: Sequence[Chat | SelfPrompt | Beginning], refuse: Refuse
) -> list[list[Example]]:
    """Returns, chat by chat, examples of every turn of the assistant, and of one after a last message of the user's, in
    the target's words; of a text that begins, an example of it and of what the target goes on with.

    A turn is a prompt as it is served and the target's answer to it, whose words replace the original in later prompts.
    Turns whose prompts begin with the turns before, token for token, are one example. A chat ends with an answer that
    was cut. `refuse` is told of chats that could not go on and of answers not to learn from.
    """
    conversations = [_Conversation.of(index, chat) for index, chat in enumerate(chats)]
    questioner = Questioner(source)
    while True:
        going = [*_asked(questioner, conversations, refuse), *(talk for talk in conversations if talk.goes_on())]
        turns = [(talk, prompt) for talk in going for prompt in _prompts(source, talk, refuse)]
        if not turns:
            return [talk.examples for talk in conversations]
        answers = source.answers([prompt for _, prompt in turns], [talk.temperature for talk, _ in turns])
        for (talk, prompt), answer in zip(turns, answers, strict=True):
            _take(source, talk, prompt, answer, refuse)


def _asked(questioner: Questioner, conversations: list[_Conversation], refuse: Refuse) -> list[_Conversation]:
    """Has the user speak in all chats where the target writes the user's messages; returns those where it did."""
    waiting = [talk for talk in conversations if talk.to_ask]
    going = list[_Conversation]()
    if not waiting:
        return []
    questions = questioner.questions([talk.said for talk in waiting], [talk.opening for talk in waiting])
    for talk, question in zip(waiting, questions, strict=True):
        if isinstance(question, Skipped):
            refuse(talk.index, question)
            talk.end()
        else:
            talk.to_ask, talk.opening = talk.to_ask - 1, ""
            talk.said.append({"role": "user", "content": question})
            going.append(talk)
    return going


def _take(source: AnswerSource, talk: _Conversation, prompt: Tensor, answer: Tensor, refuse: Refuse) -> None:
    """Adds an answer (T,) to its chat, and an example of it where there is something to learn from. Only answers of
    self-prompts have a temperature; they may not repeat themselves."""
    if talk.temperature is not None and not source.is_ended(answer) and repeats_itself(answer):
        refuse(talk.index, REPEATING)
    elif len(answer) < LEAST_ANSWER:
        refuse(talk.index, TOO_SHORT)
    else:
        talk.add(source.example(prompt, answer))
    if source.is_ended(answer):
        talk.said.append(source.message(answer))
        return
    if talk.ahead or talk.to_ask:
        refuse(talk.index, CUT)
    talk.end()  # a thought or a list that is broken off would stand in every later prompt


def first_prompt(source: AnswerSource, chat: Chat | Beginning) -> list[Tensor]:
    """Returns the prompt (T,) of the first turn that the target would answer, in a list; an empty list where there is
    none. The chat stays as it is."""
    talk = _Conversation.of(0, chat)
    return _prompts(source, talk, lambda i, refusal: None) if talk.goes_on() else []


def _prompts(source: AnswerSource, talk: _Conversation, refuse: Refuse) -> list[Tensor]:
    """Returns the prompt of the next turn (T,), or none where the chat has to end."""
    try:
        prompt, talk.begun = talk.begun, None
        if prompt is None:
            rendered = source.rendered(talk.said, tools=talk.tools, add_generation_prompt=True, return_dict=True)
            prompt = torch.tensor(rendered["input_ids"], dtype=torch.long)
        if not len(prompt) or not source.fits(prompt):
            raise Skipped(OVER_LONG if len(prompt) else "empty prompt")
        return [prompt]
    except Skipped as refusal:
        refuse(talk.index, refusal)
    talk.end()
    return []
