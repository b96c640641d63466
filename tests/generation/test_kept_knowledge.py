"""The knowledge of a pair, kept for later processes on the same machine."""

import copy
import json
from weakref import WeakKeyDictionary

import pytest
import torch

from eagle31_hf.generation.planning import knowledge
from eagle31_hf.generation.planning.controller import TOP_K
from eagle31_hf.generation.planning.knowledge import KEPT, Knowledge, kept_knowledge
from eagle31_hf.storage.measured import Measured


def decoded(target, drafter, calls: int = 1) -> None:
    for _ in range(calls):
        target.generate(torch.tensor([[3, 5, 2, 9, 4, 1]]), assistant_model=drafter, max_new_tokens=40, do_sample=False)


def forget(monkeypatch) -> None:
    """What a new process knows: nothing but what is kept in files."""
    monkeypatch.setattr(knowledge, "_known", WeakKeyDictionary())


def kept_of(drafter, target) -> Knowledge:
    """The knowledge of calls as those of `decoded`."""
    return kept_knowledge(drafter, target, "cpu", 1, TOP_K, False, False)


def test_a_later_process_goes_on_from_what_is_known(monkeypatch, target, drafter):
    forget(monkeypatch)
    decoded(target, drafter)
    known = kept_of(drafter, target)
    assert known.exploration.rounds > 0
    written = json.loads(known.store.path.read_text())[KEPT]
    assert written == known.as_dict()
    forget(monkeypatch)
    later = kept_of(drafter, target)
    assert later is not known
    assert later.as_dict()["costs"] == written["costs"]
    assert later.calibration.as_dict() == written["calibration"]
    assert later.exploration.fastest == max(later.exploration.arms, key=lambda k: later.exploration.arms[k].rate.value)
    assert later.exploration.rate == pytest.approx(known.exploration.rate)
    before = {kind: arm.trials for kind, arm in known.exploration.arms.items()}
    assert {kind: arm.trials for kind, arm in later.exploration.arms.items()} == before
    assert later.exploration.choose([*later.exploration.arms]) == later.exploration.fastest


def test_it_is_written_ever_less_often(monkeypatch, target, drafter):
    forget(monkeypatch)
    writes = []
    monkeypatch.setattr(Measured, "put", lambda self, key, figures: writes.append(key))
    decoded(target, drafter, calls=5)
    assert writes.count(KEPT) == 3  # after the first, second and fourth call


def test_what_is_kept_in_another_form_is_as_if_nothing_was_known(monkeypatch, target, drafter):
    forget(monkeypatch)
    decoded(target, drafter)
    kept = kept_of(drafter, target).as_dict()
    parts = [{name: part for name, part in kept.items() if name != left_out} for left_out in kept]
    for found in (None, [], {}, *parts, kept | {"costs": []}, kept | {"arms": "words"}):
        known = Knowledge()
        known.take_up(found)
        assert known.as_dict() == Knowledge().as_dict(), found


def test_another_drafter_is_not_known_by_the_first_one_s(monkeypatch, target, drafter, make_drafter):
    forget(monkeypatch)
    decoded(target, drafter)
    other = copy.deepcopy(drafter)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    assert kept_of(other, target).exploration.rate == 0
    assert kept_of(drafter, target).exploration.rate > 0


def test_another_version_s_times_are_not_taken_up(monkeypatch, target, drafter):
    """Its rounds may take twice as long."""
    forget(monkeypatch)
    decoded(target, drafter)
    forget(monkeypatch)
    monkeypatch.setattr(knowledge, "__version__", "0.0.0")
    assert not kept_of(drafter, target).costs["verify"].seconds
