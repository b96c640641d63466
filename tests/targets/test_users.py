"""Whoever is last to use what is replaced on a target puts it back, in a process that was forked meanwhile, too."""

import os
import threading
from functools import partial

import pytest
from conftest import ROPED
from targets.llama_forms import build
from transformers import LlamaConfig

from eagle31_hf.targets import tree_attention
from eagle31_hf.targets.tree_attention import attention_of_rounds
from eagle31_hf.targets.users import Users


def test_the_last_context_is_told_so():
    users, used, other = Users(), [], []
    for each in (used, used, other):
        users.enter(each)
    assert (users.leave(used), users.leave(used), users.leave(other)) == (False, True, True)
    assert users.leave(used), "one that began before a fork"
    users.enter(used)
    assert users.leave(used), "it has not been counted"


def test_the_first_context_begins_and_the_last_one_ends():
    users, used, told = Users(), [], []
    calls = partial(told.append, "begin"), partial(told.append, "end")
    with users.using(used, *calls):
        with users.using(used, *calls):
            pass
        assert told == ["begin"]
    assert told == ["begin", "end"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_attention_is_put_back_in_a_process_that_was_forked():
    config = build(LlamaConfig(**ROPED)).config
    own = config._attn_implementation_internal
    target = type("Target", (), {"config": config})()

    def decoded() -> None:
        with attention_of_rounds(target):
            assert config._attn_implementation_internal != own

    with attention_of_rounds(target), tree_attention._users.lock:
        child = os.fork()
        if not child:
            code = 1
            try:
                thread = threading.Thread(target=decoded, daemon=True)
                thread.start()  # another thread than the one that holds the lock
                thread.join(20)
                code = 0 if not thread.is_alive() and config._attn_implementation_internal == own else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert config._attn_implementation_internal == own
