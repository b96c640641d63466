"""The folder of a run: nobody's files are written over unasked, and an earlier result stays until there is a new one."""

import os
from pathlib import Path

import pytest
from training_runs import make_rows, make_trainer

from eagle31_hf.training.output import REPLACED, check_output, discard_replaced, set_aside
from eagle31_hf.training.saving import last_checkpoint
from eagle31_hf.training.store import MANIFEST, check_store_folder

SAVING = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "no"}


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def written(folder, *names: str):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of somebody")
    return folder


STRANGER, OURS, ROWS = ("model.safetensors", "config.json"), ("checkpoint-4/trainer_state.json",), (f"data/{MANIFEST}",)


@pytest.mark.parametrize(
    ("names", "asked", "words"),
    [
        (STRANGER, {}, "is there already; expected a folder that is new or empty. Name another, or replace what is there by --overwrite."),
        (("notes.txt",), {}, "expected a folder that is new or empty"),
        (OURS, {}, "Name another, go on with the run in it by --resume, or replace what is there by --overwrite."),
        (ROWS, {}, "go on with the run in it by --resume"),
        ((), {"resume": True}, "holds no complete checkpoint to resume from"),
        (STRANGER, {"resume": True}, "holds no complete checkpoint to resume from; begin anew, without --resume or with --overwrite"),
        (OURS + ROWS, {"resume": True}, "holds no complete checkpoint to resume from"),
        ((), {"resume": True, "overwrite": True}, "expected one of --resume and --overwrite"),
    ],
)
def test_refused(tmp_path, names, asked, words):
    folder = written(tmp_path, *names)
    before = contents(folder)
    with pytest.raises(ValueError, match=folder.name) as caught:
        check_output(folder, **asked)
    assert words in str(caught.value)
    assert contents(folder) == before


def test_a_file_and_a_link_to_a_folder_that_is_not_empty_are_refused(tmp_path):
    written(tmp_path, "file", "there/config.json")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    for name, asked in (("file", {}), ("file", {"overwrite": True}), ("link", {})):
        with pytest.raises(ValueError, match="is there already"):
            check_output(tmp_path / name, **asked)


def test_allowed(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("new", "empty", "link"):
        assert check_output(tmp_path / name) is None
    assert check_output(written(tmp_path / "rows", *ROWS), resume=True) is None, "stopped before its first checkpoint"
    assert check_output(written(tmp_path / "there", *STRANGER), overwrite=True) is None
    assert not (tmp_path / "new").exists()


def test_what_is_replaced_is_kept_until_it_is_discarded(tmp_path):
    """However often a run that replaces it is stopped; what no run writes stays where it is."""
    written(tmp_path, *STRANGER, *OURS, *ROWS, "notes.txt")
    first = {name: content for name, content in contents(tmp_path).items() if name in STRANGER + OURS}
    assert set_aside(tmp_path) == tmp_path / REPLACED / "1"
    assert contents(tmp_path / REPLACED / "1") == first
    assert {path.name for path in tmp_path.iterdir()} == {REPLACED, "data", "notes.txt"}
    assert set_aside(tmp_path) is None
    written(tmp_path, "checkpoint-2/model.safetensors")
    assert set_aside(tmp_path) == tmp_path / REPLACED / "2"
    assert contents(tmp_path / REPLACED / "1") == first
    discard_replaced(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "notes.txt"}
    discard_replaced(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "manifest.jsonl", "shard-00000.safetensors"])
def test_prepared_rows_do_not_go_among_other_files(tmp_path, name):
    written(tmp_path / "there", name)
    with pytest.raises(ValueError, match=f"holds {name} and no {MANIFEST}; expected a folder that is new or empty"):
        check_store_folder(tmp_path / "there")
    with pytest.raises(ValueError, match="is a file"):
        check_store_folder(tmp_path / "there" / name)
    written(tmp_path / "begun", f"{MANIFEST}.00ff.partial")
    for sound in ("begun", "new"):
        check_store_folder(tmp_path / sound)


# A run that is resumed once it is finished.

LENGTHS = [
    {"max_steps": 4, "num_train_epochs": 1},
    {"max_steps": 6},
    {"num_train_epochs": 2},
    {"num_train_epochs": 1.4},
    {"max_steps": 5, "save_strategy": "epoch"},
]


def finished(folder, resume=False, **options):
    """A run of steps of two rows, six an epoch; its steps, weights and files."""
    trainer = make_trainer(folder, **SAVING | options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    files = {name: content for name, content in contents(folder).items() if not name.endswith((".bin", ".pt", ".pth"))}
    return trainer.state.global_step, {name: content for name, content in files.items() if "trainer_state" not in name}


@pytest.mark.parametrize("options", LENGTHS, ids=str)
@pytest.mark.parametrize("best", [False, True])
def test_it_stays_finished_however_often_it_is_resumed(tmp_path, options, best):
    if best:
        strategy = options.get("save_strategy", "steps")
        options = options | {
            "eval_dataset": make_rows(3, seed=1),
            "eval_strategy": strategy,
            "eval_steps": 2,
            "load_best_model_at_end": True,
        }
    steps, files = finished(tmp_path, **options)
    assert "model.safetensors" in files
    for _ in range(2):
        assert finished(tmp_path, resume=True, **options) == (steps, files)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_checkpoint_stays_the_best(tmp_path, limit, monkeypatch):
    """Also where the last one is gone, as the Trainer removes it with a limit of one, and where the folder has another name by then."""
    monkeypatch.chdir(tmp_path)
    options = {"eval_dataset": make_rows(3, seed=1), "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    options |= {
        "save_total_limit": limit,
        "max_steps": 8,
        "learning_rate": 0.3,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
    }
    steps, files = finished(Path("run"), **options)
    os.rename("run", "moved")
    assert last_checkpoint("moved") == f"moved/checkpoint-{8 if limit == 2 else 4}", "the second evaluation was the best"
    again, others = finished(tmp_path / "moved", resume=True, **options)
    assert (again, others["model.safetensors"]) == (steps, files["model.safetensors"])
    assert finished(tmp_path / "moved", resume=True, **options | {"max_steps": 10})[0] == 10
    assert (tmp_path / "moved" / "checkpoint-4").exists(), "the best one was rotated away"


def test_more_steps_are_trained_and_fewer_are_not(tmp_path):
    finished(tmp_path, max_steps=4)
    assert finished(tmp_path, resume=True, max_steps=2)[0] == 4
    assert finished(tmp_path, resume=True, max_steps=8)[0] == 8
    assert finished(tmp_path / "straight", max_steps=8)[1]["model.safetensors"] == contents(tmp_path)["model.safetensors"]


def test_an_earlier_run_s_end_is_not_this_one_s(tmp_path):
    """Begun anew in the same folder, and stopped."""
    finished(tmp_path, max_steps=6)
    trainer = make_trainer(tmp_path, **SAVING | {"max_steps": 6})
    trainer.get_batch_samples = None  # the run ends where it would begin
    with pytest.raises(TypeError):
        trainer.train()
    assert not (tmp_path / "trainer_state.json").exists()
