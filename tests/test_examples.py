"""The examples run as they are, as small as their options make them.

Those that learn from the texts of `search_material.py` run in `training/test_search_recipe.py`, on fewer and shorter
ones.
"""

import gc
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from programs import forkserver

EXAMPLES = Path(__file__).parent.parent / "examples"
PAIR = EXAMPLES.parent / "eagle31_hf" / "demo"
ONE_PROMPT = "--prompts 1 --max-new-tokens 3"
ONE_STEP = "--texts 2 --left-out 1 --steps 1"
NEW_TARGET = "--files 12 --held-out 1 --steps 1 --output {}/it"
# example -> its options, where {} is an empty folder, and what it prints
RUNS = {
    "generate.py": ("--max-new-tokens 16", ["same as the target alone: True", "mean accepted length"]),
    "compare_drafters.py": (f"{ONE_PROMPT} --depth 3", ["768, window of 192           eagle3   accepted length"]),
    "upgrade_demo_drafter.py": (f"{ONE_PROMPT} --depth 3", ["fused state moved by", "upgraded             accepted"]),
    "train.py": (
        "--texts 2 --length 32 --held-out 1 --epochs 1 --output {}/it",
        ["tokens a target forward on examples held out"],
    ),
    "chat_drafter.py": (
        f"--target {PAIR / 'target'} --work {{}} --chats 6 --max-new-tokens 40 --draft-vocab-size 500 --epochs 1",
        ["/eagle31, after ", "/eagle3, after "],
    ),
    "adapted_target.py": (
        f"--target {PAIR / 'target'} --drafter {PAIR / 'eagle31'} --steps 1 --files 4",
        ["the target ", "with an adapter", "fc fitted anew"],
    ),
    "train_demo_drafters.py": (
        "--texts 2 --length 32 --held-out 1 --epochs 1 --work {} --output {}/pair",
        ["eagle31 {", "eagle3 {", '"accepted_length": '],
    ),
    "train_demo_target.py": (NEW_TARGET, ['"held_out_loss": ']),
    "train_second_target.py": (NEW_TARGET, ['"held_out_loss": ']),
    "paper_tables.py": (
        f"{ONE_STEP} --prompts 1 --max-new-tokens 6 --work {{}} --output {{}}/results",
        [f"## {letter}: " for letter in "ABCDEFG"],
    ),
}
RUN_ELSEWHERE = {"search_recipe.py", "going_on.py", "transfer_rate.py"}


LONGEST = 600  # seconds


def run_as_program(path: Path, options: list[str], output: Path) -> None:
    """Runs a file as `python` does, with its output in a file."""
    gc.freeze()  # what the process was forked with, which every training would look through
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv, sys.path[0] = [str(path), *options], str(path.parent)
    runpy.run_path(str(path), run_name="__main__")


def run_example(folder: Path, name: str, options: str) -> str:
    output = folder / f"{name}.txt"
    process = forkserver().Process(target=run_as_program, args=(EXAMPLES / name, options.split(), output))
    process.start()
    process.join(LONGEST)
    process.kill()
    assert process.exitcode == 0, output.read_text()
    return output.read_text()


@pytest.mark.parametrize("name", RUNS)
def test_example(name, tmp_path):
    options, said = RUNS[name]
    found = run_example(tmp_path, name, options.replace("{}", str(tmp_path)))
    assert [words for words in said if words not in found] == []


def test_gpu(tmp_path):
    found = run_example(tmp_path, "gpu.py", "--max-new-tokens 24 --calls 2")
    assert found.count("same text: True") == 4  # captured and eagerly, twice
    assert "rounds on cpu: eager" in found or "CUDA graphs" in found


def test_chat_figures(tmp_path):
    """Of the demo pair, whose questions are code; the second run goes on from the first."""
    demo, questions = EXAMPLES.parent / "eagle31_hf" / "demo", tmp_path / "alpaca"
    questions.mkdir()
    lines = [json.dumps({"question_id": n, "turns": [text]}) for n, text in enumerate(("def f(x):",))]
    (questions / "question.jsonl").write_text("\n".join(lines))
    pair = f"--target {demo / 'target'} --eagle31 {demo / 'eagle31'} --eagle3 {demo / 'eagle3'} --questions {tmp_path}"
    sizes = "--sets alpaca --dtypes float32 --num-prompts 1 --max-new-tokens 8"
    for _ in range(2):
        work = f"--work {tmp_path / 'work'} --output {tmp_path / 'chat.json'}"
        run_example(tmp_path, "chat_figures.py", f"{pair} {sizes} {work}")
    (found,) = json.loads((tmp_path / "chat.json").read_text()).values()
    for figures in found["drafters"].values():
        assert {"2", "3", "5", "7, tree 24", "auto"} == figures["ways"].keys()
        assert all(way["same_text"] == way["prompts"] == 1 for way in figures["ways"].values())
    assert found["others"]["the target alone"] > 0


def test_no_example_is_left_out():
    commands = {
        path.name
        for path in EXAMPLES.glob("*.py")
        if "__main__" in path.read_text() or "\nparser = " in path.read_text()
    }
    assert commands == {*RUNS, *RUN_ELSEWHERE, "gpu.py", "chat_figures.py"}
