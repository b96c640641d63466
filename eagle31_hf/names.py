"""Names that people write: a misspelt one is refused with the one that was meant."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

ALIKE = 0.8  # of their letters, in order; norm_ouput and norm_output are 0.95 alike


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelt almost like `name`, if there is one."""
    return next(iter(get_close_matches(name[:80], known, 1, ALIKE)), None)


def refuse_unknown(names: Iterable[str], known: Collection[str], expected: str, where: str = "") -> None:
    """Raises ValueError where `names` has one that is not known; the text names the nearest one, or says what was expected."""
    for name in sorted(set(names) - set(known)):
        meant = nearest(name, known)
        raise ValueError(f"{where}got {name[:80]}; expected {expected if meant is None else f'{expected}: did you mean {meant}?'}")
