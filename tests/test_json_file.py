"""JSON values from a command line: what JSON has, within the limits of files."""

import pytest

from eagle31_hf.json_file import parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e3", 1000.0), ("-7", -7), ("null", None), ("[1, 2.5]", [1, 2.5]), ('{"a": "b"}', {"a": "b"}), ("false", False)],
)
def test_values(text, value):
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        "1e999",
        "[-1e999]",
        "NaN",
        "-Infinity",
        "9" * 400,
        str(2**64),
        '{"a": 1, "a": 2}',
        "[" * 50_000,
        "cosine",
        "",
        "1 2",
    ],
)
def test_what_is_no_value(text):
    with pytest.raises(ValueError):  # noqa: PT011 -- as json's own errors are
        parse_value(text)
