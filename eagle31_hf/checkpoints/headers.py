"""Checkpoints read from their headers: of a Hub repository with safetensors nothing large is downloaded."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers
from transformers.utils.hub import extract_commit_hash

from .. import vocab
from ..json_file import MAX_BYTES, parse_json, read_json
from .files import SIDE_FILES, WEIGHTS, WEIGHTS_INDEX, read_index
from .knobs import KNOBS_FILE
from .read import Checkpoint, read_checkpoint
from .sources import HUB_ERRORS, HubError, check_name, fetch, find_config, first_line


class RangeError(Exception):
    """The Hub does not serve a part of this file."""


def read_headers(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    convention: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Checkpoint:
    """Reads a checkpoint as `read_checkpoint` does, without its weights where it is on the Hub.

    Only the config, the headers and the draft vocabulary maps are downloaded. Files in the Hub's cache are read from
    there; pickles, and weights in another repository that the config names, are downloaded whole. Raises OSError where
    something is not there or the Hub fails, ValueError for an unsound checkpoint.
    """
    check_name(name)
    hub: dict[str, Any] = {"revision": revision, "token": token}
    if Path(name).exists():
        return read_checkpoint(name, overrides, convention, **hub)
    config = find_config(name, **hub)
    hub["revision"] = extract_commit_hash(config, None) or revision  # the cache may hold the weights of another commit
    if isinstance(try_to_load_from_cache(name, WEIGHTS, revision=hub["revision"]), str):
        return read_checkpoint(name, overrides, convention, **hub)
    with TemporaryDirectory() as folder:
        try:
            _copy_headers(name, Path(config), Path(folder), hub)
            return replace(read_checkpoint(folder, overrides, convention), source=name)
        except RangeError:
            return read_checkpoint(name, overrides, convention, **hub)
        except ValueError as error:
            raise ValueError(str(error).replace(folder, name)) from None


def _copy_headers(name: str, config: Path, folder: Path, hub: Mapping[str, Any]) -> None:
    """Copies a repository's files into a folder, of the weights headers and vocabulary maps alone: the copies of weight
    files are sparse, and as long as the files.

    `hub`: revision and token. Raises RangeError where that cannot be done, OSError where the Hub fails.
    """
    if read_json(config).get("weights_from") is not None:
        raise RangeError
    (folder / "config.json").write_bytes(config.read_bytes())
    if not _fetch_header(name, WEIGHTS, folder, hub):
        if not _fetch_whole(name, WEIGHTS_INDEX, folder, hub):
            raise RangeError
        for shard in sorted(set(read_index(folder / WEIGHTS_INDEX).values())):
            if not _fetch_header(name, shard, folder, hub):
                raise RangeError
    for side_file in (*SIDE_FILES, KNOBS_FILE):
        _fetch_whole(name, side_file, folder, hub)


def _fetch_whole(name: str, file: str, folder: Path, hub: Mapping[str, Any]) -> bool:
    """Writes a copy of the file. Returns False where the repository has no such file."""
    found = fetch(name, file, **hub)
    if found is not None:
        (folder / file).write_bytes(Path(found).read_bytes())
    return found is not None


def _fetch_header(name: str, file: str, folder: Path, hub: Mapping[str, Any]) -> bool:
    """Writes a sparse copy of the file. Returns False where the repository has no such file.

    Raises RangeError where no part of it is served, HubError where the connection fails.
    """
    url, token = hf_hub_url(name, file, revision=hub["revision"]), hub["token"]
    try:
        size = get_hf_file_metadata(url, token=token).size
        length = int.from_bytes(_fetch(url, token, 0, 8), "little")
        if size is None or not 0 < length <= min(size - 8, MAX_BYTES):
            raise RangeError
        header = _fetch(url, token, 8, length)
        with open(folder / file, "wb") as copy:
            copy.write(length.to_bytes(8, "little") + header)
            copy.truncate(size)
            for start, end in _maps(header, size - 8 - length):
                copy.seek(8 + length + start)
                copy.write(_fetch(url, token, 8 + length + start, end - start))
    except EntryNotFoundError:
        return False
    # the reader of whole files, which is tried next, says in plain words what the Hub answers
    except (HfHubHTTPError, OfflineModeIsEnabled):
        raise RangeError from None
    except HUB_ERRORS as error:
        found = f"{name}: {file}: the connection to the Hub broke off ({first_line(error)})"
        raise HubError(f"{found}. Run it again.") from error
    return True


def _maps(header: bytes, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields first byte and end of every vocabulary map in a safetensors file with `num_bytes` after its header.

    An unsound header, which may be a stranger's, is passed over here; it is refused when the copy is read.
    """
    try:
        entries = parse_json(header, "")
    except ValueError:
        return
    for name, entry in entries.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) and name.split(".")[-1] in vocab.MAPS else None
        if isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets):
            start, end = offsets
            if 0 <= start < end <= num_bytes:
                yield start, end


def _fetch(url: str, token: str | bool | None, start: int, count: int) -> bytes:
    """Downloads `count` bytes of a file on the Hub, from `start` on. Raises RangeError where it sends others."""
    if not 0 < count <= MAX_BYTES:
        raise RangeError
    headers = build_hf_headers(token=token) | {"Range": f"bytes={start}-{start + count - 1}"}
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
        found = response.read() if response.status_code == 206 else b""
    if len(found) != count:
        raise RangeError
    return found
