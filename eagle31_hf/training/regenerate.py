"""Answers in the target's own words, token for token as it generates them: what a drafter meets when serving.

B prompts, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..storage.fingerprints import digest
from ..targets.ends import execution_device
from .chats import SAID
from .kinds import Chat
from .packing import Example
from .skipped import Skipped, refused_by

LEAST_ANSWER = 2  # tokens: the first is never drafted
OVER_LONG, TOO_SHORT = "over-long prompt", "too short"
Refuse = Callable[[int, Skipped | str], None]  # is told the index of what could not go on, and why


def seed_of(*numbers: int) -> int:
    """Returns a seed that follows from these numbers, in this order, and from nothing else."""
    return int(digest(*map(str, numbers))[:15], 16)


def stop_ids(target: Any, tokenizer: Any) -> list[int]:
    """Returns the ids that end a turn: those of the generation config of the target (or of what a store has kept of
    it), and the tokenizer's EOS, if it has one."""
    own = target.generation_config.eos_token_id
    found = {*(own if isinstance(own, list) else [own]), tokenizer and tokenizer.eos_token_id}
    return sorted(token for token in found if token is not None)


@dataclass
class AnswerSource:
    """Gives answers in the target's words, and makes examples of them.

    Examples have at most `max_length` tokens, answers `max_new_tokens`. `target`: its generation config says how an
    answer ends.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    max_new_tokens: int

    def __post_init__(self):
        self.stops = stop_ids(self.target, self.tokenizer)

    def answers(self, prompts: list[Tensor]) -> list[Tensor]:
        """Returns the ids of the answer to each prompt (T,), through the token that ends its turn."""
        raise NotImplementedError

    def through_end(self, answer: Tensor) -> Tensor:
        """Returns an answer (T,) without what comes after the token that ends it."""
        ends = torch.isin(answer, torch.tensor(self.stops, dtype=torch.long)).nonzero()
        return answer[: int(ends[0]) + 1] if len(ends) else answer

    def text(self, answer: Tensor) -> str:
        """Returns the words of an answer (T,), without the token that ends the turn, as a later prompt quotes them."""
        words = answer[:-1] if len(answer) and answer[-1] in self.stops else answer
        return str(self.tokenizer.decode(words, skip_special_tokens=True))

    def fits(self, prompt: Tensor) -> bool:
        """Returns True where an example has room for the prompt (T,) and the shortest answer to learn from."""
        return len(prompt) + LEAST_ANSWER <= self.max_length

    def example(self, prompt: Tensor, answer: Tensor) -> Example:
        """Makes an example of a prompt (T,) and its answer, cut to `max_length` tokens."""
        ids = torch.cat([prompt, answer])[: self.max_length]
        return {"input_ids": ids, "answers": torch.arange(len(ids)) >= len(prompt)}


@dataclass
class AnswerGenerator(AnswerSource):
    """Generates answers with the target, `batch_size` prompts at a time. `generation`: arguments of generate()."""

    batch_size: int = 8
    generation: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        pads = (self.tokenizer.pad_token_id, *self.stops, 0)
        self.pad = next(token for token in pads if token is not None)

    def answers(self, prompts: list[Tensor]) -> list[Tensor]:
        """Returns the ids of the answer to each prompt (T,), through the token that ends its turn.

        The longest prompts come first: what does not fit in memory fails at once.
        """
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        found = dict[int, Tensor]()
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            found |= zip(chosen, self._batch([prompts[i] for i in chosen]), strict=True)
        return [found[i] for i in range(len(prompts))]

    @torch.no_grad()
    def _batch(self, prompts: list[Tensor]) -> list[Tensor]:
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.full((len(prompts), max(lengths)), self.pad)
        mask = torch.zeros_like(ids)
        for b, prompt in enumerate(prompts):
            ids[b, -len(prompt) :], mask[b, -len(prompt) :] = prompt, 1
        device, room = execution_device(self.target), self.max_length - min(lengths)
        generated = self.target.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=min(self.max_new_tokens, room),
            pad_token_id=self.pad,
            eos_token_id=self.stops or None,
            return_dict_in_generate=False,
            **self.generation,
        )
        answers = generated[:, ids.shape[1] :].cpu()
        return [
            self.through_end(answer[: self.max_length - length])
            for answer, length in zip(answers, lengths, strict=True)
        ]


@dataclass
class _Conversation:
    """A chat under way: `said` is what the next prompt is made of, `ahead` the messages of the original yet to come."""

    index: int
    ahead: list[dict[str, Any]]
    tools: list[Any] | None
    said: list[dict[str, Any]] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)

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
        return False


def regenerate(generator: AnswerSource, chats: list[Chat], refuse: Refuse, **template: Any) -> list[list[Example]]:
    """Returns, chat by chat, an example for every turn of the assistant, and for one after a last message of the
    user's, in the target's words.

    An example is a prompt as it is served and the target's answer to it; the answer's words replace the original in
    later prompts. `refuse` is told of chats that could not go on and of answers too short to learn from. `template`:
    options of `apply_chat_template`.
    """
    conversations = [_Conversation(index, [*chat.messages], chat.tools) for index, chat in enumerate(chats)]
    while True:
        turns = [
            (conversation, prompt)
            for conversation in conversations
            if conversation.goes_on()
            for prompt in _prompts(generator, conversation, refuse, template)
        ]
        if not turns:
            return [conversation.examples for conversation in conversations]
        answers = generator.answers([prompt for _, prompt in turns])
        for (conversation, prompt), answer in zip(turns, answers, strict=True):
            conversation.examples += _examples(generator, conversation.index, prompt, answer, refuse)
            conversation.said.append({"role": "assistant", "content": generator.text(answer)})


def continue_texts(generator: AnswerSource, prompts: list[Tensor], refuse: Refuse) -> list[list[Example]]:
    """Returns, for each prompt (T,), an example of it and the target's continuation, or none; `refuse` is told of
    those."""
    fitting = [i for i, prompt in enumerate(prompts) if generator.fits(prompt)]
    for i in sorted({*range(len(prompts))} - {*fitting}):
        refuse(i, OVER_LONG)
    answers = dict(zip(fitting, generator.answers([prompts[i] for i in fitting]), strict=True))
    return [
        _examples(generator, i, prompt, answers[i], refuse) if i in answers else [] for i, prompt in enumerate(prompts)
    ]


def first_prompt(generator: AnswerSource, chat: Chat, **template: Any) -> list[Tensor]:
    """Returns the prompt (T,) of a chat's first turn that the target would answer, in a list; an empty list where there
    is none. The chat stays as it is."""
    conversation = _Conversation(0, [*chat.messages], chat.tools)
    return _prompts(generator, conversation, lambda i, refusal: None, template) if conversation.goes_on() else []


def _examples(generator: AnswerSource, index: int, prompt: Tensor, answer: Tensor, refuse: Refuse) -> list[Example]:
    if len(answer) >= LEAST_ANSWER:
        return [generator.example(prompt, answer)]
    refuse(index, TOO_SHORT)
    return []


def _prompts(
    generator: AnswerSource, conversation: _Conversation, refuse: Refuse, template: dict[str, Any]
) -> list[Tensor]:
    """Renders the prompt of the next turn; returns none where the chat has to end."""
    try:
        with refused_by("template"):
            rendered: Any = generator.tokenizer.apply_chat_template(
                conversation.said,
                tools=conversation.tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **template,
            )
        prompt = torch.tensor(rendered["input_ids"], dtype=torch.long)
        if not len(prompt) or not generator.fits(prompt):
            raise Skipped(OVER_LONG if len(prompt) else "empty prompt")
        return [prompt]
    except Skipped as refusal:
        refuse(conversation.index, refusal)
    conversation.ahead.clear()
    return []
