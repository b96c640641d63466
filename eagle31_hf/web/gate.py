"""The gate before a server or a page: it lets in what its users send, and no web page that one of them visits.

A browser sends requests to this machine for any page that it shows, and, where a page's name is made to lead here (DNS
rebinding), shows that page the answers. Two headers give these away: `Host` has the name that was asked for, `Origin`
the page that asks, wherever a request may change something or its answer is to be read.
"""

import hmac
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from starlette.responses import Response

from ..json_file import show

MAX_BODY = 16 * 2**20  # bytes
MOST_INSIDE = 512  # requests at once
HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(?::\d{1,5})?")
ONCE = (b"host", b"origin", b"authorization", b"content-length")  # headers that would be read in two ways
NO_SNIFFING = (b"x-content-type-options", b"nosniff")
INVALID, FAILED = "invalid_request_error", "server_error"  # OpenAI's types of errors


def error_response(
    status: int, message: str, kind: str = INVALID, param: str | None = None, code: str | None = None
) -> Response:
    """Returns an error as OpenAI's API answers with it. `param`: the field at fault."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return Response(json.dumps({"error": error}), status, headers, "application/json")


TOO_LONG = error_response(413, f"the request is longer than {MAX_BODY} bytes; expected less.", code="too_long")


@dataclass(eq=False, repr=False)  # no key in a log
class Gate:
    """An ASGI application around another, which refuses requests that are not for it.

    `hosts`: the names that requests may be sent to, besides IP addresses, `localhost` and this machine's own name.
    `has_route` says whether there is a path with a method. `key`: what requests must bring as `Authorization: Bearer
    KEY`, None: nothing; `free`: paths that need none. `any_origin`: pages of any origin may ask. `headers` stand on
    every answer.
    """

    app: Any
    hosts: Iterable[str]
    has_route: Callable[[str, str], bool]
    _: KW_ONLY
    key: str | None = None
    free: Iterable[str] = ()
    any_origin: bool = False
    headers: Iterable[tuple[bytes, bytes]] = ()

    def __post_init__(self) -> None:
        self.hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in self.hosts)}
        self.free = {*self.free}
        self.headers = [NO_SNIFFING, *self.headers]
        self._num_inside = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})  # before it is accepted: an answer of 403
            return
        exchange, refusal = _Exchange(receive, send, self.headers), self.refusal(scope)
        if refusal is not None:
            await exchange.refuse(refusal)
            return
        self._num_inside += 1
        try:
            await self.app(scope, exchange.receive, exchange.send)
        finally:
            self._num_inside -= 1

    def refusal(self, scope: Any) -> Response | None:
        """Returns why a request is not let in, None where it is."""
        given: dict[bytes, str] = {}
        for name, value in scope["headers"]:
            if name.lower() in given and name.lower() in ONCE:
                message = f"{name.decode('latin-1')} is there twice; expected one."
                return error_response(400, message, code="repeated_header")
            given[name.lower()] = value.decode("latin-1")
        host, origin = given.get(b"host", ""), given.get(b"origin")
        if not self._is_allowed_host(host):
            message = f"Host is {show(host)}; expected a name or an address of this server (--allowed-host)."
            return error_response(403, message, code="host_not_allowed")
        its_pages = [f"{scheme}://{host.lower()}" for scheme in ("http", "https")]
        if origin is not None and not self.any_origin and origin.lower() not in its_pages:
            message = f"a page of {show(origin)} asks; expected one of this server. Is a proxy to pass Host on?"
            return error_response(403, message, code="origin_not_allowed")
        if not self.has_route(scope["method"], scope["path"]):
            message = f"there is no {show(scope['path'])} for {show(scope['method'])}."
            return error_response(404, message, code="not_found")
        if self.key is not None and scope["path"] not in self.free and not _has_key(given, self.key):
            message = "expected the key of this server: Authorization: Bearer KEY."
            return error_response(401, message, code="invalid_api_key")
        if self._num_inside >= MOST_INSIDE:
            return error_response(503, f"{MOST_INSIDE} requests wait already.", FAILED, code="busy")
        length = given.get(b"content-length", "0")  # of which int() refuses thousands of digits
        is_too_long = length.isascii() and length.isdecimal() and int(length[:20]) > MAX_BODY
        return TOO_LONG if is_too_long else None

    def _is_allowed_host(self, host: str) -> bool:
        """Returns whether a request with this `Host` was meant for this server. One that was sent to an IP address was:
        a page can have its own name lead here, not an address."""
        found = HOST.fullmatch(host)
        name = (found["address"] or found["name"]).lower() if found else ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.hosts
        return True


class _Exchange:
    """A request and its answer, which has headers that stand on every one."""

    def __init__(self, receive: Any, send: Any, headers: Iterable[tuple[bytes, bytes]]):
        self._receive = receive
        self._send = send
        self._headers = headers
        self._length = 0  # bytes of the body that have come
        self._has_begun = False
        self._is_refused = False

    async def receive(self) -> Any:
        """Receives a part of the request, as ASGI's `receive`. Refuses it once more than MAX_BODY bytes have come,
        whatever its headers say; the application then sees a disconnect."""
        message = await self._receive()
        self._length += len(message.get("body", b""))
        if self._length <= MAX_BODY:
            return message
        await self.refuse(TOO_LONG)
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Sends a part of the answer, as ASGI's `send`; nothing once the request has been refused."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            self._has_begun = True
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)

    async def refuse(self, refusal: Response) -> None:
        """Sends why the request is not let in, unless it has been answered."""
        if not self._has_begun:
            await refusal({"type": "http"}, None, self.send)
        self._is_refused = True


def _has_key(headers: dict[bytes, str], key: str) -> bool:
    scheme, _, given = headers.get(b"authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())
