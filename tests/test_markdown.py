"""Foreign words in Markdown, by what a real renderer makes of them."""

import html
import re

import pytest
from hostile import NAMES, bare_links, elements, html_of, random_names

from eagle31_hf.markdown import code, inert, paragraph, table
from eagle31_hf.printable import one_line

PLACES = 9  # where `document` has a name


def document(name: str) -> str:
    """A name wherever words of others stand, and among our own, with code on either side."""
    sentence = inert(f"`ours` says {name} of `theirs`")
    parts = [
        f"## {inert(name)}",
        f"- ok: {inert(name)}\n- ok: {sentence}",
        f"**{inert(name)}**",
        table(["a", name], [[name, "1"], ["2", name]]),
        paragraph(name),
        f"{code(name)} is code",
        "the end",
    ]
    return "\n\n".join(parts)


def words_of(page: str) -> str:
    """The text that a page shows, as `squeezed` has it."""
    return squeezed(html.unescape(re.sub(r"<[^>]+>", "", page)))


def squeezed(text: str) -> str:
    """A text without what may differ where its words are the same: how many spaces, and marks of code."""
    return " ".join(text.replace("`", "").split())


@pytest.mark.parametrize("name", NAMES)
def test_names_are_words_and_no_more(name):
    page = html_of(document(name))
    assert elements(page) == elements(html_of(document("plain")))
    assert not bare_links(page)
    assert words_of(page).count(squeezed(one_line(name))) >= PLACES


def test_names_at_random_are_words_and_no_more():
    plain = elements(html_of(document("plain")))
    for name in random_names(400, seed=7):
        page = html_of(document(name))
        assert elements(page) == plain, name
        assert not bare_links(page), name
        [item] = re.findall(r"<li>ok: (.*)</li>\n<li>", page)
        assert words_of(item) == squeezed(one_line(name))


@pytest.mark.parametrize(
    "words",
    [
        "eagle31_hf 0.9: 1.10 [1.02, 1.19], 57% [40%, 60%], -0.3 (not 2.5) & more; a > b",
        "Draft at most 3 deep (`num_assistant_tokens=3`).",
        "lengths: [256, 1024]; temperatures: []. `hidden_states` [2, L // 2, L - 3], 64 wide",
        "org/my-model_v1.5",
        "-",
    ],
)
def test_ordinary_words_stay_as_they_are(words):
    assert inert(words) == words


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a|b", r"a\|b"),
        ("my_own_drafter", "my_own_drafter"),
        ("_mine_", r"\_mine\_"),
        ("<b>*x*", r"&lt;b>\*x\*"),
        ("[a](b)", r"\[a](b)"),
        ("[1](b)", r"\[1](b)"),
        ("ask @me", "ask `@me`"),
        ("a`b", "a&#96;b"),
        ("`a``b`", "&#96;a&#96;&#96;b&#96;"),
        ("a\nb", "a b"),
    ],
)
def test_how_names_are_written(name, shown):
    assert inert(name) == shown


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("- a", r"\- a"),
        ("1. a", r"1\. a"),
        ("---", r"\---"),
        ("> a", r"\> a"),
        ("2.5 nats", "2.5 nats"),
        ("a - b",) * 2,
    ],
)
def test_a_paragraph_begins_nothing_else(words, written):
    assert paragraph(words) == written


def test_long_names_take_no_longer_than_their_length():
    """Were the pattern tried anew from each of a word's letters, a million of them would take hours."""
    for part in ("a", "`", "[1", "`a", "w", "_", "<"):
        assert len(inert(part * 200_000)) >= 200_000
