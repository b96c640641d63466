"""`eagle31 train`: from data to a drafter that generates, online and from stored states, stopped and resumed."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from close import assert_close
from conftest import build_target
from programs import in_two_processes

from eagle31_hf import Eagle31DrafterModel, track_acceptance
from eagle31_hf.cli import main, training
from eagle31_hf.cli.parsing import Parser
from eagle31_hf.training.arguments import Eagle31TrainingArguments
from eagle31_hf.training.output import claim

SUMMED = 1e-5  # fp32: sums over the examples of a step, over a few plain gradient steps
# what a drafter's quality depends on, of which both the command and the trainer have a default
RECIPE = (
    "depth",
    "loss",
    "max_length",
    "learning_rate",
    "matrix_learning_rate",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)
QUICK = "--depth 2 --max-length 40 --accumulate 1 --batch-size 2 --learning-rate 0.01 --eval-every 4"


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A target with its tokenizer, and texts it can read."""
    tokenizer.eos_token = "k"
    build_target("llama", eos_token_id=10).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    letters = torch.randint(0, 10, (30, 12), generator=torch.Generator().manual_seed(0))
    lines = (json.dumps({"text": "".join(chr(ord("a") + i) for i in row)}) for row in letters.tolist())
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def trained(capsys, folder, *arguments, data="texts.jsonl", output="drafter"):
    places = ("--target", folder / "target", "--data", folder / data, "--output", folder / output)
    return run(capsys, "train", *places, *QUICK.split(), "--json", *arguments)


def prepared(capsys, folder, *arguments, output):
    """Makes a store of the texts."""
    places = ("--target", folder / "target", "--data", folder / "texts.jsonl", "--output", folder / output)
    status, _, err = run(capsys, "prepare-data", *places, "--max-length", "40", *arguments)
    assert status == 0, err


def test_from_texts_to_a_drafter_that_generates(capsys, folder):
    status, out, err = trained(capsys, folder, "--steps", "5", "--regenerate", "--draft-vocab-size", "9")
    assert status == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["steps"] == 5
    assert result["best"]["eval_accepted_length"] >= 1
    assert "step 4 of 5: held out, loss" in err
    assert "a draft vocabulary of 9 covers" in err
    drafter = Eagle31DrafterModel.from_pretrained(folder / "drafter")
    assert drafter.config.draft_vocab_size == 9
    assert 10 in drafter.draft_to_target_ids().tolist(), "the drafter cannot propose the end of a text"
    target, prompt = build_target("llama"), torch.tensor([[1, 2, 3]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": False}
    with track_acceptance() as stats:
        assert target.generate(prompt, assistant_model=drafter, **options).equal(target.generate(prompt, **options))
    assert stats.target_forwards > 0
    data = json.loads((folder / "drafter" / "training.json").read_text())["data"]
    assert data["rows"] + sum(data["skipped"].values()) == 30
    assert "Accepted length" in (folder / "drafter" / "README.md").read_text()


def test_stored_states_give_the_same_drafter_without_the_target(capsys, folder):
    prepared(capsys, folder, output="tokens")
    prepared(capsys, folder, "--states", "--states-dtype", "float32", output="states")
    plain = ["--matrix-learning-rate", "none", "--set", 'optim="sgd"', "--set", "max_grad_norm=0"]
    for name in ("tokens", "states"):
        status, _, err = trained(capsys, folder, "--steps", "2", *plain, data=name, output=f"{name}/drafter")
        assert status == 0, err
    online, offline = (
        Eagle31DrafterModel.from_pretrained(folder / name / "drafter").state_dict() for name in ("tokens", "states")
    )
    for name, weight in online.items():
        assert_close(name, offline[name], weight, SUMMED)


def parsed(tmp_path, *given):
    """What the trainer gets of a command line."""
    parser = Parser()
    training.add_train(parser)
    line = ["--target", "target", "--data", "data", "--output", str(tmp_path), "--device", "cpu"]
    return training.arguments(parser.parse_args([*line, *given]))


def test_the_command_has_the_trainers_defaults(tmp_path):
    usual, found = Eagle31TrainingArguments(str(tmp_path), use_cpu=True), parsed(tmp_path)
    for name in RECIPE:
        assert getattr(found, name) == getattr(usual, name), name


@pytest.mark.parametrize(
    ("given", "matrix_rate", "rate"),
    [
        ([], 0.02, 0.004),
        (["--matrix-learning-rate", "none"], None, 0.0001),
        (["--set", "matrix_learning_rate=null"], None, 0.0001),
        (["--drafter", "another"], 0.002, 0.0004),
        (["--drafter", "another", "--set", "matrix_learning_rate=null"], None, 0.00001),
        (["--drafter", "another", "--set", "learning_rate=0.003"], 0.002, 0.003),
        (["--drafter", "another", "--matrix-learning-rate", "none"], None, 0.00001),
        (["--drafter", "another", "--matrix-learning-rate", "0.01", "--learning-rate", "0.003"], 0.01, 0.003),
    ],
)
def test_a_trained_drafter_goes_on_at_a_tenth_of_the_rates(tmp_path, given, matrix_rate, rate):
    found = parsed(tmp_path, *given)
    assert found.matrix_learning_rate == pytest.approx(matrix_rate)
    assert found.learning_rate == pytest.approx(rate)


@pytest.fixture
def begun(capsys, folder):
    """The folder of a run of two steps, on the first 28 of the texts."""
    status, _, err = trained(capsys, folder, "--steps", "2", "--max-samples", "28")
    assert status == 0, err
    return folder / "drafter"


@pytest.mark.parametrize(
    ("data", "arguments", "what", "loads"),
    [
        ("texts.jsonl", [], "other data", False),
        ("texts.jsonl", ["--max-samples", "27"], "other data", False),
        ("others.jsonl", ["--max-samples", "28"], "other data", False),
        ("texts.jsonl", ["--max-samples", "28", "--regenerate"], "other data", False),
        ("texts.jsonl", ["--max-samples", "28", "--self-prompts", "3"], "other data", False),
        ("texts.jsonl", ["--max-samples", "28", "--eval-data", "others.jsonl"], "other rows held out", False),
        ("texts.jsonl", ["--max-samples", "28", "--eval-rows", "1"], "other rows held out", True),
        ("texts.jsonl", ["--max-samples", "28", "--seed", "1"], "other rows held out", True),
    ],
)
def test_a_run_is_not_resumed_with_other_data(capsys, folder, begun, data, arguments, what, loads):
    """Other chats would be held out, which it may have been trained on."""
    (folder / "others.jsonl").write_text((folder / "texts.jsonl").read_text().replace("a", "b"))
    before = contents(begun)
    status, out, err = trained(capsys, folder, "--steps", "3", *arguments, "--resume", data=data)
    assert (status, out) == (2, "")
    assert f"checkpoint-2: its run began with {what} (28 rows of {folder / 'texts.jsonl'}, " in err.splitlines()[-1]
    assert "of then, and unchanged data, or choose a new --output." in err.splitlines()[-1]
    assert ("loading" in err) == loads
    assert contents(begun) == before


def test_a_run_is_not_resumed_by_other_steps(capsys, folder, begun):
    before = contents(begun)
    same = ["--max-samples", "28", "--resume", "--steps", "3"]
    status, out, err = trained(capsys, folder, *same, "--accumulate", "3")
    assert (status, out) == (2, "")
    said = "checkpoint-2: a step of its run learns from 2 x 40 tokens, and 6 x 40 tokens is asked for now; expected the"
    assert said in err.splitlines()[-1]
    assert "loading" not in err
    assert contents(begun) == before
    status, _, err = trained(capsys, folder, *same, "--batch-size", "1", "--accumulate", "2")
    assert status == 0, err


def test_a_run_is_resumed_with_its_data_wherever_it_lies(capsys, folder, begun, monkeypatch):
    (folder / "elsewhere").mkdir()
    lines = (folder / "texts.jsonl").read_text()
    (folder / "texts.jsonl").rename(folder / "elsewhere" / "moved.jsonl")
    monkeypatch.chdir(folder / "elsewhere")
    same = ["--max-samples", "28", "--resume"]
    places = ["--target", "../target", "--data", "moved.jsonl", "--output", "../drafter"]
    status, _, err = run(capsys, "train", *places, *QUICK.split(), "--steps", "3", *same)
    assert (status, "step 3" in err or "after 3 steps" in err) == (0, True), err
    (folder / "texts.jsonl").write_text(lines)
    prepared(capsys, folder, "--max-samples", "28", output="store")
    status, _, err = trained(capsys, folder, "--steps", "4", "--resume", data="store")
    assert status == 0, err
    (folder / "texts.jsonl").write_text(lines.replace("a", "b"))
    status, _, err = trained(capsys, folder, "--steps", "5", *same)
    assert (status, "began with other data (28 rows of" in err) == (2, True)


def test_a_run_of_an_earlier_release_is_resumed_with_any_data(capsys, folder, begun):
    """Its record does not say what it was trained on."""
    for path in begun.rglob("training.json"):
        record = json.loads(path.read_text())
        record["data"] = {name: record["data"][name] for name in ("source", "rows", "tokens", "skipped")}
        path.write_text(json.dumps(record))
    status, _, err = trained(capsys, folder, "--steps", "3", "--resume")
    assert status == 0, err


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_training_that_diverges_is_no_success(capsys, folder):
    status, out, err = trained(capsys, folder, "--steps", "30", "--learning-rate", "1e9", "--set", "max_grad_norm=0")
    assert (status, out) == (1, "")
    assert "eagle31: failed: weights are not finite after step" in err
    assert not (folder / "drafter" / "model.safetensors").exists()


@pytest.mark.parametrize("command", ["train", "prepare-data"])
def test_a_folder_of_somebody_is_refused_before_anything_is_read(capsys, folder, command):
    (folder / "theirs").mkdir()
    (folder / "theirs" / "model.safetensors").write_bytes(b"weights of years")
    status, out, err = run(
        capsys, command, "--target", "no/such-target", "--data", "no-data.jsonl", "--output", folder / "theirs"
    )
    assert (status, out) == (2, "")
    assert "expected a folder that is new or empty" in err
    assert "loading" not in err
    assert contents(folder / "theirs") == {"model.safetensors": b"weights of years"}


def test_a_second_run_into_one_folder_is_refused(capsys, folder):
    with claim(folder / "drafter"):
        status, out, err = trained(capsys, folder, "--steps", "1")
        assert contents(folder / "drafter") == {}
    assert (status, out) == (2, "")
    assert "drafter: another run is writing into it" in err
    assert "loading" not in err


def test_an_earlier_drafter_goes_when_the_new_one_is_there(capsys, folder):
    assert trained(capsys, folder, "--steps", "2")[0] == 0
    earlier = contents(folder / "drafter")
    (folder / "drafter" / "notes.txt").write_text("mine")
    status, _, err = trained(capsys, folder, "--steps", "1")
    assert (status, "go on with the run in it by --resume, or replace what is there by --overwrite" in err) == (2, True)
    status, _, err = trained(
        capsys, folder, "--steps", "2", "--overwrite", "--learning-rate", "1e38", "--set", "max_grad_norm=0"
    )
    assert (status, "what an earlier run wrote is in" in err) == (1, True)
    assert contents(folder / "drafter" / "eagle31-replaced" / "1") == earlier
    assert trained(capsys, folder, "--steps", "1", "--overwrite")[0] == 0
    assert contents(folder / "drafter")["model.safetensors"] != earlier["model.safetensors"]
    left = {name.partition("/")[0] for name in contents(folder / "drafter")}
    assert left == {name.partition("/")[0] for name in earlier} - {"checkpoint-2"} | {"checkpoint-1", "notes.txt"}


def test_a_run_stopped_while_it_regenerates_goes_on_by_resume(capsys, folder):
    """It goes on with its examples, which are as prepare-data makes them, by 32; without --resume it is refused."""
    prepared(capsys, folder, "--batch-size", "32", "--regenerate", output="drafter/data")
    status, _, err = trained(capsys, folder, "--steps", "2", "--regenerate")
    assert (status, "go on with the run in it by --resume" in err) == (2, True)
    status, _, err = trained(capsys, folder, "--steps", "1", "--regenerate", "--resume")
    assert (status, "shard 1 of" in err) == (0, False), err


@pytest.mark.parametrize(
    ("free", "why"), [(0, "the disk is full. Free some space first."), (2**30, "the disk failed to read or write.")]
)
@pytest.mark.parametrize("unwritten", ["optimizer.pt", ""], ids=["optimizer", "weights"])
def test_a_checkpoint_that_finds_no_room_is_named_and_the_run_resumed(
    capsys, folder, begun, monkeypatch, free, why, unwritten
):
    """A limit on the size of files, which the weights are within or not, stands for the disk's."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    sizes = [(begun / "checkpoint-2" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")]
    assert sizes[0] < sizes[1]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sum(sizes) // 2 if unwritten else sizes[0] // 2, before[1]))
    try:
        status, _, err = trained(capsys, folder, "--steps", "4", "--max-samples", "28", "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = f"eagle31: failed: {begun / 'checkpoint-4' / unwritten}: {why} If {begun} holds a complete checkpoint"
    assert status == 1
    assert said in err.splitlines()[-1]
    assert "the same command with --resume" in err.splitlines()[-1]
    status, _, err = trained(capsys, folder, "--steps", "4", "--max-samples", "28", "--resume")
    assert status == 0, err


def test_a_finished_run_is_finished(capsys, folder):
    asked = ["--steps", "4", "--set", "eval_steps=3", "--set", "save_steps=3"]
    status, out, _ = trained(capsys, folder, *asked)
    assert (status, json.loads(out)["steps"]) == (0, 4)
    status, out, err = trained(capsys, folder, *asked, "--resume")
    assert (status, json.loads(out)["steps"]) == (0, 4)
    assert "the run was finished after step 4: there is nothing left to train" in err


def test_going_on_from_a_published_drafter(capsys, folder):
    eagle3 = ("--field", "fc_norm=false", "--field", "norm_output=false")
    assert trained(capsys, folder, "--steps", "1", *eagle3, output="three")[0] == 0
    upgrade = ("--drafter", folder / "three", "--upgrade")
    status, _, err = trained(capsys, folder, "--steps", "1", *upgrade, output="upgraded")
    assert status == 0, err
    assert "making the EAGLE 3 drafter an EAGLE 3.1 one" in err
    assert Eagle31DrafterModel.from_pretrained(folder / "upgraded").config.is_eagle31


def succeed(*words, status=0):
    assert main([str(word) for word in words]) == status


def fail(*words):
    succeed(*words, status=2)


@pytest.mark.parametrize("how", ["--set shard_target=true", "--tensor-parallel"])
def test_two_processes_train_beside_a_target_that_each_has_a_part_of(capsys, folder, how):
    """As one process with the batches of both, where nothing is drawn by the process."""
    even = {"vocab_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
    build_target("llama", eos_token_id=10, **even).save_pretrained(folder / "target")
    alike = ["--steps", "2", "--set", "logging_steps=1", "--set", "position_reach=0"]
    status, _, err = trained(capsys, folder, *alike, "--batch-size", "4", output="one")
    assert status == 0, err
    words = ["train", "--target", folder / "target", "--data", folder / "texts.jsonl", "--output", folder / "two"]
    words += [*QUICK.split(), *alike, *how.split(), "--device", "cpu"]
    in_two_processes(folder, succeed, *words)
    losses = [
        [entry["loss"] for entry in json.loads(path.read_text())["log_history"] if "loss" in entry]
        for path in (folder / "two" / "trainer_state.json", folder / "one" / "trainer_state.json")
    ]
    assert len(losses[0]) == 2  # a third batch would be filled up, with other rows in each
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # behind an optimizer that normalises what was rounded
    before = contents(folder / "two")
    in_two_processes(folder, fail, *words, "--resume", "--max-samples", "28")
    assert contents(folder / "two") == before
