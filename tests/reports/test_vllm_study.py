"""The acceptance report of vLLM: its counts beside ours where a vLLM is named, and what is told where there is none.

VLLM_PYTHON=/path/to/python pytest tests/reports/test_vllm_study.py
"""

import json
import os
from importlib.util import find_spec

import psutil
import pytest

from eagle31_hf import demo
from eagle31_hf.cli import main
from eagle31_hf.reports.vllm_study import rounds_of

PAIR = ["--target", str(demo.FOLDER / "target"), "--drafter", str(demo.FOLDER / "eagle31"), "--dtype", "float32"]
PROMPTS = ["--prompts", "python", "--num-prompts", "2", "--max-new-tokens", "24", "--depths", "3", "--depth", "3"]
VLLM = os.environ.get("VLLM_PYTHON")


def acceptance(*words):
    return main(["bench", "acceptance", *PAIR, *PROMPTS, "--trees", "--no-perturbations", *words])


def test_rounds_are_counted_by_depth():
    found = {"drafted": [[3, 3], [3, 2]], "accepted": [[3, 0], [1, 2]]}
    assert rounds_of(found) == {"tokens": 10, "rounds": 4, "drafted": [4, 4, 3], "accepted": [3, 2, 1]}
    assert rounds_of({"drafted": [[]], "accepted": [[]]}) == {"tokens": 0, "rounds": 0, "drafted": [], "accepted": []}


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_python_without_vllm_is_told(tmp_path, capsys):
    assert acceptance("--engine", "vllm", "--output", str(tmp_path / "report")) == 1
    told = capsys.readouterr().err
    assert "No module named 'vllm'" in told
    assert "expected vLLM 0.32 or later" in told
    assert "--engine-python" in told
    left = [child for child in psutil.Process().children() if any("vllm_worker" in word for word in child.cmdline())]
    assert not left, "the process that could not start vLLM has ended"
    assert acceptance("--engine", "vllm", "--engine-python", str(tmp_path / "none")) == 2
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.skipif(VLLM is None, reason="VLLM_PYTHON names no Python with vLLM")
def test_vllm_accepts_what_we_accept(tmp_path, capsys):
    """Of every prompt as many drafts in as many rounds, but for the last round, which vLLM counts in full."""
    assert acceptance("--engine", "vllm", "--engine-python", VLLM, "--output", str(tmp_path / "vllm"), "--json") == 0
    theirs = json.loads(capsys.readouterr().out)
    assert acceptance("--json") == 0
    ours = json.loads(capsys.readouterr().out)
    found, expected = (report["figures"]["eagle31"]["as served"]["3"] for report in (theirs, ours))
    for (accepted, rounds), (our_accepted, our_rounds) in zip(found["by_prompt"], expected["by_prompt"], strict=True):
        assert rounds in (our_rounds, our_rounds - 1)
        assert abs(accepted - our_accepted) <= 3
    assert found["same_text"] == 2
    before = (tmp_path / "vllm" / "report.json").read_bytes()
    again = ["--engine", "vllm", "--engine-python", "not/needed", "--output", str(tmp_path / "vllm"), "--resume"]
    assert acceptance(*again) == 0, "what was measured needs no engine"
    assert (tmp_path / "vllm" / "report.json").read_bytes() == before
