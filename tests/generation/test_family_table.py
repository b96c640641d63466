"""The table of families in the docs says of each family what the tests expect of it."""

import json
from pathlib import Path

import pytest
from families import BATCHES, DRAFTINGS, FAMILIES, REFUSED

RECORD = Path(__file__).parents[2] / "docs" / "figures" / "families.json"
ROWS = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_in_the_table_as_expected(name):
    rows = [row for row in ROWS if name in row["families"]]
    assert rows, f"{name} is not in the table; run python tests/generation/family_table.py"
    for count in BATCHES:
        words = ", ".join(FAMILIES[name].expected(drafting, count) for drafting in DRAFTINGS)
        found = {row[f"batch {count}"] for row in rows}
        assert found == {words} or (FAMILIES[name].bug is not None and found == {", ".join([REFUSED] * len(DRAFTINGS))})


def test_the_table_has_no_other_families():
    assert {name for row in ROWS for name in row["families"]} == set(FAMILIES)
