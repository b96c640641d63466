"""Chats of which the target writes every word: the template is rendered up to where the user speaks, and the target
goes on from there (Magpie, arXiv 2406.08464). T tokens."""

import random
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    *(None,) * 4,
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
    *("Who", "When", "Where", "What is", "Why", "How", "How many", "If", "A", "Give me", "Explain", "Write"),
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


class Ask(NamedTuple):
    """A request of a chat to the target: to continue `prompt` (T,), at a temperature (None: as the source samples). The
    chat goes on once it is answered. `after`: where the user is to speak, the text that follows the user's words; None
    for an answer."""

    prompt: Tensor
    temperature: float | None
    after: str | None = None


Reply = tuple[Tensor, bool]  # what the target goes on with (T,), and whether it has ended it
Turns = Generator[Ask, Any, None]  # is sent each Reply


def asking(source: AnswerSource, texts: set[str]) -> AnswerSource:
    """Returns a source of questions, which end as answers do, and with the special tokens that begin the texts after a
    user's words."""
    tokenizer = source.tokenizer
    added = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
    firsts = (tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"][:1] for text in texts)
    ends = [token for first in firsts for token in first if token in added]
    return replace(source, ends=ends, options=replace(source.options, max_new_tokens=_longest(source)))


def _longest(source: AnswerSource) -> int:
    return min(LONGEST_QUESTION, source.options.max_length // 4)


def question(
    source: AnswerSource, said: list[dict[str, Any]], opening: str, asked: set[str]
) -> Generator[Ask, Reply, str]:
    """Has the target write the user's next message in a chat, whose messages so far are `said`; returns it. It begins
    with the words of the opening, which may be none. `asked`: the first questions of all chats, without regard to case
    and spaces.

    Raises Skipped for a question that was asked before, has no end (unless a text is quoted in it that does not repeat
    itself), is empty or has special tokens in it, and where there is no room for one.
    """
    prompt, after = _prompt(source, said, opening)
    answer, is_ended = yield Ask(prompt, 1.0, after)
    words, end = str(source.tokenizer.decode(answer[:-1] if is_ended else answer)), after.strip()
    # Where a user's turn has no token that ends it, the target goes on with what begins its own.
    words, has_end, _ = words.partition(end) if end else (words, "", "")
    if not (is_ended or has_end or (opening.endswith(QUOTING) and not repeats_itself(answer))):
        raise Skipped(ENDLESS)
    words = words.rstrip("\ufffd").rstrip()  # a text that breaks off may do so within a character
    if not words.strip():  # an opening alone asks nothing
        raise Skipped("an empty question")
    words = (opening + words).strip()
    if any(token in words for token in source.tokenizer.all_special_tokens):
        raise Skipped("a question with special tokens in it")
    plain = _plain(words)
    earlier = {_plain(str(message["content"])) for message in said if message["role"] == "user"}
    if plain in (earlier or asked):
        raise Skipped(ASKED_BEFORE)
    if not earlier:
        asked.add(plain)
    return words


def _prompt(source: AnswerSource, said: list[dict[str, Any]], opening: str) -> tuple[Tensor, str]:
    """Renders a chat through the opening of the user's words: ids (T,), and the text that follows them. Raises Skipped
    where the template refuses it, and where there is no room for a question and an answer."""
    messages = [*said, {"role": "user", "content": MARK}]
    before, mark, after = str(source.rendered(messages, add_generation_prompt=True, tokenize=False)).rpartition(MARK)
    if not mark:
        raise Skipped("template leaves out the user's words")
    with refused_by("tokenizer"):
        ids = source.tokenizer(before + opening, add_special_tokens=False)["input_ids"]
    if not ids or len(ids) + 2 * _longest(source) > source.options.max_length:
        raise Skipped("no room for another question" if ids else "empty prompt")
    return torch.tensor(ids, dtype=torch.long), after


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
