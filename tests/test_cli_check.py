"""`eagle31 check`: its lines, its JSON and its status."""

import json

import pytest
import torch
from transformers.utils import logging

from eagle31_hf import Eagle31Config, Eagle31DrafterModel, demo
from eagle31_hf.checking.check import CAPABILITIES, TargetReport
from eagle31_hf.cli import checking, main

TARGET, DRAFTER = str(demo.FOLDER / "target"), str(demo.FOLDER / "eagle31")


@pytest.mark.parametrize("arguments", [[TARGET], ["/no/such/target"]], ids=["done", "refused"])
def test_afterwards_threads_and_logs_are_as_the_caller_had_them(arguments):
    ours, num_threads, verbosity = logging.get_logger("eagle31_hf"), torch.get_num_threads(), logging.get_verbosity()
    level = ours.level
    try:
        torch.set_num_threads(2)
        logging.set_verbosity_info()
        ours.setLevel(logging.DEBUG)
        main(["check", *arguments])
        assert (torch.get_num_threads(), logging.get_verbosity(), ours.level) == (2, logging.INFO, logging.DEBUG)
    finally:
        torch.set_num_threads(num_threads)
        logging.set_verbosity(verbosity)
        ours.setLevel(level)


def test_a_line_for_each_capability_then_the_drafter_then_the_verdict(capsys):
    assert main(["check", TARGET, DRAFTER]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.partition("  ")[0] for line in lines[:10]] == [
        "target",
        "tried",
        "chains",
        "trees",
        "auto",
        "batches",
        "static cache",
        "prompt in chunks",
        "sampling",
        "training",
    ]
    assert "24 layers of width 128, 2,048 ids, 4,397,184 parameters, 8.8 MB in bfloat16" in lines[0]
    assert any("590,720 parameters, 1.2 MB beside the target's 8.8 MB" in line for line in lines)
    assert lines[-1].split() == ["verdict", "works,", "and", "the", "drafter", "fits"]
    assert "trying a tiny LlamaForCausalLM" in captured.err


def test_a_target_is_answered_for_beside_a_p_eagle_drafter(capsys, tmp_path):
    """Its mask token is none of the ids that the tiny target has."""
    sizes = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4}
    Eagle31DrafterModel(Eagle31Config(**sizes, mask_token_id=2047)).save_pretrained(tmp_path)
    assert main(["check", TARGET, str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("works, and the drafter fits")


def test_sizes_that_are_not_known_are_left_out():
    lines = checking._lines(TargetReport("someone/model", True, "works", "SomeForCausalLM", num_layers=3))
    assert lines[0].split(maxsplit=1)[1] == "someone/model: SomeForCausalLM, 3 layers"
    assert checking._about(TargetReport("someone/model", True, "works", "SomeForCausalLM")) == ": SomeForCausalLM"


def test_json_has_its_keys_and_a_drafter_that_does_not_fit_is_status_one(capsys, tmp_path):
    config = json.loads((demo.FOLDER / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 32000}))
    assert main(["check", str(tmp_path / "config.json"), DRAFTER, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "target",
        "works",
        "verdict",
        "architecture",
        "num_layers",
        "hidden_size",
        "vocab_size",
        "num_parameters",
        "num_bytes",
        "dtype",
        "tried",
        "capabilities",
        "drafter",
        "notes",
    }
    assert list(report["capabilities"]) == list(CAPABILITIES)
    assert report["capabilities"]["tree"] == {"answer": "works", "text": "same text as the target alone"}
    assert set(report["drafter"]) == {"name", "fits", "num_parameters", "num_bytes", "config", "findings"}
    assert (report["works"], report["drafter"]["fits"]) == (False, False)
    assert report["verdict"].startswith(
        "this drafter does not fit: the target's vocabulary has 32000 ids, the drafter's 2048"
    )


def test_a_reason_is_said_once_and_what_does_not_work_is_status_one(capsys, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "homemade", "auto_map": {"AutoConfig": "code.Config"}})
    )
    assert main(["check", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("chains            refused: its architecture, homemade, is code in its repository")
    assert lines[2] == "trees             refused: as chains"
