"""The error of a request that a client got wrong."""

from typing import Any


class RequestError(ValueError):
    """Raised where a request is at fault, not the server: it is answered by status 400. `param`: the field, `code`: as
    in OpenAI's API, where there is one for it."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


def shown(value: Any) -> str:
    """Returns the beginning of a client's value, escaped so that it is safe to print."""
    text = ascii(value[:20] if isinstance(value, list) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
