"""The text that the demo's models were trained on: source of Python's standard library, less what is held out."""

from collections.abc import Iterator

from eagle31_hf.demo import HELD_OUT, stdlib

# Folders that are left out: tests, which repeat themselves, and tables or generated text rather than code.
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "lib2to3",
    "pydoc_data",
    "encodings",
    "turtledemo",
    "__pycache__",
}
LARGEST_FILE = 200_000  # bytes


def training_files() -> Iterator[str]:
    """Yields the text of every training file, in the order of their paths."""
    root = stdlib()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if LEFT_OUT.isdisjoint(parts) and parts[-1] not in HELD_OUT and path.stat().st_size <= LARGEST_FILE:
            yield path.read_text(encoding="utf-8", errors="ignore")
