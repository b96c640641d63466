"""Answers of the target to prompts of token ids, token for token as it generates them. T tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat_template import as_read, message_of
from ..storage.fingerprints import digest
from ..targets.ends import execution_device
from .preparation_options import PreparationOptions
from .skipped import refused_by

Temperatures = Sequence[float | None]  # of each prompt; 0: greedy, None: as the source samples


def seed_of(*numbers: int) -> int:
    """Returns a seed that follows from these numbers, in this order, and from nothing else."""
    return int(digest(*map(str, numbers))[:15], 16)


def stop_ids(target: Any, tokenizer: Any) -> list[int]:
    """Returns the ids that end a turn: those of the generation config of the target (or of what a store has kept of
    it), and the tokenizer's EOS, if it has one."""
    own = target.generation_config.eos_token_id
    found = {*(own if isinstance(own, list) else [own]), tokenizer and tokenizer.eos_token_id}
    return sorted(token for token in found if token is not None)


def at_temperature(generation: dict[str, Any], temperature: float | None) -> dict[str, Any]:
    """Returns arguments of generate() with another temperature (0: greedy, None: as they are)."""
    if temperature is None:
        return generation
    sampled = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    return {name: value for name, value in generation.items() if name != "temperature"} | sampled


@dataclass
class AnswerSource:
    """Gives answers in the target's words.

    `target`: its generation config says how an answer ends; `ends`: further ids that end one. `options`: how long
    examples and answers may be, and what the target samples by.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: PreparationOptions
    ends: Sequence[int] = field(default=(), kw_only=True)

    def __post_init__(self):
        self.stops = sorted({*stop_ids(self.target, self.tokenizer), *self.ends})

    def answers(self, prompts: list[Tensor], temperatures: Temperatures) -> list[Tensor]:
        """Returns the ids of the answer to each prompt (T,), through the token that ends its turn."""
        raise NotImplementedError

    def is_ended(self, answer: Tensor) -> bool:
        """Returns True for an answer (T,) that ends with a token that ends its turn, False for one that was cut."""
        return len(answer) > 0 and int(answer[-1]) in self.stops

    def through_end(self, answer: Tensor) -> Tensor:
        """Returns an answer (T,) without what comes after the token that ends it."""
        ends = torch.isin(answer, torch.tensor(self.stops, dtype=torch.long)).nonzero()
        return answer[: int(ends[0]) + 1] if len(ends) else answer

    def text(self, answer: Tensor) -> str:
        """Returns the words of an answer (T,), without the token that ends the turn, as a later prompt quotes them."""
        words = answer[:-1] if self.is_ended(answer) else answer
        return str(self.tokenizer.decode(words, skip_special_tokens=True))

    def message(self, answer: Tensor) -> dict[str, Any]:
        """Returns an answer (T,) as a message of its chat; thoughts stand in a field of their own, which templates
        leave out of later prompts."""
        return message_of(str(self.tokenizer.decode(answer)), self.text(answer))

    def rendered(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        """Returns a chat as the template renders it, as text or ids. Raises Skipped where the template refuses it."""
        messages = as_read(self.tokenizer, messages, self.options.template)
        with refused_by("template"):
            return self.tokenizer.apply_chat_template(messages, **self.options.template | options)


@dataclass
class AnswerGenerator(AnswerSource):
    """Generates answers with the target, `batch_size` prompts at a time."""

    def answers(self, prompts: list[Tensor], temperatures: Temperatures) -> list[Tensor]:
        """Returns the ids of the answer to each prompt (T,), through the token that ends its turn.

        Prompts of one temperature are answered together, the longest first: what does not fit in memory fails at once.
        """
        found = dict[int, Tensor]()
        for temperature in dict.fromkeys(temperatures):
            alike = [i for i in range(len(prompts)) if temperatures[i] == temperature]
            order = sorted(alike, key=lambda i: -len(prompts[i]))
            for start in range(0, len(order), self.options.batch_size):
                chosen = order[start : start + self.options.batch_size]
                found |= zip(chosen, self._batch([prompts[i] for i in chosen], temperature), strict=True)
        return [found[i] for i in range(len(prompts))]

    @torch.no_grad()
    def _batch(self, prompts: list[Tensor], temperature: float | None) -> list[Tensor]:
        pads = (self.tokenizer.pad_token_id, *self.stops, 0)
        pad = next(token for token in pads if token is not None)
        ids = pad_sequence(prompts, batch_first=True, padding_value=pad, padding_side="left")
        mask = pad_sequence([torch.ones_like(each) for each in prompts], batch_first=True, padding_side="left")
        device, room = execution_device(self.target), self.options.max_length - min(map(len, prompts))
        generated = self.target.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=min(self.options.max_new_tokens, room),
            pad_token_id=pad,
            eos_token_id=self.stops or None,
            return_dict_in_generate=False,
            **at_temperature(self.options.generation, temperature),
        )
        answers = generated[:, ids.shape[1] :].cpu()
        return [
            self.through_end(answer[: self.options.max_length - len(prompt)])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
