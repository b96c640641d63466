"""The Hub of `server.py`, used by the installed `huggingface_hub` and `transformers`."""

import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest
import torch
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    snapshot_download,
    upload_folder,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaModel

from .server import CHUNK_BYTES, FIRST_FILES, HubServer

REPO = "tester/drafter"
CONFIG = {"config.json": b'{"model_type": "llama"}'}
WEIGHTS = {"model.safetensors": bytes(range(256)) * 40}  # 10240 bytes
WEIGHT_BYTES = 10_240


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, data in (CONFIG | WEIGHTS | {"heads/a/card.md": b"# card"}).items():
        file = tmp_path / "local" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return tmp_path / "local"


def read(repo_id: str = REPO, path: str = "config.json", **options) -> bytes:
    return Path(hf_hub_download(repo_id, path, **options)).read_bytes()


def test_a_folder_goes_up_and_comes_down_the_same(hub, api, folder):
    assert api.whoami()["name"] == "tester"
    assert api.create_repo(REPO).repo_id == REPO
    commit = upload_folder(repo_id=REPO, folder_path=folder)
    files = CONFIG | WEIGHTS | {"heads/a/card.md": b"# card"}
    assert hub.files(REPO) == FIRST_FILES | files
    snapshot = Path(snapshot_download(REPO))
    assert snapshot.name == commit.oid
    assert {
        str(p.relative_to(snapshot)): p.read_bytes() for p in snapshot.rglob("*") if p.is_file()
    } == FIRST_FILES | files


def test_only_large_files_go_through_lfs_and_only_once(hub, api, folder):
    api.create_repo(REPO)
    first = upload_folder(repo_id=REPO, folder_path=folder)
    assert [request.received for request in hub.requests("PUT")] == [WEIGHT_BYTES]
    assert len(hub.requests("POST", "verify")) == 1
    assert api.get_paths_info(REPO, ["model.safetensors", "config.json"])[0].lfs.size == WEIGHT_BYTES
    assert upload_folder(repo_id=REPO, folder_path=folder).oid == first.oid, "nothing changed, so no commit"
    api.upload_file(repo_id=REPO, path_in_repo="copy.bin", path_or_fileobj=WEIGHTS["model.safetensors"])
    assert len(hub.requests("PUT")) == 1
    assert hub.files(REPO)["copy.bin"] == WEIGHTS["model.safetensors"]


def test_storage_gets_no_token(hub):
    hub.add(REPO, WEIGHTS, private=True)
    assert read(path="model.safetensors") == WEIGHTS["model.safetensors"]
    assert [request.user for request in hub.requests("GET", "/storage/")] == [""]
    assert {request.user for request in hub.requests("HEAD", "/resolve/")} == {"tester"}


@pytest.mark.parametrize("source", [bytes, BytesIO, Path])
def test_sources_of_an_upload(hub, api, folder, source):
    api.create_repo(REPO)
    content = folder / "model.safetensors" if source is Path else source(WEIGHTS["model.safetensors"])
    api.upload_file(repo_id=REPO, path_in_repo="model.safetensors", path_or_fileobj=content)
    assert [request.received for request in hub.requests("PUT")] == [WEIGHT_BYTES]
    assert hub.files(REPO) == FIRST_FILES | WEIGHTS


def test_revisions(hub, api):
    first = hub.add(REPO, CONFIG)
    second = hub.add(REPO, {"config.json": b"{}"})
    api.create_tag(REPO, tag="v1", revision=first)
    api.create_branch(REPO, branch="feature/a", revision="v1")
    api.create_branch(REPO, branch="feature/a", exist_ok=True)
    for revision in ("v1", "feature/a", first):
        assert read(revision=revision) == CONFIG["config.json"]
        assert api.model_info(REPO, revision=revision).sha == first
    assert read() == read(revision=second) == b"{}"
    refs = api.list_repo_refs(REPO)
    assert {b.name: b.target_commit for b in refs.branches} == {"main": second, "feature/a": first}
    assert {t.ref: t.target_commit for t in refs.tags} == {"refs/tags/v1": first}
    other = hub.add(REPO, {"new.txt": b"new"}, revision="feature/b")
    assert hub.files(REPO, other) == FIRST_FILES | {"config.json": b"{}", "new.txt": b"new"}


def test_tree(hub, api):
    hub.add(REPO, {"a/b/c.txt": b"c", "a/d.txt": b"d", "e.txt": b"e"})
    assert {e.path for e in api.list_repo_tree(REPO)} == {*FIRST_FILES, "a", "e.txt"}
    assert {e.path for e in api.list_repo_tree(REPO, "a")} == {"a/b", "a/d.txt"}
    assert {e.path for e in api.list_repo_tree(REPO, "a", recursive=True)} == {"a/b", "a/b/c.txt", "a/d.txt"}
    assert set(api.list_repo_files(REPO)) == set(hub.files(REPO))
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "none"))
    assert {s.rfilename: s.size for s in api.model_info(REPO, files_metadata=True).siblings}["e.txt"] == 1


def test_pull_requests(hub, api):
    api.create_repo(REPO)
    add = CommitOperationAdd("model.safetensors", WEIGHTS["model.safetensors"])
    pull = api.create_commit(REPO, [add], commit_message="Add weights", create_pr=True)
    assert (pull.pr_num, pull.pr_revision) == (1, "refs/pr/1")
    assert hub.files(REPO) == FIRST_FILES
    api.upload_file(
        repo_id=REPO, path_in_repo="config.json", path_or_fileobj=CONFIG["config.json"], revision=pull.pr_revision
    )
    assert hub.files(REPO, "refs/pr/1") == FIRST_FILES | WEIGHTS | CONFIG
    assert read(revision="refs/pr/1") == CONFIG["config.json"]
    assert (
        Path(snapshot_download(REPO, revision="refs/pr/1"), "model.safetensors").read_bytes()
        == WEIGHTS["model.safetensors"]
    )
    assert api.list_repo_refs(REPO, include_pull_requests=True).pull_requests[0].ref == "refs/pr/1"
    assert (
        api.create_commit(
            REPO, [CommitOperationDelete(".gitattributes")], commit_message="Second", create_pr=True
        ).pr_num
        == 2
    )


def test_who_may_only_read_may_propose(hub, api):
    hub.add("others/target", CONFIG)
    operations = [CommitOperationAdd("config.json", b"{}")]
    with pytest.raises(HfHubHTTPError, match="403 Forbidden"):
        api.create_commit("others/target", operations, commit_message="Empty")
    pull = api.create_commit(
        "others/target", [CommitOperationAdd("config.json", b"{}")], commit_message="Empty", create_pr=True
    )
    assert hub.files("others/target", pull.pr_revision)["config.json"] == b"{}"
    with pytest.raises(HfHubHTTPError, match="write token"):
        api.create_repo("reader/x", token=hub.add_user("reader", can_write=False))


def test_deleting_and_copying(hub, api):
    hub.add(REPO, CONFIG | WEIGHTS | {"old/a.txt": b"a", "old/b/c.txt": b"c"})
    operations = [
        CommitOperationDelete("config.json"),
        CommitOperationDelete("old/"),
        CommitOperationCopy("model.safetensors", "copy.safetensors"),
    ]
    api.create_commit(REPO, operations, commit_message="Tidy up")
    assert hub.files(REPO) == FIRST_FILES | WEIGHTS | {"copy.safetensors": WEIGHTS["model.safetensors"]}
    with pytest.raises(EntryNotFoundError, match="doesn't exist"):
        api.delete_file("config.json", REPO)


def test_a_commit_after_another_one_is_refused(hub, api):
    first = hub.add(REPO, CONFIG)
    hub.add(REPO, {"config.json": b"{}"})
    with pytest.raises(HfHubHTTPError, match="412"):
        api.upload_file(repo_id=REPO, path_in_repo="a.txt", path_or_fileobj=b"a", parent_commit=first)
    with pytest.raises(HfHubHTTPError, match="no branch"):
        api.upload_file(repo_id=REPO, path_in_repo="a.txt", path_or_fileobj=b"a", revision=first)


def test_what_is_missing(hub, api):
    hub.add(REPO, CONFIG)
    with pytest.raises(EntryNotFoundError):
        read(path="none.json")
    with pytest.raises(RevisionNotFoundError):
        read(revision="none")
    with pytest.raises(RevisionNotFoundError):
        snapshot_download(REPO, revision="none")
    with pytest.raises(RepositoryNotFoundError):
        read("tester/none")
    assert not api.repo_exists("tester/none")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(REPO)
    assert api.create_repo(REPO, exist_ok=True).repo_id == REPO


def test_private_repos_open_to_their_owners_only(hub, api):
    api.create_repo(REPO, private=True)
    hub.add(REPO, CONFIG)
    assert api.model_info(REPO).private
    assert read() == CONFIG["config.json"]
    for token in (False, hub.add_user("stranger")):
        with pytest.raises(RepositoryNotFoundError):
            read(token=token, cache_dir=hub.home / "elsewhere")
        with pytest.raises(RepositoryNotFoundError):
            snapshot_download(REPO, token=token, cache_dir=hub.home / "elsewhere")
        with pytest.raises(RepositoryNotFoundError):
            api.upload_file(repo_id=REPO, path_in_repo="a.txt", path_or_fileobj=b"a", token=token)
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        api.model_info(REPO, token="hf_wrong")
    assert api.model_info(REPO, token=hub.add_user("colleague", "tester")).private


def test_gated_repos_open_to_approved_users(hub):
    hub.add("others/gated", CONFIG, gated=True)
    for token in (None, False):
        with pytest.raises(GatedRepoError):
            read("others/gated", token=token)
    hub.repos["others/gated"].approved.add("tester")
    assert read("others/gated") == CONFIG["config.json"]


def test_a_download_broken_off_resumes(hub):
    hub.add(REPO, WEIGHTS)
    hub.break_download(after=3 * CHUNK_BYTES + 100)
    assert read(path="model.safetensors") == WEIGHTS["model.safetensors"]
    first, second = hub.requests("GET", "/storage/")
    assert (first.status, first.sent) == (200, 3 * CHUNK_BYTES + 100)
    assert (second.status, second.sent) == (206, WEIGHT_BYTES - 3 * CHUNK_BYTES)


def test_an_upload_broken_off_is_retried(hub, api, folder):
    api.create_repo(REPO)
    hub.break_upload(after=3000)
    upload_folder(repo_id=REPO, folder_path=folder)
    assert [request.received for request in hub.requests("PUT")] == [3000, WEIGHT_BYTES]
    assert hub.files(REPO)["model.safetensors"] == WEIGHTS["model.safetensors"]


def test_transformers_pushes_and_loads(hub):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "vocab_size": 11,
    }
    model = LlamaModel(LlamaConfig(**sizes))
    commit = model.push_to_hub(REPO, private=True)
    assert {"config.json", "model.safetensors"} <= set(hub.files(REPO))
    assert AutoConfig.from_pretrained(REPO).hidden_size == 12
    loaded = AutoModel.from_pretrained(REPO, revision=commit.oid)
    assert type(loaded) is LlamaModel
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    hub.add(REPO, {"config.json": b"{}"})
    pull = model.push_to_hub(REPO, create_pr=True, commit_message="Mend the config")
    assert AutoConfig.from_pretrained(REPO, revision=pull.pr_revision).hidden_size == 12
    with pytest.raises(OSError, match="not a valid model identifier"):
        AutoConfig.from_pretrained(REPO, token=False)


def test_a_process_of_its_own(hub):
    hub.add(REPO, WEIGHTS, private=True)
    program = f"from huggingface_hub import hf_hub_download; print(hf_hub_download({REPO!r}, 'model.safetensors'))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=hub.environment(), capture_output=True, text=True, check=True
    )
    path = Path(done.stdout.strip())
    assert path.is_relative_to(hub.home)
    assert path.read_bytes() == WEIGHTS["model.safetensors"]
