"""Threads share a target and a drafter: eight that take fifty requests from one list, others that use the target
otherwise, and two with targets of their own."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from close import assert_close
from draftings import DRAFTINGS
from families import build_drafter, build_target
from observers import num_hooks, speculate

from eagle31_hf import AcceptanceStats, track_acceptance
from eagle31_hf.cache.states import HAS_METHODS

NUM_THREADS, NUM_CALLS, LENGTH = 8, 50, 9
GREEDY = {"max_new_tokens": LENGTH, "do_sample": False}
PROMPTS = ([[1, 2, 3, 5, 8]], [[4, 4]], [[9, 0, 7, 7, 1, 6, 2, 2, 5]], [[3]], [[1, 2, 3], [4, 4, 4], [9, 0, 7]])
REQUESTS = [(torch.tensor(prompt), way) for prompt in PROMPTS for way in DRAFTINGS]


def counts(stats: AcceptanceStats) -> tuple:
    """Everything counted, in all and sequence by sequence; not the seconds."""
    each = [(one.generated_tokens, one.drafted_per_position, one.accepted_per_round) for one in stats.sequences]
    return (
        stats.prefills,
        stats.generated_tokens,
        stats.target_forwards,
        stats.drafted_per_position,
        stats.accepted_per_round,
        each,
    )


with_states = pytest.mark.skipif(not HAS_METHODS, reason="transformers before 5.21 reads states in another way")
PAIRS = [("Qwen3", NUM_CALLS), *(pytest.param(name, 15, marks=with_states) for name in ("Qwen3-Next", "Jamba"))]


@pytest.mark.parametrize(("name", "num_calls"), PAIRS)
def test_every_call_says_and_counts_what_it_does_alone(name, num_calls):
    """Caches, masks' placements, captured states, random numbers and statistics belong to a call; only what auto learns
    is shared."""
    target, drafter = build_target(name, "eager"), build_drafter(name)
    alone = [speculate(target, drafter, prompt, **DRAFTINGS[way], **GREEDY) for prompt, way in REQUESTS]
    plain = [target.generate(prompt, **GREEDY) for prompt, _ in REQUESTS]
    order = [i % len(REQUESTS) for i in range(num_calls)]
    random.Random(0).shuffle(order)

    def serve(i: int):
        torch.set_num_threads(1)
        prompt, way = REQUESTS[i]
        return speculate(target, drafter, prompt, **DRAFTINGS[way], **GREEDY)

    with track_acceptance() as outside, ThreadPoolExecutor(NUM_THREADS) as pool:
        results = list(pool.map(serve, order))
    for i, (text, stats) in zip(order, results, strict=True):
        prompt, way = REQUESTS[i]
        name = f"{way} after {prompt.tolist()}"
        assert_close(name, text, plain[i])
        assert stats.generated_tokens == LENGTH * len(prompt), name
        if way != "auto":  # it goes by the clock
            assert counts(stats) == counts(alone[i][1]), name
    assert outside.prefills == outside.generated_tokens == 0, "threads have statistics of their own"
    assert num_hooks(target) == num_hooks(drafter) == 0


def test_one_tracker_counts_all_threads_that_share_it(target, drafter, prompt):
    """No count is lost when several add to it at once."""
    stats, alone = AcceptanceStats(), speculate(target, drafter, prompt, **DRAFTINGS["chain"], **GREEDY)[1]

    def serve(_) -> None:
        torch.set_num_threads(1)
        with track_acceptance(stats):
            target.generate(prompt, assistant_model=drafter, **DRAFTINGS["chain"], **GREEDY)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(serve, range(16)))
    assert stats.prefills == 16
    assert stats.generated_tokens == 16 * alone.generated_tokens
    assert stats.target_forwards == 16 * alone.target_forwards
    assert stats.drafted_per_position == [16 * count for count in alone.drafted_per_position]
    assert stats.accepted_per_position == [16 * count for count in alone.accepted_per_position]
    assert Counter(stats.accepted_per_round) == Counter(alone.accepted_per_round * 16)


def at_once(functions):
    """Runs all at the same time, in threads of their own."""
    barrier = Barrier(len(functions))

    def run(function):
        torch.set_num_threads(1)
        barrier.wait(timeout=60)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


DRAFTED = {"max_new_tokens": 20, "do_sample": False, "num_assistant_tokens": 5}
ALONE = {"max_new_tokens": 20, "do_sample": False}


def test_beside_threads_that_use_the_target_otherwise(target, drafter, prompt):
    """Their forwards pass the same hooks."""
    expected, expected_stats = speculate(target, drafter, prompt, **DRAFTED)
    functions = [
        lambda: speculate(target, drafter, prompt, **DRAFTED),
        lambda: (target.generate(prompt, **ALONE), None),
        lambda: (target.generate(prompt.repeat(3, 1), **ALONE)[1:2], None),
    ]
    for i, (text, stats) in enumerate(at_once(functions)):
        assert_close(f"text {i}", text, expected)
        assert stats is None or stats.accepted_per_round == expected_stats.accepted_per_round


def test_two_targets_at_once(make_target, make_drafter, prompt):
    """They share one drafter that borrows its embedding: drafts may suffer, texts may not."""
    targets = make_target("llama"), make_target("llama", rms_norm_eps=1e-3)
    drafter = make_drafter(targets[0])
    results = at_once([lambda target=target: speculate(target, drafter, prompt, **DRAFTED)[0] for target in targets])
    for i, (text, target) in enumerate(zip(results, targets, strict=True)):
        assert_close(f"text of target {i}", text, target.generate(prompt, **ALONE))
