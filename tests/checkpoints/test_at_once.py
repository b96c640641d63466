"""Several processes on one folder: conversions in place take turns, readers see the old checkpoint or the new one."""

import errno
import json
import logging
import os
import shutil
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import pytest
import torch
from folders import SPECFORGE, WEIGHTS, assert_loads, contents
from kill_points import disturbed_at, left_behind, start, was_killed
from writers import LAYOUTS

from eagle31_hf import Eagle31DrafterModel, convert_checkpoint, export_checkpoint
from eagle31_hf.checkpoints import sharing
from eagle31_hf.checkpoints.convert import write_weights
from eagle31_hf.checkpoints.files import STAGED
from eagle31_hf.checkpoints.sharing import LOCK, folder_lock, stamps
from eagle31_hf.hub import publish
from eagle31_hf.storage.folders import new_folder

fcntl = pytest.importorskip("fcntl", reason="locks and forks as POSIX has them")
KINDS = {
    "safetensors": SPECFORGE,
    "bin": LAYOUTS["original_release"],
    "sharded": replace(LAYOUTS["nemo"], subfolder=""),
    "native_with_another_field": replace(LAYOUTS["native"], options={"logit_scale": 0.5}),
}
ROUNDS, SPREAD = 12, 0.2  # seconds
STRIDE = 9  # of the looks at files, between which a folder changes: each of them would take a minute
STEPS = 45  # towards the disk, of one conversion: a killed one dies somewhere among them


@dataclass(frozen=True)
class Prepared:
    """A drafter, its unconverted folder, which each test gets anew, and the contents of that folder once it is
    converted."""

    drafter: Eagle31DrafterModel
    folder: Path
    finished: dict[str, bytes]


@pytest.fixture(scope="module")
def prepare(tmp_path_factory):
    @cache
    def prepared(kind: str, discard: bool) -> tuple[Prepared, Path]:
        source, folder = tmp_path_factory.mktemp(kind), tmp_path_factory.mktemp(kind) / "drafter"
        drafter = KINDS[kind].write(source)
        shutil.copytree(source, folder)
        convert_checkpoint(folder, discard_original=discard, **KINDS[kind].options)
        assert_loads(folder, drafter)
        return Prepared(drafter, folder, contents(folder)), source

    def fresh(kind: str, discard: bool = False) -> Prepared:
        found, source = prepared(kind, discard)
        shutil.rmtree(found.folder)
        shutil.copytree(source, found.folder)
        return found

    return fresh


def assert_exact(folder: Path, drafter: Eagle31DrafterModel) -> None:
    loaded = Eagle31DrafterModel.from_pretrained(folder).state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name


# Conversions of one folder.


@pytest.mark.parametrize("round_number", range(ROUNDS))
def test_conversions_take_turns(round_number, prepare):
    """Two or four processes start up to 0.2 s apart; in every other round one is killed at some step."""
    random = Random(round_number)
    count, kill, discard = (2, 4)[round_number // 2 % 2], round_number % 2 == 1, round_number % 3 == 2
    kind = random.choice(list(KINDS))
    prepared = prepare(kind, discard)
    delays = [0.0] + [random.choice([0.0, random.uniform(0, SPREAD)]) for _ in range(count - 1)]
    victim = random.randrange(count) if kill else None

    def convert() -> None:
        assert convert_checkpoint(prepared.folder, discard_original=discard, **KINDS[kind].options).is_native

    steps = [random.randint(1, STEPS) if i == victim else 0 for i in range(count)]
    pids = [start(convert, prepared.folder, n, delay) for n, delay in zip(steps, delays, strict=True)]
    died = [was_killed(pid) for pid in pids]
    assert [i for i, is_dead in enumerate(died) if is_dead] in ([], [victim])
    assert_exact(prepared.folder, prepared.drafter)
    if not any(died):
        assert contents(prepared.folder) == prepared.finished, "the new checkpoint, the originals, and nothing else"
    convert()
    assert contents(prepared.folder) == prepared.finished


def test_threads_of_one_process_take_turns(prepare):
    prepared, results = prepare("sharded"), []
    threads = [threading.Thread(target=lambda: results.append(convert_checkpoint(prepared.folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.is_native for result in results] == [True] * 4
    assert contents(prepared.folder) == prepared.finished


# The lock.


class Waiting(logging.Handler):
    """A log handler that counts the processes that say they wait."""

    def __init__(self):
        super().__init__()
        self.said = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting" in record.getMessage():
            self.said.release()


@pytest.fixture
def waiting():
    handler = Waiting()
    logging.getLogger(sharing.__name__).addHandler(handler)
    yield handler.said
    logging.getLogger(sharing.__name__).removeHandler(handler)


def test_one_is_in_at_a_time(tmp_path):
    def work() -> None:
        for _ in range(50):
            with folder_lock(tmp_path):
                os.close(os.open(tmp_path / "inside", os.O_CREAT | os.O_EXCL))
                (tmp_path / "inside").unlink()
        done.append(True)

    done: list[bool] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    assert contents(tmp_path) == {}


def test_who_waited_for_a_removed_lock_file_waits_for_its_successor(tmp_path, waiting):
    """The owner removes the file; a third one makes it anew and locks that before the one who waited wakes up."""

    def take() -> int:
        descriptor = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    def wait() -> None:
        with folder_lock(tmp_path):
            inside.append(True)
            waiting.release()

    inside: list[bool] = []
    first, thread = take(), threading.Thread(target=wait)
    thread.start()
    assert waiting.acquire(timeout=60)
    (tmp_path / LOCK).unlink()
    third = take()
    os.close(first)
    assert waiting.acquire(timeout=60)
    assert not inside, "it waits again"
    (tmp_path / LOCK).unlink()
    os.close(third)
    thread.join()
    assert inside
    assert contents(tmp_path) == {}


def test_a_lock_file_that_became_a_link_is_an_error_and_the_lock_is_let_go(tmp_path, waiting):
    """It becomes one while a process waits for it. Whoever has the file under its new name would otherwise wait for
    ever."""

    def wait() -> None:
        with pytest.raises(OSError, match=LOCK), folder_lock(tmp_path):
            pass
        refused.append(True)

    refused: list[bool] = []
    descriptor = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.acquire(timeout=60)
    (tmp_path / LOCK).rename(tmp_path / "moved")
    (tmp_path / LOCK).symlink_to("moved")
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    thread.join()
    assert refused
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_lock_whose_file_cannot_be_removed_is_let_go(tmp_path):
    """A folder stands in its place by then."""

    def work() -> None:
        with folder_lock(tmp_path):
            (tmp_path / LOCK).rename(tmp_path / "moved")
            (tmp_path / LOCK).mkdir()

    with pytest.raises(OSError, match=LOCK):
        work()
    with open(tmp_path / "moved", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_ends_with_its_owner_and_its_file_is_no_part_of_the_checkpoint(prepare):
    prepared = prepare("safetensors")

    def die() -> None:
        with folder_lock(prepared.folder):
            os.kill(os.getpid(), signal.SIGKILL)

    assert was_killed(start(die, prepared.folder))
    assert (prepared.folder / LOCK).exists()
    assert_exact(prepared.folder, prepared.drafter)
    convert_checkpoint(prepared.folder)
    assert contents(prepared.folder) == prepared.finished


def test_a_file_system_without_locks_is_refused(prepare, monkeypatch):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    prepared = prepare("safetensors")
    before = contents(prepared.folder)
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=r"does not lock files \(No locks available\).*Name a destination"):
        convert_checkpoint(prepared.folder)
    assert contents(prepared.folder) == before | {LOCK: b""}


@pytest.fixture
def public_path():
    """A folder that other users can reach, as they cannot reach pytest's."""
    path = Path(mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def refused_to_a_stranger(work, folder: Path) -> None:
    """Runs `work` in a process of another user, because this one may do everything."""

    def as_stranger() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        work()

    assert not was_killed(start(as_stranger, folder))


def test_a_folder_that_cannot_be_written_to_is_refused_unless_nothing_is_to_be_done(public_path):
    SPECFORGE.write(public_path / "drafter")
    convert_checkpoint(public_path / "drafter", public_path / "native")
    for path in public_path.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def work() -> None:
        with pytest.raises(
            PermissionError, match="cannot be written to, so it cannot be converted in place; name a destination"
        ):
            convert_checkpoint(public_path / "drafter")
        assert convert_checkpoint(public_path / "native").is_native

    before = contents(public_path)
    refused_to_a_stranger(work, public_path)
    assert contents(public_path) == before
    for folder in ("drafter", "native"):
        (public_path / folder).chmod(0o755)


def test_a_lock_file_of_somebody_elses_is_one_clear_error(public_path):
    SPECFORGE.write(public_path / "drafter")
    (public_path / "drafter").chmod(0o777)
    (public_path / "drafter" / LOCK).touch(0o000)

    def work() -> None:
        with pytest.raises(
            PermissionError, match=r"\.eagle31\.lock: cannot be opened to lock the folder.*Name a destination"
        ):
            convert_checkpoint(public_path / "drafter")

    before = {path: path.stat().st_mtime_ns for path in public_path.rglob("*")}
    refused_to_a_stranger(work, public_path)
    assert {path: path.stat().st_mtime_ns for path in public_path.rglob("*")} == before


# Readers, and writers that read.


def disturb_everywhere(work, folder: Path, begin) -> int:
    """Runs `work` on what `begin` prepares, again and again; before its n-th look at files, the folder is converted.

    Returns the number of looks.
    """
    n = 1
    begin()
    while disturbed_at(n, work, folder, lambda: convert_checkpoint(folder)):
        n += STRIDE
        begin()
    return n


@pytest.mark.parametrize("kind", ["safetensors", "sharded"])
def test_a_reader_sees_the_old_checkpoint_or_the_new_one(kind, prepare):
    prepared = prepare(kind)
    looks = disturb_everywhere(
        lambda: assert_exact(prepared.folder, prepared.drafter), prepared.folder, lambda: prepare(kind)
    )
    assert looks > 20


def test_a_reader_of_a_half_converted_folder_sees_the_same(prepare, tmp_path):
    """A conversion is killed after its commit, and another finishes it while the folder is read."""
    prepared = prepare("safetensors")
    copies = left_behind(lambda: convert_checkpoint(prepared.folder), prepared.folder, tmp_path)
    half = next(copy for copy in copies if is_half_converted(copy))

    def begin() -> None:
        shutil.rmtree(prepared.folder)
        shutil.copytree(half, prepared.folder)

    looks = disturb_everywhere(lambda: assert_exact(prepared.folder, prepared.drafter), prepared.folder, begin)
    assert looks > 20
    begin()
    with pytest.raises(ValueError, match="is not the native format yet; run `eagle31 convert"):
        publish(prepared.folder, "owner/name", token=False)


def is_half_converted(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text()).get("transformers_weights") == STAGED


@pytest.mark.parametrize("write", [convert_checkpoint, export_checkpoint], ids=["convert", "export"])
def test_what_is_written_from_a_folder_that_changes_is_whole_or_nothing(write, prepare, tmp_path):
    prepared, destination = prepare("safetensors"), tmp_path / "new" / "folder"

    def work() -> None:
        refusals = []
        try:
            write(prepared.folder, destination)
        except OSError as error:
            refusals.append(str(error))
        if refusals:
            assert "was changed while it was read" in refusals[0]
            assert list(destination.parent.iterdir()) == []
        else:
            assert_exact(destination, prepared.drafter)
            shutil.rmtree(destination)

    destination.parent.mkdir()
    looks = disturb_everywhere(work, prepared.folder, lambda: prepare("safetensors"))
    assert looks > 20


def test_what_changes_while_its_conversion_is_prepared_is_left_alone(prepare):
    """The change is by somebody who knows nothing of our lock, a trainer that saves, say. Once the old config is in
    original/, it is too late."""
    prepared = prepare("safetensors")
    other = replace(SPECFORGE, extra={"norm.weight": torch.full((20,), 2.0)})

    def work() -> None:
        with suppress(OSError):
            convert_checkpoint(prepared.folder)

    def save() -> None:
        if not (prepared.folder / "original").exists():
            other.write(prepared.folder)
            saved.touch()

    n, outcomes, saved = 1, set(), prepared.folder.parent / "saved"
    while disturbed_at(n, work, prepared.folder, save):
        if saved.exists():
            loaded = Eagle31DrafterModel.from_pretrained(prepared.folder)
            assert torch.equal(loaded.norm.weight, torch.full_like(loaded.norm.weight, 2.0))
        else:
            assert contents(prepared.folder) == prepared.finished
        outcomes.add((saved.exists(), (prepared.folder / "original").exists()))
        saved.unlink(missing_ok=True)
        n += STRIDE
        prepare("safetensors")
    assert outcomes == {(True, True), (True, False), (False, True)}, (
        "converted as saved, left as saved, converted before"
    )


def test_a_folder_that_never_settles_is_one_clear_error(prepare):
    """Another program copies it, or mends it over and over: here its config is touched at every look."""
    prepared, looks = prepare("safetensors"), []

    @sharing.reads_one_state("source")
    def read(source: Path) -> None:
        looks.append(source)
        os.utime(source / "config.json", ns=(0, len(looks)))
        raise ValueError("what was seen in between")

    with pytest.raises(OSError, match=f"was changed while it was read, {sharing.ATTEMPTS} times in a row") as caught:
        read(prepared.folder)
    assert str(caught.value.__cause__) == "what was seen in between"
    assert len(looks) == sharing.ATTEMPTS


# Two that write the same new folder, or file.


def test_the_second_of_two_writers_of_a_new_folder_is_refused(tmp_path):
    def write() -> None:
        with new_folder(tmp_path / "new") as folder:
            (folder / "second").touch()
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "first").touch()

    with pytest.raises(ValueError, match="is there already; expected a folder that is new or empty"):
        write()
    assert contents(tmp_path) == {"new/first": b""}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_folder_is_as_open_as_the_umask_lets_it_be(tmp_path, umask, monkeypatch):
    """The umask itself stays: it is the process's, and files of other threads would have other modes meanwhile."""
    before = os.umask(umask)
    try:
        with monkeypatch.context() as patched:
            patched.delattr(os, "umask")
            with new_folder(tmp_path / "new"):
                pass
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~umask


def test_weights_are_never_written_into_a_file_that_is_there(tmp_path):
    (tmp_path / WEIGHTS).write_bytes(b"somebody maps this")
    with pytest.raises(FileExistsError):
        write_weights(tmp_path / WEIGHTS, {}, "source")
    assert (tmp_path / WEIGHTS).read_bytes() == b"somebody maps this"


@pytest.mark.parametrize("goal", ["..", "/dev/null", "gone", "eagle_meta.pt"])
def test_only_files_tell_that_a_folder_has_changed(tmp_path, goal):
    """A folder's time changes with every file beside it, and a device's whenever somebody writes to it."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    before = stamps(folder)
    (folder / "eagle_meta.pt").symlink_to(goal)
    assert stamps(folder) == before
    for name in ("generation_config.json", WEIGHTS):
        (folder / name).write_bytes(b"")
        assert stamps(folder).keys() - before.keys() == {str(folder / name)}
        before = stamps(folder)
