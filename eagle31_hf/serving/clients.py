"""Clients that go away before they have their answer. transformers' server ends a stream whose client has gone; an
answer that is sent as a whole it would generate to its end, for nobody, while others wait."""

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

from transformers.cli.serving.utils import GenerateManager

# Of the request that is answered in this context: set once its client has gone.
_gone: ContextVar[threading.Event | None] = ContextVar("gone", default=None)


class ClientGoneError(Exception):
    """Ends generate(): nobody waits for its answer any more."""


def check_client(*_: Any) -> None:
    """Raises ClientGoneError where the client has gone whose request is answered. May be given to `watch_rounds`."""
    gone = _gone.get()
    if gone is not None and gone.is_set():
        raise ClientGoneError


class GenerationThread(GenerateManager):
    """The thread that makes all generate() calls, one after another, each in the context of the request it answers:
    there `check_client` finds whose client to ask for."""

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future:
        """Returns the outcome of a call, once the thread has made it in the caller's context."""
        return super().async_submit(copy_context().run, fn, *args, **kwargs)


class ClientWatch:
    """An ASGI application around another: notes when a request's client goes away."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = _WatchedRequest(receive)
        token = _gone.set(request.gone)
        try:
            await self.app(scope, request.receive, send)
        finally:
            request.end()
            _gone.reset(token)


class _WatchedRequest:
    """What a client sends. Once that has come whole, a task waits for the end of the connection, all that can still
    come: the application does not ask for it while it generates. `gone` is set then."""

    def __init__(self, receive: Any):
        self.gone = threading.Event()
        self._receive = receive
        self._waiting: asyncio.Task | None = None

    async def receive(self) -> Any:
        """Returns the next message, in place of the server's own."""
        if self._waiting is not None:
            return await asyncio.shield(self._waiting)
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone.set()
        elif not message.get("more_body"):
            self._waiting = asyncio.create_task(self._wait())
        return message

    async def _wait(self) -> Any:
        message = await self._receive()
        self.gone.set()
        return message

    def end(self) -> None:
        """Stops waiting: the request has been answered."""
        if self._waiting is not None:
            self._waiting.cancel()
