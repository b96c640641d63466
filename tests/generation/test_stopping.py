"""Stopping is checked token by token, wherever in a burst the token stands; `test_cases.py` has most ways to stop."""

import pytest
import torch
from close import assert_close
from draftings import DRAFTINGS, tree_of
from observers import speculate
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

LENGTH = 24
GREEDY = {"max_new_tokens": LENGTH, "do_sample": False}
BURSTS = {  # that begin and end elsewhere
    "chain": {"num_assistant_tokens": 7},
    "tree": tree_of(3, 16, 4),
}
each_burst = pytest.mark.parametrize("drafting", BURSTS.values(), ids=BURSTS)


@pytest.fixture
def target(make_target):
    """Its text uses ten of the eleven ids, most of them late for the first time."""
    return make_target("mistral_window_8")


@each_burst
def test_eos_in_a_sampled_text(target, drafter, prompt, drafting):
    torch.manual_seed(0)
    kwargs = {"max_new_tokens": LENGTH, "do_sample": True, "top_k": 0, "eos_token_id": [7, 4]} | drafting
    for _ in range(6):
        output, _ = speculate(target, drafter, prompt, **kwargs)
        new = output[0, prompt.shape[1] :].tolist()
        assert not {7, 4} & set(new[:-1]), "went on after the end"
        assert new[-1] in (7, 4) or len(new) == LENGTH


def test_max_time_ends_inside_a_burst(target, drafter, prompt, monkeypatch):
    """A clock that ticks once for every criterion asked: the time is up at a certain token, whatever the bursts."""
    ticks = iter(range(1000))
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: float(next(ticks)))
    output, stats = speculate(target, drafter, prompt, num_assistant_tokens=5, max_time=6.5, **GREEDY)
    assert output.shape[1] - prompt.shape[1] == 7
    assert max(stats.accepted_per_round) >= 2


class Confidant(BaseStreamer, LogitsProcessor, StoppingCriteria):
    """A streamer, a processor and a criterion that know of each other: whichever of them is `heard` for the `count`-th
    time has the processor favour one token from then on or, where it `stops`, the criterion end the text. Notes who is
    called, and when.
    """

    def __init__(self, heard: str, count: int, stops: bool):
        self.heard, self.count, self.stops, self.calls = heard, count, stops, list[str]()

    @property
    def is_told(self) -> bool:
        return self.calls.count(self.heard) >= self.count

    def put(self, value):
        self.calls.append("streamer")

    def end(self):
        self.calls.append("end")

    def __call__(self, input_ids, scores):
        if isinstance(scores, torch.Tensor):
            self.calls.append("processor")
            return scores.index_fill(1, torch.tensor([7]), 1e4) if self.is_told and not self.stops else scores
        self.calls.append("criterion")
        return torch.full((len(input_ids),), self.is_told and self.stops)


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("heard", ["streamer", "processor", "criterion"])
@pytest.mark.parametrize(("drafting", "num_sequences"), [("tree", 1), ("chain", 3)])
def test_what_the_user_plugs_in_is_called_in_plain_decodings_order(
    target, drafter, prompt, drafting, num_sequences, heard, stops
):
    prompts = prompt.repeat(num_sequences, 1)
    for count in (1, 6):
        texts, users = [], []
        for assistant in ({}, {"assistant_model": drafter, **DRAFTINGS[drafting]}):
            users.append(Confidant(heard, count, stops))
            plugs = {
                "logits_processor": LogitsProcessorList(users[-1:]),
                "stopping_criteria": StoppingCriteriaList(users[-1:]),
            }
            texts.append(target.generate(prompts, streamer=users[-1], **plugs, **GREEDY, **assistant))
        assert_close(f"text, told at {count}", texts[1], texts[0])
        assert users[1].calls == users[0].calls
