"""Measurements in processes of their own, which are ended when they take too long."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]  # in which the modules are found


def without_folders(trace: str) -> str:
    """A traceback whose files are named with their last folder alone: results are kept, and no machine's paths."""
    return re.sub(r'File "[^"\n]*?([^"/\\]+[/\\][^"/\\]+)"', r'File "\1"', trace)


def in_subprocess(what: str, limit: float, device: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Runs a function of `compiled.py` by its name, within `limit` seconds. Returns what it returns, or, in `left_out`
    or `error`, why it returned nothing."""
    command = [sys.executable, "-m", f"{__package__}.compiled", what, device, json.dumps(facts)]
    # what this process finds, the child does, whose folder is another
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    given = {"capture_output": True, "text": True, "timeout": max(1.0, limit), "cwd": FOLDER, "env": env}
    try:
        done = subprocess.run(command, check=False, **given)
    except subprocess.TimeoutExpired:
        return {"left_out": f"it took longer than {limit:g} s"}
    if done.returncode:
        return {"error": without_folders(done.stderr[-2000:])}
    return json.loads(done.stdout.splitlines()[-1])
