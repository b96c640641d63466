"""`eagle31 drift` as a user runs it, on the demo pair."""

import json
import sys

import pytest

from eagle31_hf import Eagle31Config, Eagle31DrafterModel, demo
from eagle31_hf.cli import main

PAIR = ["--target", str(demo.FOLDER / "target"), "--drafter", str(demo.FOLDER / "eagle31")]
SMALL = ["--prompts", "python", "--num-prompts", "2", "--prompt-tokens", "16", "--max-new-tokens", "4", "--depth", "2"]
PLAIN = [*SMALL, "--no-interventions", "--lengths", "48"]


def drift(*words):
    return main(["drift", *PAIR, *words])


@pytest.fixture
def texts(tmp_path):
    """Two texts of many more tokens than are shown to a target."""
    file = tmp_path / "texts.jsonl"
    lines = [" ".join(f"name_{i} = {i + k}" for i in range(60)) for k in range(2)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file


def test_a_report_is_written_and_goes_on_where_it_was_but_with_nothing_else(texts, tmp_path, capsys):
    """With other prompts, which differ only behind the tokens that are shown to the target, and another field of the
    drafter's config, it does not."""
    folder, words = tmp_path / "report", texts.read_text()
    command = ["--prompts", str(texts), *PLAIN[2:], "--compare", str(demo.FOLDER / "eagle3"), "--output", str(folder)]
    assert drift(*command, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((folder / "report.json").read_text())
    assert list(shown["figures"]) == ["eagle31", "eagle3"]
    assert shown["figures"]["eagle3"]["acceptance"]["48 tokens"]["prompts"] == 2
    assert "<title>Attention drift: eagle31, eagle3</title>" in (folder / "report.html").read_text()
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    assert drift(*command) == 2
    told = capsys.readouterr().err
    assert "holds a report already" in told
    assert "loading" not in told  # said before the models are read
    assert drift(*command, "--resume", "--set", "norm_output=false") == 2
    assert "other settings" in capsys.readouterr().err
    texts.write_text(words.replace('"}', ' changed"}'))
    assert drift(*command, "--resume") == 2
    assert "other settings (prompts" in capsys.readouterr().err
    texts.write_text(words)
    (folder / "report.html").unlink()
    lines = (folder / "measured.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "measured.jsonl").write_bytes(b"".join(lines[:-2]) + lines[-2][:20])  # as a kill leaves it
    assert drift(*command, "--resume") == 0
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before


def test_without_an_output_it_is_printed_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert drift(*PLAIN) == 0
    printed = capsys.readouterr().out
    assert "Attention: eagle31: attention by depth" in printed
    assert "accepted by length of the context" in printed
    assert not list(tmp_path.iterdir())


ACCEPTANCE = ["--prompts", "python", "--num-prompts", "2", "--prompt-tokens", "16", "--max-new-tokens", "4"]
ONE_WAY = [*ACCEPTANCE, "--depths", "2", "--trees", "--depth", "2", "--no-perturbations"]


def acceptance(*words):
    return main(["bench", "acceptance", *PAIR, *words])


def test_acceptance_is_reported_and_compared_with_an_earlier_report(tmp_path, capsys):
    earlier = tmp_path / "earlier"
    assert acceptance(*ONE_WAY, "--concurrency", "2", "--temperatures", "0.7", "--output", str(earlier), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["figures"]["eagle31"].keys() == {"as served", "temperature 0.7", "2 at once"}
    assert "Speed" in (earlier / "report.html").read_text()
    assert acceptance(*ONE_WAY, "--against", str(earlier / "report.json")) == 0
    printed = capsys.readouterr().out
    assert "Beside " in printed
    assert "same" in printed  # greedy, of the same prompts


def test_a_drafter_whose_drift_cannot_be_measured_is_told_before_any_is(tmp_path, capsys):
    config = demo.load_drafter("eagle31").config.to_dict()
    parallel = Eagle31DrafterModel(Eagle31Config(**config | {"mask_token_id": 0}))
    parallel.save_pretrained(tmp_path / "parallel")
    folder = tmp_path / "report"
    assert drift(*PLAIN, "--compare", str(tmp_path / "parallel"), "--output", str(folder)) == 2
    assert "cannot be measured step by step" in capsys.readouterr().err
    assert not folder.exists()


def test_prompts_that_are_left_out_are_counted_by_reason(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": ""}\n' * 5 + '{"prompt": "import os"}\n')
    assert drift("--prompts", str(tmp_path / "prompts.jsonl"), *PLAIN[2:-2]) == 0
    assert "left out 5: empty prompt" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that takes any bytes")
def test_names_of_files_that_are_no_utf_8_are_spelled_out(tmp_path, capsys):
    """Of prompts and of an earlier report: what was measured is written."""
    prompts, folder = (tmp_path / f"{name}\udcff" for name in ("prompts", "earlier"))
    prompts.write_text('{"prompt": "import os"}\n')
    command = ["--prompts", str(prompts), *ONE_WAY[2:]]
    assert acceptance(*command, "--output", str(folder)) == 0
    assert acceptance(*command, "--against", str(folder / "report.json"), "--output", str(tmp_path / "now")) == 0
    assert rf"Beside {tmp_path}/earlier\udcff/report.json" in (tmp_path / "now" / "report.html").read_text()


def test_what_writes_reports_is_asked_for_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert drift(*PLAIN, "--output", str(tmp_path / "report")) == 1
    assert "pip install eagle31_hf[plots]" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
