"""Errors of the library that callers tell apart by their class."""


class DraftingRefusedError(ValueError):
    """Raised where generate() cannot draft for a target, with a drafter or in a call; the message says what to do."""
