"""A share of `python tests/soak.py --runs 2000`: bound by runs, not by time, so that it is the same wherever
it runs."""

import pytest
import soak
from soaking.trial import draw

SEED = 0
# Of the first 85 these have between them every choice that any has, but compilers, which keep what they have compiled.
RUNS = (30, 31, 32, 35, 38, 41, 43, 44, 46, 47, 52, 53, 54, 56, 57, 59, 60, 61, 62, 64, 67, 68, 71, 72, 73, 74, 75, 76)
RUNS += (77, 80, 82, 83)
REPEATED = (46, 62, 71, 77)  # a conversation, a batch and failures among them


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
    for name, (was, now) in soak.flat(SEED, REPEATED).items():
        if name in soak.COUNTED:
            assert now <= was * (1 + soak.GROWTH), f"{name}: {was} before, {now} after"


def test_a_run_is_drawn_again_as_it_was():
    assert draw(3, 17) == draw(3, 17)
    assert draw(3, 17) != draw(4, 17)
    assert "--seed 3 --only 17" in soak.again(draw(3, 17))
