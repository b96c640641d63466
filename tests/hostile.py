"""Names and texts of strangers: what would steer a terminal, or be more than words in Markdown and HTML."""

import json
import random
import re
import shutil
import unicodedata
from importlib.util import find_spec
from pathlib import Path

from markdown_it import MarkdownIt

from eagle31_hf import demo

STEERING = "\x1b[2J\x1b]0;owned\x07\x08\x0b\x0c\x7f\x9b31m\u202e\u2066\r"  # clears, names the window, turns about
SPELLED = r"\x1b[2J\x1b]0;owned\x07\x08\x0b\x0c\x7f\x9b31m\u202e\u2066\r"
NAMES = (
    "<img src=x onerror=alert(1)>",
    "</code></td></table><script>alert(1)</script>",
    "<!-- end of eagle31_hf report -->",
    "[here](http://evil.example)",
    "![](http://evil.example/x.png)",
    "[ref]: http://evil.example",
    "see http://evil.example or www.evil.example, ask @somebody or me@evil.example about #123",
    "a`b",
    "``` a `http://evil.example` b``",
    "two\n\n# lines\n- and more\n\n| a | b |\n| - | - |\n| c | d |",
    "a\n```\n<img src=x>\n```python",
    "a | b \\| c \\",
    "**bold** _it_ __it__ ~~gone~~ &lt;b&gt; &#60;i> $x^2$ $\\frac{1$",
    "# 1. - > + = ---",
    'quotes " and \' and """',
    "#0072b2 #000000",
    STEERING,
)
PARTS = (
    *("`", "``", "<b>", "[a](b)", "![", "](", "[", "]", ":", " ", "\n", "|", "\\", "*", "**", "_", "~~", "# ", "#12"),
    *(
        "http://e.example",
        "www.e",
        "a@b.co",
        "@me",
        "&lt;",
        "&#60;",
        "a",
        "b1",
        "- ",
        "1. ",
        ">",
        "---",
        "===",
        "$",
        "!",
    ),
    *('"', "'", "(", ")", "<!-- x -->", "é", "\x1b", "\u202e", "\t", "[1.0, 2]", "[1]: http://x"),
)


def random_names(count: int, seed: int) -> list[str]:
    """Names put together of what means something in Markdown."""
    draw = random.Random(seed)
    return [f"n{''.join(draw.choices(PARTS, k=draw.randint(1, 9)))}" for _ in range(count)]


def steering_in(text: str) -> set[str]:
    """The characters of a text that a terminal would not only show."""
    return {char for char in text if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs")} | set(
        re.findall("[\u2028-\u202e\u2066-\u2069]", text)
    )


def steering_target(folder: Path) -> Path:
    """The demo's target, with a tokenizer by which every `e` that is decoded steers the terminal."""
    shutil.copytree(demo.FOLDER / "target", folder)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    replace = {"type": "Replace", "pattern": {"String": "e"}, "content": f"e{STEERING}"}
    values["decoder"] = {"type": "Sequence", "decoders": [values["decoder"], replace]}
    file.write_text(json.dumps(values))
    return folder


def html_of(markdown: str) -> str:
    """Markdown as HTML, by CommonMark with GitHub's tables, struck text and links, as far as these are installed."""
    rules = ["table", "strikethrough"]
    parser = MarkdownIt("commonmark", {"html": True}).enable(rules)
    if find_spec("linkify_it") is not None:
        parser = MarkdownIt("gfm-like", {"html": True})
        parser.linkify.set({"fuzzy_link": False})  # GitHub makes none of a bare name of a host
    return parser.render(markdown)


def elements(html: str) -> list[str]:
    """The elements of a page, in their order, but those of code."""
    return [name for name in re.findall(r"<(/?\w+)", html) if name.strip("/") != "code"]


def bare_links(html: str) -> list[str]:
    """What GitHub makes links of in text that is no code."""
    return re.findall(r"://|www\.|@|#\d", re.sub(r"<code.*?</code>", "", html, flags=re.DOTALL))
