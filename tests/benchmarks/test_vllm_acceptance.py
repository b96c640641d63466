"""The acceptance report of vLLM: its counts beside ours where a vLLM is named, and what is told where there is none.

VLLM_PYTHON=/path/to/python pytest tests/benchmarks/test_vllm_acceptance.py
"""

import json
import os
import sys
from importlib.util import find_spec

import psutil
import pytest
import vllm_acceptance
from vllm_acceptance import rounds_of

from eagle31_hf import demo
from eagle31_hf.cli import main
from eagle31_hf.reports.acceptance_study import WARM_UP

PAIR = ["--target", str(demo.FOLDER / "target"), "--drafter", str(demo.FOLDER / "eagle31"), "--dtype", "float32"]
PROMPTS = ["--prompts", "python", "--num-prompts", "2", "--max-new-tokens", "24", "--depths", "3", "--depth", "3"]
VLLM = os.environ.get("VLLM_PYTHON")


GIVEN = [*PAIR, *PROMPTS, "--trees", "--no-perturbations"]


def acceptance(*words):
    return vllm_acceptance.main([*GIVEN, *words])


def test_rounds_are_counted_by_depth():
    found = {"drafted": [[3, 3], [3, 2]], "accepted": [[3, 0], [1, 2]]}
    assert rounds_of(found) == {"tokens": 10, "rounds": 4, "drafted": [4, 4, 3], "accepted": [3, 2, 1]}
    assert rounds_of({"drafted": [[]], "accepted": [[]]}) == {"tokens": 0, "rounds": 0, "drafted": [], "accepted": []}


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_python_without_vllm_is_told(tmp_path, capsys):
    assert acceptance("--output", str(tmp_path / "report")) == 1
    told = capsys.readouterr().err
    assert "No module named 'vllm'" in told
    assert "expected vLLM 0.32 or later" in told
    assert "--python" in told
    left = [child for child in psutil.Process().children() if any("vllm_worker" in word for word in child.cmdline())]
    assert not left, "the process that could not start vLLM has ended"
    assert acceptance("--python", str(tmp_path / "none")) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_rivals_are_not_of_vllm(capsys):
    with pytest.raises(SystemExit):
        acceptance("--rivals=prompt-lookup")
    assert "--rivals are ways of transformers" in capsys.readouterr().err


# Answers as the worker does, each prompt with tokens of its own, and notes how it was started and what it was asked. It
# fails at the fourth request where there is a file `failing` beside its notes.
STAND_IN = """#!{python}
import json, os, sys
notes = {notes!r}
plan = json.loads(sys.stdin.readline())
speculation = plan["speculation"]
is_there = speculation is None or os.path.isfile(os.path.join(speculation["model"], "config.json"))
depth = speculation["num_speculative_tokens"] if speculation else 0
print(json.dumps(plan | {{"is_there": is_there}}), file=open(notes, "a"))
print(json.dumps({{"versions": {{}}}}), flush=True)
for number, line in enumerate(sys.stdin, 1):
    request = json.loads(line)
    print(json.dumps(request), file=open(notes, "a"))
    rounds = [[depth] * 2] * len(request["prompts"])
    answer = {{
        "seconds": 1.0,
        "tokens": [[sum(ids) % 100] * request["max_new_tokens"] for ids in request["prompts"]],
        "drafted": rounds,
        "accepted": [[depth, 0] for depth, _ in rounds],
    }}
    is_failing = number == 4 and os.path.exists(notes + ".failing")
    print(json.dumps({{"error": "out of memory"}} if is_failing else answer), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="runs a script by its first line")
def test_an_engine_is_started_for_everybody_and_asked_what_is_not_known(tmp_path, capsys):
    """By a program that stands in for a Python with vLLM: a run that failed goes on, and asks for nothing twice."""
    notes, python = tmp_path / "notes", tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, notes=str(notes)))
    python.chmod(0o755)
    failing = tmp_path / "notes.failing"
    failing.touch()
    words = ["--python", str(python), "--output", str(tmp_path / "report")]
    words += ["--depth", "4", "--temperatures", "0.5", "--concurrency", "2"]
    assert acceptance(*words) == 1
    assert "vLLM: out of memory" in capsys.readouterr().err
    failing.unlink()
    assert acceptance(*words, "--resume", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["decoded by"] == "vllm"
    said = [json.loads(line) for line in notes.read_text().splitlines()]
    started, asked = ([one for one in said if ("speculation" in one) == is_start] for is_start in (True, False))
    depths = [one["speculation"] and one["speculation"]["num_speculative_tokens"] for one in started]
    assert depths == [None, None, 3, 4]  # the target alone, twice; chains of both depths
    assert all(one["is_there"] and one["max_num_seqs"] == 2 for one in started)
    longest = max(len(ids) for one in asked for ids in one["prompts"])
    assert [one["max_model_len"] for one in started] == [longest + 24 + 3 * depth + 1 for depth in (0, 0, 3, 4)]
    # Alone: two as served, and a batch, which failed at first. Depth 3: two. Depth 4: two, two sampled, a batch.
    warm_ups = [one for one in asked if one["max_new_tokens"] == WARM_UP]
    assert (len(warm_ups), len(asked) - len(warm_ups)) == (4, 2 + 1 + 1 + 2 + 5)
    assert [one["sampling"]["temperature"] for one in asked].count(0.5) == 2
    ways = found["figures"]["eagle31"]
    assert ways["as served"]["3"]["by_prompt"] == [[3, 2], [3, 2]]
    assert ways["2 at once"]["4"]["by_prompt"] == [[8, 4]]
    assert (ways["as served"]["4"]["same_text"], ways["temperature 0.5"]["4"]["same_text"]) == (2, None)


@pytest.mark.skipif(VLLM is None, reason="VLLM_PYTHON names no Python with vLLM")
def test_vllm_accepts_what_we_accept(tmp_path, capsys):
    """Of every prompt as many drafts in as many rounds, but for the last round, which vLLM counts in full."""
    assert acceptance("--python", VLLM, "--output", str(tmp_path / "vllm"), "--json") == 0
    theirs = json.loads(capsys.readouterr().out)
    assert main(["bench", "acceptance", *GIVEN, "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    found, expected = (report["figures"]["eagle31"]["as served"]["3"] for report in (theirs, ours))
    for (accepted, rounds), (our_accepted, our_rounds) in zip(found["by_prompt"], expected["by_prompt"], strict=True):
        assert rounds in (our_rounds, our_rounds - 1)
        assert abs(accepted - our_accepted) <= 3
    assert found["same_text"] == 2
    before = (tmp_path / "vllm" / "report.json").read_bytes()
    again = ["--python", "not/needed", "--output", str(tmp_path / "vllm"), "--resume"]
    assert acceptance(*again) == 0, "what was measured needs no engine"
    assert (tmp_path / "vllm" / "report.json").read_bytes() == before
