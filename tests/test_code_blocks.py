"""The Python blocks of README and docs, run as they stand, a page's one after another.

The models that they name are folders here, the demo pair, which `from_pretrained` finds below the working directory
before it asks the Hub; what a reader has to bring (rows to train on, a running server) is there before.
"""

import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pages import PAGES, README, blocks

from eagle31_hf import demo
from eagle31_hf.training.packing import Examples

WITH_BLOCKS = [page for page in PAGES if blocks(page, "python")]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
MODELS = {"Qwen/Qwen3-8B": "target", "path/or/repo-of-a-drafter": "eagle31"}
LONGEST = 120  # seconds that the server may take to start on a machine that does much else
ADDRESS = "http://localhost:8000"


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The working directory, with the models that the blocks name; the target has a chat template."""
    monkeypatch.chdir(tmp_path)
    target, tokenizer = demo.load_target()
    for name, folder in MODELS.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        if folder != "target":
            Path(name).symlink_to(demo.FOLDER / folder)
    tokenizer.chat_template = TEMPLATE
    target.save_pretrained("Qwen/Qwen3-8B")
    tokenizer.save_pretrained("Qwen/Qwen3-8B")


def brought() -> dict:
    """What readers of a block about training have: the target, its tokenizer, and rows of their own."""
    target, tokenizer = demo.load_target()
    answers = torch.arange(48) >= 24
    rows = [{"input_ids": prompt[0], "answers": answers} for prompt in demo.prompts(tokenizer, 6, 48)]
    held_out, train = Examples.from_iterable(rows[:2]), Examples.from_iterable(rows[2:])
    return {"target": target, "tokenizer": tokenizer, "train_rows": train, "held_out_rows": held_out}


@contextmanager
def server(port):
    """`eagle31 serve` for the pair, as the page has it."""
    command = [sys.executable, "-m", "eagle31_hf", "serve", "--target", "Qwen/Qwen3-8B", "--port", str(port)]
    with open("server.log", "w") as log:
        process = subprocess.Popen(
            [*command, "--drafter", "path/or/repo-of-a-drafter"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + LONGEST
        while not is_up(port):
            assert process.poll() is None, Path("server.log").read_text()
            assert time.monotonic() < until, Path("server.log").read_text()
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(LONGEST)


def is_up(port):
    try:
        return urllib.request.urlopen(f"http://localhost:{port}/health").status == 200
    except OSError:
        return False


def run(page: Path, names: dict, **replaced: str) -> dict:
    """Runs a page's blocks one after another; what stands in a block may be `replaced`."""
    for block in blocks(page, "python"):
        for old, new in replaced.items():
            block = block.replace(old, new)
        exec(compile(block, str(page), "exec"), names)
    return names


@pytest.mark.parametrize(
    "page", [page for page in WITH_BLOCKS if page.name != "chat-and-serve.md"], ids=lambda page: page.name
)
def test_they_run(page, models, capsys):
    names = run(page, brought() | {"drafter": demo.load_drafter("eagle31")})
    printed = capsys.readouterr().out
    if page == README:
        assert "mean accepted length" in printed
        assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    if "my-drafter" in page.read_text() and page.name in ("README.md", "training.md"):
        assert Path("my-drafter").is_dir()


def test_a_client_talks_to_the_server(models, capsys):
    pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    [page] = [page for page in WITH_BLOCKS if page.name == "chat-and-serve.md"]
    with socket.socket() as tried:
        tried.bind(("localhost", 0))
        port = tried.getsockname()[1]
    assert all(ADDRESS in block for block in blocks(page, "python"))
    with server(port):
        run(page, {}, **{ADDRESS: f"http://localhost:{port}"})
    assert len(capsys.readouterr().out) > 20
