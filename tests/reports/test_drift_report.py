"""The drift report: its figures against counting by hand, and the same ones in JSON, Markdown, terminal and page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from reports.studies import DEPTH, NAMES, SETTINGS, study_of

from eagle31_hf.diagnostics.drift import drift_of
from eagle31_hf.markdown import inert
from eagle31_hf.reports import figures, plots
from eagle31_hf.reports.document import GOOD, NOTE, SCHEMA, WARNING, Chart, Column, Section, Series
from eagle31_hf.reports.drift_report import drift_report, findings_of
from eagle31_hf.reports.drift_study import PLAIN, Context, default_lengths, remedies_of
from eagle31_hf.reports.journal import Journal
from eagle31_hf.reports.writing import terminal, write_report


class Outline(HTMLParser):
    """What a page consists of: its tags with attributes, the cells of its tables, and all of its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        self.text += data
        if self.tags and self.tags[-1][0] == "td":
            self.cells[-1] += data.strip()

    def all(self, attribute):
        return [attributes[attribute] for _, attributes in self.tags if attribute in attributes]


@pytest.fixture(scope="module")
def journal():
    return Journal(None, {})


@pytest.fixture(scope="module")
def measured(tmp_path_factory, journal):
    return study_of(tmp_path_factory.mktemp("study"), journal)


@pytest.fixture(scope="module")
def report(measured):
    return drift_report(measured, DEPTH, {"target": "tiny", "prompts": "4"})


@pytest.fixture(scope="module")
def written(report, tmp_path_factory):
    """The folder of the report's files."""
    folder = tmp_path_factory.mktemp("written")
    write_report(folder, report, ", ".join(NAMES))
    return folder


@pytest.fixture(scope="module")
def outline(written):
    return Outline((written / "report.html").read_text())


def row(tokens, rounds, accepted, drafted):
    return {"tokens": tokens, "rounds": rounds, "accepted": accepted, "drafted": drafted}


def test_lengths_are_with_the_bonus_token_and_drafts_without():
    rows = [row(10, 4, [4, 2], [4, 4]), row(2, 2, [0, 0], [2, 1])]
    assert figures.accepted_length(rows).value == 2.0
    assert figures.accepted_drafts(rows).value == 1.0
    assert [one.value for one in figures.acceptance_by_depth(rows, 3)] == [pytest.approx(4 / 6), 0.4, None]
    assert figures.kept(rows[1:], rows[:1]).value == 0.0
    assert figures.kept(rows[:1], rows[1:]).value is None


def test_intervals_are_those_of_prompts():
    alike = figures.accepted_length([row(6, 3, [3], [3])] * 4)
    assert (alike.value, alike.low, alike.high) == (2.0, 2.0, 2.0)  # nothing to doubt
    alone = figures.accepted_length([row(6, 3, [3], [3])])
    assert (alone.value, alone.low, alone.shown) == (2.0, None, "2.00")  # says nothing about others
    low, high = (
        getattr(figures.accepted_length([row(3, 3, [0], [3]), row(9, 3, [3], [3])]), end) for end in ("low", "high")
    )
    assert (low, high) == (1.0, 3.0)


def test_figures_of_other_prompts_are_drawn_apart():
    """Few prompts beside many that are all alike vary as the few do, however many the others are; one says nothing."""
    few, many = ([{"accepted": [count], "rounds": 10} for count in counts] for counts in ((10, 30, 20), [10] * 60))
    alone, beside = figures.accepted_drafts(few), figures.kept(few, many, is_same=False)
    assert (beside.value, beside.low, beside.high) == pytest.approx((alone.value, alone.low, alone.high))
    assert figures.kept(few[:1], many, is_same=False) == figures.Figure(1.0, None, None)
    apart, together = (figures.kept(few, few, is_same=same) for same in (False, True))
    assert together.low == together.high == 1
    assert apart.low < 0.9
    assert apart.high > 1.1


def test_figures_are_those_of_the_prompts_together(measured, report):
    for one in measured:
        found = report.figures[one.label]
        drift = drift_of(one.plain)
        assert found["drift"]["states"] == drift.states
        assert found["drift"]["growth"] == drift.states[-1] / drift.states[0]
        plain = found["acceptance"][PLAIN]
        tokens, rounds = (sum(row[name] for row in one.plain) for name in ("tokens", "rounds"))
        assert plain["accepted_length"].value == pytest.approx(tokens / rounds)
        assert plain["prompts"] == 4
        conditions = {PLAIN, "noise 0.5 on the state", "noise 1 on the embedding", "24 tokens", "40 tokens"}
        assert conditions <= set(found["acceptance"])


def test_the_report_reads_the_same_in_every_form(report, outline, written):
    """Every cell of every table, as it stands in the JSON and its column's format, is in all of them."""
    found = json.loads((written / "report.json").read_text())
    assert found["schema"] == SCHEMA
    texts = {"markdown": (written / "report.md").read_text(), "terminal": terminal(report)}
    cells = []
    for section in found["sections"]:
        for table in section["tables"]:
            assert table["note"] in texts["terminal"]
            assert inert(table["note"]) in texts["markdown"]
            columns = [Column(**column) for column in table["columns"]]
            for values in table["rows"]:
                shown = [column.shown(value) for column, value in zip(columns, values, strict=True)]
                cells += shown
                assert "| " + " | ".join(map(inert, shown)) + " |" in texts["markdown"]
                line = re.compile(r"^" + r" +".join(re.escape(cell) if cell else "" for cell in shown) + "$", re.M)
                assert line.search(texts["terminal"]), shown
    assert outline.cells == cells
    for finding in found["findings"]:
        assert finding["text"] in texts["terminal"]
        assert inert(finding["text"]) in texts["markdown"]
        assert finding["text"] in " ".join(outline.text.split())


def test_the_page_needs_nothing_but_itself(written, outline):
    links = outline.all("href") + outline.all("src") + outline.all("xlink:href")
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(
        r"url\((?!#)|@import|fetch\(|https?://(?!www\.w3\.org|matplotlib\.org|purl\.org|creativecommons)",
        (written / "report.html").read_text(),
    )


def test_the_page_has_every_name_once_and_every_target_of_a_link(outline):
    names = outline.all("id")
    assert len(names) == len(set(names))
    used = [link[1:] for link in outline.all("href") + outline.all("xlink:href") if link.startswith("#")]
    assert set(used) <= set(names)
    labelled = [name for each in outline.all("aria-labelledby") for name in each.split()]
    assert set(labelled) <= set(names)


def test_the_page_has_a_picture_with_a_name_for_every_chart(report, outline):
    charts = [chart for section in report.sections for chart in (*section.charts, *section.heat_maps)]
    drawn = [attributes for tag, attributes in outline.tags if tag == "svg"]
    assert len(drawn) == len(charts) > 8
    for chart, attributes in zip(charts, drawn, strict=True):
        assert attributes["role"] == "img"
        assert attributes["aria-label"].startswith(chart.title)
        assert attributes["id"].startswith("c") if "id" in attributes else True


def test_names_of_drafters_are_no_markup(outline):
    assert "mine" not in {tag for tag, _ in outline.tags}
    assert NAMES[0] in outline.text


def test_the_same_figures_give_the_same_bytes(report, tmp_path):
    short = replace(report, sections=report.sections[:1])
    for folder in ("a", "b"):
        write_report(tmp_path / folder, short, "names")
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert [file.suffix for file in files] == [".png", ".svg", ".html", ".json", ".md"]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_pictures_differ_in_more_than_colour(report):
    """Lines by their marks, parts of a whole by hatching: so they can be told apart in grey."""
    chart = next(chart for section in report.sections for chart in section.charts if not chart.is_stacked)
    drawn = plots.files_of(chart, ("svg",))["svg"].decode()
    assert len(set(plots.MARKERS)) == len(plots.MARKERS) == len(plots.COLOURS) == len(set(plots.HATCHES))
    assert all(
        label in drawn
        for label in (
            series.label.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for series in chart.series
        )
    )


def test_labels_are_shown_as_they_are(tmp_path, report):
    """Dollars are no formula, an underscore hides nothing, and names that differ in marks alone are other files."""
    labels = ["_hid", "m$\\foo$", "a.b", "a-b"]
    chart = Chart("by depth", "x", "y", [1.0, 2.0], [Series(label, [0.0, 1.0]) for label in labels])
    drawn = plots.files_of(chart, ("svg",))["svg"].decode()
    assert all(label in drawn for label in labels)
    charts = [replace(chart, title=title) for title in ("a.b", "a-b", "x" * 400)]
    written = write_report(tmp_path, replace(report, sections=[Section("s", "", charts=charts)]), "names")
    assert len({path.name for path in written}) == len(written) == 3 + 2 * len(charts)
    assert all(path.is_file() for path in written)


def test_a_stopped_study_goes_on_and_says_the_same(measured, journal, tmp_path):
    """From what the journal has of half of it."""
    resumed = Journal(None, dict(list(journal.items())[: len(journal) // 2]))
    found = study_of(tmp_path, resumed)
    assert [*resumed] == [*journal]
    assert [vars(one)["rows"] for one in found] == [vars(one)["rows"] for one in measured]
    assert [one.contexts for one in found] == [one.contexts for one in measured]


def test_without_interventions_and_lengths_there_are_no_such_parts(tmp_path):
    plain = study_of(tmp_path, Journal(None, {}), SETTINGS | {"lengths": (), "has_interventions": False})
    titles = [section.title for section in drift_report(plain, DEPTH, {}).sections]
    assert titles == ["Acceptance", "States", "Attention"]


def test_findings_say_what_is_wrong_and_what_to_do(measured):
    one = replace(measured[1], rows={PLAIN: [grown(row, 2.0) for row in measured[1].plain]})
    texts = {finding.level: finding for finding in findings_of(one, DEPTH) if "state" in finding.text}
    assert f"grows 2.00x over {DEPTH} steps" in texts[WARNING].text
    assert "eagle31 upgrade" in texts[WARNING].remedy
    post_norm = replace(measured[0], rows={PLAIN: [grown(row, 2.0) for row in measured[0].plain]})
    assert not next(finding for finding in findings_of(post_norm, DEPTH) if finding.level == WARNING).remedy
    steady = replace(measured[1], rows={PLAIN: [grown(row, 1.0) for row in measured[1].plain]})
    assert any(
        finding.level == GOOD and "does not grow (1.00x" in finding.text for finding in findings_of(steady, DEPTH)
    )


def grown(row, factor):
    first = row["states"][0]
    return {**row, "states": [first * factor ** (k / (DEPTH - 1)) for k in range(DEPTH)]}


def test_findings_name_the_best_remedy_in_long_contexts(measured):
    def rows(accepted):
        return [row(10 + accepted + i, 10, [accepted + i], [10]) for i in range(4)]

    def contexts(plain, **remedies):
        accepted = {"": plain} | {name.replace("_", " "): count for name, count in remedies.items()}
        return [Context(40, remedy, rows(count), rows(6)) for remedy, count in accepted.items()]

    one = replace(measured[0], contexts=contexts(2, window_of_8=4, rope=3))
    finding = next(finding for finding in findings_of(one, DEPTH) if "contexts of 40 tokens" in finding.text)
    assert finding.level == WARNING
    assert "set a window of 8: +57% here" in finding.remedy
    fine = replace(one, contexts=contexts(6))
    assert any(finding.level == GOOD and "contexts" in finding.text for finding in findings_of(fine, DEPTH))
    unhelped = replace(one, contexts=contexts(2, window_of_8=2))
    assert any("neither windows nor slower rope helped" in finding.remedy for finding in findings_of(unhelped, DEPTH))


def test_findings_say_how_deep_to_draft(measured):
    rows = [{**row, "drafted": [20] * DEPTH, "accepted": [10, 1, 0]} for row in measured[0].plain]
    one = replace(measured[0], rows={PLAIN: rows})
    finding = next(finding for finding in findings_of(one, DEPTH) if "fewer than" in finding.text)
    assert (finding.level, "accepts depth 2 or more" in finding.text) == (NOTE, True)
    assert "num_assistant_tokens=1" in finding.remedy


def test_remedies_fit_the_drafter(measured):
    config = measured[0].config
    assert list(remedies_of(config, 40, (24, 40))) == ["window of 10", "window of 24", "rope 2 times as slow"]
    config = replace_rope(config)
    assert list(remedies_of(config, 40, (40,))) == ["window of 10"]


def replace_rope(config):
    copied = type(config)(**config.to_dict())
    copied.rope_parameters = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    return copied


def test_lengths_by_default_grow_up_to_the_context():
    assert default_lengths(100, 5000, 96) == (256, 1024, 4096)
    assert default_lengths(300, 1024, 96) == ()
    assert torch.tensor(default_lengths(10, 2**31 - 1, 96)).max() == 256 * 4**7
