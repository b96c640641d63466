"""Hub options of a `from_pretrained` also hold for the weights its config points to, in every loading class."""

import json
from functools import cache

import pytest
from factories import build
from huggingface_hub import constants
from transformers import AutoConfig, AutoModel
from transformers.models.auto import auto_factory

from eagle31_hf import Eagle31Config, Eagle31DrafterModel

from .repositories import BASE, REPO, original_release, pointing
from .server import HubServer

LOADERS = (Eagle31Config, AutoConfig, Eagle31DrafterModel, AutoModel)
every_loader = pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)


@cache
def drafter() -> Eagle31DrafterModel:
    return build(num_attention_heads=2, fc_norm=False, norm_output=False)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return original_release(drafter())


@pytest.fixture(autouse=True)
def without_peft(monkeypatch):
    """Hides peft, with which transformers' AutoModel first looks for an adapter, without the options it was given."""
    monkeypatch.setattr(auto_factory, "is_peft_available", lambda: False)


def assert_complete(loaded: Eagle31Config | Eagle31DrafterModel) -> None:
    config = getattr(loaded, "config", loaded)
    assert type(config) is Eagle31Config
    assert (config.weights_from, config.target_model) == (None, "org/target")
    assert config.hidden_size == drafter().config.hidden_size
    if isinstance(loaded, Eagle31DrafterModel):
        assert all(tensor.equal(drafter().state_dict()[name]) for name, tensor in loaded.state_dict().items())


@every_loader
def test_the_token_reaches_the_weights(loader, hub: HubServer, files, monkeypatch):
    token = hub.add_user("yuhuili", "tester")
    hub.add(BASE, files, private=True)
    hub.add(REPO, {"config.json": pointing()}, private=True)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match=REPO):
        loader.from_pretrained(REPO, token=False)
    hub.log.clear()
    assert_complete(loader.from_pretrained(REPO, token=token))
    assert {request.user for request in hub.log if BASE in request.path and "/storage/" not in request.path} == {
        "yuhuili"
    }


@every_loader
def test_a_token_that_is_not_to_be_sent_is_not(loader, hub: HubServer, files):
    hub.add(BASE, files)
    hub.add(REPO, {"config.json": pointing()})
    assert_complete(loader.from_pretrained(REPO, token=False))
    assert hub.requests("HEAD", BASE)
    assert {request.user for request in hub.log} == {""}


@every_loader
def test_without_the_network_nothing_is_asked(loader, hub: HubServer, files):
    hub.add(BASE, files)
    hub.add(REPO, {"config.json": pointing()})
    AutoConfig.from_pretrained(REPO)
    hub.log.clear()
    assert_complete(loader.from_pretrained(REPO, local_files_only=True))
    assert hub.log == []


@every_loader
def test_without_the_network_and_with_an_empty_cache_the_error_names_the_weights(
    loader, hub: HubServer, files, tmp_path
):
    hub.add(BASE, files)
    (tmp_path / "config.json").write_bytes(pointing())
    with pytest.raises(OSError, match=BASE):
        loader.from_pretrained(tmp_path, local_files_only=True)
    assert hub.log == []


@every_loader
def test_files_land_in_the_cache_that_was_named(loader, hub: HubServer, files, tmp_path):
    hub.add(BASE, files)
    hub.add(REPO, {"config.json": pointing()})
    assert_complete(loader.from_pretrained(REPO, cache_dir=tmp_path / "mine"))
    landed = {path.name for path in (tmp_path / "mine" / f"models--{BASE.replace('/', '--')}").rglob("*.*")}
    assert files.keys() <= landed
    usual = hub.home / "hub"
    assert str(usual) == constants.HF_HUB_CACHE
    assert not list(usual.glob("models--*"))


@every_loader
def test_files_are_fetched_again_when_asked(loader, hub: HubServer, files):
    hub.add(BASE, files)
    hub.add(REPO, {"config.json": pointing()})
    loader.from_pretrained(REPO)
    hub.log.clear()
    loader.from_pretrained(REPO)
    assert not hub.requests("GET", f"/{BASE}/resolve/")
    assert_complete(loader.from_pretrained(REPO, force_download=True))
    assert hub.requests("GET", f"/{BASE}/resolve/")


@every_loader
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_revision_is_of_the_config_and_never_of_the_weights(is_pinned, loader, hub: HubServer, files):
    """Both repositories have a branch of that name; that of the weights is not looked at, pinned or not."""
    commit = hub.add(BASE, files)
    hub.add(BASE, {"config.json": b"{}"}, revision="trained")
    if is_pinned:
        hub.add(BASE, {"config.json": b"{}"})
    link = {"repo_id": BASE} | ({"revision": commit} if is_pinned else {})
    hub.add(REPO, {"notes.txt": b"main has no config"})
    hub.add(REPO, {"config.json": pointing(weights_from=link)}, revision="trained")
    assert_complete(loader.from_pretrained(REPO, revision="trained"))


@every_loader
def test_a_subfolder_is_of_the_config_and_never_of_the_weights(loader, hub: HubServer, files):
    hub.add(BASE, files)
    hub.add(REPO, {"drafter/config.json": pointing()})
    assert_complete(loader.from_pretrained(REPO, subfolder="drafter"))


def test_a_config_made_from_a_dictionary_takes_the_options_too(hub: HubServer, files, monkeypatch):
    token = hub.add_user("yuhuili")
    hub.add(BASE, files, private=True)
    monkeypatch.delenv("HF_TOKEN")
    values = {"model_type": "eagle31", "weights_from": {"repo_id": BASE}, "target_model": "org/target"}
    with pytest.raises(OSError, match=BASE):
        Eagle31Config.from_dict(dict(values))
    assert_complete(Eagle31Config.from_dict(dict(values), token=token))


def test_options_end_with_their_call(hub: HubServer, files, monkeypatch, tmp_path):
    token = hub.add_user("yuhuili", "tester")
    hub.add(BASE, files, private=True)
    hub.add(REPO, {"config.json": pointing()})
    monkeypatch.delenv("HF_TOKEN")
    AutoConfig.from_pretrained(REPO, token=token, cache_dir=tmp_path)
    with pytest.raises(OSError, match=BASE):
        AutoConfig.from_pretrained(REPO)


@every_loader
def test_a_field_given_decides_what_the_weights_leave_open(loader, hub: HubServer):
    """SpecForge has written `norm_output: true` with two meanings."""
    files = original_release(build(num_attention_heads=2))
    stated = {"architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True}
    hub.add(BASE, files | {"config.json": json.dumps(json.loads(files["config.json"]) | stated).encode()})
    hub.add(REPO, {"config.json": pointing()})
    with pytest.raises(ValueError, match="Pass norm_output=False"):
        loader.from_pretrained(REPO)
    for norm_output in (False, True):
        loaded = loader.from_pretrained(REPO, norm_output=norm_output)
        assert getattr(loaded, "config", loaded).norm_output is norm_output
