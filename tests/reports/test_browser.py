"""The page in a real browser, as a reader uses it: offline, light and dark, by keyboard, and by axe's rules for screen
readers.

    pip install playwright axe-playwright-python    # and Chromium, or CHROMIUM=/path/to/it
"""

import os
import shutil

import pytest
from reports.studies import DEPTH, NAMES, study_of

from eagle31_hf.reports.drift_report import drift_report
from eagle31_hf.reports.journal import Journal
from eagle31_hf.reports.writing import write_report

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    measured = study_of(folder, Journal(None, {}))
    write_report(folder, drift_report(measured, DEPTH, {"target": "tiny"}), ", ".join(NAMES))
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(params=["light", "dark"])
def page(request, browser, address):
    """The page, opened without a network; everything the browser complains of or asks for is noted."""
    context = browser.new_context(color_scheme=request.param, offline=True, viewport={"width": 1200, "height": 900})
    opened = context.new_page()
    opened.complaints, opened.requests = [], []
    opened.on("console", lambda message: opened.complaints.append(message.text))
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.on("request", lambda asked: opened.requests.append(asked.url))
    opened.goto(address)
    opened.scheme = request.param
    yield opened
    context.close()


def brightness(page):
    red, green, blue = map(int, page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"))
    return red + green + blue


def test_it_opens_without_a_network_or_a_complaint(page, address):
    assert page.requests == [address]
    assert page.complaints == []


def test_axe_finds_nothing(page):
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_charts_are_drawn(page):
    pictures = page.locator("figure svg")
    assert pictures.count() > 8
    for i in range(pictures.count()):
        box = pictures.nth(i).bounding_box()
        assert box["width"] > 200
        assert box["height"] > 100
        assert pictures.nth(i).locator("path").count() > 10


def test_tables_sort_by_keyboard(page):
    table = page.locator("table").nth(1)  # acceptance by depth
    heading, first = table.locator("th").first, table.locator("tbody tr td:first-child")
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert first.all_inner_texts() == [str(k) for k in range(DEPTH, 0, -1)]


def test_light_and_dark_are_the_readers_choice(page):
    is_dark = page.scheme == "dark"
    assert (brightness(page) < 200) == is_dark
    page.click("#theme")
    assert (brightness(page) < 200) != is_dark
    page.emulate_media(media="print")
    assert brightness(page) > 700  # paper is white


def test_nothing_is_wider_than_a_phone_but_what_scrolls_by_itself(page):
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
