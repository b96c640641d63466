"""Figures are kept as they come: a stopped run goes on, and what is not the same is not mixed."""

import json
import math
import sys

import pytest
from programs import forked

from eagle31_hf.reports.journal import FILE, open_journal

FACTS = {"target": "a", "depth": 4}


def measured(folder, names, facts=FACTS, resume=False):
    """Measures figures by their names; returns those that had to be measured, and all that came back."""
    new = []

    def measure(name):
        new.append(name)
        return {"name": name}

    with open_journal(folder, facts, resume) as journal:
        return new, [journal.once(name, lambda name=name: measure(name)) for name in names]


def test_what_was_measured_is_not_measured_again(tmp_path):
    assert measured(tmp_path / "new", "ab")[0] == ["a", "b"]
    new, found = measured(tmp_path / "new", "abc", resume=True)
    assert new == ["c"]
    assert found == [{"name": name} for name in "abc"]


def test_figures_are_on_the_disk_before_the_next_is_measured(tmp_path):
    def killed():
        lines = (tmp_path / FILE).read_text().splitlines()
        assert json.loads(lines[1]) == {"a": 1}
        raise KeyboardInterrupt

    with open_journal(tmp_path, FACTS, False) as journal:
        journal.once("a", lambda: 1)
        with pytest.raises(KeyboardInterrupt):
            journal.once("b", killed)
    assert measured(tmp_path, "ab", resume=True) == (["b"], [1, {"name": "b"}])


def test_figures_that_are_not_finite_are_kept(tmp_path):
    """States may overflow in fp16: what was measured beside them is not to be lost."""
    with open_journal(tmp_path, FACTS, False) as journal:
        journal.once("a", lambda: {"state_norm": math.inf})
    with open_journal(tmp_path, FACTS, True) as journal:
        assert journal.once("a", pytest.fail) == {"state_norm": math.inf}


@pytest.mark.parametrize("cut", [1, 5, 13])
def test_a_line_that_was_cut_off_is_measured_again(tmp_path, cut):
    measured(tmp_path, "ab")
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[:-cut])
    assert measured(tmp_path, "abc", resume=True)[0] == ["b", "c"]
    assert measured(tmp_path, "abc", resume=True)[0] == []


def test_other_facts_are_refused_and_named(tmp_path):
    measured(tmp_path, "a")
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ValueError, match=r"other settings \(depth 4, now 5\); name another folder"):
        measured(tmp_path, "a", FACTS | {"depth": 5}, resume=True)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_report_is_not_overwritten_unasked(tmp_path):
    measured(tmp_path, "a")
    with pytest.raises(ValueError, match=r"holds a report already; .*--resume"):
        measured(tmp_path, "a")


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(ValueError, match="holds something else than a report"):
        measured(tmp_path, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        measured(tmp_path / "thesis.tex", "a")


@pytest.mark.parametrize("text", ["no JSON", "[1]", "null", "{}\n123"])
def test_a_journal_that_is_none_is_refused(tmp_path, text):
    (tmp_path / FILE).write_text(f"{text}\n")
    with pytest.raises(ValueError, match="is no journal of figures"):
        measured(tmp_path, "a", resume=True)


def refused_to_another(folder):
    with pytest.raises(ValueError, match="another process is measuring into it"):
        measured(folder, "a", resume=True)


@pytest.mark.skipif(sys.platform == "win32", reason="needs flock")
def test_two_processes_do_not_share_a_journal(tmp_path):
    with open_journal(tmp_path, FACTS, False):
        forked(refused_to_another, tmp_path)
    assert measured(tmp_path, "a", resume=True)[0] == ["a"]
