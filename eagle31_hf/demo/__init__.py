"""The demo: a small target trained on the source of Python's standard library, and an EAGLE 3.1 and an EAGLE 3 drafter
for it."""

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..modeling import Eagle31DrafterModel

FOLDER = Path(__file__).parent
DRAFTERS = ("eagle31", "eagle3")
# Never trained on, by the target or by a drafter; the demo's prompts and every reported acceptance come from these.
HELD_OUT = (
    "calendar.py", "configparser.py", "csv.py", "fractions.py", "ftplib.py", "graphlib.py",
    "heapq.py", "queue.py", "sched.py", "shelve.py", "statistics.py", "textwrap.py",
)  # fmt: skip


def stdlib() -> Path:
    """Returns the folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def held_out_file(name: str) -> str:
    """Returns the text of one of `HELD_OUT`. Raises FileNotFoundError for an interpreter without the source of its
    library."""
    return (stdlib() / name).read_text(encoding="utf-8")


def load_target(device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the demo's target in fp32, and its tokenizer."""
    target: Any = AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32)
    return target.to(device).eval(), AutoTokenizer.from_pretrained(FOLDER / "target")


def load_drafter(name: str, device: str = "cpu") -> Eagle31DrafterModel:
    """Loads one of `DRAFTERS` in fp32."""
    drafter: Any = Eagle31DrafterModel.from_pretrained(FOLDER / name, dtype=torch.float32)
    return drafter.to(device).eval()


def prompts(tokenizer: PreTrainedTokenizerBase, count: int, num_tokens: int = 96) -> list[Tensor]:
    """Returns `count` prompts (1, num_tokens) from the files held out of training.

    The files are used in turn. The first prompt of a file begins a third into it, each later one where the one before
    ended, or, past the end, further to the front.
    """
    chosen = []
    for i in range(count):
        ids = tokenizer(held_out_file(HELD_OUT[i % len(HELD_OUT)]), return_tensors="pt")["input_ids"]
        third = ids.shape[1] // 3
        start = third + i // len(HELD_OUT) * num_tokens % max(1, 2 * third - num_tokens)
        chosen.append(ids[:, start : start + num_tokens])
    return chosen
