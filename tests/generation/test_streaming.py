"""Streamers get every token once, in order, of sampled texts and in another thread; all else is in `test_cases.py`."""

from threading import Thread

import torch
from observers import Puts, speculate
from transformers import TextIteratorStreamer

GREEDY = {"max_new_tokens": 24, "do_sample": False}


def test_a_sampled_text_is_streamed_as_it_is_returned(target, drafter, prompt):
    torch.manual_seed(0)
    puts = Puts()
    output, _ = speculate(
        target, drafter, prompt, streamer=puts, max_new_tokens=24, do_sample=True, num_assistant_tokens=5
    )
    assert [token for _, _, (token,) in puts.calls[1:-1]] == output[0, prompt.shape[1] :].tolist()


def test_text_iterator_streamer(target, drafter, prompt, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    kwargs = GREEDY | {"streamer": streamer, "assistant_model": drafter, "num_assistant_tokens": 5}
    thread = Thread(target=target.generate, args=(prompt,), kwargs=kwargs)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(target.generate(prompt, **GREEDY)[0, prompt.shape[1] :])
