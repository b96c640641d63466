"""A share of `tests/fuzz_checkpoints.py` in a process of its own, whose memory is measured, and which is offline."""

import sys

import pytest
from fuzz_checkpoints import run_all
from programs import forked


@pytest.mark.skipif(sys.platform == "win32", reason="makes pipes, and measures with timers of processor time")
def test_folders_that_are_damaged_or_hostile_are_loaded_or_refused():
    outcomes, findings = forked(run_all, 0, 70, print)
    assert not findings, "\n".join(findings)
    assert outcomes.total() == 70
    assert {outcome for _, outcome in outcomes} >= {"loaded", "refused"}
