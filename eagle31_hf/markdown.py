"""Foreign words in Markdown: names of models, files and data sets may hold anything, and are shown as they are.

What is escaped here is words and no more to CommonMark, and to what extends it: GitHub's tables, links and formulas.
"""

import re
from collections.abc import Iterable, Sequence

from .printable import one_line

# A code span of single backticks, whose words are literal anyway. A pipe in it would end the cell of a table, and with
# `<` it could be the mark around a card's report.
_SPAN = r"(?<!`)`[^`|<]+`(?!`)"
# A word that Markdown makes a link without any brackets: an address, a mention, the number of an issue.
_LINK = r"(?<![^\s`|<])[^\s`|<]*(?:://|[wW]{3}\.|@|#\d)[^\s`|<]*"
# Brackets, but those of an interval or of layers, which make no link while no address or definition follows them.
_BRACKET = r"\[(?![-\d., %/L]*\](?! ?[(\[:]))"
# An underscore between letters marks nothing, and an ampersand begins an entity only in front of a letter or `#`.
_MARK = rf"[\\*~$#`|<]|(?<![^\W_])_|_(?![^\W_])|{_BRACKET}|&(?=[#\w])"
_TOKEN = re.compile(rf"(?P<span>{_SPAN})|(?P<link>{_LINK})|{_MARK}")
_ENTITIES = {"`": "&#96;", "<": "&lt;", "&": "&amp;"}  # a backslash before a backtick means nothing within a code span
_BLOCK = re.compile(r"\A(\d*)(?=[-+=>]|[.)](?:\s|\Z))")  # begins a list, a quotation or a line across the page


def inert(text: str) -> str:
    """Returns words in one line that are shown as they are, within a paragraph, a heading or the cell of a table.

    Code spans stay code. A word that would be a link is shown as code, where no kind of Markdown makes one.
    """
    return _TOKEN.sub(_escaped, one_line(text))


def _escaped(found: re.Match[str]) -> str:
    if found["span"]:
        return found[0]
    if found["link"]:
        return f"`{found[0]}`"  # beside another code span the two are one, which is literal, too
    return _ENTITIES.get(found[0], f"\\{found[0]}")


def paragraph(text: str) -> str:
    """Returns words as `inert` does, for a line of their own: they begin no list, heading or quotation."""
    return _BLOCK.sub(r"\1\\", inert(text))


def code(text: str) -> str:
    """Returns a code span of any words, in one line."""
    text = one_line(text)
    marks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    around = " " if "`" in text else ""  # which Markdown takes away again
    return f"{marks}{around}{text}{around}{marks}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of inert cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(inert, cells))} |" for cells in lines)
