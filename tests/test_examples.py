"""The short examples run as they are."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_generate():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "generate.py", "--max-new-tokens", "16"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "same as the target alone: True" in run.stdout
    assert "mean accepted length" in run.stdout
