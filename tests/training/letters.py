"""A tokenizer with a chat template whose tokens are letters, and chats in them."""

import json
import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle31_hf.training.answers import AnswerGenerator
from eagle31_hf.training.chats import ExampleMaker
from eagle31_hf.training.preparation_options import PreparationOptions

END = 10  # the token that ends an answer, "k"
# Letters are tokens: h, i and j begin what the system, the user and the assistant say, k ends it. "gg" offers tools.
TEMPLATE = (
    "{{ 'gg' if tools }}{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('bad words') }}{% endif"
    " %}{{ {'system': 'h', 'user': 'i', 'assistant': 'j', 'tool': 'i'}[m.role] }}{{ m.content or 'f' }}{{ 'k' if m.role"
    " == 'assistant' }}{% endfor %}{{ 'j' if add_generation_prompt }}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({chr(ord("a") + i): i for i in range(END + 1)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="k")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def conversations(count: int = 14) -> list[dict]:
    """Chats of one or two turns, the same ones every time."""
    draw = random.Random(0)
    words = lambda least: "".join(draw.choices("abcdefg", k=draw.randrange(least, 12)))  # noqa: E731
    turns = [
        [("human", words(1)), ("gpt", words(3)), ("human", words(1)), ("gpt", words(3))][: draw.choice([2, 4])]
        for _ in range(count)
    ]
    return [{"conversations": [{"from": role, "value": text} for role, text in made]} for made in turns]


def write_data(path, records: list[dict]) -> str:
    """Writes records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def maker_of(tokenizer, max_length: int, vocab_size: int = 2**31, stop_ids: set[int] | None = None, **options):
    """Returns a maker of examples whose turns end with the tokenizer's EOS, unless other ids are given."""
    stop_ids = {tokenizer.eos_token_id} if stop_ids is None else stop_ids
    return ExampleMaker(tokenizer, PreparationOptions(max_length=max_length, **options), vocab_size, stop_ids)


def generator_of(target, tokenizer, max_length: int, max_new_tokens: int, batch_size: int = 8, generation=None):
    """Returns what generates answers of at most so many tokens, so many at once."""
    options = PreparationOptions(
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        generation=generation or {},
        regenerate=True,
    )
    return AnswerGenerator(target, tokenizer, options)
