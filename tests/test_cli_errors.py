"""Commands with arguments that cannot be: refused in one line, before anything is loaded or written."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import build_drafter, build_target
from fuzz_commands import fuzz, prepared
from transformers import AutoModelForCausalLM

from eagle31_hf import demo
from eagle31_hf.cli import main
from eagle31_hf.cli.parsing import to_json

TARGET, DRAFTER = str(demo.FOLDER / "target"), str(demo.FOLDER / "eagle31")


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    """A folder with a target and its tokenizer, the target without it, a drafter, and texts."""
    folder, target = tmp_path_factory.mktemp("made"), build_target("llama")
    target.save_pretrained(folder / "bare")
    shutil.copytree(folder / "bare", folder / "target")
    tokenizer.save_pretrained(folder / "target")
    build_drafter(target).save_pretrained(folder / "drafter")
    (folder / "texts.jsonl").write_text(
        "\n".join(json.dumps({"text": "abcdefghij"[i % 7 :] + "abcdef"}) for i in range(6))
    )
    (folder / "latin.jsonl").write_bytes('{"text": "ü"}'.encode("latin-1"))
    shutil.copy(folder / "latin.jsonl", folder / "latin.txt")
    (folder / "deep.jsonl").write_text('{"text": "a\u2028b"}\n' + "[" * 50_000)
    (folder / "empty").mkdir()
    shutil.copytree(folder / "target", folder / "refusing")
    (folder / "refusing" / "chat_template.jinja").write_text("{{ raise_exception('no chats') }}")
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> Path:
    """The current folder, with copies of what was made."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


GENERATE = ["generate", "--target", "target", "--drafter", "drafter", "--max-new-tokens", "4"]
PREPARE = ["prepare-data", "--target", "target", "--data", "texts.jsonl", "--output", "out"]
TRAIN = ["train", "--target", "target", "--data", "texts.jsonl", "--output", "out", "--steps", "1"]
UPGRADE = ["upgrade", "--target", "target", "--drafter", "drafter", "--texts", "texts.jsonl"]
ACCEPTANCE = ["bench", "acceptance", "--target", "target", "--drafter", "drafter", "--prompts", "texts.jsonl"]
DEMO = ["--target", TARGET, "--drafter", DRAFTER, "--prompts", "python", "--num-prompts", "2", "--prompt-tokens", "16"]
DRIFT = ["drift", *DEMO, "--max-new-tokens", "4", "--depth", "2", "--no-interventions", "--lengths", "48"]
OF_DEMO = ["bench", "acceptance", *DEMO, "--max-new-tokens", "4", "--depths", "2", "--depth", "2", "--no-perturbations"]
BAD = {
    "no cuda": ([*GENERATE, "--device", "cuda:99", "abc"], "--device: got 'cuda:99'"),
    "no such device": (["demo", "--device", "gpu"], "--device: got 'gpu', expected a device: cpu"),
    "no memory": ([*GENERATE, "--device", "meta", "abc"], "--device: got 'meta'"),
    "bench's device": ([*ACCEPTANCE, "--device", "cuda:99"], "--device: got 'cuda:99'"),
    "a device map": ([*PREPARE, "--device-map", "nonsense"], "--device-map: got 'nonsense'"),
    "no such dtype": ([*GENERATE, "--dtype", "float99", "abc"], "--dtype: invalid choice: 'float99'"),
    "no such dtype in training": ([*TRAIN, "--dtype", "float99"], "--dtype: invalid choice: 'float99'"),
    "no UTF-8": ([*GENERATE, "ab\udcff"], "prompt: character 3 is no UTF-8"),
    "no prompt": ([*GENERATE, ""], "makes no tokens"),
    "too long a prompt": ([*GENERATE, "abc" * 50], "the prompt has 150 tokens; expected fewer than 128"),
    "a template that refuses": (
        ["generate", "--target", "refusing", "--drafter", "drafter", "--chat", "abc"],
        "template refused it: no chats",
    ),
    "a word of Python": (
        [*GENERATE, "--set", "norm_output=False", "abc"],
        "got 'norm_output=False', expected norm_output=false",
    ),
    "an option of training": ([*ACCEPTANCE, "--processes", "2"], "unrecognized arguments: --processes 2"),
    "no chat template": ([*GENERATE, "--chat", "abc"], "has no chat template"),
    "negative temperature": (
        [*GENERATE, "--temperature", "-1", "abc"],
        "--temperature: got '-1', expected a number of at least 0",
    ),
    "no temperature": ([*GENERATE, "--temperature", "nan", "abc"], "--temperature: got 'nan'"),
    "endless temperature": ([*GENERATE, "--temperature", "inf", "abc"], "--temperature: got 'inf'"),
    "prepare-data's temperature": ([*PREPARE, "--regenerate", "--temperature", "-1"], "--temperature: got '-1'"),
    "top-p": ([*PREPARE, "--regenerate", "--top-p", "0"], "--top-p: got '0', expected a number above 0 and at most 1"),
    "a share": ([*PREPARE, "--template-augmentation", "2"], "--template-augmentation: got '2'"),
    "a layer": ([*PREPARE, "--states", "--layers", "-5"], "--layers: got '-5'"),
    "layers in no order": (
        [*PREPARE, "--states", "--layers", "5", "3"],
        "expected distinct ids >= 0 in ascending order",
    ),
    "too short": ([*PREPARE, "--max-length", "1"], "max_length is 1; expected at least 4"),
    "no samples": ([*TRAIN, "--max-samples", "0"], "--max-samples: got '0'"),
    "samples of no data": (
        ["prepare-data", "--target", "target", "--self-prompts", "2", "--output", "out", "--max-samples", "3"],
        "max_samples is 3 and there is no data",
    ),
    "seed": ([*TRAIN, "--seed", "-1"], "--seed: got '-1'"),
    "no value at all": (
        ["train", "--target", "t", "--data=--", "--output", "o"],
        "argument --data: expected a value, got '--'",
    ),
    "a large seed": (
        [*GENERATE, "--seed", str(2**64), "abc"],
        "expected an integer of at least 0 and at most 4294967295",
    ),
    "a number of 5,000 digits": (["demo", "--prompts", "9" * 5000], "--prompts: got '9999"),
    "epochs": ([*TRAIN, "--epochs", "nan"], "--epochs: got 'nan'"),
    "learning rate": ([*TRAIN, "--learning-rate", "inf"], "--learning-rate: got 'inf'"),
    "rows": ([*TRAIN, "--eval-rows", "-3"], "--eval-rows: got '-3'"),
    "a size": ([*TRAIN, "--field", "hidden_size=-1"], "hidden_size is -1"),
    "a misspelt field": (
        [*GENERATE, "--set", "norm_ouput=true", "abc"],
        "--set: got norm_ouput; expected a field of Eagle31Config: did you mean norm_output?",
    ),
    "a setting of another type": ([*TRAIN, "--set", "max_grad_norm=x"], "max_grad_norm"),
    "an output besides": ([*TRAIN, "--set", "output_dir=b"], "the folder of a run is --output"),
    "a part for one process": ([*TRAIN, "--set", "shard_target=true"], "this is the only process; expected several"),
    "upgrading nothing": ([*TRAIN, "--upgrade"], "expected --drafter with it"),
    "a vocabulary of a drafter": (
        [*TRAIN, "--drafter", "drafter", "--draft-vocab-size", "5"],
        "expected one of the two",
    ),
    "two ways to split": (
        [*TRAIN, "--tensor-parallel", "--device-map", "auto"],
        "expected neither --device-map nor --load-in",
    ),
    "discarding from elsewhere": (
        ["convert", "drafter", "out", "--discard-original"],
        "expected no destination with it",
    ),
    "a drafter for a target": (
        ["generate", "--target", "drafter", "--drafter", "drafter", "abc"],
        "is a drafter (model_type 'eagle31')",
    ),
    "no tokenizer": (["generate", "--target", "bare", "--drafter", "drafter", "abc"], "its tokenizer cannot be read"),
    "an empty name": (["convert", "drafter", ""], "destination: got '', expected a name"),
    "a name too long": (["info", "x" * 500], "there is no such folder"),
    "below a file": (["convert", "drafter", "texts.jsonl/out"], "texts.jsonl is a file; expected a folder"),
    "a folder without texts": ([*UPGRADE[:-1], "empty"], "empty: is a folder without files; expected .jsonl"),
    "a folder as a template": ([*PREPARE, "--chat-template", "empty"], "empty: is a folder; expected a file."),
    "output is a file": ([*UPGRADE, "--output", "texts.jsonl"], "texts.jsonl: is there already"),
    "a rate beyond all numbers": (
        [*TRAIN, "--set", "learning_rate=1e999"],
        "learning_rate is '1e999'; expected a finite number",
    ),
    "a depth beyond all use": ([*TRAIN, "--depth", "100000"], "depth is 100000; expected 1 to 64"),
    "a revision of a folder": (
        ["convert", "drafter", "--revision", "main"],
        "drafter: revision is 'main', and a folder",
    ),
    "texts in no UTF-8": ([*UPGRADE[:-1], "latin.txt"], "latin.txt: byte 10 is no UTF-8"),
    "texts that are weights": (
        [*UPGRADE[:-1], "drafter/model.safetensors"],
        "drafter/model.safetensors: was not written by prepare-data, and may be a model's weights; expected",
    ),
    "data beside weights": ([*PREPARE, "--data", "drafter"], "drafter/model.safetensors: was not written by"),
    "an output within the data": ([*TRAIN, "--data", "."], "the output out lies within the data, ., of which"),
    "an output within what is evaluated on": ([*TRAIN, "--eval-data", "."], "the output out lies within the data"),
    "a store within the data": ([*PREPARE, "--data", "."], "the output out lies within the data"),
    "lines in no UTF-8": (
        [*UPGRADE[:-1], "latin.jsonl"],
        "latin.jsonl, line 1: 'utf-8' codec can't decode byte 0xfc in position 10",
    ),
    "a line nested too deep": ([*UPGRADE[:-1], "deep.jsonl"], "deep.jsonl, line 2: is nested too deep"),
    "a template in no UTF-8": (
        [*PREPARE, "--chat-template", "latin.jsonl"],
        "latin.jsonl: byte 10 is no UTF-8; expected a text file",
    ),
    "no template": ([*PREPARE, "--chat-template", "nope"], "nope: there is no such file or folder."),
    "no such drafter": (["info", "/nowhere/at/all"], "/nowhere/at/all"),
    "a target as drafter": (["info", TARGET], "llama"),
    "no depth": ([*GENERATE, "--num-assistant-tokens", "0", "x"], "--num-assistant-tokens: got '0'"),
    "no tree": (
        [*GENERATE, "--draft-tree-total-tokens", "1", "x"],
        "--draft-tree-total-tokens: got '1', expected an integer of at least 2, or auto",
    ),
    "too wide a tree": (
        [*GENERATE, "--draft-tree-top-k", "4097", "x"],
        "--draft-tree-top-k: got '4097', expected an integer of at least 1 and at most 4096, or auto",
    ),
    "no prompts": (["demo", "--prompts", "0"], "--prompts"),
    "check: no target": (["check", "/no/such/target"], "/no/such/target: there is no such folder"),
    "check: no config": (["check", str(demo.FOLDER)], "holds no config.json"),
    "check: a drafter as target": (["check", DRAFTER], "expected the target first, then the drafter"),
    "check: no drafter": (["check", TARGET, "/no/such/drafter"], "/no/such/drafter"),
    "check: no such field": (["check", TARGET, DRAFTER, "--set", "nope=1"], "nope"),
    "no destination": (["convert", "owner/name"], "name a destination"),
    "a destination and a pull request": (["convert", "owner/name", "there", "--create-pr"], "neither a destination"),
    "the target itself": (["convert", TARGET, "there"], "looks like the target itself"),
    "a setting without a value": (["info", DRAFTER, "--set", "norm_output"], "NAME=VALUE"),
    "no such format": (["export", DRAFTER, "there", "--format", "gguf"], "--format"),
    "publishing what is not converted": (["publish", TARGET, "--repo-id", "me/x"], "Convert it first"),
    "no such texts": ([*UPGRADE[:-1], "/nowhere.txt"], "/nowhere.txt"),
    "a misspelt setting": ([*TRAIN, "--set", "depht=3"], "--set: "),
    "steps beyond all numbers": ([*TRAIN, "--set", "max_steps=" + "9" * 400], "expected an integer"),
    "a depth of evaluations": ([*TRAIN, "--set", "eval_depth=65"], "eval_depth is 65; expected 1 to 64"),
    "no such loss": ([*TRAIN, "--loss", "mse"], "names 'mse'; expected some of kl"),
    "nothing to resume": ([*TRAIN, "--resume"], "holds no complete checkpoint"),
    "a draft vocabulary above the target's": ([*TRAIN, "--draft-vocab-size", "99"], "to have 99 ids; expected 1 to 11"),
    "drift: depth": ([*DRIFT, "--depth", "17"], "--depth is 17; expected at most 16"),
    "drift: nothing to resume": ([*DRIFT, "--resume"], "expected --output with its folder"),
    "drift: a drafter twice": ([*DRIFT, "--compare", DRAFTER], "names a drafter twice"),
    "drift: no such prompts": ([*DRIFT, "--prompts", "nowhere.jsonl"], "nowhere.jsonl not found"),
    "drift: no room": (
        [*DRIFT, "--max-new-tokens", "4000"],
        "gives no prompt (python, prompt 1: a prompt has 16 tokens; expected at most",
    ),
    "drift: shorter than prompts": (
        [*DRIFT, "--lengths", "48", "8"],
        "no prompt can be made 8 tokens long; expected more than the prompts have (16 to 16)",
    ),
    "drift: lengths": ([*DRIFT, "--lengths", "48", "4000"], "--lengths: got 4000; expected at most"),
    "drift: shorter than chains": (
        [*DRIFT, "--max-new-tokens", "2", "--lengths", "32"],
        "--max-new-tokens is 2; expected at least 4",
    ),
    "acceptance: depths": ([*OF_DEMO, "--depths", "3", "17"], "--depths: got 17; expected at most 16"),
    "acceptance: depth": ([*OF_DEMO, "--depth", "17"], "--depth: got 17; expected at most 16"),
    "acceptance: concurrency": ([*OF_DEMO, "--concurrency", "3"], "--concurrency: got 3; expected at most 2"),
    "acceptance: temperatures": (
        [*OF_DEMO, "--temperatures", "0"],
        "--temperatures: got '0', expected a number above 0",
    ),
    "acceptance: nothing to compare with": (
        [*OF_DEMO, "--against", "nowhere.json"],
        "nowhere.json: there is no such file",
    ),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_is_refused_in_one_line_and_nothing_is_written(capsys, made, monkeypatch, arguments, words):
    monkeypatch.chdir(made)
    before = sorted(made.rglob("*"))
    for given in (arguments, [arguments[0], "--json", *arguments[1:]]):
        assert main(given) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        [line] = [line for line in captured.err.splitlines() if line.startswith("eagle31: error:")]
        assert words in line
        assert len(line) < 1100
        assert sorted(made.rglob("*")) == before


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (
            '{"assistant_confidence_threshold": "x"}',
            "drafter/generation_config.json: assistant_confidence_threshold is 'x'",
        ),
        ('{"num_assistant_tokens": true}', "drafter/generation_config.json: num_assistant_tokens is True"),
    ],
)
def test_a_drafters_own_knobs_are_refused_in_one_line(capsys, folder, knobs, words):
    (folder / "drafter" / "generation_config.json").write_text(knobs)
    assert main([*GENERATE, "abc"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eagle31: error:")]
    assert words in line


def test_a_config_of_many_times_the_weights_is_refused_before_they_are_made_up(capsys, folder, monkeypatch):
    """A Llama of no stated sizes has 6.7 billion parameters."""
    (folder / "target" / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("it was loaded"))
    assert main([*GENERATE, "abc"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eagle31: error:")]
    assert re.search(
        r"target: its weights are [0-9,]+ bytes, its config.json describes 6,738,415,616 parameters; expected", line
    )


def test_info_refuses_knobs_that_are_none(capsys, folder):
    (folder / "drafter" / "generation_config.json").write_text("[1]")
    assert main(["info", "drafter"]) == 2
    assert "generation_config.json: holds a list; expected one JSON object" in capsys.readouterr().err


def test_a_prompt_takes_the_room_there_is(capsys, folder):
    assert main(["generate", "--target", "target", "--drafter", "drafter", "--json", "abcdefghij" * 12 + "abc"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["generated_tokens"] <= 5
    assert "at most 5 new tokens: the target reads 128, and the prompt has 123" in captured.err


def test_too_few_rows_to_evaluate_on_are_trained_on(capsys, folder):
    assert main([*TRAIN, "--depth", "1", "--max-length", "40", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 1
    assert "too few rows to hold any out" in captured.err


def test_figures_that_are_not_finite_are_null():
    assert (
        to_json({"loss": float("nan"), "rates": [1.0, float("inf")], "steps": 3})
        == '{"loss": null, "rates": [1.0, null], "steps": 3}'
    )


def test_random_command_lines(tmp_path, monkeypatch):
    """A share of `python tests/fuzz_commands.py`."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with prepared():
        problems, _ = fuzz(12, 0, tmp_path / "world")
    assert not problems, "\n".join(problems)
