"""Printable text: nothing in it steers a terminal, and what does not steer is as it was."""

import unicodedata

import pytest
from hostile import SPELLED, STEERING, steering_in

from eagle31_hf.printable import one_line, printable

TURNING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}


def test_of_every_code_point_only_what_steers_is_spelled():
    for number in range(0x110000):
        char = chr(number)
        shown = printable(char)
        if char in "\n\t":
            assert shown == char
        elif unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or number in TURNING:
            assert shown.isascii()
            assert shown.isprintable()
            assert shown.startswith("\\")
            assert shown.encode().decode("unicode_escape") == char
        else:
            assert shown == char


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (STEERING, SPELLED),
        ("a\r\nb\r\r\nc\n", "a\nb\\r\nc\n"),
        ("\udc80", r"\udc80"),
        ("\u2028\u2029\x85", r"\u2028\u2029\x85"),
        (r"\x1b", r"\x1b"),
        ("", ""),
    ],
)
def test_how_it_is_spelled(text, shown):
    assert printable(text) == shown
    assert not steering_in(shown)


@pytest.mark.parametrize(
    "text",
    ["naïve e\u0301", "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f", "שלום \u200fa\u200e مرحبا", "\ta\n"],
)
def test_other_text_stays_as_it_is(text):
    assert printable(text) == text


def test_a_line_is_one():
    assert one_line(" a\n\tb\r\nc\r ") == "a  b c\\r"
