"""Chats of which the target writes every word: the template is rendered up to where the user speaks, and the target
goes on from there (Magpie, arXiv 2406.08464). T tokens."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .answers import AnswerSource
from .records import Records
from .skipped import Skipped, refused_by

MARK = "b81d5f0c"  # stands for the user's words in a rendered template
LONGEST_QUESTION = 256  # tokens, and at most a quarter of an example
# One entry of each of the following is drawn for a chat, all equally likely.
NUM_TURNS = (1, 1, 1, 1, 2, 2, 3)
TEMPERATURES = (0.0, 0.7, 1.0)  # of answers; questions are asked at 1
# None: as the template has it without a system message.
SYSTEM_MESSAGES = (
    None,
    None,
    None,
    None,
    "You are a helpful assistant.",
    "You are a concise assistant. Answer in a few sentences.",
    "You are a patient teacher who explains things step by step.",
    "You are an experienced programmer. Answer with code where code helps.",
    "You are an expert in mathematics. Show how you arrive at each result.",
    "You are an editor who rewrites, summarizes and corrects texts.",
    "You answer questions about facts, and say so when you are not sure.",
    "You are a creative writer.",
)
# How the user's first message begins; None: as the target likes. What it likes is mostly general talk.
OPENINGS = (
    *(None,) * 18,
    "Summarize:",
    "Summarize the following article.\n\n",
    "Rewrite this text:\n\n",
    "Complete this function.\n\n```python\ndef",
    "Write a Python function that",
    "What does this code do?\n\n```",
    "Who",
    "When",
    "Where",
    "What is",
    "Why",
    "How",
    "How many",
    "If",
    "A",
    "Give me",
    "Explain",
    "Write",
)
QUOTING = ("\n\n", ":", "```")  # how openings end after which a text is quoted, which may break off anywhere
LONGEST_PERIOD, LEAST_REPEATED = 64, 48  # tokens: of a pattern that is repeated, and of all its repetitions together
LEAST_REPETITIONS = 3
ASKED_BEFORE = "a question that was asked before"
ENDLESS = "a question without an end"
REPEATING = "an answer that repeats itself"


@dataclass(frozen=True)
class SelfPrompt:
    """A chat to be: its system message (None: the template's), how often the user speaks, the temperature of the
    target's answers (0: greedy), and the words that the user's first message begins with."""

    system: str | None
    num_turns: int
    temperature: float
    opening: str = ""


class SelfPrompts(Records):
    """Records of chats that the target is to write; record i follows from `seed` and i alone."""

    def __init__(self, num: int, seed: int):
        self.num, self.seed = num, seed

    def __len__(self) -> int:
        return self.num

    def where(self, number: int) -> str:
        """Returns the place of a record."""
        return f"self-prompted chat {range(len(self))[number] + 1}"

    def __getitem__(self, index):
        draw = random.Random(f"{self.seed}/{range(len(self))[index]}")
        return SelfPrompt(
            draw.choice(SYSTEM_MESSAGES), draw.choice(NUM_TURNS), draw.choice(TEMPERATURES), draw.choice(OPENINGS) or ""
        )


@dataclass
class Questioner:
    """Writes the user's messages by the target.

    Questions that were asked before, without an end, empty ones and such with special tokens in them are refused.
    """

    source: AnswerSource
    asked: set[str] = field(default_factory=set)  # first questions, without regard to case and spaces

    def questions(self, chats: list[list[dict[str, Any]]], openings: list[str]) -> list[str | Skipped]:
        """Returns the user's next message in each chat, whose messages so far are given, or why there is none; each
        begins with the words of its opening, which may be none."""
        found: dict[int, str | Skipped] = {}
        prompts = dict[int, tuple[Tensor, str]]()
        for index, (said, opening) in enumerate(zip(chats, openings, strict=True)):
            try:
                prompts[index] = self._prompt(said, opening)
            except Skipped as refusal:
                found[index] = refusal
        # All chats have one template, and so the same text after a user's words.
        source = self.source.ending_at(self._ends({text for _, text in prompts.values()}), self._longest)
        answers = source.answers([ids for ids, _ in prompts.values()], [1.0] * len(prompts))
        for (index, (_, after)), answer in zip(prompts.items(), answers, strict=True):
            try:
                words = self._question(source, answer, after.strip(), openings[index])
                found[index] = self._checked(words, chats[index])
            except Skipped as refusal:
                found[index] = refusal
        return [found[index] for index in range(len(chats))]

    def _prompt(self, said: list[dict[str, Any]], opening: str) -> tuple[Tensor, str]:
        """Renders a chat through the opening of the user's words: ids (T,), and the text that follows them. Raises
        Skipped where the template refuses it, and where there is no room for a question and an answer."""
        messages = [*said, {"role": "user", "content": MARK}]
        text = self.source.rendered(messages, add_generation_prompt=True, tokenize=False)
        before, mark, after = str(text).rpartition(MARK)
        if not mark:
            raise Skipped("template leaves out the user's words")
        with refused_by("tokenizer"):
            ids = self.source.tokenizer(before + opening, add_special_tokens=False)["input_ids"]
        prompt = torch.tensor(ids, dtype=torch.long)
        if not len(prompt) or len(prompt) + 2 * self._longest > self.source.options.max_length:
            raise Skipped("no room for another question" if len(prompt) else "empty prompt")
        return prompt, after

    @property
    def _longest(self) -> int:
        return min(LONGEST_QUESTION, self.source.options.max_length // 4)

    def _ends(self, texts: set[str]) -> list[int]:
        """Returns the ids besides the target's own that end a question, by the texts that follow one."""
        tokenizer = self.source.tokenizer
        added = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
        firsts = (tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"][:1] for text in texts)
        return [token for first in firsts for token in first if token in added]

    def _question(self, source: AnswerSource, answer: Tensor, end: str, opening: str) -> str:
        """Returns the user's words: an opening and what the target went on with (T,), which may not be nothing. Raises
        Skipped where they have no end, unless a text is quoted in them that does not repeat itself."""
        is_ended = source.is_ended(answer)
        words = str(source.tokenizer.decode(answer[:-1] if is_ended else answer))
        # Where a user's turn has no token that ends it, the target goes on with what begins its own.
        question, has_end, _ = words.partition(end) if end else (words, "", "")
        if not (is_ended or has_end or (opening.endswith(QUOTING) and not repeats_itself(answer))):
            raise Skipped(ENDLESS)
        question = question.rstrip("\ufffd").rstrip()  # a text that breaks off may do so within a character
        return (opening + question).strip() if question.strip() else ""

    def _checked(self, question: str, said: list[dict[str, Any]]) -> str:
        """Returns the user's words. Raises Skipped where no user would say them."""
        if not question:
            raise Skipped("an empty question")
        if any(token in question for token in self.source.tokenizer.all_special_tokens):
            raise Skipped("a question with special tokens in it")
        plain = _plain(question)
        earlier = {_plain(str(message["content"])) for message in said if message["role"] == "user"}
        if plain in (earlier or self.asked):
            raise Skipped(ASKED_BEFORE)
        if not earlier:
            self.asked.add(plain)
        return question


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def repeats_itself(answer: Tensor) -> bool:
    """Returns True where the end of an answer (T,) says the same again and again."""
    for period in range(1, min(LONGEST_PERIOD, len(answer) // LEAST_REPETITIONS) + 1):
        length = max(LEAST_REPEATED, LEAST_REPETITIONS * period)
        if length <= len(answer) and bool((answer[-length:-period] == answer[period - length :]).all()):
            return True
    return False


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the id that a text without a template begins with: BOS, or EOS where there is none.

    Raises ValueError for a tokenizer that has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError(
        "the tokenizer has no chat template, no BOS and no EOS, from which the target could begin a text; expected one"
        " of them, or data with prompts."
    )
