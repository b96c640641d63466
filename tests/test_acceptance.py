"""Statistics of speculation, recounted by hand."""

import contextvars
import copy
import pickle
from threading import Thread

import pytest
import torch
from observers import Puts, speculate

from eagle31_hf import AcceptanceStats, track_acceptance
from eagle31_hf.acceptance import CHAINS, LOCK_STEP, PLAIN, PREFILL, TREES, Round, SequenceStats

GREEDY = {"max_new_tokens": 24, "do_sample": False}
DRAFTED = GREEDY | {"num_assistant_tokens": 5}


class Recount(Puts):
    """Tokens of every target forward, and how many tokens were streamed before the next."""

    def __init__(self, target):
        super().__init__()
        self.read, self.tokens = [], []
        self.handle = target.register_forward_pre_hook(self.forward, with_kwargs=True)

    def forward(self, module, args, kwargs):
        self.read.append(kwargs["input_ids"].shape[1])
        self.tokens.append(0)

    def put(self, value):
        if self.tokens:  # the prompt comes before the first forward
            self.tokens[-1] += value.numel()

    def end(self):
        self.handle.remove()


@pytest.mark.parametrize(
    "kwargs", [{}, {"assistant_confidence_threshold": 0.3}, {"eos_token_id": 6}], ids=["chain", "confidence", "eos"]
)
@pytest.mark.parametrize("depth", [1, 4])
def test_recounted(target, drafter, prompt, depth, kwargs):
    speculate(target, drafter, prompt, num_assistant_tokens=depth, **GREEDY)  # the first call tries the target, too
    recount = Recount(target)
    output, stats = speculate(target, drafter, prompt, num_assistant_tokens=depth, streamer=recount, **GREEDY, **kwargs)
    (_, *read), (prefill, *tokens) = recount.read, recount.tokens
    assert prefill == stats.prefills == 1
    assert stats.target_forwards == len(read)
    assert stats.generated_tokens == 1 + sum(tokens) == output.shape[1] - prompt.shape[1]
    assert stats.mean_accepted_length == pytest.approx(sum(tokens) / len(read))
    drafted, accepted = [count - 1 for count in read], [count - 1 for count in tokens]
    # the last token may have been a draft: then no token of the target's own follows
    if kwargs.get("eos_token_id") == output[0, -1]:
        accepted[-1] = stats.accepted_per_round[-1]
        assert accepted[-1] in (tokens[-1] - 1, tokens[-1])
    assert stats.accepted_per_round == accepted
    assert stats.drafted_per_position == [sum(count > i for count in drafted) for i in range(max(drafted))]
    assert stats.accepted_per_position == [sum(count > i for count in accepted) for i in range(max(drafted))]
    assert stats.acceptance_rates == [
        a / d for a, d in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)
    ]


def test_calls_add_up_and_blocks_nest(target, drafter, prompt):
    with track_acceptance() as outer:
        target.generate(prompt, assistant_model=drafter, **DRAFTED)
        with track_acceptance() as inner:
            target.generate(prompt, assistant_model=drafter, **DRAFTED)
        target.generate(prompt, assistant_model=drafter, **DRAFTED)
    target.generate(prompt, assistant_model=drafter, **DRAFTED)  # nobody counts
    assert (inner.prefills, outer.prefills) == (1, 3)
    assert outer.generated_tokens == 3 * inner.generated_tokens == 72
    assert outer.accepted_per_round == 3 * inner.accepted_per_round
    assert outer.drafted_per_position == [3 * count for count in inner.drafted_per_position]


def test_counting_goes_on_in_given_statistics(target, drafter, prompt):
    stats = AcceptanceStats()
    for calls in (1, 2):
        with track_acceptance(stats) as same:
            target.generate(prompt, assistant_model=drafter, **DRAFTED)
        assert same is stats
        assert stats.prefills == calls


def test_a_block_ends_on_error_too(target, drafter, prompt):
    with pytest.raises(KeyError), track_acceptance() as stats:
        raise KeyError
    target.generate(prompt, assistant_model=drafter, **DRAFTED)
    assert stats == AcceptanceStats()


def test_plain_generate_and_nothing_count_nothing(target, prompt):
    with track_acceptance() as stats:
        target.generate(prompt, **GREEDY)
    assert stats == AcceptanceStats()
    assert stats.mean_accepted_length == 0.0
    assert stats.acceptance_rates == []
    assert "nothing was drafted" in stats.summary()


def test_a_text_of_one_token_has_no_target_forward(target, drafter, prompt):
    _, stats = speculate(target, drafter, prompt, max_new_tokens=1, do_sample=False, num_assistant_tokens=5)
    assert (stats.prefills, stats.target_forwards, stats.generated_tokens) == (1, 0, 1)
    assert stats.mean_accepted_length == 0.0


def test_a_rejected_text_counts_one_token_a_forward(target, make_drafter, prompt):
    ban = {"suppress_tokens": make_drafter(target, "pruned").draft_to_target_ids().tolist()}  # nothing is left to draft
    _, stats = speculate(target, make_drafter(target, "pruned"), prompt, **DRAFTED, **ban)
    assert stats.mean_accepted_length == 1.0
    assert stats.drafted_per_position == []


def test_other_threads_count_only_where_their_context_says_so(target, drafter, prompt):
    def run():
        target.generate(prompt, assistant_model=drafter, **DRAFTED)

    with track_acceptance() as stats:
        context = contextvars.copy_context()
        for function in (run, lambda: context.run(run)):
            thread = Thread(target=function)
            thread.start()
            thread.join()
    assert stats.prefills == 1


def test_summary_and_seconds(target, drafter, prompt):
    _, stats = speculate(target, drafter, prompt, num_assistant_tokens=2, **GREEDY)
    lines = stats.summary().splitlines()
    assert lines[0] == f"24 tokens in 1 prefills and {stats.target_forwards} target forwards"
    assert f"{23 / stats.target_forwards:.2f}" in lines[1]
    assert lines[2].endswith(" ".join(f"{rate:.2f}" for rate in stats.acceptance_rates))
    assert set(stats.seconds) == {"prefill", "draft", "verify", "accept"}
    assert all(seconds > 0 for seconds in stats.seconds.values())


def counted(*rounds: tuple[str, list[int], list[int | None], list[int]]) -> AcceptanceStats:
    """Statistics of rounds: kind, tokens drafted for each sequence, those accepted, and those committed."""
    stats = AcceptanceStats()
    for kind, drafted, accepted, tokens in rounds:
        stats.add(kind, Round([[0] * count for count in tokens], accepted, [], None), drafted, {"verify": 0.5})
    return stats


def test_counts_of_one_round():
    stats = counted((PREFILL, [0], [0], [1]), (CHAINS, [3], [1], [2]), (PLAIN, [0], [0], [1]), (CHAINS, [4], [4], [5]))
    assert stats.seconds["verify"] == 2.0
    assert stats.drafted_per_position == [2, 2, 2, 1]
    assert stats.accepted_per_position == [2, 1, 1, 1]
    assert stats.accepted_per_round == [1, 0, 4]
    assert stats.kinds == {CHAINS: 2, PLAIN: 1}
    assert stats.mean_accepted_length == 8 / 3
    assert torch.allclose(torch.tensor(stats.acceptance_rates), torch.tensor([1.0, 0.5, 0.5, 1.0]))
    assert stats.sequences[0] == SequenceStats(1, 9, [2, 2, 2, 1], [2, 1, 1, 1], [1, 0, 4])
    assert "by sequence" not in stats.summary()


def test_counts_of_two_sequences():
    """A forward serves both; one that has ended counts for nothing more."""
    stats = counted(
        (PREFILL, [0, 0], [0, 0], [1, 1]), (CHAINS, [2, 2], [2, 0], [3, 1]), (CHAINS, [3, 3], [None, 1], [0, 2])
    )
    assert stats.sequences == [
        SequenceStats(1, 4, [1, 1], [1, 1], [2]),
        SequenceStats(1, 4, [2, 2, 1], [1, 0, 0], [0, 1]),
    ]
    assert [one.mean_accepted_length for one in stats.sequences] == [3.0, 1.5]
    assert (stats.target_forwards, stats.prefills, stats.generated_tokens) == (2, 2, 8)
    assert stats.accepted_per_round == [2, 0, 1]
    assert stats.drafted_per_position == [3, 3, 1]
    assert stats.mean_accepted_length == 2.0
    assert "2.00 tokens per target forward and sequence" in stats.summary()
    assert "by sequence: 3.00 1.50" in stats.summary()


KINDS = {  # the number of prompts, what is asked, the kind of every round that drafts
    "chain": (1, {"num_assistant_tokens": 3}, CHAINS),
    "tree": (1, {"num_assistant_tokens": 3, "draft_tree_top_k": 2, "draft_tree_total_tokens": 8}, TREES),
    "batch": (2, {"num_assistant_tokens": 3}, CHAINS),
    "lock_step": (2, {"num_assistant_tokens": 3, "output_scores": True, "return_dict_in_generate": True}, LOCK_STEP),
}


@pytest.mark.parametrize(("num_sequences", "kwargs", "kind"), KINDS.values(), ids=KINDS)
def test_kinds_of_rounds(target, drafter, prompt, num_sequences, kwargs, kind):
    _, stats = speculate(target, drafter, prompt.repeat(num_sequences, 1), **GREEDY, **kwargs)
    assert sum(stats.kinds.values()) == stats.target_forwards
    assert stats.kinds[kind] > 3
    assert set(stats.kinds) <= {kind, PLAIN}  # nothing is left to draft for the last token
    assert stats.kinds[PLAIN] <= 1


def test_a_draft_that_ends_a_text_is_accepted_in_lock_step_too(target, drafter, prompt):
    new = target.generate(prompt, **GREEDY)[0, prompt.shape[1] :].tolist()
    for end in dict.fromkeys(new):
        asked = {"num_assistant_tokens": 3, "eos_token_id": end, "pad_token_id": 0, **GREEDY}
        _, free = speculate(target, drafter, prompt, **asked)
        in_step = {"output_scores": True, "return_dict_in_generate": True}
        _, kept = speculate(target, drafter, prompt.repeat(2, 1), **asked, **in_step)
        assert kept.sequences[0].accepted_per_round == free.accepted_per_round


def test_statistics_can_be_copied_and_sent(target, drafter, prompt):
    _, stats = speculate(target, drafter, prompt, **DRAFTED)
    assert pickle.loads(pickle.dumps(stats)) == copy.deepcopy(stats) == stats


def test_what_auto_chose_is_counted_round_by_round(target, drafter, prompt):
    _, stats = speculate(target, drafter, prompt, num_assistant_tokens="auto", **GREEDY)
    assert sum(stats.choices.values()) == stats.target_forwards
    assert stats.summary().endswith(stats.explanation)
    assert "chosen: " in stats.summary()
    _, stats = speculate(target, drafter, prompt, **DRAFTED)
    assert (sum(stats.choices.values()), stats.explanation) == (0, "")
    assert "auto" not in stats.summary()


def test_people_are_shown_the_first_positions(target, drafter, prompt):
    _, stats = speculate(target, drafter, prompt, num_assistant_tokens=10, **GREEDY)
    assert len(stats.acceptance_rates) == 10
    (line,) = [line for line in stats.summary().splitlines() if line.startswith("accepted by position")]
    assert line.endswith(" ...")
    assert len(line.split(": ")[1].split()) == 8
