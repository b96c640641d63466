"""Folders that appear whole or not at all, and the JSON and text files in them."""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME_ANOTHER = "Name another, or remove it."


def json_text(value: Any) -> str:
    """Returns the content of a JSON file for people and programs, keys in order."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file for people and programs, and syncs it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json_text(value))
        file.flush()
        os.fsync(file.fileno())


def read_text(file: str | Path) -> str:
    """Returns the content of a text file. Raises ValueError where it is not UTF-8, OSError where it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: byte {error.start} is no UTF-8; expected a text file in UTF-8.") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of `path` when the block ends well; that is never seen half written."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield staged
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def replace_json(path: Path, value: Any) -> None:
    """Writes a JSON file as `write_json` does, in place of one that may be there."""
    with replacing(path) as staged:
        write_json(staged, value)


def check_new_folder(destination: Path, remedy: str = NAME_ANOTHER) -> None:
    """Raises ValueError where something is at `destination` already, or in the way to it; `remedy` says what to do
    about it."""
    if destination.is_symlink() or destination.is_file() or (destination.is_dir() and any(destination.iterdir())):
        raise _taken(destination, remedy)
    above = next((parent for parent in destination.parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        raise ValueError(f"{destination}: {above} is a file; expected a folder to write into.")


def _taken(destination: Path, remedy: str = NAME_ANOTHER) -> ValueError:
    return ValueError(f"{destination}: is there already; expected a folder that is new or empty. {remedy}")


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder to write into that becomes `destination` when the block ends well, and nothing at all otherwise.

    Raises ValueError where something is at `destination` already, or another process was there first.
    """
    check_new_folder(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = destination.parent / f".{destination.name}.{secrets.token_hex(4)}"
    staging.mkdir()  # as open to others as the umask lets new folders be; mkdtemp's are private
    try:
        yield staging
        try:
            os.replace(staging, destination)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY):
                raise
            raise _taken(destination) from None
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
