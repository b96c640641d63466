"""Errors of the library that callers tell apart by their class."""

REFUSED = "EAGLE drafting: "  # how the message of a refusal begins


class DraftingRefusedError(ValueError):
    """Raised where generate() cannot draft for a target, with a drafter or in a call; the message says what to do."""


def is_refusal(error: Exception) -> bool:
    """Returns True where generate() has refused to draft, rather than failed."""
    return isinstance(error, DraftingRefusedError) or str(error).startswith(REFUSED)
