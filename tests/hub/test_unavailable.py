"""Commands on a repository they cannot have: each reason in its own words, and nothing on stdout."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from eagle31_hf import Eagle31DrafterModel, demo
from eagle31_hf.cli import main

FILES = {path.name: path.read_bytes() for path in (demo.FOLDER / "eagle31").iterdir() if path.is_file()}
CARD = Path(__file__).parents[2] / "model_cards" / "Qwen3-8B-speculator.eagle3"
TARGET, DRAFTER = str(demo.FOLDER / "target"), str(demo.FOLDER / "eagle31")
COMMANDS = {
    "info": lambda name: ["info", name],
    "target": lambda name: ["generate", "--target", name, "--drafter", DRAFTER, "x"],
    "drafter": lambda name: ["generate", "--target", TARGET, "--drafter", name, "x"],
    "convert": lambda name: ["convert", name, "there"],
}
EVERY = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)


@pytest.fixture(autouse=True)
def repositories(hub, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    hub.add("tester/drafter", FILES)
    hub.add("other/gated", FILES, gated=True)
    hub.add("other/private", FILES, private=True)
    hub.add("tester/nothing", {"README.md": b"empty"})


def error_of(capsys, arguments: list[str], status: int) -> str:
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = [
        line
        for line in captured.err.splitlines()
        if line.startswith("eagle31: ") and ("error:" in line or "failed:" in line)
    ]
    assert not list(Path().iterdir())
    return line


@pytest.mark.parametrize("command", [COMMANDS["info"], COMMANDS["target"]], ids=["of a drafter", "of a target"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other/none", ("there is no such folder", "has no such repository", "hf auth login")),
        ("other/private", ("has no such repository, or hides it", "HF_TOKEN")),
        ("other/gated", ("is gated", "Ask for access at http")),
        ("tester/nothing", ("has no config.json at revision main",)),
        ("a/b/c", ("a/b/c: there is no such folder",)),
        ("/no/such/folder", ("/no/such/folder: there is no such folder",)),
        (__file__, ("is a file; expected the folder",)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else Path(value).name,
)
def test_what_cannot_be_had(capsys, command, name, words):
    line = error_of(capsys, command(name), 2)
    assert all(word in line for word in words), line


def test_a_revision_that_is_not_there(capsys):
    assert "has no revision 'v9'" in error_of(capsys, ["info", "tester/drafter", "--revision", "v9"], 2)


@EVERY
def test_no_network(capsys, hub, command, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client tries again and again, for 23 seconds
    hub.shutdown()
    hub.server_close()
    line = error_of(capsys, command("tester/drafter"), 1)
    assert "failed:" in line
    assert f"{hub.url} does not answer" in line


@EVERY
def test_offline_without_what_is_needed(capsys, monkeypatch, command):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = error_of(capsys, command("tester/drafter"), 1)
    assert "does not hold its config.json" in line
    assert "HF_HUB_OFFLINE" in line


def test_offline_with_what_is_needed(capsys, monkeypatch):
    """Headers read from the Hub are not kept; files that were downloaded to be used are."""
    assert main(["info", "tester/drafter"]) == 0
    Eagle31DrafterModel.from_pretrained("tester/drafter")
    online = capsys.readouterr().out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["info", "tester/drafter"]) == 0
    assert capsys.readouterr().out == online


def test_offline_with_only_a_part(capsys, monkeypatch, hub):
    Eagle31DrafterModel.from_pretrained("tester/drafter")
    for path in hub.home.rglob("model.safetensors"):
        path.unlink()
    capsys.readouterr()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "does not hold its model.safetensors" in error_of(capsys, ["info", "tester/drafter"], 1)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["/nope", "--repo-id", "tester/x"], 2, "/nope: is no folder; expected the folder of a native checkpoint"),
        ([__file__, "--repo-id", "tester/x"], 2, "is no folder; expected"),
        ([str(demo.FOLDER), "--repo-id", "tester/x"], 2, "holds no config.json"),
        ([DRAFTER, "--repo-id", "a b/c"], 2, "expected OWNER/NAME"),
        ([DRAFTER, "--repo-id", "other/private"], 1, "Nothing was committed"),
    ],
    ids=["no folder", "a file", "no config", "no name", "another's"],
)
def test_publish(capsys, arguments, status, words):
    assert words in error_of(capsys, ["publish", *arguments], status)


def test_publish_offline(capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline mode is enabled" in error_of(capsys, ["publish", DRAFTER, "--repo-id", "tester/x"], 1)


def test_publish_of_a_config_without_a_network(capsys, hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.shutdown()
    hub.server_close()
    line = error_of(capsys, ["publish", str(CARD), "--repo-id", "tester/x"], 1)
    assert "weights_from {'repo_id': 'RedHatAI/Qwen3-8B-speculator.eagle3'" in line
    assert f"{hub.url} does not answer: " in line
