"""Answers in the target's own words, token for token as it says them: what a drafter meets when serving. B prompts, T
tokens."""

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
from .skipped import Skipped, refused_by
from .store import Row

LEAST_ANSWER = 2  # tokens: the first is never drafted
OVER_LONG, TOO_SHORT = "over-long prompt", "too short"
Refuse = Callable[[int, Skipped | str], None]  # told the place in the list of what could not go on, and why


def seed_of(*numbers: int) -> int:
    """A seed that follows from these numbers, in this order, and from nothing else."""
    return int(digest(*map(str, numbers))[:15], 16)


def stop_ids(target: Any, tokenizer: Any) -> list[int]:
    """The ids that end a turn: those the target, or what a store has kept of it, is generated with, and its
    tokenizer's, if any."""
    own = target.generation_config.eos_token_id
    found = {*(own if isinstance(own, list) else [own]), tokenizer and tokenizer.eos_token_id}
    return sorted(token for token in found if token is not None)


@dataclass
class Speaker:
    """The target as the author of answers: rows have at most `max_length` tokens, answers `max_new_tokens`;
    `generation` is what generate() takes."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    max_new_tokens: int
    batch_size: int = 8
    generation: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.stops = stop_ids(self.target, self.tokenizer)
        pads = (self.tokenizer.pad_token_id, *self.stops, 0)
        self.pad = next(token for token in pads if token is not None)

    def answers(self, prompts: list[Tensor]) -> list[Tensor]:
        """Ids of each answer through the end of its turn. The longest prompts come first: what does not fit in memory
        fails at once."""
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
        for row, prompt in enumerate(prompts):
            ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
        device, room = execution_device(self.target), self.max_length - min(lengths)
        said = self.target.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=min(self.max_new_tokens, room),
            pad_token_id=self.pad,
            eos_token_id=self.stops or None,
            return_dict_in_generate=False,
            **self.generation,
        )
        return [self._through_end(answer) for answer in said[:, ids.shape[1] :].cpu()]

    def _through_end(self, answer: Tensor) -> Tensor:
        ends = torch.isin(answer, torch.tensor(self.stops, dtype=torch.long)).nonzero()
        return answer[: int(ends[0]) + 1] if len(ends) else answer

    def text(self, answer: Tensor) -> str:
        """The words of an answer (T,), without the token that ends the turn, as a later prompt quotes them."""
        said = answer[:-1] if answer[-1] in self.stops else answer
        return str(self.tokenizer.decode(said, skip_special_tokens=True))

    def fits(self, prompt: Tensor) -> bool:
        """Returns True where a row has room for the prompt (T,) and the shortest answer to learn from."""
        return len(prompt) + LEAST_ANSWER <= self.max_length

    def row(self, prompt: Tensor, answer: Tensor) -> Row:
        """The row of a prompt (T,) and its answer, cut to `max_length` tokens."""
        ids = torch.cat([prompt, answer])[: self.max_length]
        return {"input_ids": ids, "answers": torch.arange(len(ids)) >= len(prompt)}


@dataclass
class _Talk:
    """A chat under way: `said` is what the next prompt is made of, `ahead` the messages of the original yet to come."""

    index: int
    ahead: list[dict[str, Any]]
    tools: list[Any] | None
    said: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def goes_on(self) -> bool:
        """Takes over what others say, up to the target's next turn. Calls of tools stay as they are: what follows
        answers them."""
        while self.ahead:
            message = self.ahead.pop(0)
            if (
                message["role"] == "assistant"
                and self.said
                and not message.get("tool_calls")
                and any(map(message.get, SAID))
            ):
                return True
            self.said.append(message)
            if message["role"] == "user" and not self.ahead:
                return True
        return False


def regenerate(speaker: Speaker, chats: list[Chat], refuse: Refuse, **template: Any) -> list[list[Row]]:
    """Chat by chat a row for every turn of the assistant, and for the one after a last message of the user's, as the
    target says it.

    A row is the prompt as it is served and what the target said to it; its words replace the original in later prompts.
    `refuse` is told of chats that could not go on and of answers too short to learn from. `template`: options of
    `apply_chat_template`.
    """
    talks = [_Talk(index, [*chat.messages], chat.tools) for index, chat in enumerate(chats)]
    while True:
        turns = [
            (talk, prompt) for talk in talks if talk.goes_on() for prompt in _prompts(speaker, talk, refuse, template)
        ]
        if not turns:
            return [talk.rows for talk in talks]
        answers = speaker.answers([prompt for _, prompt in turns])
        for (talk, prompt), answer in zip(turns, answers, strict=True):
            talk.rows += _rows(speaker, talk.index, prompt, answer, refuse)
            talk.said.append({"role": "assistant", "content": speaker.text(answer)})


def continue_texts(speaker: Speaker, prompts: list[Tensor], refuse: Refuse) -> list[list[Row]]:
    """Prompt ids (T,) -> a row of the prompt and what the target goes on with, or none; `refuse` is told of those."""
    fitting = [i for i, prompt in enumerate(prompts) if speaker.fits(prompt)]
    for i in sorted({*range(len(prompts))} - {*fitting}):
        refuse(i, OVER_LONG)
    answers = dict(zip(fitting, speaker.answers([prompts[i] for i in fitting]), strict=True))
    return [_rows(speaker, i, prompt, answers[i], refuse) if i in answers else [] for i, prompt in enumerate(prompts)]


def _rows(speaker: Speaker, index: int, prompt: Tensor, answer: Tensor, refuse: Refuse) -> list[Row]:
    if len(answer) >= LEAST_ANSWER:
        return [speaker.row(prompt, answer)]
    refuse(index, TOO_SHORT)
    return []


def _prompts(speaker: Speaker, talk: _Talk, refuse: Refuse, template: dict[str, Any]) -> list[Tensor]:
    """The prompt of the next turn, or none: the chat ends there."""
    try:
        with refused_by("template"):
            rendered: Any = speaker.tokenizer.apply_chat_template(
                talk.said, tools=talk.tools, add_generation_prompt=True, tokenize=True, return_dict=True, **template
            )
        prompt = torch.tensor(rendered["input_ids"], dtype=torch.long)
        if not len(prompt) or not speaker.fits(prompt):
            raise Skipped(OVER_LONG if len(prompt) else "empty prompt")
        return [prompt]
    except Skipped as refusal:
        refuse(talk.index, refusal)
    talk.ahead.clear()
    return []
