"""Files into which a server of vLLM writes the hidden states of a request's prompt.

`hidden_states` (T, m, ht) of the T tokens `token_ids`, m states each of width ht. The server names the file as it
answers, and may write it after that; a lock beside it is its own until then. Source: vLLM's
`ExampleHiddenStatesConnector`.
"""

import time
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

POLL = 0.005  # seconds between looks at a file that is being written
MAY = "expected files that this user may read and remove: run the server as the same user."
GRACE = 2.0  # seconds until a file that is not there is missed: shared folders show new ones late


def read_states(path: Path, ids: list[int], timeout: float) -> Tensor:
    """Returns the states (T, m, ht) that a server has written, or is writing, for a text of these ids, and removes the
    file, once it has turned out to be that.

    Raises OSError where it is not finished within `timeout` seconds, ValueError where this machine does not have the
    file, may not read or remove it, or where it is of another text.
    """
    _wait_for(path, timeout)
    if not path.is_file():
        raise OSError(f"{path} is unfinished")
    try:
        tensors = load_file(path)
        found, states = tensors["token_ids"].tolist(), tensors["hidden_states"]
    except PermissionError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {MAY}") from None
    except (SafetensorError, KeyError, FileNotFoundError) as error:
        raise OSError(f"{path} is unfinished ({error})") from None
    if found != ids:
        raise ValueError(f"{path} has the states of {len(found)} other tokens; expected those of the {len(ids)} sent.")
    try:
        for each in (path, Path(f"{path}.lock")):
            each.unlink(missing_ok=True)
    except PermissionError as error:
        raise ValueError(f"{path} cannot be removed ({error.strerror}); {MAY}") from None
    return states


def _wait_for(path: Path, timeout: float) -> None:
    """Waits until the writer of a file has let go of its lock. Raises TimeoutError where that takes longer than
    `timeout` seconds, ValueError where there is no such file."""
    import fcntl  # not on every system; vLLM's servers lock with it

    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        try:
            with open(f"{path}.lock", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
        except FileNotFoundError:
            if path.exists():  # of a release of vLLM that writes it before it answers, without a lock
                return
            if waited > GRACE:
                raise ValueError(
                    f"the states are in {path}, which is not here; expected a folder that both machines share, under"
                    " one name, or --engine-states-folder."
                ) from None
        except PermissionError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); {MAY}") from None
        except BlockingIOError:
            pass
        if waited > timeout:
            raise TimeoutError(f"{path} is not finished after {timeout:g} seconds")
        time.sleep(POLL)
