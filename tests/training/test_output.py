"""The folder of a run: no file is written over unasked, and an earlier result stays until there is a new one."""

import json
import os
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
from accelerate import PartialState
from factories import build
from programs import in_two_processes
from training_runs import make_examples, make_trainer

from eagle31_hf.training.output import REPLACED, check_output, claim, discard_replaced, once, set_aside
from eagle31_hf.training.saving import RECORD, STAGED_RECORD, checkpoints, last_checkpoint, write_record
from eagle31_hf.training.store import MANIFEST, check_store_folder
from eagle31_hf.training.trainer import Eagle31Trainer

SAVING = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "no"}


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def written(folder, *names: str):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of somebody")
    return folder


STRANGER = ("model.safetensors", "config.json")
OURS = ("checkpoint-4/trainer_state.json",)
ROWS = (f"data/{MANIFEST}",)


@pytest.mark.parametrize(
    ("names", "asked", "words"),
    [
        (
            STRANGER,
            {},
            (
                "is there already; expected a folder that is new or empty. Name another, or replace what is there by"
                " --overwrite."
            ),
        ),
        (("notes.txt",), {}, "expected a folder that is new or empty"),
        (OURS, {}, "Name another, go on with the run in it by --resume, or replace what is there by --overwrite."),
        (ROWS, {}, "go on with the run in it by --resume"),
        ((), {"resume": True}, "holds no complete checkpoint to resume from"),
        (
            STRANGER,
            {"resume": True},
            "holds no complete checkpoint to resume from; begin anew, without --resume or with --overwrite",
        ),
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
    assert not (tmp_path / "new").exists()


# What is a run's, and may be replaced.

drafter = cache(build)
A_CHECKPOINT = "checkpoint-2"


def finish(folder):
    """What `save_model` leaves: the record, then the rest."""
    write_record(folder, drafter(), {"depth": 1}, {"data": {"source": "texts", "figure": float("nan")}})
    drafter().save_pretrained(folder)


def checkpoint(folder):
    finish(folder / A_CHECKPOINT)
    written(folder, f"{A_CHECKPOINT}/trainer_state.json")


def break_off(folder):
    """A run that was killed while it wrote the drafter: of its config there is half."""
    finish(folder)
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").unlink()


def of_another_trainer(folder):
    drafter().save_pretrained(folder / A_CHECKPOINT)
    (folder / A_CHECKPOINT / "trainer_state.json").write_text('{"log_history": [{"loss": NaN}]}')


def ended_without_saving(folder):
    checkpoint(folder)
    written(folder, "trainer_state.json")


def hardly_begun(folder):
    written(folder, f"{A_CHECKPOINT}/{STAGED_RECORD}")


RUNS = (finish, checkpoint, break_off, of_another_trainer, ended_without_saving, hardly_begun)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_may_be_replaced(tmp_path, run):
    run(tmp_path)
    before = contents(tmp_path)
    assert check_output(tmp_path, overwrite=True) is None
    aside = set_aside(tmp_path)
    assert contents(aside) == before
    assert [path.name for path in tmp_path.iterdir()] == [REPLACED]


def converted(folder):
    """A drafter that was downloaded, or converted: as native as one of ours."""
    drafter().save_pretrained(folder)


def beside_checkpoints(folder):
    """A drafter somebody put where a run had left only checkpoints."""
    checkpoint(folder)
    drafter().save_pretrained(folder)


def with_a_record_of_something_else(folder):
    drafter().save_pretrained(folder)
    (folder / RECORD).write_text('{"epochs": 3}')


def with_a_nested_config(folder):
    written(folder, "model.safetensors")
    (folder / "config.json").write_text("[" * 50_000)


def weights_alone(folder):
    written(folder, f"{A_CHECKPOINT}/model.safetensors")


def another_model(folder):
    checkpoint(folder)
    (folder / A_CHECKPOINT / "config.json").write_text('{"model_type": "llama", "time_step_limit": [0.0, Infinity]}')


def a_state_alone(folder):
    written(folder, "trainer_state.json")


@pytest.mark.parametrize(
    ("somebody", "named"),
    [
        (converted, "model.safetensors"),
        (beside_checkpoints, "model.safetensors"),
        (with_a_record_of_something_else, "model.safetensors"),
        (with_a_nested_config, "model.safetensors"),
        (weights_alone, A_CHECKPOINT),
        (another_model, f"{A_CHECKPOINT}/config.json"),
        (a_state_alone, "trainer_state.json"),
    ],
)
def test_what_no_run_is_known_to_have_written_is_not_replaced(tmp_path, somebody, named):
    somebody(tmp_path)
    before = contents(tmp_path)
    for replace in (lambda: check_output(tmp_path, overwrite=True), lambda: set_aside(tmp_path)):
        with pytest.raises(
            ValueError, match=f"{tmp_path / named}: was not written by a run.* Name another, or move it away"
        ):
            replace()
    assert contents(tmp_path) == before


def test_the_record_comes_first(tmp_path):
    """The folder is known as a run's, whenever the run is killed."""
    trainer = make_trainer(tmp_path)
    trainer.drafter.save_pretrained = None  # the run ends where it would write the drafter
    with pytest.raises(TypeError):
        trainer.save_model()
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]
    assert check_output(tmp_path, overwrite=True) is None


def test_what_is_replaced_is_kept_until_it_is_discarded(tmp_path):
    """It is kept however often a run that replaces it is stopped; files that no run writes stay where they are."""
    checkpoint(tmp_path)
    first = contents(tmp_path)
    written(tmp_path, *ROWS, "notes.txt", "checkpoint-best/model.safetensors", "checkpoint-100.bak/model.safetensors")
    others = {path.name for path in tmp_path.iterdir()} - {A_CHECKPOINT}
    assert set_aside(tmp_path) == tmp_path / REPLACED / "1"
    assert contents(tmp_path / REPLACED / "1") == first
    assert {path.name for path in tmp_path.iterdir()} == others | {REPLACED}
    assert set_aside(tmp_path) is None
    finish(tmp_path)
    assert set_aside(tmp_path) == tmp_path / REPLACED / "2"
    assert contents(tmp_path / REPLACED / "1") == first
    discard_replaced(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others
    discard_replaced(tmp_path)


def test_folders_of_other_names_are_left_alone(tmp_path):
    written(tmp_path, f"{REPLACED}/1x/notes.txt", f"{REPLACED}/3/notes.txt")
    finish(tmp_path)
    assert set_aside(tmp_path) == tmp_path / REPLACED / "4"
    discard_replaced(tmp_path)
    assert contents(tmp_path).keys() == {f"{REPLACED}/1x/notes.txt"}


def test_only_numbered_checkpoints_count(tmp_path):
    checkpoint(tmp_path)
    for name in ("checkpoint-best", "checkpoint-100.bak", "checkpoint-", "checkpoint-²"):
        written(tmp_path, f"{name}/trainer_state.json")
    written(tmp_path, "checkpoint-10/trainer_state.json", "checkpoint-9")
    (tmp_path / A_CHECKPOINT / "trainer_state.json").write_text("{}")
    assert [path.name for path in checkpoints(tmp_path)] == [A_CHECKPOINT, "checkpoint-10"]
    assert last_checkpoint(tmp_path) == str(tmp_path / A_CHECKPOINT)


@pytest.mark.parametrize(("limit", "best"), [(1, True), (2, False)])
def test_a_limit_removes_only_numbered_checkpoints(tmp_path, limit, best):
    """transformers takes the others for old ones."""
    others = ("checkpoint-best/model.safetensors", "checkpoint-1.bak/model.safetensors")
    options = SAVING | {"save_total_limit": limit, "max_steps": 8}
    if best:  # which is the first: the learning rate is far too high
        options |= {
            "eval_dataset": make_examples(3, seed=1),
            "eval_strategy": "steps",
            "eval_steps": 2,
            "load_best_model_at_end": True,
        }
        options |= {"learning_rate": 0.3, "metric_for_best_model": "loss", "greater_is_better": False}
    make_trainer(tmp_path / "alone", **options).train()
    written(tmp_path / "beside", *others)
    before = contents(tmp_path / "beside")
    make_trainer(tmp_path / "beside", **options).train()
    assert before.items() <= contents(tmp_path / "beside").items()
    alone, beside = ([path.name for path in checkpoints(tmp_path / name)] for name in ("alone", "beside"))
    assert alone == beside
    assert len(alone) == 2, "the best and the last one, or the last two"


def test_a_state_nested_without_end_is_no_whole_checkpoint(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / A_CHECKPOINT / "trainer_state.json").write_text("[" * 50_000)
    assert last_checkpoint(tmp_path) is None


def look(folder: Path) -> None:
    """By one of two processes of a run, of which the main one meets an error that nobody foresaw."""
    state = PartialState(cpu=True)
    try:
        once(lambda: json.loads("[" * 50_000))
    except Exception as error:
        (folder / f"error-{state.process_index}").write_text(type(error).__name__)


def test_no_process_waits_for_one_that_failed(tmp_path):
    """The others are told, whatever it was; in the process that met it the error keeps its type."""
    in_two_processes(tmp_path, look, tmp_path)
    assert [(tmp_path / f"error-{rank}").read_text() for rank in (0, 1)] == ["RecursionError", "ValueError"]


@pytest.mark.parametrize("name", ["config.json", "manifest.jsonl", "shard-00000.safetensors"])
def test_prepared_examples_do_not_go_among_other_files(tmp_path, name):
    written(tmp_path / "there", name)
    for taken in ("there", f"there/{name}"):
        with pytest.raises(ValueError, match=rf"new or empty\. A store that goes on has a {MANIFEST}\. Name another"):
            check_store_folder(tmp_path / taken)
    written(tmp_path / "begun", f"{MANIFEST}.00ff.partial")
    for sound in ("begun", "new"):
        check_store_folder(tmp_path / sound)


# A run that is resumed once it is finished.

LENGTHS = [  # and whether the best checkpoint is loaded at the end
    ({"max_steps": 4, "num_train_epochs": 1}, True),
    ({"num_train_epochs": 1}, False),
    ({"num_train_epochs": 1.4}, False),
    ({"max_steps": 5, "save_strategy": "epoch"}, True),
    ({"max_steps": 5, "save_strategy": "best"}, True),
]


def finished(folder, resume=False, **options):
    """A run of steps of two examples, six an epoch; its steps, weights and files."""
    trainer = make_trainer(folder, **SAVING | options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    files = {name: content for name, content in contents(folder).items() if not name.endswith((".bin", ".pt", ".pth"))}
    return trainer.state.global_step, {name: content for name, content in files.items() if "trainer_state" not in name}


@pytest.mark.parametrize(("options", "best"), LENGTHS, ids=str)
def test_it_stays_finished_however_often_it_is_resumed(tmp_path, options, best):
    if best:
        strategy = "epoch" if options.get("save_strategy") == "epoch" else "steps"
        options = options | {
            "eval_dataset": make_examples(3, seed=1),
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
    """It stays so where the folder has another name by then; the last one is kept beside it, also with a limit of
    one."""
    monkeypatch.chdir(tmp_path)
    options = {
        "eval_dataset": make_examples(3, seed=1),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    options |= {
        "save_total_limit": limit,
        "max_steps": 8,
        "learning_rate": 0.01,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    steps, files = finished(Path("run"), **options)
    os.rename("run", "moved")
    best = json.loads(Path("moved", "trainer_state.json").read_text())["best_global_step"]
    assert best < 8, "training lowers the loss, and the highest is the best here"
    assert sorted(path.name for path in checkpoints("moved")) == sorted({f"checkpoint-{best}", "checkpoint-8"})
    with monkeypatch.context() as patch:
        patch.setattr(Eagle31Trainer, "training_step", None)  # nothing is left to train
        again, others = finished(tmp_path / "moved", resume=True, **options)
    assert (again, others["model.safetensors"]) == (steps, files["model.safetensors"])
    assert finished(tmp_path / "moved", resume=True, **options | {"max_steps": 10})[0] == 10
    assert (tmp_path / "moved" / f"checkpoint-{best}").exists(), "the best one was rotated away"


def test_more_steps_are_trained_and_fewer_are_not(tmp_path):
    finished(tmp_path, max_steps=4)
    assert finished(tmp_path, resume=True, max_steps=2)[0] == 4
    assert finished(tmp_path, resume=True, max_steps=8)[0] == 8
    assert (
        finished(tmp_path / "straight", max_steps=8)[1]["model.safetensors"] == contents(tmp_path)["model.safetensors"]
    )


# --- one run at a time ---


@contextmanager
def held_by_another_process(folder: Path):
    """Yields the process that has claimed the folder."""
    context = get_context("fork")
    # and no Event: setting one waits for a waiting process to wake, also for one that was killed
    here, there = context.Pipe()

    def hold() -> None:
        with claim(folder):
            there.send("it is held")
            there.recv()

    process = context.Process(target=hold)
    process.start()
    try:
        assert here.poll(60)
        yield process
    finally:
        here.send("it is over")
        process.join()


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    folder = tmp_path / "run"
    with held_by_another_process(folder):
        with pytest.raises(ValueError, match=f"{folder}: another run is writing into it; name another"), claim(folder):
            pytest.fail("both write")
        with claim(tmp_path / "other"):
            pass
    with claim(folder):
        assert list(folder.iterdir()) == []


def test_a_killed_run_keeps_nobody_out(tmp_path):
    with held_by_another_process(tmp_path / "run") as process:
        process.kill()
        process.join()
        with claim(tmp_path / "run"):
            pass


def test_a_run_that_never_began_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), claim(tmp_path / "a" / "run"):
        raise KeyError
    assert not (tmp_path / "a" / "run").exists()
    with claim(tmp_path / "run"):
        (tmp_path / "run" / "config.json").write_text("{}")
    assert contents(tmp_path / "run") == {"config.json": b"{}"}


def test_a_folder_that_cannot_be_opened_is_claimed_without_a_lock(tmp_path, monkeypatch):
    """This user may write into it, but not list it."""

    def work() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        with claim("run"):
            Path("run", "config.json").write_text("{}")

    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o333)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the other user cannot reach it by its whole path
    process = get_context("fork").Process(target=work)
    process.start()
    process.join()
    folder.chmod(0o755)
    assert process.exitcode == 0
    assert contents(folder) == {"config.json": b"{}"}
