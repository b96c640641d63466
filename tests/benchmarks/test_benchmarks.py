"""The benchmarks beside the library, in the process, small."""

import json

import batch_budget
import engine
import memory
import prompt_lookup
import pytest
import sampling
import small
import store
import torch
import training
import turns
from programs import forkserver

from eagle31_hf import demo


def figures_of(capsys, benchmark, *arguments: str) -> dict:
    """Runs a benchmark; returns the figures it prints."""
    benchmark.main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_bench_small_reports_every_call(capsys, monkeypatch):
    monkeypatch.setattr(small, "CALLS", 2)
    result = figures_of(capsys, small, "--prompt-tokens", "4", "--max-new-tokens", "6")
    assert [(run["rate"], run["setting"]) for run in result["runs"]] == [
        (rate, setting) for rate in (0.45, 0.65) for setting in ("auto", "chain of 3")
    ]
    for run in result["runs"]:
        assert len(run["speedups"]) == 2
        assert min(run["speedups"]) <= run["speedup"] <= max(run["speedups"])


def test_bench_turns_goes_on_as_after_one_long_prompt(capsys):
    result = figures_of(capsys, turns, "--turns", "3", "--texts", "1", "--max-new-tokens", "12")
    lengths = {(run["way"], run["turn"]): run["accepted_length"] for run in result["runs"]}
    assert len(lengths) == 9
    for turn in (1, 2, 3):
        assert lengths["goes on", turn] == lengths["one long prompt", turn]
    assert lengths["not seen", 1] == lengths["goes on", 1]


def test_bench_prompt_lookup_decodes_each_prompt_in_both_ways(capsys):
    result = figures_of(capsys, prompt_lookup, "--prompts", "1", "--max-new-tokens", "16", "--rounds", "1")
    (found,) = result["kinds"].values()
    assert found["same_text"] == found["prompts"] == 1
    assert found["gain"] == pytest.approx(
        found["tokens_per_second"]["drafter and text"] / found["tokens_per_second"]["drafter"]
    )
    assert len(list(prompt_lookup.edits())) >= 6


def test_a_budget_for_a_batch_gains_what_a_depth_for_each_sequence_can():
    shape = batch_budget.SHAPES["Llama-3.1-8B"]
    alike, mixed = [0.7] * 4, [0.9, 0.3] * 32
    assert batch_budget.best_budget(shape, alike) == pytest.approx(batch_budget.best_depth(shape, alike))
    assert batch_budget.best_budget(shape, mixed) > 1.1 * batch_budget.best_depth(shape, mixed)


def test_bench_store_reads_what_it_wrote(capsys, tmp_path):
    result = figures_of(capsys, store, "--width", "8", "--examples", "2", "--folder", str(tmp_path))
    assert [run["dtype"] for run in result["runs"]] == ["bfloat16", "fp8"]
    assert result["runs"][0]["bytes"] > 0
    assert min(value for run in result["runs"] for name, value in run.items() if name != "dtype") > 0
    assert not [*tmp_path.iterdir()]


def test_bench_sampling_counts_both_kinds(capsys):
    result = figures_of(capsys, sampling, "--prompts", "1", "--seeds", "1", "--max-new-tokens", "16")
    lengths = {(run["depth"], run["kind"]): run["accepted_length"] for run in result["runs"]}
    assert len(lengths) == 6
    assert lengths[5, "rejection"] != lengths[5, "shared noise"]
    assert min(lengths.values()) >= 1


def test_bench_sampling_times_a_pair(capsys):
    pair = [str(demo.FOLDER / name) for name in ("target", "eagle31")]
    result = figures_of(capsys, sampling, "--pair", *pair, "--seeds", "1", "--max-new-tokens", "4")
    assert [run["way"] for run in result["runs"]] == [*sampling.WAYS]
    assert all(run["tokens_per_second"] > 0 for run in result["runs"])


def test_bench_engine_accepts_what_was_decreed(capsys):
    sizes = ["--prompt-tokens", "8", "--max-new-tokens", "40", "--rounds", "1"]
    result = figures_of(capsys, engine, "--shape", "tiny", "--dtype", "float32", *sizes)
    runs = {(run["setting"], run["rows"]): run for run in result["runs"]}
    chain = runs["chain K=5", 1]
    shares = [n / m for n, m in zip(chain["accepted_per_position"], chain["drafted_per_position"], strict=True)]
    assert shares == sorted(shares, reverse=True)
    assert 0.5 < shares[0] < 1, "0.8 was decreed"
    assert runs["auto, nothing accepted", 1]["mean_accepted_length"] == 1
    assert all(run["efficiency"] > 0 for run in runs.values())


def test_training_says_what_a_step_takes(capsys):
    sizes = ["--shape", "tiny", "--dtype", "float32", "--prompt-tokens", "48", "--rounds", "2"]
    runs = figures_of(capsys, training, *sizes)["runs"]
    assert [found["activations"] for found in runs] == ["computed again", "kept"]
    for found in runs:
        assert found["step"] == pytest.approx(sum(found["seconds"].values()))
        assert found["tokens_per_second"] == pytest.approx(48 / found["step"])
        assert all(seconds > 0 for seconds in found["seconds"].values())


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_benched_step_trains(recomputes):
    step = training.Step(engine.build("tiny", torch.float32, "cpu")[0], tokens=48, depth=3, recomputes=recomputes)
    before = [parameter.detach().clone() for parameter in step.trained]
    step.run()
    assert not any(torch.equal(old, new) for old, new in zip(before, step.trained, strict=True))


def test_memory_is_that_of_processes_of_their_own(capsys, monkeypatch):
    forkserver()  # that of all tests, whichever comes first
    row, asked = memory.measure_memory("tiny", "float32", prompt_tokens=64, chunk=32), []
    assert row["alone"] > 2**25, "less than Python and torch take"
    assert row["ratio"] == pytest.approx(row["drafted"] / row["alone"])
    monkeypatch.setattr(memory, "measure_memory", lambda *given: asked.append(given) or row | {"chunk": given[-1]})
    rows = figures_of(capsys, memory, "--shape", "tiny", "--dtype", "float32", "--prompt-tokens", "64")["memory"]
    assert [row["chunk"] for row in rows] == [None, 2048]
    assert asked == [("tiny", "float32", "cpu", 64, chunk) for chunk in (None, 2048)]
