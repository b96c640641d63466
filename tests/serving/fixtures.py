"""A server for all tests of serving, and the target's own answers."""

from functools import cache

import pytest
import torch
from serving.servers import COUNT, TEMPLATE, Server, demo_target

from eagle31_hf import demo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return demo_target(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder):
    served = Server(folder, "--num-assistant-tokens", "4")  # how much auto drafts depends on the clock
    yield served
    served.end()


@pytest.fixture(scope="module")
def expected(folder):
    """The target's own answer to some words."""
    target, tokenizer = demo.load_target()
    tokenizer.chat_template = TEMPLATE

    @cache  # most tests ask of the same words
    def answer(words, count=COUNT, **options):
        messages = [{"role": "user", "content": words}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        found = target.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)
        return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)

    return answer
