"""A share of `tests/fuzz_checkpoints.py` in a process of its own, whose memory is measured, and which is offline."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fuzz_checkpoints.py"


@pytest.mark.skipif(sys.platform == "win32", reason="makes pipes, and measures with timers of processor time")
def test_folders_that_are_damaged_or_hostile_are_loaded_or_refused():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--runs", "70", "--seed", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    assert "70 folders from seed 0: 0 findings" in done.stdout
