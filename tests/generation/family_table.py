"""The matrix of `families.FAMILIES` as this machine and this version of transformers give it, as a Markdown table.

    python tests/generation/family_table.py [--grouped]

"same": text and logits are the target's own, with drafts accepted and rejected. "chains": the same, but of chains where a tree was asked
for. "-": transformers has not this attention implementation for the family. `--grouped` gives families with equal rows one row.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # of conftest.py

import torch
import transformers
from families import ATTENTIONS, CHAINS, DRAFTINGS, FAMILIES, LOSSLESS, REFUSED, NotThereError, build_target, decode

COLUMNS = [(drafting, attention) for drafting in DRAFTINGS for attention in ATTENTIONS]


def cell(name: str, drafting: str, attention: str) -> str:
    try:
        outcome = decode(name, attention, drafting)
    except NotThereError:
        return "-"
    except (RuntimeError, KeyError) as failure:  # a known bug
        return f"**{type(failure).__name__}**"
    if outcome.word == LOSSLESS:
        return "same"
    if outcome.word == CHAINS:
        return f"chains: {outcome.reason.partition(': chains instead of trees for ')[2].partition(': ')[2].rstrip('.')}"
    if outcome.word == REFUSED:
        class_name = type(build_target(name, attention)).__name__
        return f"refused: {outcome.reason.removeprefix('EAGLE drafting: ').removeprefix(class_name).partition(';')[0].strip(' .')}"
    return f"**{outcome.word}**"


def table(names: list[str], grouped: bool) -> list[str]:
    rows: dict[tuple, list[str]] = {}
    for name in names:
        cells = tuple(cell(name, *column) for column in COLUMNS)
        rows.setdefault(cells if grouped else (*cells, name), []).append(name)
    head = ["family", *(" ".join(column) for column in COLUMNS)]
    lines = [head, ["---"] * len(head), *(["; ".join(members), *cells[: len(COLUMNS)]] for cells, members in rows.items())]
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grouped", action="store_true", help="one row for all families that do the same")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.get_logger("eagle31_hf").setLevel("WARNING")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, fp32, greedy, {len(FAMILIES)} families\n")
    print("\n".join(table(list(FAMILIES), arguments.grouped)))


if __name__ == "__main__":
    main()
