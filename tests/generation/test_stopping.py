"""Stopping is checked token by token, wherever in a burst the token stands."""

import pytest
import torch
from close import assert_close
from conftest import greedy_text
from draftings import DRAFTINGS, tree_of
from observers import Countdown, speculate
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

LENGTH = 24
GREEDY = {"max_new_tokens": LENGTH, "do_sample": False}
DRAFTED = GREEDY | {"num_assistant_tokens": 5}
BURSTS = {  # that begin and end elsewhere
    "chain": {"num_assistant_tokens": 7},
    "tree": tree_of(3, 16, 4),
}
each_burst = pytest.mark.parametrize("drafting", BURSTS.values(), ids=BURSTS)


@pytest.fixture
def target(make_target):
    """Its text uses ten of the eleven ids, most of them late for the first time."""
    return make_target("mistral_window_8")


def check(target, drafter, prompt, drafting, **kwargs):
    """The same text as the target alone, and a cache of all of it but its last token; returns how many tokens that
    is."""
    kwargs |= {"return_dict_in_generate": True}
    output, stats = speculate(target, drafter, prompt, **drafting, **GREEDY, **kwargs)
    assert_close("text", output.sequences, target.generate(prompt, **GREEDY, **kwargs).sequences)
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
    assert stats.generated_tokens == output.sequences.shape[1] - prompt.shape[1]
    return stats.generated_tokens


@pytest.mark.parametrize(("drafting", "processors"), [("chain", {"repetition_penalty": 1.0001}), ("tree", {})])
def test_eos_at_every_offset(target, drafter, prompt, drafting, processors):
    text = greedy_text(target)[0, prompt.shape[1] :][:LENGTH].tolist()
    burst = BURSTS[drafting]
    offsets = [check(target, drafter, prompt, burst, eos_token_id=eos, **processors) - 1 for eos in range(11)]
    assert offsets == [text.index(eos) if eos in text else LENGTH - 1 for eos in range(11)]


@pytest.mark.parametrize(("eos", "count"), [([10, 4], 8), ([4, 6, 5], 5), ([6, 9], 12)])
@each_burst
def test_eos_lists(target, drafter, prompt, drafting, eos, count):
    assert check(target, drafter, prompt, drafting, eos_token_id=eos) == count


@each_burst
def test_eos_in_a_sampled_text(target, drafter, prompt, drafting):
    torch.manual_seed(0)
    kwargs = {"max_new_tokens": LENGTH, "do_sample": True, "top_k": 0, "eos_token_id": [7, 4]} | drafting
    for _ in range(6):
        output, _ = speculate(target, drafter, prompt, **kwargs)
        new = output[0, prompt.shape[1] :].tolist()
        assert not {7, 4} & set(new[:-1]), "went on after the end"
        assert new[-1] in (7, 4) or len(new) == LENGTH


@each_burst
def test_stop_strings_at_every_offset(target, drafter, prompt, tokenizer, drafting):
    letters = tokenizer.decode(greedy_text(target)[0])
    for end in range(prompt.shape[1] + 1, prompt.shape[1] + 14):
        strings = ["zz", letters[end - 3 : end]]  # three tokens, of which the first may be the prompt's
        count = check(target, drafter, prompt, drafting, stop_strings=strings, tokenizer=tokenizer)
        assert count == max(letters.find(strings[1]) + 3 - prompt.shape[1], 1)


@each_burst
def test_a_custom_criterion_is_shown_every_text_once(target, drafter, prompt, drafting):
    for count in range(1, 14):
        shown = [Countdown(count), Countdown(count)]
        texts = [
            target.generate(prompt, stopping_criteria=StoppingCriteriaList([one]), **GREEDY, **assistant)
            for one, assistant in zip(shown, ({"assistant_model": drafter, **drafting}, {}), strict=True)
        ]
        assert_close("text", *texts)
        assert shown[0].texts == shown[1].texts
        assert len(shown[0].texts) == count


def test_criteria_together_with_eos_and_length(target, drafter, prompt):
    for eos, count, length, expected in ((4, 20, 20, 8), (4, 6, 20, 6), (4, 20, 3, 3)):
        kwargs = {"eos_token_id": eos, "max_new_tokens": length, "do_sample": False}
        criteria = StoppingCriteriaList([Countdown(count)])
        output, _ = speculate(target, drafter, prompt, stopping_criteria=criteria, num_assistant_tokens=5, **kwargs)
        assert output.shape[1] - prompt.shape[1] == expected


class Scored(StoppingCriteria):
    """Notes how many scores it is given."""

    def __init__(self):
        self.counts = []

    def __call__(self, input_ids, scores, **kwargs):
        self.counts.append(None if scores is None else len(scores))
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "asked", [{}, {"return_dict_in_generate": True, "output_scores": True}], ids=["none", "scores"]
)
def test_a_criterion_gets_the_scores_plain_generate_gives_it(target, drafter, prompt, asked):
    ours, alone = Scored(), Scored()
    speculate(target, drafter, prompt, stopping_criteria=StoppingCriteriaList([ours]), **DRAFTED, **asked)
    target.generate(prompt, stopping_criteria=StoppingCriteriaList([alone]), **GREEDY, **asked)
    assert ours.counts == alone.counts


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
