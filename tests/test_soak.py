"""A share of `python tests/soak.py --runs 2000`: bound by runs, not by time, so that it is the same wherever
it runs."""

import pytest
import soak
from soaking.trial import draw

SEED, COMPILED = 0, "compiled"  # compilers keep what they have compiled, and take seconds
RUNS = [number for number in range(100) if not draw(SEED, number).choices["wrapper"].startswith(COMPILED)][:84]


@pytest.fixture(autouse=True)
def forgotten():
    yield
    soak.models.forget_models()


@pytest.mark.parametrize("first", [28, 56])
def test_nothing_differs_from_plain_generate(first):
    report = soak.soak(SEED, RUNS[first : first + 28])
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
