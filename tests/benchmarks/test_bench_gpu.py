"""`benchmarks/gpu.py`, whole and small on a CPU, and its parts."""

import json
import sys

import gpu
import on_gpu
import pytest
import torch
from engine import SHAPES, Setting, build, seconds_of_call
from on_gpu import Runner, rounds
from on_gpu.floors import Floor
from on_gpu.inputs import MAKERS
from on_gpu.marked import Marked
from on_gpu.report import table
from on_gpu.rivals import STATIC_LIMIT
from on_gpu.rounds import survival_of, timed
from on_gpu.run import SMALL, SURVIVAL, Run, Section
from on_gpu.sections import BUDGET, NAMES, SECTIONS
from on_gpu.subprocesses import FOLDER, in_subprocess
from on_gpu.watched import Watch

from eagle31_hf.generation.captured.seam import Uncaptured
from eagle31_hf.kernels.operation import OPERATIONS
from eagle31_hf.storage.folders import replace_json

CPU = torch.device("cpu")
LONG = 2000  # seconds, on a machine that does much else


@pytest.fixture(autouse=True)
def _among_tests(monkeypatch):
    """A child is no worker of pytest's, and would have all cores that other workers are using; what a run sets for its
    process would be set for other tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda is_on: None)


def small_run() -> Run:
    return Run(CPU, ("tiny",), sizes=SMALL)


def runner_of(tmp_path, budget: float = 100.0) -> Runner:
    return Runner(small_run(), tmp_path / "results.json", budget)


@pytest.mark.slow
def test_all_sections_run_on_a_cpu_in_a_process_that_is_watched(capsys, tmp_path):
    output = tmp_path / "results.json"
    gpu.main(["--device", "cpu", "--shape", "tiny", "--budget", str(LONG), "--output", str(output)])
    printed = capsys.readouterr().out
    sections = json.loads(output.read_text())["sections"]
    assert tuple(sections) == tuple(sorted(NAMES)), "in the file, keys are in order"
    for name, section in sections.items():
        assert "error" not in section, section["error"]
        assert section["title"] in printed
        for row in section["rows"]:
            assert "error" not in row, f"{name}, {row['name']}: {row['error']}"
    for row in sections["texts"]["rows"]:
        assert row["equal"], row["name"]
        assert [*row["executions"]] == [f"as {Uncaptured.name}"]
    assert max(row["mean_accepted_length"] for row in sections["texts"]["rows"]) > 1.5, "little is accepted"
    assert all(row.get("equal", True) for row in sections["demo"]["rows"])
    for row in sections["rounds"]["rows"]:
        if "round_ms" in row:
            parts = row["draft_ms"] + row["verify_ms"] + row["gap_ms"]
            assert parts == pytest.approx(row["round_ms"])
            assert row["round_over_floor"] == pytest.approx(row["round_ms"] / row["floor_ms"]["round"])
    static = next(row for row in sections["rivals"]["rows"] if "static" in row["name"])
    assert static["tokens_per_second"] == pytest.approx(1000 / static["ms_a_token"])
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_sections_are_chosen_by_name(capsys, tmp_path):
    output = tmp_path / "results.json"
    given = ["--here", "--device", "cpu", "--shape", "tiny", "--output", str(output)]
    gpu.main([*given, "--only", "machine,matmuls", "--json"])
    sections = json.loads(capsys.readouterr().out)["sections"]
    assert [*sections] == ["machine", "matmuls"]
    assert sections["machine"]["rows"]
    assert json.loads(output.read_text())["sections"] == sections
    with pytest.raises(SystemExit):
        gpu.main([*given, "--only", "machin"])
    assert "did you mean machine?" in capsys.readouterr().err


def test_results_are_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    replace_json(path, {"a": 1})
    replace_json(path, {"a": 2})
    with pytest.raises(TypeError):
        replace_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_what_fails_is_told_and_the_rest_goes_on(tmp_path):
    def tasks(run):
        yield "broken", lambda: {"ms": 1 / 0}
        yield "sound", lambda: {"ms": 1.0, "written": json.loads(runner.output.read_text())["sections"]["one"]["rows"]}
        raise RuntimeError("no further")

    runner = runner_of(tmp_path)
    runner.measure(Section("one", "One", 10, tasks))
    runner.measure(Section("two", "Two", 10, lambda run: iter([("sound", lambda: {"ms": 2.0})])))
    one, two = json.loads(runner.output.read_text())["sections"].values()
    assert "ZeroDivisionError" in one["rows"][0]["error"]
    assert one["rows"][1]["ms"] == 1.0
    assert one["rows"][1]["written"] == one["rows"][:1], "a crash would lose the rows before it"
    assert "no further" in one["error"]
    assert two["rows"][0]["ms"] == 2.0
    assert runner.has_failed
    lines = table(runner.results).splitlines()
    assert any("broken" in line and "failed: ZeroDivisionError" in line for line in lines)
    assert any("no further" in line for line in lines)


def test_rows_are_left_out_where_time_is_spent(tmp_path):
    runner = runner_of(tmp_path)

    def tasks(run):
        yield "first", dict
        run.ends = 0.0  # long ago
        yield "second", dict

    runner.measure(Section("one", "One", 10, tasks))
    figures = runner.results["sections"]["one"]
    assert [row["name"] for row in figures["rows"]] == ["first"]
    assert "'second'" in figures["left_out"]
    runner.budget = runner.spent()
    runner.measure(Section("two", "Two", 10, tasks))
    assert runner.results["sections"]["two"]["rows"] == []
    assert "is spent" in runner.results["sections"]["two"]["left_out"]


def test_where_the_device_is_of_no_use_the_rest_is_left_to_another_process(monkeypatch, tmp_path):
    parts = {"useless": lambda: {"ms": 1 / 0}, "sound": dict}
    sections = tuple(Section(name, name, 10, lambda run, row=row: iter([("row", row)])) for name, row in parts.items())
    monkeypatch.setattr(on_gpu, "SECTIONS", sections)
    monkeypatch.setattr(on_gpu, "is_usable", lambda device: False)
    output = tmp_path / "results.json"
    results = on_gpu.measure_gpu(output, "cpu", ("tiny",), tuple(parts), 100.0, None)
    assert json.loads(output.read_text()) == results
    assert "torch" in results["environment"]
    (section,) = results["sections"].values()
    assert "ZeroDivisionError" in section["rows"][0]["error"]


# A program that writes what the benchmark's process would: a section of it crashes, one hangs, and one is the last that
# its process can measure.
HARMFUL = """
import json, os, sys, time

options, found = dict(zip(sys.argv[2::2], sys.argv[3::2])), {}

def write(name, **figures):
    found[name] = {"title": name, "limit": 2, "rows": [{"name": "before"}]} | figures
    with open(options["--output"], "w") as file:
        json.dump({"environment": {}, "sections": found}, file)

for name in options["--only"].split(","):
    write(name)
    if name == "crash":
        os._exit(139)
    if name == "hang":
        time.sleep(600)
    write(name, seconds=1.0)
    if name == "useless":
        break
"""


def test_a_section_that_crashes_or_hangs_does_not_end_the_run(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(HARMFUL)
    told = []
    watch = Watch(tmp_path / "results.json", 200, ["--device", "cpu"], told.append, [sys.executable, str(program)], 0.5)
    results = watch.measure(["crash", "hang", "useless", "sound"])
    assert json.loads(watch.output.read_text()) == results
    sections = results["sections"]
    assert sections["crash"]["error"] == "its process ended by status 139"
    assert [row["name"] for row in sections["crash"]["rows"]] == ["before"]
    assert "hang went on past its limit" in sections["hang"]["error"]
    assert all(sections[name]["seconds"] == 1.0 for name in ("useless", "sound"))
    assert len(told) == 2
    assert "environment" in results
    assert {path.name for path in tmp_path.iterdir()} == {"program.py", "results.json"}


def test_a_program_that_does_not_start_ends_the_run(tmp_path):
    watch = Watch(tmp_path / "results.json", 60, [], program=[sys.executable, "-c", "raise SystemExit(7)"])
    results = watch.measure(["machine", "texts"])
    assert {section["error"] for section in results["sections"].values()} == {"its process ended by status 7"}
    silent = Watch(tmp_path / "results.json", 60, [], program=[sys.executable, "-c", "pass"])
    assert silent.measure(["machine"])["sections"] == {}


def test_the_telling_sections_fit_in_the_budget():
    limits = {section.name: section.limit for section in SECTIONS}
    telling = ("machine", "texts", "rounds", "rivals")
    assert NAMES[: len(telling)] == telling
    assert sum(limits[name] for name in telling) <= BUDGET
    assert limits["rivals"] > STATIC_LIMIT


def test_captures_are_no_part_of_what_is_timed(monkeypatch):
    """Auto meets its plans one after the other, some of them in a second call."""
    counts, made = [], []

    class Counted(Uncaptured):
        def capture(self, function, part):
            made.append(part)
            return function

    def counted(*args, **options):
        before = len(made)
        seconds = seconds_of_call(*args, **options)
        counts.append(len(made) - before)
        return seconds

    run = small_run()
    run.seam = Counted
    monkeypatch.setattr(rounds, "seconds_of_call", counted)
    row = timed(run, "tiny", Setting("auto", {"num_assistant_tokens": "auto"}, SURVIVAL), 12)
    assert counts[0] > 0
    assert counts[-2:] == [0, 0]  # the last one is timed
    assert row["fused"] == "9 of 9"


def test_processes_that_take_too_long_or_fail_are_told(monkeypatch, tmp_path):
    """They are given another torch, which takes no seconds to import."""
    monkeypatch.syspath_prepend(tmp_path)
    torch_of_theirs = tmp_path / "torch.py"
    torch_of_theirs.write_text("import time; time.sleep(600)")
    assert "longer than" in in_subprocess("static", 0.0, "cpu", {})["left_out"]
    torch_of_theirs.write_text("raise ImportError('no libtorch')")
    told = in_subprocess("static", LONG, "cpu", {})["error"]
    assert "ImportError: no libtorch" in told
    assert "on_gpu/__init__.py" in told
    assert str(FOLDER) not in told, "results are kept, and no machine's paths"


def test_every_operation_has_inputs():
    assert MAKERS.keys() == OPERATIONS.keys()


def test_floors_count_the_bytes_that_are_read():
    target, drafter = build("tiny", torch.float32, "cpu")
    fields = SHAPES["tiny"]
    floor = Floor.of(target, drafter)
    hidden, inner, vocab = (fields[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    of_layer = 2 * hidden * 64 + 2 * hidden * 32 + 3 * hidden * inner + 2 * hidden + 2 * 16  # Qwen3 norms heads
    assert floor.target_weights == 4 * (8 * of_layer + hidden + vocab * hidden)
    assert floor.target_token == 4 * 2 * 8 * 2 * 16
    assert floor.drafter_token == 4 * 2 * 2 * 16
    assert floor.drafter_fusion == 4 * (3 * hidden * hidden + 3 * hidden)
    of_drafter = 2 * hidden * (64 + 32 + 32) + 64 * hidden + 3 * hidden * inner + 4 * hidden + vocab // 2 * hidden
    assert floor.drafter_weights == 4 * of_drafter
    both = floor.milliseconds(context=10, steps=3, num_sequences=2, bandwidth=1e6)
    assert both["verify"] == pytest.approx((floor.target_weights + 20 * floor.target_token) / 1000)
    step = floor.drafter_weights + 20 * floor.drafter_token
    assert both["draft"] == pytest.approx((floor.drafter_fusion + 3 * step) / 1000)
    assert both["round"] == pytest.approx(both["verify"] + both["draft"])


def test_a_round_is_split_by_marks():
    """Two rounds, before the second of which the plan changed, so that it was drafted twice; a gap of 1 s after each
    run; and the draft of a third round that never was."""
    marked = Marked(Uncaptured(), CPU)
    drafts, verifications = [(0.0, 2.0), (8.0, 10.0), (11.0, 13.0), (21.0, 30.0)], [(3.0, 7.0), (14.0, 20.0)]
    marked.spans = sorted(
        [("draft", *span) for span in drafts] + [("verify", *span) for span in verifications], key=lambda span: span[1]
    )
    split = marked.split()
    expected = {"round_ms": 10000, "draft_ms": 3000, "verify_ms": 5000, "gap_ms": 2000}
    assert {name: split[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("length", [1.5, 4.5, 6.1])
def test_chances_give_the_length_that_is_wanted(length):
    assert 1 + sum(survival_of(length, 7)) == pytest.approx(length)
