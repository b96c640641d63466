"""`eagle31 train`: from data to a drafter that generates, online and from stored states, stopped and resumed."""

import json

import pytest
import torch
from conftest import build_target

from eagle31_hf import Eagle31DrafterModel, track_acceptance
from eagle31_hf.bench.engine import build
from eagle31_hf.bench.training import Step
from eagle31_hf.cli import main

QUICK = ["--depth", "2", "--max-length", "40", "--accumulate", "1", "--batch-size", "2", "--learning-rate", "0.01", "--eval-every", "4"]


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
    return run(
        capsys, "train", "--target", folder / "target", "--data", folder / data, "--output", folder / output, *QUICK, "--json", *arguments
    )  # fmt: skip


def test_from_texts_to_a_drafter_that_generates(capsys, folder):
    status, out, err = trained(capsys, folder, "--steps", "8", "--regenerate", "--draft-vocab-size", "9")
    assert status == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["steps"] == 8
    assert result["best"]["eval_accepted_length"] >= 1
    assert "step 4 of 8: held out, loss" in err
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
    target = ["--target", folder / "target"]
    for name, states in (("tokens", []), ("states", ["--states", "--states-dtype", "float32"])):
        status, _, err = run(
            capsys, "prepare-data", *target, "--data", folder / "texts.jsonl", "--output", folder / name, "--max-length", "40", *states
        )
        assert status == 0, err
    for name in ("tokens", "states"):
        status, _, err = trained(capsys, folder, "--steps", "4", data=name, output=f"from-{name}")
        assert status == 0, err
    online, offline = (Eagle31DrafterModel.from_pretrained(folder / f"from-{name}").state_dict() for name in ("tokens", "states"))
    for name, weight in online.items():
        assert torch.allclose(weight, offline[name], atol=1e-5), name


def test_resumed_is_as_if_never_stopped(capsys, folder):
    constant = ["--set", 'lr_scheduler_type="constant"', "--steps"]  # any other would be that of fewer steps
    for output, arguments in (("straight", ["8"]), ("part", ["4"]), ("part", ["8", "--resume"])):
        status, _, err = trained(capsys, folder, *constant, *arguments, output=output)
        assert status == 0, err
    part, straight = (Eagle31DrafterModel.from_pretrained(folder / name).state_dict() for name in ("part", "straight"))
    assert all(weight.equal(part[name]) for name, weight in straight.items())


def test_going_on_from_a_published_drafter(capsys, folder):
    assert trained(capsys, folder, "--steps", "4", "--field", "fc_norm=false", "--field", "norm_output=false", output="three")[0] == 0
    status, _, err = trained(capsys, folder, "--steps", "4", "--drafter", folder / "three", "--upgrade", output="upgraded")
    assert status == 0, err
    assert "making the EAGLE 3 drafter an EAGLE 3.1 one" in err
    assert Eagle31DrafterModel.from_pretrained(folder / "upgraded").config.is_eagle31


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "depht=3"], "--set: "),
        (["--loss", "mse"], "names 'mse'; expected some of kl"),
        (["--resume"], "holds no complete checkpoint"),
        (["--draft-vocab-size", "99"], "to have 99 ids; expected 1 to 11"),
    ],
)
def test_bad_input_is_one_line(capsys, folder, arguments, message):
    status, out, err = trained(capsys, folder, *arguments)
    assert status == 2
    assert out == ""
    assert message in err.splitlines()[-1]


def test_bench_train_says_what_a_step_takes(capsys):
    status, out, err = run(
        capsys, "bench", "train", "--shape", "tiny", "--dtype", "float32", "--prompt-tokens", 48, "--rounds", 2, "--json"
    )
    assert status == 0, err
    runs = json.loads(out)["runs"]
    assert [found["activations"] for found in runs] == ["computed again", "kept"]
    for found in runs:
        assert found["step"] == pytest.approx(sum(found["seconds"].values()))
        assert found["tokens_per_second"] == pytest.approx(48 / found["step"])
        assert all(seconds > 0 for seconds in found["seconds"].values())


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_benched_step_trains(recomputes):
    step = Step(build("tiny", torch.float32, "cpu")[0], tokens=48, depth=3, recomputes=recomputes)
    before = [parameter.detach().clone() for parameter in step.trained]
    step.run()
    assert not any(torch.equal(old, new) for old, new in zip(before, step.trained, strict=True))
