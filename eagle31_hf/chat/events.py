"""Events that a browser may send to the page: they hold the values of its components, text, numbers and nothing else.

Gradio takes more: an object that looks like a file has it read that file, or an address, before any function is called.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..json_file import parse_value
from ..web.gate import Refusal, refuse

MOST_WORDS = 2**20  # bytes of an event
FIELDS = ("data", "event_id", "fn_index", "session_hash", "trigger_id")  # of Gradio's events; others are left out
WRONG = Refusal(400, "no_event", "expected an event of this page.")


class PlainEvents:
    """An ASGI application around Gradio's. `inputs`: how many values each of the page's functions takes, by Gradio's
    number of it."""

    def __init__(self, app: Any, inputs: Mapping[int, int]):
        self.app = app
        self.inputs = inputs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        event = self.event(await _body(receive))
        if event is None:
            await refuse(send, WRONG)
            return
        body = json.dumps(event).encode()
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self.app({**scope, "headers": headers}, _receiving(body, receive), send)

    def event(self, body: bytes) -> dict[str, Any] | None:
        """Returns an event of the page, of the fields that it has, None for anything else."""
        try:
            value = parse_value(body.decode())
        except ValueError:
            return None
        if not isinstance(value, dict):
            return None
        event = {name: value[name] for name in FIELDS if name in value}
        data = event.get("data", [])
        is_plain = all(_is_plain(part) for name, part in event.items() if name != "data")
        if not (is_plain and isinstance(data, list) and all(map(_is_plain, data))):
            return None
        if "data" not in event:  # one that ends another
            return event
        number = event.get("fn_index")
        is_ours = isinstance(number, int) and not isinstance(number, bool) and self.inputs.get(number) == len(data)
        return event if is_ours else None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


async def _body(receive: Any) -> bytes:
    """Returns the body of a request; nothing of one that is longer than MOST_WORDS, or that does not come whole."""
    parts = list[bytes]()
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] == "http.disconnect" or sum(map(len, parts)) > MOST_WORDS:
            return b""
        if not message.get("more_body"):
            return b"".join(parts)


def _receiving(body: bytes, receive: Any) -> Any:
    """Returns an ASGI `receive` that gives a body, then what `receive` gives."""
    left = [{"type": "http.request", "body": body}]

    async def receiving() -> Any:
        return left.pop() if left else await receive()

    return receiving
