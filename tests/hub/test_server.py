"""The Hub of `server.py` is what the installed `huggingface_hub` takes for one, where the tests of drafters do not
show it."""

from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download, snapshot_download, upload_folder
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from .server import CHUNK_BYTES, FIRST_FILES, HubServer

REPO = "tester/drafter"
CONFIG = {"config.json": b'{"model_type": "llama"}'}
WEIGHTS = {"model.safetensors": bytes(range(256)) * 40}
WEIGHT_BYTES = 10_240


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi()


def read(repo_id: str = REPO, path: str = "config.json", **options) -> bytes:
    return Path(hf_hub_download(repo_id, path, **options)).read_bytes()


def test_a_folder_goes_up_and_comes_down_the_same_and_what_is_there_is_not_sent_again(hub, api, tmp_path):
    files = CONFIG | WEIGHTS | {"heads/a/card.md": b"# card"}
    for path, data in files.items():
        (tmp_path / "local" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / path).write_bytes(data)
    api.create_repo(REPO)
    commit = upload_folder(repo_id=REPO, folder_path=tmp_path / "local")
    assert hub.files(REPO) == FIRST_FILES | files
    snapshot = Path(snapshot_download(REPO))
    assert snapshot.name == commit.oid
    found = {str(p.relative_to(snapshot)): p.read_bytes() for p in snapshot.rglob("*") if p.is_file()}
    assert found == FIRST_FILES | files
    assert upload_folder(repo_id=REPO, folder_path=tmp_path / "local").oid == commit.oid, "nothing changed"
    assert [request.received for request in hub.requests("PUT")] == [WEIGHT_BYTES], "only weights go to the storage"


def test_storage_gets_no_token(hub):
    hub.add(REPO, WEIGHTS, private=True)
    assert read(path="model.safetensors") == WEIGHTS["model.safetensors"]
    assert [request.user for request in hub.requests("GET", "/storage/")] == [""]
    assert {request.user for request in hub.requests("HEAD", "/resolve/")} == {"tester"}


def test_revisions(hub, api):
    first, second = hub.add(REPO, CONFIG), hub.add(REPO, {"config.json": b"{}"})
    api.create_branch(REPO, branch="feature/a", revision=first)
    api.create_branch(REPO, branch="feature/a", exist_ok=True)
    assert [read(revision=revision) for revision in ("feature/a", first)] == [CONFIG["config.json"]] * 2
    assert read() == read(revision=second) == b"{}"
    assert api.model_info(REPO, revision="feature/a").sha == first
    with pytest.raises(RevisionNotFoundError):
        read(revision="none")


def test_who_may_only_read_may_propose(hub, api):
    hub.add("others/target", CONFIG)
    options = {"operations": [CommitOperationAdd("config.json", b"{}")], "commit_message": "Empty"}
    with pytest.raises(HfHubHTTPError, match="403 Forbidden"):
        api.create_commit("others/target", **options)
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        api.model_info("others/target", token="hf_wrong")
    with pytest.raises(RepositoryNotFoundError):
        api.create_commit("others/target", token=False, create_pr=True, **options)
    pull = api.create_commit("others/target", create_pr=True, **options)
    assert hub.files("others/target", pull.pr_revision)["config.json"] == b"{}"
    assert hub.files("others/target")["config.json"] == CONFIG["config.json"]


def test_a_download_broken_off_resumes(hub):
    hub.add(REPO, WEIGHTS)
    hub.break_download(after=3 * CHUNK_BYTES + 100)
    assert read(path="model.safetensors") == WEIGHTS["model.safetensors"]
    first, second = hub.requests("GET", "/storage/")
    assert (first.status, first.sent) == (200, 3 * CHUNK_BYTES + 100)
    assert (second.status, second.sent) == (206, WEIGHT_BYTES - 3 * CHUNK_BYTES)
