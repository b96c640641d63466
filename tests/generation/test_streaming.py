"""Streamers get every token once, in order, as from plain generate."""

from threading import Thread

import pytest
import torch
from draftings import tree_of
from observers import Countdown, Puts, speculate
from transformers import StoppingCriteriaList, TextIteratorStreamer, TextStreamer

GREEDY = {"max_new_tokens": 24, "do_sample": False}
ENDS = {
    "length": dict,
    "eos_in_a_burst": lambda: {"eos_token_id": 6},
    "eos_at_once": lambda: {"eos_token_id": 2},
    "criterion_in_a_burst": lambda: {"stopping_criteria": StoppingCriteriaList([Countdown(6)])},
    "one_token": lambda: {"max_new_tokens": 1},
}


@pytest.mark.parametrize("drafting", [{"num_assistant_tokens": 7}, tree_of(4, 30, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_same_calls_as_plain_generate(target, drafter, prompt, end, drafting):
    ours, alone = Puts(), Puts()
    _, stats = speculate(target, drafter, prompt, streamer=ours, **drafting, **GREEDY | end())
    target.generate(prompt, streamer=alone, **GREEDY | end())
    assert ours.calls == alone.calls
    assert ours.calls[0][0] == prompt.shape
    assert ours.calls[-1] == "end"
    assert len(ours.calls) == 2 + stats.generated_tokens


def test_a_sampled_text_is_streamed_as_it_is_returned(target, drafter, prompt):
    torch.manual_seed(0)
    puts = Puts()
    output, _ = speculate(
        target, drafter, prompt, streamer=puts, max_new_tokens=24, do_sample=True, num_assistant_tokens=5
    )
    assert [token for _, _, (token,) in puts.calls[1:-1]] == output[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer(target, drafter, prompt, tokenizer, capsys, skip_prompt):
    printed = []
    for assistant in ({}, {"assistant_model": drafter, "num_assistant_tokens": 5}):
        target.generate(prompt, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt), **GREEDY, **assistant)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].startswith("bcdfi") != skip_prompt


def test_text_iterator_streamer(target, drafter, prompt, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    kwargs = GREEDY | {"streamer": streamer, "assistant_model": drafter, "num_assistant_tokens": 5}
    thread = Thread(target=target.generate, args=(prompt,), kwargs=kwargs)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(target.generate(prompt, **GREEDY)[0, prompt.shape[1] :])
