"""The Python blocks of README and docs, run as they stand, but for fewer tokens, a page's one after another.

The models that they name are folders here, the demo pair, which `from_pretrained` finds below the working directory
before it asks the Hub; what a reader has to bring (rows to train on, a running server) is there before.
"""

from pathlib import Path

import pytest
import torch
from pages import DOCS, PAGES, README, blocks
from serving.servers import Server

from eagle31_hf import demo

WITH_BLOCKS = [page for page in PAGES if blocks(page, "python")]
SERVED = DOCS / "chat-and-serve.md"
RUN_HERE = [README, DOCS / "generating.md"]  # other pages have blocks of these
FEWER = {
    "max_new_tokens=256": "max_new_tokens=12",
    "(tokenizer, 12)": "(tokenizer, 1)",
    '_tokens": 96': '_tokens": 12',
    'strategy="epoch", save': 'strategy="epoch", num_train_epochs=1, eval_max_new_tokens=12, save',
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
MODELS = {"Qwen/Qwen3-8B": "target", "path/or/repo-of-a-drafter": "eagle31"}


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
    return {"target": target, "tokenizer": tokenizer, "train_rows": rows[2:], "held_out_rows": rows[:2]}


def run(page: Path, names: dict, replaced: dict[str, str]) -> dict:
    """Runs a page's blocks one after another; what stands in a block may be `replaced`."""
    for block in blocks(page, "python"):
        for old, new in replaced.items():
            block = block.replace(old, new)
        exec(compile(block, str(page), "exec"), names)
    return names


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_they_run(page, models, capsys):
    names = run(page, brought() | {"drafter": demo.load_drafter("eagle31")}, FEWER)
    printed = capsys.readouterr().out
    if page == README:
        assert "mean accepted length" in printed
        assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
        assert Path("my-drafter").is_dir()


def test_no_block_is_left_out():
    here = [block for page in RUN_HERE for block in blocks(page, "python")]
    assert [page.name for page in WITH_BLOCKS if not {*blocks(page, "python")} <= {*here}] == [SERVED.name]
    assert all(any(words in block for block in here) for words in FEWER)


def test_a_client_talks_to_the_server(models, capsys):
    pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    served = Server(Path("Qwen/Qwen3-8B").absolute())
    try:
        run(SERVED, {}, {"http://localhost:8000": f"http://localhost:{served.port}", "Qwen/Qwen3-8B": served.target})
    finally:
        served.end()
    assert len(capsys.readouterr().out) > 20
