"""Files of a folder or a Hub repository, by its name; plain words where they cannot be read."""

import os
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers.utils import cached_file

# Errors that the Hub's client raises when a request fails: its own, and the base class of that, which belongs to the
# HTTP library it uses.
HUB_ERRORS = (HfHubHTTPError.__mro__[1], HfHubHTTPError)


class HubError(OSError):
    """The Hub or the connection to it failed; the name that was asked for may be right."""


def check_name(source: str, expected: str = "drafter") -> None:
    """Raises OSError for what is neither a folder nor a name that a Hub repository can have."""
    if os.path.isdir(source):
        return
    if os.path.lexists(source):
        found = f"{source}: is a file"
        raise OSError(f"{found}; expected the folder of a {expected}, or a Hub repository as in owner/name.")
    try:
        validate_repo_id(source)
    except HFValidationError:
        name = source[:200] or "''"
        found = f"{name}: there is no such folder"
        raise OSError(f"{found}; expected that of a {expected}, or a Hub repository as in owner/name.") from None


def find_config(source: str, expected: str = "drafter", **hub: Any) -> str:
    """Returns the path of `config.json` in a folder, or in the Hub's cache, where it is downloaded to.

    `expected` says in messages what the name is to be of. `hub`: revision, token and the like. Raises OSError where
    there is none.
    """
    check_name(source, expected)
    if os.path.isdir(source):
        path = os.path.join(source, hub.get("subfolder") or "", "config.json")
        if not os.path.isfile(path):
            found = f"{source}: holds no config.json"
            raise OSError(f"{found}; expected the folder of a {expected}, or the name of a Hub repository.")
        return path
    path = fetch(source, "config.json", **hub)
    if path is None:
        found = f"{source}: has no config.json at revision {hub.get('revision') or 'main'}"
        raise OSError(f"{found}; expected a {expected}'s repository.")
    return path


def fetch(source: str, name: str, **hub: Any) -> str | None:
    """Returns the path of a repository's file in the Hub's cache, downloaded if need be; None where the repository has
    no such file.

    Raises OSError, which names the repository and the remedy, where the Hub refuses to tell, `HubError` where it did
    not answer.
    """
    try:
        return cached_file(source, name, **hub)
    except OSError as error:
        cause = error.__cause__
        # the Hub answered: no such file
        if cause is None and error.errno is None and not isinstance(error, HfHubHTTPError):
            return None
        raise _diagnosed(source, name, hub.get("revision"), error, cause) from error
    except HUB_ERRORS as error:
        found = f"{source}: {name}: the download broke off ({first_line(error)})"
        raise HubError(f"{found}. Run it again to go on.") from error


def _diagnosed(source: str, name: str, revision: str | None, error: OSError, cause: BaseException | None) -> OSError:
    """Returns an error in plain words for one that the Hub's client caused, `error` itself for any other."""
    page, log_in = f"{constants.ENDPOINT}/{source}", "log in with `hf auth login` or set HF_TOKEN."
    if isinstance(cause, GatedRepoError):
        return OSError(f"{source}: is gated. Ask for access at {page}, then {log_in}")
    if isinstance(cause, RepositoryNotFoundError):
        found = f"{source}: there is no such folder, and {constants.ENDPOINT} has no such repository, or hides it"
        return OSError(f"{found}. Check the name; if it is private, {log_in}")
    if isinstance(cause, RevisionNotFoundError):
        return OSError(f"{source}: has no revision {revision!r}; expected a branch, a tag or a commit of {page}.")
    if isinstance(cause, LocalEntryNotFoundError):
        reason = cause.__cause__
        refusal = "HF_HUB_OFFLINE or local_files_only forbids downloads."
        why = refusal if reason is None else f"{constants.ENDPOINT} does not answer: {first_line(reason)}"
        return HubError(f"{source}: there is no such folder, the Hub's cache does not hold its {name}, and {why}")
    if isinstance(cause, HfHubHTTPError):
        return HubError(f"{source}: {name}: the Hub refused: {first_line(cause)}")
    return error


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type: some of the client's have no message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
