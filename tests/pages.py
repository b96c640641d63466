"""The pages that people read, and the blocks of code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
NOT_CARDS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/recipes.md")
PAGES = [*(ROOT / name for name in NOT_CARDS), *sorted(DOCS.glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Returns a page's blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
