"""A tokenizer with a chat template whose tokens are letters."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
