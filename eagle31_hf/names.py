"""Names that users write: unknown ones are refused, with the known name that they resemble."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

ALIKE = 0.8  # the least ratio of difflib at which a name is suggested; norm_ouput and norm_output have 0.95


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name most like `name`, or None where none is similar."""
    return next(iter(get_close_matches(name[:80], known, 1, ALIKE)), None)


def refuse_unknown(names: Iterable[str], known: Collection[str], expected: str, where: str = "") -> None:
    """Raises ValueError where `names` has one that is not known; the message suggests the nearest known one, if any."""
    for name in sorted(set(names) - set(known)):
        meant = nearest(name, known)
        raise ValueError(
            f"{where}got {name[:80]}; expected {expected if meant is None else f'{expected}: did you mean {meant}?'}"
        )
