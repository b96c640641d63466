"""Every kernel compiles for an H100 and one other GPU that users have, in turn, without spills and within their shared
memory (`compile_ahead.py` does so for all of them); every operation is its reference where there is no GPU."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from eagle31_hf import kernels
from eagle31_hf.kernels.operation import OPERATIONS, SWITCH, why_torch

HERE = Path(__file__).parent
MODULES = sorted(path.stem for path in Path(kernels.__file__).parent.glob("*.py") if path.stem != "__init__")
pytest.importorskip("triton", minversion="3.6", reason="an earlier Triton compiles ahead of time otherwise")


@pytest.fixture(scope="module")
def found() -> dict:
    """What the script finds where Triton compiles and does not interpret: {case: {target: figures}}."""
    done = subprocess.run(
        [sys.executable, HERE / "compile_ahead.py", "--json", "--sparse"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_kernels_fit_every_gpu(found):
    problems = {
        f"{name} on {target}": figures["problems"]
        for name, targets in found.items()
        for target, figures in targets.items()
        if figures["problems"]
    }
    assert not problems


def test_every_kernel_has_a_case(found):
    for name in MODULES:
        import_module(f"eagle31_hf.kernels.{name}")
    assert {name.split(",")[0] for name in found} == set(OPERATIONS)


def test_why_an_operation_runs_as_torch_does(monkeypatch):
    assert why_torch("add_rms_norm", torch.device("cpu")) == "as torch does: no GPU, but cpu"
    assert why_torch("add_rms_norm", torch.device("cuda")) is None
    monkeypatch.setenv(SWITCH, "joint_linear,add_rms_norm")
    assert why_torch("add_rms_norm", torch.device("cuda")) == f"as torch does: {SWITCH}=joint_linear,add_rms_norm"
    assert why_torch("rope_append", torch.device("cuda")) is None
