"""Tells which tests compare numbers within one of close's tolerances, by the names in the code that they run."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

TOLERANCES = {"FORWARD", "TARGET_FORWARD"}
TESTS = Path(__file__).parent


def compares_numbers(function: Callable, seen: set[Any] | None = None) -> bool:
    """Tells whether a test, or a function of the tests that it calls, names one of TOLERANCES."""
    seen = set() if seen is None else seen
    function = inspect.unwrap(getattr(function, "__func__", function))
    if function in seen or not isinstance(function, FunctionType):
        return False
    seen.add(function)
    if TESTS not in Path(function.__code__.co_filename).parents:
        return False
    names = {name for code in codes(function.__code__) for name in code.co_names}
    if names & TOLERANCES:
        return True
    called = [function.__globals__[name] for name in sorted(names & function.__globals__.keys())]
    methods = [method for each in called if isinstance(each, type) for method in vars(each).values()]
    return any(compares_numbers(each, seen) for each in (*called, *methods) if inspect.isfunction(each))


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)
