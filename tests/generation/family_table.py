"""The matrix of `families.FAMILIES` as this machine and this version of transformers give it, as JSON.

    python tests/generation/family_table.py > docs/figures/families.json       # of which docs/tables.py makes a table

"same text": text and, for one prompt, logits are the target's own, with drafts accepted and rejected; in a batch every
sequence goes at its own pace. "chains": the same, but of chains where a tree was asked for. "in step": the same, but
all sequences accept as much as the one that accepts least, of chains. "attention": the implementations of the target
that give this row of the table. Families that do the same share a row.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # of conftest.py

import torch
import transformers
from families import (
    ATTENTIONS,
    BATCHES,
    DRAFTINGS,
    FAMILIES,
    LOSSLESS,
    NOT_DRAFTED,
    REFUSED,
    NotThereError,
    Outcome,
    build_target,
    decode,
)

from eagle31_hf.targets.probe import why_no_trees

BATCH_KEYS = [f"batch {count}" for count in BATCHES]


def row(name: str, attention: str) -> tuple[str, ...]:
    """A family's words, a cell a batch, and the reason of the first that is not "same text". Raises NotThereError."""
    outcomes = [[decode(name, attention, drafting, count) for drafting in DRAFTINGS] for count in BATCHES]
    words = [", ".join(outcome.word for outcome in cell) for cell in outcomes]
    reasons = [reason(name, attention, outcome) for cell in outcomes for outcome in cell if outcome.word != LOSSLESS]
    return (*words, next(iter(reasons), ""))


def reason(name: str, attention: str, outcome: Outcome) -> str:
    """In words that do not name the class, so that families share them."""
    target = build_target(name, attention)
    if outcome.word == REFUSED:
        return (
            outcome.reason.removeprefix("EAGLE drafting: ")
            .removeprefix(type(target).__name__)
            .partition(";")[0]
            .strip(" .")
        )
    if outcome.word == NOT_DRAFTED:
        return "padding is compressed, too"
    told = outcome.reason.partition(": chains instead of trees for ")[2].partition(": ")[2].rstrip(".")
    return told or outcome.reason or str(why_no_trees(target))


def rows(name: str) -> dict[tuple[str, ...], list[str]]:
    """By row, the attention implementations that give it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for attention in ATTENTIONS:
        try:
            found.setdefault(row(name, attention), []).append(attention)
        except NotThereError:
            continue
    return found


def grouped(names: list[str]) -> list[dict[str, str | list[str]]]:
    """The rows that families have, each with the families that have it."""
    members: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        for (*words, why), attentions in rows(name).items():
            members.setdefault((*words, ", ".join(attentions), why), []).append(name)
    keys = (*BATCH_KEYS, "attention", "why")
    return [{"families": group, **dict(zip(keys, cells, strict=True))} for cells, group in members.items()]


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.get_logger("eagle31_hf").setLevel("WARNING")
    environment = f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, greedy"
    found = {"environment": environment, "rows": grouped(list(FAMILIES))}
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
