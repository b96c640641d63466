"""Measurements in processes of their own, which are ended when they take too long."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]  # in which the modules are found


def in_subprocess(what: str, limit: float, device: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Runs a function of `compiled.py` by its name, within `limit` seconds. Returns what it returns, or, in `left_out`
    or `error`, why it returned nothing."""
    command = [sys.executable, "-m", f"{__package__}.compiled", what, device, json.dumps(facts)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(1.0, limit), cwd=FOLDER)
    except subprocess.TimeoutExpired:
        return {"left_out": f"it took longer than {limit:g} s"}
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])
