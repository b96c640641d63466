"""The short examples run as they are."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_gpu():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "gpu.py", "--max-new-tokens", "24", "--calls", "2"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert run.stdout.count("same text: True") == 4  # captured and eagerly, twice
    assert "rounds on cpu: eager" in run.stdout or "CUDA graphs" in run.stdout


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
