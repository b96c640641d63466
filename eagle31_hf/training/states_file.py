"""Files into which a server of vLLM writes the hidden states of a request's prompt.

`hidden_states` (T, m, ht) of the T tokens `token_ids`, m states each of width ht. The server names the file as it
answers, and may write it after that; a lock beside it is its own until then. Source: vLLM's
`ExampleHiddenStatesConnector`.
"""

import errno
import time
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

POLL = 0.005  # seconds between looks at a file that is being written


def read_states(path: Path, ids: list[int], timeout: float) -> Tensor:
    """Returns the states (T, m, ht) that a server has written, or is writing, for a text of these ids, and removes the
    file.

    Raises OSError where it is not written to its end within `timeout` seconds, ValueError where this machine does not
    have it, or it is of another text.
    """
    _wait_for(path, timeout)
    try:
        tensors = load_file(path)
        found, states = tensors["token_ids"].tolist(), tensors["hidden_states"]
    except (SafetensorError, KeyError) as error:
        raise OSError(f"{path} is unfinished ({error})") from None
    finally:
        _remove(path)
    if found != ids:
        raise ValueError(f"{path} has the states of {len(found)} other tokens; expected those of the {len(ids)} sent.")
    return states


def discard_states(path: Path, timeout: float) -> None:
    """Removes a file of states that nobody asked for, once it is written, where this machine has it at all."""
    try:
        _wait_for(path, timeout)
    except (OSError, ValueError):
        return
    _remove(path)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _remove(path: Path) -> None:
    for each in (path, _lock_of(path)):
        each.unlink(missing_ok=True)


def _wait_for(path: Path, timeout: float) -> None:
    """Waits until the writer of a file has let go of its lock. Raises TimeoutError where that takes longer than
    `timeout` seconds, ValueError where there is no such file."""
    import fcntl  # not on every system; vLLM's servers lock with it

    give_up = time.monotonic() + timeout
    while True:
        try:
            with open(_lock_of(path), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
        except FileNotFoundError:
            if path.exists():  # earlier releases write it before they answer, without a lock
                return
            raise ValueError(
                f"the states are in {path}, which is not here; expected a folder that both machines share, under one"
                " name, or --engine-states-folder."
            ) from None
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() > give_up:
            raise TimeoutError(f"{path} is not finished after {timeout:g} seconds")
        time.sleep(POLL)
