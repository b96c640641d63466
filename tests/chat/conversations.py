"""A conversation with the demo pair, in fp32 and greedily."""

from functools import cache

from eagle31_hf import demo
from eagle31_hf.cache.prefix_cache import PrefixCache
from eagle31_hf.chat.conversation import Conversation

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if thinking is defined %}{{ thinking }}{% endif %}"
)


@cache
def pair():
    return *demo.load_target(), demo.load_drafter("eagle31")


def conversation(template: str | None = TEMPLATE, knobs=None, system=None, **template_options) -> Conversation:
    target, tokenizer, drafter = pair()
    tokenizer.chat_template = template
    options = {"max_new_tokens": 24, "do_sample": False}
    knobs = {"num_assistant_tokens": 4} if knobs is None else knobs
    return Conversation(target, tokenizer, drafter, knobs, options, template_options, system, PrefixCache(target))
