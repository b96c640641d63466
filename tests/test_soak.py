"""A share of `python tests/soak.py --runs 2000`: bound by runs, not by time, so that it is the same wherever
it runs."""

from collections import Counter

import pytest
import soak
from soaking.trial import Trial, draw

SEED, COMPILED = 0, "compiled"  # compilers keep what they have compiled, and take seconds


def had(trial: Trial) -> set[tuple[str, object]]:
    """What a run has of what runs differ in, but its family: families have tests of their own."""
    place, kind, _ = trial.fault or ("", "", 0)
    found = trial.choices | {"batch": trial.batch, "turns": trial.num_turns, "place": place, "kind": kind}
    return {*found.items()} - {("family", trial.choices["family"])}


def covering(numbers: range, times: int = 2) -> list[int]:
    """Of these runs those, taken greedily, that have between them all that any has, but compilers: so often, where so
    many have it."""
    trials = {number: draw(SEED, number) for number in numbers}
    left = {n: had(trial) for n, trial in trials.items() if not trial.choices["wrapper"].startswith(COMPILED)}
    counts = Counter(each for found in left.values() for each in found)
    missing, chosen = Counter({each: min(times, count) for each, count in counts.items()}), []
    while +missing:
        chosen.append(max(left, key=lambda number: sum(missing[each] > 0 for each in left[number])))
        missing.subtract(left.pop(chosen[-1]))
    return chosen


RUNS = covering(range(30, 85))


@pytest.fixture(autouse=True)
def forgotten():
    yield
    soak.models.forget_models()


def test_nothing_differs_from_plain_generate():
    report = soak.soak(SEED, RUNS)
    assert report.failures == []
    assert report.ties == []
    assert report.words["same"] > 14
    assert report.words["failed alike"] > 2
    assert report.runs_with_accepted > 3, "hardly a draft was accepted: nothing was tried"


def test_memory_is_flat():
    for name, (was, now) in soak.flat(SEED, RUNS[:4]).items():
        if name in soak.COUNTED:
            assert now <= was * (1 + soak.GROWTH), f"{name}: {was} before, {now} after"


def test_a_run_is_drawn_again_as_it_was():
    assert draw(3, 17) == draw(3, 17)
    assert draw(3, 17) != draw(4, 17)
    assert "--seed 3 --only 17" in soak.again(draw(3, 17))
