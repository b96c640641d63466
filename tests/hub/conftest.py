"""The fixture `hub`: a Hub of its own for each test, and the client of this process pointed at it."""

import os
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants, hf_api
from transformers.utils import hub as transformers_hub

from .server import CHUNK_BYTES, HubServer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub, with this process logged in as "tester", and an empty cache."""
    with HubServer(tmp_path / "hf_home") as server:
        close_session()  # connections kept alive would still reach another test's Hub
        environment = server.environment()
        for name in os.environ.keys() - environment.keys():
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        read_environment_again(monkeypatch)
        yield server
        close_session()


def read_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `huggingface_hub` read the environment again, which it reads at import, and renews its two API objects."""
    spec = find_spec(constants.__name__)
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    for name in filter(str.isupper, vars(fresh)):
        monkeypatch.setattr(constants, name, getattr(fresh, name))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK_BYTES)
    monkeypatch.setattr(hf_api.api, "endpoint", constants.ENDPOINT)
    monkeypatch.setattr(transformers_hub, "_hf_api", None)
