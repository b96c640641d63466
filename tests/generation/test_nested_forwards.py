"""User code that runs the target in the midst of a call, however it gets to run: nothing of it reaches the drafter."""

import threading
from contextvars import Context

import pytest
import torch
from close import assert_close
from conftest import build_drafter, build_target
from draftings import DRAFTINGS, steady_clock
from observers import speculate
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from eagle31_hf.targets.layers import decoder_layers

LENGTH = 11
OTHER_TEXT = torch.tensor([[9, 0, 7, 7, 1, 6, 2]])


class Pair:
    """A target with a drafter, and what may be run in a callback; never from within itself."""

    def __init__(self):
        self.target = build_target("qwen3")
        self.drafter, self.other_drafter = build_drafter(self.target), build_drafter(self.target, "pruned")
        self.is_running, self.runs, self.alone = False, 0, {}

    def run(self, what: str) -> None:
        if not self.is_running:
            self.is_running = True
            try:
                Context().run(RUNS[what], self)  # which no tracker of acceptance is open in
                self.runs += 1
            finally:
                self.is_running = False

    def fail(self) -> None:
        handle = decoder_layers(self.target)[2].register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            with pytest.raises(ZeroDivisionError):
                self.target(OTHER_TEXT)
        finally:
            handle.remove()

    def in_a_thread(self) -> None:
        thread = threading.Thread(target=lambda: self.target(OTHER_TEXT))
        thread.start()
        thread.join()


def generate(pair: Pair, **kwargs) -> None:
    pair.target.generate(OTHER_TEXT, max_new_tokens=3, do_sample=False, **kwargs)


RUNS = {
    "forward": lambda pair: pair.target(OTHER_TEXT),
    "decoder": lambda pair: pair.target.get_decoder()(OTHER_TEXT),
    "failing": Pair.fail,
    "thread": Pair.in_a_thread,
    "same_drafter": lambda pair: generate(pair, assistant_model=pair.drafter, **DRAFTINGS["chain"]),
    "other_drafter": lambda pair: generate(pair, assistant_model=pair.other_drafter, **DRAFTINGS["tree"]),
}


class Running(BaseStreamer):
    def __init__(self, run):
        self.run = run

    def put(self, value) -> None:
        self.run()

    def end(self) -> None:
        self.run()


def then(result, run):
    run()
    return result


def hooked(register):
    """A place that is a hook, on until the call is over."""
    return lambda pair, run: (register(pair)(lambda *_: run()), {})


PLACES = {
    "streamer": lambda pair, run: (None, {"streamer": Running(run)}),
    "processor": lambda pair, run: (
        None,
        {"logits_processor": LogitsProcessorList([lambda ids, scores: then(scores, run)])},
    ),
    "criterion": lambda pair, run: (
        None,
        {
            "stopping_criteria": StoppingCriteriaList(
                [lambda ids, scores: then(torch.zeros(len(ids), dtype=torch.bool), run)]
            )
        },
    ),
    "prefix_function": lambda pair, run: (
        None,
        {"prefix_allowed_tokens_fn": lambda b, ids: then(list(range(11)), run)},
    ),
    "before_target": hooked(lambda pair: pair.target.register_forward_pre_hook),
    "after_target": hooked(lambda pair: pair.target.register_forward_hook),
    "after_decoder": hooked(lambda pair: pair.target.get_decoder().register_forward_hook),
    "after_a_layer": hooked(lambda pair: decoder_layers(pair.target)[1].register_forward_hook),
    "after_the_drafter": hooked(lambda pair: pair.drafter.register_forward_hook),
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


CASES = [  # a forward everywhere, everything in two places, and what drafts itself wherever a state is captured
    *((place, "forward") for place in PLACES),
    *((place, what) for place in ("streamer", "after_target") for what in RUNS if what != "forward"),
    *((place, "same_drafter") for place in ("processor", "after_decoder", "after_a_layer", "after_the_drafter")),
]


@pytest.mark.parametrize(("place", "what"), CASES)
def test_nothing_of_it_is_drafted_from(pair, prompt, place, what):
    """The same text, and the same drafts accepted, as without it."""
    way = "tree" if what in ("decoder", "same_drafter") else "chain"
    kwargs = {"max_new_tokens": LENGTH, "do_sample": False, "prefill_chunk_size": 2} | DRAFTINGS[way]
    if way not in pair.alone:
        pair.alone[way] = speculate(pair.target, pair.drafter, prompt, **kwargs)
    (expected, alone), runs = pair.alone[way], pair.runs
    handle, callback = PLACES[place](pair, lambda: pair.run(what))
    try:
        output, stats = speculate(pair.target, pair.drafter, prompt, **kwargs, **callback)
    finally:
        if handle is not None:
            handle.remove()
    assert pair.runs > runs
    assert_close("text", output, expected)
    assert stats.accepted_per_round == alone.accepted_per_round, "drafted from states of another forward"


def test_auto_too(pair, prompt):
    kwargs = {"max_new_tokens": LENGTH, "do_sample": False}
    with steady_clock(pair.target, pair.drafter):
        output, _ = speculate(
            pair.target, pair.drafter, prompt, streamer=Running(lambda: pair.run("same_drafter")), **kwargs
        )
    assert_close("text", output, pair.target.generate(prompt, **kwargs))
