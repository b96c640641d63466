"""Names of strangers in reports: words and no more in Markdown, on the page and in pictures, wherever they stand."""

from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hostile import NAMES, bare_links, elements, html_of, random_names

from eagle31_hf.hub import REPORT_BEGINS, REPORT_ENDS, with_report
from eagle31_hf.reports import plots
from eagle31_hf.reports.document import (
    NOTE,
    WARNING,
    Chart,
    Column,
    Finding,
    Generation,
    HeatMap,
    Report,
    Section,
    Series,
    Table,
)
from eagle31_hf.reports.writing import markdown, page, write_report

OURS = {"kind", "level", "format", "x_label", "y_label"}  # fields whose text is never another's
ROUND = {"accepted": ["w"], "bonus": "w", "drafts": [{"text": "w", "depth": 1, "is_accepted": True}]}
CHART = Chart("w", "x", "y", [1.0, 2.0], [Series("w", [0.0, 1.0]), Series("w", [1.0, 0.5])], note="w")
STACK = replace(CHART, is_stacked=True)
MAP = HeatMap("w", "x", "y", ["1", "2"], ["1"], [[0.5, None]], "w")
REPORT = Report(
    kind="drift",
    title="w",
    findings=[Finding(WARNING, "w: from `code` on", "Do `this`, w."), Finding(NOTE, "w")],
    sections=[
        Section(
            "w",
            "w",
            [Table("w", [Column("w"), Column("w", ".2f")], [["w", 1.0], ["w", None]], "w")],
            [CHART, STACK],
            [MAP],
            [Generation("w", "w", [ROUND])],
        )
    ],
    facts={"w": "w", "a list": ["w"]},
    figures={},
)


def named(value, name, where=""):
    """A report in which every `w` of others is a name."""
    if isinstance(value, str):
        return value if where in OURS else value.replace("w", name)
    if isinstance(value, list):
        return [named(each, name) for each in value]
    if isinstance(value, dict):
        return {named(key, name): named(each, name) for key, each in value.items()}
    if is_dataclass(value):
        return replace(
            value, **{each.name: named(getattr(value, each.name), name, each.name) for each in fields(value)}
        )
    return value


class Page(HTMLParser):
    """The elements of a page, but those of pictures and code, with the names of their attributes; where links lead."""

    def __init__(self, text):
        super().__init__()
        self.found, self.links, self.in_picture = [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.in_picture += tag == "svg"
        if not self.in_picture and tag != "code":
            self.found.append((tag, [name for name, _ in attributes]))
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href")]
        assert not [name for name, _ in attributes if name.startswith("on")]
        assert not (self.in_picture and tag in ("script", "a", "img", "foreignobject"))

    def handle_endtag(self, tag):
        self.in_picture -= tag == "svg"


@pytest.mark.parametrize("name", NAMES)
def test_in_markdown_names_are_words_and_no_more(name):
    shown = html_of(markdown(named(REPORT, name)))
    assert elements(shown) == elements(html_of(markdown(named(REPORT, "plain"))))
    assert not bare_links(shown)


def test_in_markdown_names_at_random_are_words_and_no_more():
    plain = elements(html_of(markdown(named(REPORT, "plain"))))
    for name in random_names(200, seed=3):
        shown = html_of(markdown(named(REPORT, name)))
        assert elements(shown) == plain, name
        assert not bare_links(shown), name


def test_our_own_code_stays_code():
    shown = html_of(markdown(named(REPORT, "plain")))
    assert "warning: plain: from <code>code</code> on Do <code>this</code>, plain." in shown
    assert "<strong>plain</strong>" in shown


@pytest.mark.parametrize("name", NAMES)
def test_a_card_keeps_nothing_of_an_earlier_report(name):
    card = with_report("# mine\n", markdown(named(REPORT, name)))
    assert (card.count(REPORT_BEGINS), card.count(REPORT_ENDS)) == (1, 1)
    assert with_report(card, "## later\n") == with_report("# mine\n", "## later\n")


def with_one_chart(name):
    """A named report with the chart of lines alone: what is around a picture is the same for all kinds."""
    section = replace(REPORT.sections[0], charts=[CHART], heat_maps=[])
    return named(replace(REPORT, sections=[section]), name)


def svg_of(chart):
    return plots.files_of(chart, ("svg",))["svg"]


def test_on_the_page_names_are_words_and_no_more():
    plain = Page(page(with_one_chart("plain"), "plain", svg_of))
    for name in NAMES:
        hostile = Page(page(with_one_chart(name), name, svg_of))
        assert hostile.found == plain.found, name
        assert all(link.startswith(("#", "data:,", "data:image/png;base64,")) for link in hostile.links), name


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_well_formed_and_no_formulas(name):
    """Of every kind; that of lines is on the page as well."""
    for chart, forms in ((MAP, ("svg",)), (STACK, ("svg", "png"))):
        drawn = ElementTree.fromstring(plots.files_of(named(chart, name), forms)["svg"])
        kinds = {element.tag.rpartition("}")[2] for element in drawn.iter()}
        assert not kinds & {"script", "a", "foreignObject"}


def test_files_are_in_the_folder_whatever_names_are(tmp_path):
    for i, name in enumerate(["../../up", "/etc/x", NAMES[1], "\u4f60" * 85]):
        folder = tmp_path / "deep" / "er" / str(i)
        written = write_report(folder, with_one_chart(name), name)
        assert all(folder in path.resolve().parents for path in written)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
