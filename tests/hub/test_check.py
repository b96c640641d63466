"""`check_target` on a Hub: a target's config.json is fetched only, and a drafter's config, headers and vocabulary."""

import json

import pytest
import torch
from factories import build
from huggingface_hub import constants
from safetensors.torch import load
from transformers import LlamaConfig

from eagle31_hf import Eagle31DrafterModel
from eagle31_hf.checking.drafters import check_drafter
from eagle31_hf.checking.source import read_target
from eagle31_hf.checkpoints.headers import read_headers
from eagle31_hf.checkpoints.sources import HubError, fetch
from eagle31_hf.cli import main

from .repositories import BASE, original_release

TARGET, DRAFTER = "org/target", "tester/drafter"
CONFIG = {"model_type": "llama", "vocab_size": 61, "hidden_size": 20, "num_hidden_layers": 4, "num_attention_heads": 2}


@pytest.fixture
def files(tmp_path) -> dict[str, bytes]:
    """A drafter of two shards, most of whose bytes are weights."""
    drafter = build(num_attention_heads=2, intermediate_size=3000)
    drafter.save_pretrained(tmp_path, max_shard_size="200kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_of_a_target_only_its_config_is_fetched(hub):
    hub.add(TARGET, {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"0" * 10**6})
    source = read_target(TARGET)
    assert (source.name, source.decoder.num_hidden_layers) == (TARGET, 4)
    assert {request.path.rpartition("/")[2] for request in hub.requests("GET", TARGET)} == {"config.json"}


@pytest.mark.parametrize("is_sharded", [True, False], ids=["shards", "one file"])
def test_of_a_drafter_no_weights_are_fetched(hub, files, tmp_path, is_sharded):
    if not is_sharded:
        build(num_attention_heads=2, intermediate_size=3000).save_pretrained(tmp_path / "whole")
        files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    hub.add(DRAFTER, files)
    checkpoint = read_headers(DRAFTER)
    sent = sum(request.sent for request in hub.requests("GET") if not request.path.endswith(".json"))
    weights = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    assert 0 < sent < weights / 20
    loaded = {
        name: tensor
        for data in files.items()
        if data[0].endswith(".safetensors")
        for name, tensor in load(data[1]).items()
    }
    assert {name: stored.shape for name, stored in checkpoint.tensors.items()} == {
        name: tuple(x.shape) for name, x in loaded.items()
    }
    assert checkpoint.made["d2t"].tolist() == loaded["d2t"].tolist()
    assert checkpoint.source == DRAFTER
    assert checkpoint.num_parameters == sum(x.numel() for name, x in loaded.items() if name not in ("d2t", "t2d"))


def test_info_fetches_no_weights(hub, files):
    hub.add(DRAFTER, files | {"generation_config.json": b'{"num_assistant_tokens": 6}'})
    weights = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    assert main(["info", DRAFTER]) == 0
    assert sum(request.sent for request in hub.requests("GET") if not request.path.endswith(".json")) < weights / 20


def test_info_reads_the_headers_of_what_is_there_now(hub):
    """The cache holds the weights of an earlier commit."""
    build(num_attention_heads=2).save_pretrained(hub.home / "old")
    hub.add(DRAFTER, {name: (hub.home / "old" / name).read_bytes() for name in ("config.json", "model.safetensors")})
    Eagle31DrafterModel.from_pretrained(DRAFTER)
    build(num_attention_heads=2, seed=1).save_pretrained(hub.home / "new")
    hub.add(DRAFTER, {"model.safetensors": (hub.home / "new" / "model.safetensors").read_bytes()})
    hub.log.clear()
    assert read_headers(DRAFTER).num_parameters
    assert {request.status for request in hub.requests("GET", "/storage/")} == {206}


def test_the_reasons_are_those_of_a_local_copy(hub, tmp_path):
    """No folder of the copy of its headers is named in them."""
    files = original_release(build(num_attention_heads=2, fc_norm=False, norm_output=False))
    config = json.loads(files["config.json"]) | {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    files["config.json"] = json.dumps(config).encode()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    hub.add(BASE, files)
    reasons = read_headers(BASE).reasons
    assert reasons == read_headers(str(tmp_path)).reasons
    assert "config.json: eagle_aux_hidden_state_layer_ids [1, 2, 4] are boundary ids" in reasons


def test_what_is_wrong_with_a_drafter_names_its_repository(hub, files):
    config = json.loads(files["config.json"])
    hub.add(DRAFTER, files | {"config.json": json.dumps(config | {"intermediate_size": 77}).encode()})
    hub.add(TARGET, {"config.json": json.dumps(CONFIG).encode()})
    report = check_drafter(DRAFTER, read_target(TARGET))
    assert not report.fits
    assert report.findings[0].text.startswith(f"{DRAFTER}/")


def test_weights_that_are_only_pickled_are_read_whole(hub, files, tmp_path):
    drafter = build(num_attention_heads=2)
    torch.save(drafter.state_dict(), tmp_path / "pytorch_model.bin")
    drafter.save_pretrained(tmp_path / "native")
    config = (tmp_path / "native" / "config.json").read_bytes()
    hub.add(DRAFTER, {"config.json": config, "pytorch_model.bin": (tmp_path / "pytorch_model.bin").read_bytes()})
    assert read_headers(DRAFTER).config.vocab_size == 61


@pytest.mark.parametrize(
    "offsets",
    [["a", "b"], [8, 0], [10**18, 10**18 + 8], [10**30, 10**31], [0, True], [None], {"0": 1}],
    ids=["words", "backwards", "past the end", "huge", "a truth", "one", "no list"],
)
def test_offsets_that_are_no_place_in_the_file_are_refused_by_name(hub, files, offsets):
    header = json.dumps({"d2t": {"dtype": "I64", "shape": [1], "data_offsets": offsets}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(8)
    hub.add(DRAFTER, {"config.json": files["config.json"], "model.safetensors": weights})
    report = check_drafter(DRAFTER, read_target(LlamaConfig(**CONFIG)))
    assert not report.fits
    assert report.findings[0].text.startswith(f"{DRAFTER}/model.safetensors: is not a sound safetensors file")


@pytest.mark.parametrize("after", [0, 1000], ids=["at once", "within the header"])
def test_a_connection_that_breaks_off_is_said_in_plain_words(hub, files, after):
    hub.add(DRAFTER, files)
    hub.break_download(after)
    with pytest.raises(
        HubError, match=rf"{DRAFTER}: model-.*: the connection to the Hub broke off \(.*\)\. Run it again\."
    ):
        read_headers(DRAFTER)


def test_a_hub_that_goes_away_after_the_config_is_said_in_plain_words(hub, files, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client tries again and again
    hub.add(DRAFTER, files)
    fetch(DRAFTER, "config.json")
    hub.shutdown()
    hub.server_close()
    with pytest.raises(HubError, match=rf"{DRAFTER}: "):
        check_drafter(DRAFTER, read_target(LlamaConfig(**CONFIG)))


def test_a_repository_without_a_config_is_said_in_plain_words(hub):
    hub.add(DRAFTER, {"README.md": b"empty"})
    with pytest.raises(
        OSError, match=f"{DRAFTER}: has no config.json at revision main; expected a drafter's repository"
    ):
        check_drafter(DRAFTER, read_target(LlamaConfig(**CONFIG)))


def test_without_the_hub_it_says_what_to_do(hub, monkeypatch):
    with pytest.raises(OSError, match="has no such repository"):
        read_target("org/nothing")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="HF_HUB_OFFLINE"):
        read_target(TARGET)
