"""README and docs: they link to what is there, the commands they name are understood, and their tables and picture show
the recorded figures."""

import ast
import importlib
import importlib.util
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from pages import DOCS, PAGES, README, ROOT, blocks

from eagle31_hf.cli import COMMANDS, parser
from eagle31_hf.training.losses import DISTANCES

MAX_README_LINES = 200
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
SCRIPTS = ("python", "bash", ".venv/bin/python")


def load(name: str):
    """A script of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(page: Path) -> list[list[str]]:
    """The words of every command line in a page's shell blocks, comments left out."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    split = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    return [words for words in split if words]


def anchors(page: Path) -> set[str]:
    """The fragments by which a page's headings are linked to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_read_in_five_minutes():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@each_page
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, fragment = link.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{link}: is not there"
        assert not fragment or fragment in anchors(linked), f"{link}: has no such heading"


@each_page
def test_commands_are_understood(page):
    for words in commands(page):
        program, *arguments = words
        if program.endswith("eagle31"):
            parser().parse_args(["cpu" if word == "cuda" else word for word in arguments])  # which may be missing here
        elif program in SCRIPTS and not arguments[0].startswith("-"):
            assert (ROOT / arguments[0]).is_file(), " ".join(words)
        elif "pytest" in arguments:
            assert all((ROOT / word).exists() for word in arguments if word.startswith("tests")), " ".join(words)


def test_files_that_ci_runs_are_there():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    files = re.findall(r"\btests/\S+", script)
    assert files, "no test file is named in .ci/run"
    assert not [name for name in files if not (ROOT / name).is_file()]


@each_page
def test_what_python_blocks_import_is_there(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert all(importlib.util.find_spec(f"{node.module}.{name}") for name in missing)  # modules of it


def test_readme_names_every_command():
    table = README.read_text(encoding="utf-8").partition("## Commands")[2].partition("\n## ")[0]
    assert set(re.findall(r"`eagle31 ([\w-]+)", table)) == COMMANDS.keys()


def test_every_loss_is_described():
    table = (DOCS / "training.md").read_text(encoding="utf-8").partition("## Losses")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == DISTANCES.keys()


def test_tables_show_what_is_recorded(capsys):
    assert load("tables").main(["--check"]) == 0, f"{capsys.readouterr().out}run python docs/tables.py"


def words_of(picture: Path) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_shows_what_is_recorded(tmp_path):
    pytest.importorskip("matplotlib")
    load("speedup").draw(load("tables").read(DOCS / "figures" / "demo.json"), tmp_path / "speedup.svg")
    assert words_of(DOCS / "speedup.svg") == words_of(tmp_path / "speedup.svg"), "run python docs/speedup.py"
