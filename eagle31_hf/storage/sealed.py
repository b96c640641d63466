"""Sealed files: safetensors files that carry their own checksum, and appear whole or not at all."""

import errno
import hashlib
import os
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .tensor_file import CHUNK_BYTES, Entry, header_of, write_tensor_file

MARKED_BYTES = 2**26  # files of fewer are verified in no time, and get no mark beside them
AHEAD = 4  # chunks that are written before they are hashed
NO_DIGEST = "0" * 64  # where a file's sha256 stands in its header, which counts too, while it is computed


def write_sealed(path: Path, entries: Mapping[str, Entry], facts: Mapping[str, str]) -> None:
    """Writes a sealed file with `facts` in its metadata, in place of one that is there already. Of several that write
    the same contents at once, the first to finish has written them for all. Raises OSError, naming the file, where it
    cannot be written."""
    staged = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        _write_with_digest(staged, entries, facts)
        os.replace(staged, path)
        sweep(path.parent, path.name)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE) and path.is_file():  # another was faster
            return
        reason = f"could not be written ({error.strerror}); expected room for it"
        remedy = "Make some and run the same command again: finished files are kept"
        raise OSError(error.errno, f"{reason}. {remedy}", str(path)) from error
    finally:
        staged.unlink(missing_ok=True)


def sweep(folder: Path, pattern: str) -> None:
    """Removes the unfinished files of writers of a sealed file that is there: killed ones, and slower ones, which end
    quietly. `pattern`: of the names of sealed files that are written once."""
    with suppress(OSError):
        for leftover in folder.glob(f"{pattern}.*.partial"):
            if leftover.with_suffix("").with_suffix("").is_file():
                leftover.unlink(missing_ok=True)


def _write_with_digest(path: Path, entries: Mapping[str, Entry], facts: Mapping[str, str]) -> None:
    """Writes a file whose header has the checksum of all of it, which another thread computes while it is written."""
    unsealed = {"sha256": NO_DIGEST, **facts}
    sha = hashlib.sha256(header_of(entries, unsealed))
    with ThreadPoolExecutor(1) as hashing:
        chunks: deque[Future] = deque()

        def add(name: str, entry: Entry, chunk: memoryview) -> None:
            chunks.append(hashing.submit(sha.update, chunk))
            if len(chunks) > AHEAD:
                chunks.popleft().result()

        write_tensor_file(path, entries, unsealed, add)
    with open(path, "r+b", buffering=0) as file:
        file.seek(8)  # behind the length of the header
        file.write(header_of(entries, {"sha256": sha.hexdigest(), **facts}))
        os.fsync(file.fileno())


@contextmanager
def open_sealed(path: Path, verify: bool) -> Iterator[Any]:
    """A sealed file, open for reading as safetensors' `safe_open` gives it; with `verify` its checksum is compared,
    once for a file as it lies there, by whichever process is the first.

    Raises ValueError, here or in the block, where the file is damaged.
    """
    try:
        file = safe_open(path, "pt")
        if verify:
            _verify(path, file.metadata()["sha256"])
        yield file
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is damaged ({error}). Delete it and run the command that made it again.") from None


def is_sealed(path: Path) -> bool:
    """Returns False for a safetensors file that is none of ours, as a model's weights; True for one that cannot be
    read, which may be a damaged one of ours."""
    with suppress(SafetensorError), safe_open(path, "pt") as file:
        return "sha256" in (file.metadata() or {})
    return True


def _verify(path: Path, digest: str) -> None:
    """Compares a file's checksum with the one in its header, and notes beside it that it was found right, with the
    state that the file had before it was read; of a file in that state nothing is read again. Raises ValueError where
    they differ."""
    mark, found = path.with_name(f".{path.name}.verified"), path.stat()
    state = f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"
    with suppress(OSError, ValueError):
        if mark.read_text() == state:
            return
    if _checksum(path, digest) != digest:
        raise ValueError("its checksum differs")
    if found.st_size >= MARKED_BYTES:
        with suppress(OSError):  # in a folder that cannot be written to it is verified again
            mark.write_text(state)


def _checksum(path: Path, digest: str) -> str:
    """Returns the sha256 of header and data, computed as if `digest` were not in the header yet."""
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        sha = hashlib.sha256(header.replace(digest.encode(), NO_DIGEST.encode(), 1))
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
    return sha.hexdigest()
