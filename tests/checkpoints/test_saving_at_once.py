"""`save_pretrained` by several processes into one folder: it holds one drafter whole, and no process waits for ever."""

import errno
import threading

import pytest
import torch
from factories import build
from kill_points import start, was_killed
from programs import in_two_processes
from torch import distributed

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.checkpoints import sharing
from eagle31_hf.checkpoints.sharing import LOCK, folder_lock

fcntl = pytest.importorskip("fcntl", reason="locks and forks as POSIX has them")
ROUNDS, SAVES = 8, 3
DRAFTERS = {
    "one file": (build(), {}),
    "shards": (build(num_hidden_layers=2, intermediate_size=40, seed=1), {"max_shard_size": 12_000}),
}


def save(name: str, folder) -> None:
    drafter, options = DRAFTERS[name]
    drafter.save_pretrained(folder, **options)


def which(folder) -> str:
    """Returns the name of the drafter that the folder holds, all of it."""
    loaded = Eagle31DrafterModel.from_pretrained(folder)
    name = "one file" if loaded.config.num_hidden_layers == 1 else "shards"
    expected = DRAFTERS[name][0].state_dict()
    assert loaded.config.intermediate_size == DRAFTERS[name][0].config.intermediate_size
    assert all(torch.equal(tensor, expected[key]) for key, tensor in loaded.state_dict().items())
    return name


def test_a_folder_holds_one_of_them_whole(tmp_path):
    def save_several(name: str) -> None:
        for _ in range(SAVES):
            save(name, tmp_path)

    for _ in range(ROUNDS):
        pids = [start(lambda name=name: save_several(name), tmp_path) for name in DRAFTERS]
        assert [was_killed(pid) for pid in pids] == [False, False]
        has_index = (tmp_path / "model.safetensors.index.json").exists()
        assert (which(tmp_path), (tmp_path / "model.safetensors").exists()) == (
            ("shards", False) if has_index else ("one file", True)
        )
        assert not (tmp_path / LOCK).exists()


def test_a_save_waits_for_its_turn(tmp_path, monkeypatch):
    waits = threading.Event()
    monkeypatch.setattr(sharing.logger, "warning", lambda *words: waits.set())
    saving = threading.Thread(target=lambda: save("one file", tmp_path))
    with folder_lock(tmp_path):
        saving.start()
        assert waits.wait(60)
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    saving.join()
    assert which(tmp_path) == "one file"


@pytest.mark.parametrize("order", [("one file", "shards", "one file"), ("shards", "one file", "shards")])
def test_what_was_saved_last_is_loaded(tmp_path, order):
    for name in order:
        save(name, tmp_path)
        assert which(tmp_path) == name


def test_weights_of_another_name_are_neither_saved_nor_loaded(tmp_path):
    """Headers, and what is made of them, would be those of the usual ones."""
    save("one file", tmp_path)
    for act in (DRAFTERS["one file"][0].save_pretrained, Eagle31DrafterModel.from_pretrained):
        with pytest.raises(ValueError, match="variant is 'fp32'; expected none"):
            act(tmp_path, variant="fp32")
    assert which(tmp_path) == "one file"


def in_time(work) -> bool:
    """Runs `work` in a thread. Returns False where it still waits after a minute."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_who_holds_the_lock_can_save(tmp_path):
    """A function that changes a folder under its lock may save on the way."""

    def work() -> None:
        with folder_lock(tmp_path):
            save("one file", tmp_path)
            assert (tmp_path / LOCK).exists(), "the inner one has released the outer one's lock"

    assert in_time(work)
    assert not (tmp_path / LOCK).exists()
    assert which(tmp_path) == "one file"


def test_who_does_not_write_does_not_wait(tmp_path):
    """It is a process of a distributed run that only takes part in gathering: the one that writes may wait for it."""
    with folder_lock(tmp_path):
        assert in_time(lambda: DRAFTERS["one file"][0].save_pretrained(tmp_path, is_main_process=False))
    assert not [*tmp_path.iterdir()]


def test_a_file_system_without_locks_is_saved_to(tmp_path, monkeypatch):
    """A trained drafter that cannot be saved would be lost."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    save("one file", tmp_path)
    assert which(tmp_path) == "one file"


def save_in_a_run(folder) -> None:
    distributed.init_process_group("gloo")
    save("one file", folder)
    distributed.barrier()


def test_all_processes_of_a_run_may_call_it(tmp_path):
    in_two_processes(tmp_path, save_in_a_run, tmp_path / "saved")
    assert which(tmp_path / "saved") == "one file"
