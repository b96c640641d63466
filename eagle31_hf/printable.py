"""Text as a terminal may be given it: what would steer the terminal, or hide other text, is shown in its place."""

import re

# Controls but newline and tab; the marks that end a line elsewhere; those that change the direction of other text;
# halves of surrogate pairs, which no encoding has.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Returns text in which every control character but newline and tab is spelled as Python does (`\x1b`), and so are
    bidirectional embeddings, overrides and isolates, U+2028, U+2029 and lone surrogates. "\r\n" becomes "\n"."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Returns printable words, spaces in place of their line breaks and tabs."""
    return re.sub(r"[\n\t]", " ", printable(text)).strip()
