"""Drafters on the Hub: pushed, published, fetched by a config that points to them, converted, refused."""

import io
import json
import os
from pathlib import Path

import pytest
import torch
from factories import build
from huggingface_hub import HfApi, ModelCard, snapshot_download
from safetensors.torch import load_file, save
from transformers import AutoConfig, AutoModel

from eagle31_hf import Eagle31Config, Eagle31DrafterModel
from eagle31_hf.checkpoints import export_checkpoint, read_checkpoint
from eagle31_hf.cli import main
from eagle31_hf.hub import convert_on_hub, publish, render_card

from .repositories import BASE, REPO, original_release, pointing
from .server import HubServer

NATIVE = {"config.json", "generation_config.json", "model.safetensors", "README.md", ".gitattributes"}


@pytest.fixture(scope="module")
def drafter() -> Eagle31DrafterModel:
    model = build(num_attention_heads=2, fc_norm=False, norm_output=False, target_model="org/target")
    model.generation_config.num_assistant_tokens = 4
    return model


def assert_same(loaded: Eagle31DrafterModel, drafter: Eagle31DrafterModel) -> None:
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_push_brings_a_card_and_loads_back(hub, drafter):
    url = drafter.push_to_hub(REPO)
    assert hub.files(REPO).keys() == NATIVE
    assert url.startswith(hub.url)
    loaded = Eagle31DrafterModel.from_pretrained(REPO)
    assert_same(loaded, drafter)
    assert loaded.generation_config.num_assistant_tokens == 4
    assert loaded.config.name_or_path == REPO
    assert type(AutoConfig.from_pretrained(REPO)) is Eagle31Config
    assert_same(AutoModel.from_pretrained(REPO), drafter)


def test_the_card_is_one_the_hub_understands(hub, drafter):
    drafter.push_to_hub(REPO, tags=["mine"])
    data = ModelCard.load(REPO).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == ("org/target", "transformers", "text-generation")
    assert data["base_model_relation"]
    assert {"eagle3", "speculative-decoding", "eagle31_hf", "mine"} <= set(data.tags)
    text = hub.files(REPO)["README.md"].decode()
    assert f'from_pretrained("{REPO}"' in text
    assert f'"model": "{REPO}"' in text


def test_a_card_that_is_there_is_kept(hub, drafter):
    hub.add(REPO, {"README.md": b"# mine"})
    drafter.push_to_hub(REPO)
    assert hub.files(REPO)["README.md"] == b"# mine"
    assert hub.files(REPO).keys() == NATIVE


def test_a_report_goes_along_and_takes_the_place_of_an_earlier_one(hub, drafter, tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "report.md").write_text("## Attention drift\n\n- ok: nothing grows\n")
    drafter.save_pretrained(tmp_path / "saved")
    hub.add(REPO, {"README.md": b"# mine"})
    publish(tmp_path / "saved", REPO, report=folder)
    card = hub.files(REPO)["README.md"].decode()
    assert card.startswith("# mine\n\n<!--")
    assert card.count("- ok: nothing grows") == 1
    assert hub.files(REPO)["report.md"] == (folder / "report.md").read_bytes()
    drafter.card_facts.report = "## Attention drift\n\n- warning: it grows\n"
    try:
        drafter.push_to_hub(REPO)
        assert "- warning: it grows" in render_card(drafter.config, drafter.card_facts)
    finally:
        drafter.card_facts.report = None
    card = hub.files(REPO)["README.md"].decode()
    assert card.startswith("# mine\n\n<!--")
    assert "nothing grows" not in card
    assert card.count("- warning: it grows") == 1
    hub.add("tester/fresh", {"notes.txt": b"first"})
    publish(tmp_path / "saved", "tester/fresh", report=folder / "report.md")
    fresh = hub.files("tester/fresh")["README.md"].decode()
    assert "from_pretrained" in fresh
    assert fresh.endswith("- ok: nothing grows\n<!-- end of eagle31_hf report -->\n")


def test_a_report_that_is_none_is_refused_before_anything_is_sent(hub, drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "saved")
    (tmp_path / "empty.md").write_text(" ")
    (tmp_path / "bytes.md").write_bytes(b"\xff")
    (tmp_path / "report.json").write_text("{}")
    before = len(hub.requests("POST"))
    with pytest.raises(FileNotFoundError, match=r"report\.md"):
        publish(tmp_path / "saved", REPO, report=tmp_path)
    for name, message in (("empty.md", "is empty"), ("bytes.md", "no UTF-8"), ("report.json", "is no Markdown")):
        with pytest.raises(ValueError, match=message):
            publish(tmp_path / "saved", REPO, report=tmp_path / name)
    assert len(hub.requests("POST")) == before


def test_save_pretrained_pushes_the_same(hub, drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id=REPO)
    assert hub.files(REPO).keys() == NATIVE
    for name in ("config.json", "model.safetensors"):
        assert hub.files(REPO)[name] == (tmp_path / "saved" / name).read_bytes()


def test_the_weights_that_are_given_are_pushed_by_the_process_that_writes(hub, drafter, tmp_path):
    drafter.save_pretrained(tmp_path, is_main_process=False, push_to_hub=True, repo_id=REPO)
    assert REPO not in hub.repos
    given = {name: value.clone() for name, value in drafter.state_dict().items()}
    given["norm.weight"] += 1
    drafter.save_pretrained(tmp_path, state_dict=given, push_to_hub=True, repo_id=REPO)
    assert hub.files(REPO)["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()
    assert torch.equal(Eagle31DrafterModel.from_pretrained(REPO).norm.weight, given["norm.weight"])


def test_the_folder_one_stands_in_has_a_name(drafter, tmp_path, monkeypatch):
    (tmp_path / "my-drafter").mkdir()
    monkeypatch.chdir(tmp_path / "my-drafter")
    drafter.save_pretrained(".")
    assert 'from_pretrained("my-drafter"' in Path("README.md").read_text()


def test_push_to_a_branch_and_as_a_pull_request(hub, drafter):
    hub.add(REPO, {"notes.txt": b"first", "README.md": b"# mine"})
    drafter.push_to_hub(REPO, revision="trained")
    assert hub.files(REPO, "trained")["README.md"] == b"# mine"
    assert "model.safetensors" not in hub.files(REPO)
    assert_same(Eagle31DrafterModel.from_pretrained(REPO, revision="trained"), drafter)
    drafter.push_to_hub(REPO, create_pr=True)
    assert "model.safetensors" not in hub.files(REPO)
    assert_same(Eagle31DrafterModel.from_pretrained(REPO, revision="refs/pr/1"), drafter)


def test_an_upload_that_breaks_off_commits_nothing_and_resumes(hub, drafter, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits between its retries
    drafter.save_pretrained(tmp_path / "saved", max_shard_size=12_000)
    shards = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
    assert len(shards) > 2
    hub.break_upload(after=9_000, times=100)
    with pytest.raises(OSError, match=REPO):
        publish(tmp_path / "saved", REPO)
    assert not set(shards) & hub.files(REPO).keys()
    hub.faults["PUT"].clear()
    before = len(hub.requests("PUT"))
    publish(tmp_path / "saved", REPO)
    assert {name: hub.files(REPO)[name] for name in shards} == {
        name: (tmp_path / "saved" / name).read_bytes() for name in shards
    }
    done = [request for request in hub.requests("PUT")[:before] if request.status == 200]
    assert len(hub.requests("PUT")) - before == len(shards) - len(done), "what had arrived is not sent again"


def test_a_download_that_breaks_off_is_resumed(hub, drafter):
    hub.add(BASE, original_release(drafter))
    hub.break_download(after=4_000)
    assert_same(Eagle31DrafterModel.from_pretrained(BASE), drafter)
    assert any(request.sent == 4_000 for request in hub.requests("GET"))


def test_a_vocabulary_in_a_file_of_its_own_is_fetched(hub, drafter, tmp_path):
    """As NeMo's older layout has it."""
    drafter.save_pretrained(tmp_path)
    tensors = {name: value for name, value in drafter.state_dict().items() if name not in ("d2t", "t2d")}
    torch.save({"selected_token_ids": drafter.draft_to_target_ids()}, tmp_path / "eagle_meta.pt")
    files = {name: (tmp_path / name).read_bytes() for name in ("config.json", "eagle_meta.pt")}
    hub.add(REPO, files | {"model.safetensors": save(tensors)})
    assert_same(Eagle31DrafterModel.from_pretrained(REPO), drafter)


def test_a_missing_repository_is_one_clear_error(hub):
    with pytest.raises(OSError, match="tester/nothing"):
        Eagle31DrafterModel.from_pretrained("tester/nothing")
    hub.add("tester/empty", {"notes.txt": b"nothing here"})
    with pytest.raises(OSError, match=r"tester/empty.*config\.json"):
        Eagle31DrafterModel.from_pretrained("tester/empty")


def test_an_incomplete_repository_is_one_clear_error(hub, drafter):
    files = original_release(drafter)
    del files["model-00002-of-00002.safetensors"]
    hub.add(BASE, files)
    with pytest.raises(OSError, match="model-00002-of-00002"):
        Eagle31DrafterModel.from_pretrained(BASE)


def test_a_config_that_points_to_its_weights(hub, drafter):
    commit = hub.add(BASE, original_release(drafter))
    hub.add(BASE, {"config.json": b"{}"})  # what came later does not matter
    hub.add(
        REPO,
        {
            "config.json": pointing(
                weights_from={"repo_id": BASE, "revision": commit}, aux_hidden_state_layer_ids=[1, 2, 4]
            )
        },
    )
    loaded = Eagle31DrafterModel.from_pretrained(REPO)
    assert_same(loaded, drafter)
    assert loaded.config.aux_hidden_state_layer_ids == [1, 2, 4]
    assert loaded.config.target_model == "org/target"
    assert loaded.config.weights_from is None
    config = AutoConfig.from_pretrained(REPO)
    assert (config.hidden_size, config.aux_hidden_state_layer_ids) == (drafter.config.hidden_size, [1, 2, 4])
    assert Eagle31DrafterModel.from_pretrained(
        REPO, aux_hidden_state_layer_ids=[0, 1, 2]
    ).config.aux_hidden_state_layer_ids == [0, 1, 2]


def test_a_local_config_that_points_to_the_hub(hub, drafter, tmp_path):
    hub.add(BASE, original_release(drafter))
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "config.json").write_bytes(pointing())
    assert_same(Eagle31DrafterModel.from_pretrained(tmp_path / "card"), drafter)


def test_links_that_lead_in_circles_are_refused(hub, drafter, tmp_path, monkeypatch):
    hub.add(REPO, {"config.json": pointing(weights_from={"repo_id": REPO})})
    with pytest.raises(ValueError, match="names the repository itself"):
        Eagle31DrafterModel.from_pretrained(REPO)
    hub.add(BASE, {"config.json": pointing(weights_from={"repo_id": REPO})})
    hub.add(REPO, {"config.json": pointing(weights_from={"repo_id": BASE})})
    with pytest.raises(ValueError, match="points on"):
        Eagle31DrafterModel.from_pretrained(REPO)
    (tmp_path / BASE).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)  # now the name is also a local folder
    with pytest.raises(ValueError, match="local path"):
        Eagle31DrafterModel.from_pretrained(REPO)


def test_publish_pins_the_revision(hub, drafter, tmp_path):
    commit = hub.add(BASE, original_release(drafter))
    (tmp_path / "config.json").write_bytes(pointing())
    publish(tmp_path, REPO)
    assert json.loads(hub.files(REPO)["config.json"])["weights_from"] == {"repo_id": BASE, "revision": commit}
    assert hub.files(REPO).keys() == {"config.json", "README.md", ".gitattributes"}
    hub.add(BASE, {"config.json": b"{}"})
    assert_same(Eagle31DrafterModel.from_pretrained(REPO), drafter)


def test_the_card_of_a_config_that_points_is_that_of_its_weights(hub, drafter, tmp_path):
    hub.add(BASE, original_release(drafter))
    (tmp_path / "config.json").write_bytes(pointing(norm_output=False))
    publish(tmp_path, REPO)
    # of the weights headers alone are read
    assert all(request.status == 206 for request in hub.requests("GET", "/storage/yuhuili"))
    card = hub.files(REPO)["README.md"].decode()
    assert "# EAGLE 3 drafter for org/target" in card
    assert f"1, {drafter.config.hidden_size} wide, MLP {drafter.config.intermediate_size}, 2 heads" in card
    assert "vllm serve" not in card  # its plug-in does not follow the link
    assert "`eagle31 export tester/drafter FOLDER --format vllm`" in card


def test_publish_refuses_before_it_uploads(hub, drafter, tmp_path):
    export_checkpoint(drafter, tmp_path / "vllm", "vllm")
    with pytest.raises(ValueError, match="Convert it first"):
        publish(tmp_path / "vllm", REPO)
    (tmp_path / "config.json").write_bytes(pointing(weights_from={"repo_id": "nobody/nothing"}))
    with pytest.raises(OSError, match="the Hub does not have it"):
        publish(tmp_path, REPO)
    hub.add(BASE, original_release(drafter) | {"config.json": b"{}"})
    (tmp_path / "config.json").write_bytes(pointing())
    with pytest.raises(ValueError, match=rf"{BASE}: config\.json"):
        publish(tmp_path, REPO)
    assert REPO not in hub.repos


def test_a_folder_that_changes_while_it_is_sent_is_not_committed(hub, drafter, tmp_path, monkeypatch):
    drafter.save_pretrained(tmp_path)
    send = HfApi.preupload_lfs_files

    def send_and_change(*args, **options) -> None:
        send(*args, **options)
        os.utime(tmp_path / "model.safetensors")

    monkeypatch.setattr(HfApi, "preupload_lfs_files", send_and_change)
    with pytest.raises(OSError, match="was changed while it was read"):
        publish(tmp_path, REPO)
    assert "model.safetensors" not in hub.files(REPO)


def test_a_pull_request_converts_a_repository(hub, drafter):
    hub.add_user("yuhuili")
    other = {"README.md": b"# theirs", "generation_config.json": b'{"num_assistant_tokens": 0}'}
    hub.add(BASE, original_release(drafter) | other)
    before = hub.files(BASE)
    checkpoint, url = convert_on_hub(BASE)
    assert url
    assert checkpoint.format == "eagle31_hf"
    assert hub.files(BASE) == before
    after = hub.files(BASE, "refs/pr/1")
    assert after.keys() == {"config.json", "model.safetensors", "conversion.json", "README.md", ".gitattributes"}
    assert after["README.md"] == b"# theirs"
    assert read_checkpoint(BASE, revision="refs/pr/1").is_native
    assert_same(Eagle31DrafterModel.from_pretrained(BASE, revision="refs/pr/1"), drafter)


def test_a_pull_request_removes_only_what_the_repository_has(hub, drafter):
    """The weights it is converted from are another repository's, and lie there in a file of another name."""
    config = original_release(drafter)["config.json"]
    weights = io.BytesIO()
    torch.save(
        {name.replace("layers.0.", "midlayer."): tensor for name, tensor in drafter.state_dict().items()}, weights
    )
    hub.add(BASE, {"config.json": config, "pytorch_model.bin": weights.getvalue()})
    hub.add(REPO, {"config.json": pointing(), "README.md": b"# mine"})
    assert convert_on_hub(REPO)[1]
    after = hub.files(REPO, "refs/pr/1")
    assert after.keys() == {"config.json", "model.safetensors", "conversion.json", "README.md", ".gitattributes"}
    assert_same(Eagle31DrafterModel.from_pretrained(REPO, revision="refs/pr/1"), drafter)


LINKED = ("README.md", "generation_config.json", "config.json", "model.safetensors")


@pytest.mark.parametrize("name", LINKED)
def test_a_link_out_of_the_folder_is_not_followed(hub, drafter, tmp_path, name):
    """The folder's author could otherwise have any file published that its publisher can read."""
    drafter.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / name).rename(tmp_path / "private")
    (tmp_path / "saved" / name).symlink_to("../private")
    with pytest.raises(
        ValueError, match=rf"{name}: is a link to .*private, outside the folder; expected a file\. Copy it there"
    ):
        publish(tmp_path / "saved", REPO)
    assert REPO not in hub.repos


@pytest.mark.parametrize("where", ["blobs", "snapshots/other"])
def test_a_folder_that_looks_like_the_cache_is_no_way_out(hub, drafter, tmp_path, where):
    """`blobs` is a link itself, or the file is another snapshot's."""
    folder = tmp_path / "fake" / "snapshots" / "0123"
    drafter.save_pretrained(folder)
    (tmp_path / "private").mkdir()
    (folder / "README.md").rename(tmp_path / "private" / "notes")
    (tmp_path / "fake" / where).symlink_to(tmp_path / "private")
    (folder / "README.md").symlink_to(tmp_path / "fake" / where / "notes")
    with pytest.raises(ValueError, match="outside the folder"):
        publish(folder, REPO)


def test_links_of_the_cache_and_within_the_folder_are_followed(hub, drafter, tmp_path):
    drafter.push_to_hub(BASE.replace("yuhuili", "tester"))
    snapshot = Path(snapshot_download(BASE.replace("yuhuili", "tester")))
    assert (snapshot / "model.safetensors").is_symlink()
    publish(snapshot, REPO)
    assert_same(Eagle31DrafterModel.from_pretrained(REPO), drafter)
    drafter.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").rename(tmp_path / "saved" / "card.md")
    (tmp_path / "saved" / "README.md").symlink_to("card.md")
    (tmp_path / "link").symlink_to("saved")
    publish(tmp_path / "link", "tester/another")
    assert hub.files("tester/another").keys() == NATIVE


def test_a_native_repository_needs_no_pull_request(hub, drafter):
    drafter.push_to_hub(REPO)
    assert convert_on_hub(REPO)[1] is None
    assert not hub.requests("POST", "/commit/refs")


def test_a_pull_request_changes_a_field_of_a_native_repository(hub, drafter):
    drafter.push_to_hub(REPO)
    assert convert_on_hub(REPO, logit_scale=0.5)[1]
    assert AutoConfig.from_pretrained(REPO, revision="refs/pr/1").logit_scale == 0.5
    assert hub.files(REPO, "refs/pr/1").keys() == NATIVE | {"conversion.json"}


def test_a_pull_request_takes_the_options_of_a_conversion(hub, drafter, tmp_path):
    hub.add(REPO, {f"heads/{name}": data for name, data in original_release(drafter).items()})
    assert convert_on_hub(REPO, subfolder="heads", cache_dir=tmp_path)[1]
    after = hub.files(REPO, "refs/pr/1").keys() - {".gitattributes"}
    assert after == {f"heads/{name}" for name in ("config.json", "model.safetensors", "conversion.json")}
    assert not list((hub.home / "hub").glob("models--*"))


def test_a_local_folder_gets_no_pull_request(hub, drafter, tmp_path, monkeypatch):
    drafter.push_to_hub(REPO)
    drafter.save_pretrained(tmp_path / REPO)
    monkeypatch.chdir(tmp_path)  # now the name is also a local folder
    with pytest.raises(ValueError, match=f"{REPO}: is a local folder; expected a Hub repository"):
        convert_on_hub(REPO)


def test_the_commands_against_the_hub(hub: HubServer, drafter, tmp_path, capsys):
    hub.add_user("yuhuili")
    hub.add(BASE, original_release(drafter))

    def eagle31(*arguments: str) -> dict:
        status, said = main([*arguments, "--json"]), capsys.readouterr()
        assert status == 0, said.err
        return json.loads(said.out)

    assert eagle31("info", BASE)["format"] == "original EAGLE 3 release"
    assert eagle31("convert", BASE, "--create-pr")["result"].endswith("/discussions/1")
    assert eagle31("convert", BASE, str(tmp_path / "native"))["result"] == str(tmp_path / "native")
    assert load_file(tmp_path / "native" / "model.safetensors").keys() == drafter.state_dict().keys()
    assert eagle31("publish", str(tmp_path / "native"), "--repo-id", REPO)["url"].startswith(hub.url)
    assert_same(Eagle31DrafterModel.from_pretrained(REPO), drafter)
