"""The gate before a server or a page: it lets in what its users send, and no web page that one of them visits.

A browser sends requests to this machine for any page that it shows, and, where a page's name is made to lead here (DNS
rebinding), shows that page the answers. Both are told by two headers: `Host` has the name that was asked for, `Origin`
the page that asks.
"""

import hmac
import ipaddress
import json
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_BODY = 16 * 2**20  # bytes
NO_SNIFFING = (b"x-content-type-options", b"nosniff")


@dataclass(frozen=True)
class Refusal:
    """The answer to a request that is not let in: its status, and OpenAI's `code` and words for it."""

    status: int
    code: str
    message: str

    def body(self) -> bytes:
        """Returns the answer as JSON, in OpenAI's form of errors."""
        return error_json(self.message, "invalid_request_error", code=self.code).encode()


TOO_LONG = Refusal(413, "too_long", f"the request is longer than {MAX_BODY} bytes; expected less.")


def error_json(message: str, kind: str, param: str | None = None, code: str | None = None) -> str:
    """Returns an error as OpenAI's API writes it. `param`: the field at fault."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


class Gate:
    """An ASGI application around another.

    `hosts`: the names that requests may be sent to, besides IP addresses, `localhost` and this machine's own name.
    `is_open` says of a method and a path whether they are there. `key`: what requests must bring as `Authorization:
    Bearer KEY`, None: nothing; `needs_key` says of a path whether it is only for those who have it. `any_origin`: pages
    of any origin may ask. `headers` stand on every answer.
    """

    def __init__(
        self,
        app: Any,
        hosts: Iterable[str],
        is_open: Callable[[str, str], bool],
        *,
        key: str | None = None,
        needs_key: Callable[[str], bool] = lambda path: True,
        any_origin: bool = False,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ):
        self.app = app
        self.names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in hosts)}
        self.is_open = is_open
        self.key = key
        self.needs_key = needs_key
        self.any_origin = any_origin
        self.headers = [NO_SNIFFING, *headers]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a WebSocket that is not accepted is answered by 403
        answer, refusal = _Answer(send, self.headers), self.refusal(scope)
        if refusal is not None:
            await answer.refuse(refusal)
        else:
            await self.app(scope, _limited(receive, answer), answer.send)

    def refusal(self, scope: Any) -> Refusal | None:
        """Returns why a request is not let in, None where it is."""
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        given: dict[bytes, str] = dict(headers)
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return Refusal(
                403,
                "host_not_allowed",
                f"Host is {_shown(hosts)}; expected an IP address or one of {', '.join(sorted(self.names))}."
                " --allowed-host lets others in.",
            )
        origin = given.get(b"origin")
        if origin is not None and not self.any_origin and not _is_same(origin, hosts[0]):
            return Refusal(
                403, "origin_not_allowed", f"a page of {_shown(origin)} asks; expected a page of this server."
            )
        if not self.is_open(scope["method"], scope["path"]):
            return Refusal(404, "not_found", f"there is no {scope['method']} {_shown(scope['path'])} here.")
        if not self._is_allowed(scope, given.get(b"authorization", "")):
            return Refusal(401, "invalid_api_key", "expected the key of this server: Authorization: Bearer KEY.")
        return TOO_LONG if _is_too_long(given.get(b"content-length", "0")) else None

    def _is_allowed(self, scope: Any, authorization: str) -> bool:
        """Returns whether a request has the key, or needs none. A browser asks without it whether a page may ask."""
        is_preflight = self.any_origin and scope["method"] == "OPTIONS"
        is_free = self.key is None or is_preflight or not self.needs_key(scope["path"])
        return is_free or _has_key(authorization, str(self.key))

    def _is_ours(self, host: str) -> bool:
        """Returns whether a request to this `Host` was meant for this server. Whoever asks by an IP address meant it: a
        page can have its own name lead here, not an address."""
        name = _name_in(host)
        if name is None:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return True


class _Answer:
    """The answer to a request, with headers that stand on every one."""

    def __init__(self, send: Any, headers: list[tuple[bytes, bytes]]):
        self._send = send
        self._headers = headers
        self._has_begun = False
        self._is_refused = False

    async def send(self, message: Any) -> None:
        """Sends a part of it, as ASGI's `send`; nothing once the request has been refused."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            self._has_begun = True
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Sends why the request is not let in, unless it has been answered."""
        if not self._has_begun:
            body = refusal.body()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            if refusal.status == 401:
                headers.append((b"www-authenticate", b"Bearer"))
            await self.send({"type": "http.response.start", "status": refusal.status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body})
        self._is_refused = True


def _limited(receive: Any, answer: _Answer) -> Any:
    """Returns an ASGI `receive` that refuses a request once MAX_BODY bytes have come, whatever its headers say: to the
    application the client has gone then."""
    length = 0

    async def receiving() -> Any:
        nonlocal length
        message = await receive()
        length += len(message.get("body", b""))
        if length <= MAX_BODY:
            return message
        await answer.refuse(TOO_LONG)
        return {"type": "http.disconnect"}

    return receiving


def _name_in(host: str) -> str | None:
    """Returns the name or the address in a `Host` header, in lower case and without port and brackets; None where there
    is none."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname if parts.netloc == host and parts.username is None and parts.port != 0 else None
    except ValueError:  # a port that is no number, brackets around no address
        return None


def _is_same(origin: str, host: str) -> bool:
    """Returns whether a page of this origin came from the server that is asked."""
    scheme, sign, rest = origin.lower().partition("://")
    return bool(sign) and scheme in ("http", "https") and rest == host.lower()


def _has_key(authorization: str, key: str) -> bool:
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


def _is_too_long(length: str) -> bool:
    return length.isascii() and length.isdecimal() and int(length[:20]) > MAX_BODY


def _shown(value: Any) -> str:
    return ascii(value)[:100]
