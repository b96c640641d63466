"""The routes of the server, all there are: transformers' handlers behind checks of what clients send."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import HTTPException
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers.utils import logging

from ..printable import printable
from ..web.gate import FAILED, error_response
from .body import Served, checked, parsed
from .clients import AnswerFailedError, Call, ClientGoneError, ClientWatch, ServerStoppingError, current_call
from .fields import RequestError
from .metrics import CONTENT_TYPE, Metrics

logger = logging.get_logger(__name__)
# A handler of transformers' server. It takes the fields of a request and its id, and returns the answer.
Handler = Callable[[dict[str, Any], str], Awaitable[Any]]
GONE = 499  # the status of an answer whose client has gone; nobody reads it
# every route: its method, and the method of App that answers it
ROUTES = {
    "/v1/chat/completions": ("POST", "_answer"),
    "/v1/completions": ("POST", "_answer"),
    "/v1/responses": ("POST", "_answer"),
    "/v1/models": ("GET", "_models"),
    "/load_model": ("POST", "_load_model"),
    "/metrics": ("GET", "_metrics"),
    "/health": ("GET", "_health"),
    "/": ("GET", "_index"),
}
FREE = ("/health",)  # needs no key


class App:
    """Answers the routes. `handlers`: transformers' handlers, by route; `metrics`: what /metrics shows."""

    def __init__(self, served: Served, handlers: dict[str, Handler], metrics: Metrics):
        self.served = served
        self.handlers = handlers
        self.metrics = metrics

    def application(self) -> Any:
        """Returns the ASGI application."""
        routes = [Route(path, getattr(self, name), methods=[method]) for path, (method, name) in ROUTES.items()]
        return ClientWatch(Starlette(routes=routes, exception_handlers=HANDLERS))

    async def _answer(self, request: Request) -> Response:
        """Answers a request for text. Errors become OpenAI's, of the client's or of the server's kind."""
        fields = await self._fields(request)
        call, route = current_call(), request.url.path
        call.seed = fields.pop("seed", None)  # the handlers would set it at once, in the middle of another's answer
        try:
            response = await self.handlers[route](fields, str(uuid4()))
        except Exception as error:
            return await _error_response(request, error)
        if isinstance(response, StreamingResponse):  # events of responses say which of them is the last
            response.body_iterator = _ended(response.body_iterator, call, has_mark=route != "/v1/responses")
        return response

    async def _fields(self, request: Request) -> dict[str, Any]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(f"Content-Type is {kind[:80]!a}; expected application/json.")
        return checked(request.url.path, parsed(await request.body()), self.served)

    async def _models(self, request: Request) -> Response:
        name = self.served.model
        model = {"id": name, "object": "model", "created": 0, "owned_by": name.partition("/")[0]}
        return JSONResponse({"object": "list", "data": [model]})

    async def _load_model(self, request: Request) -> Response:
        """Says that the model is loaded, as `transformers chat` asks before it begins. Nothing is loaded here."""
        await self._fields(request)
        event = {"status": "ready", "model": self.served.model, "cached": True}
        return PlainTextResponse(f"data: {json.dumps(event)}\n\n", media_type="text/event-stream")

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.as_text(), media_type=CONTENT_TYPE)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _index(self, request: Request) -> Response:
        """Says in plain text what is served: a page of documentation would need scripts from elsewhere."""
        lines = [f"eagle31 serves {printable(self.served.model)} with its drafter, by OpenAI's API.", ""]
        lines += [f"{method:<5} {path}" for path, (method, _) in ROUTES.items()]
        return PlainTextResponse("\n".join(lines) + "\n")


async def _error_response(request: Request, error: Exception) -> Response:
    """Returns the answer to a request that ended by an error."""
    if isinstance(error, ClientGoneError | ClientDisconnect):
        return Response(status_code=GONE)
    return _explained(error, current_call())


def _explained(error: Exception, call: Call) -> Response:
    """Returns the answer of an error: the client's, or the server's own, which is logged whole.

    Before the request is queued, what fails is its chat template or its tokens: a template is a program of its
    author's, and may raise anything at messages that it does not expect. Afterwards a ValueError is what generate()
    says to its arguments, or, once there are tokens, what reads tool calls to one that is no JSON.
    """
    words = " ".join(str(error).split())[:1000] or type(error).__name__
    if isinstance(error, RequestError):
        return error_response(400, words, param=error.param, code=error.code)
    if isinstance(error, HTTPException):
        return error_response(400 if error.status_code < 500 else error.status_code, str(error.detail))
    if isinstance(error, ServerStoppingError):
        return error_response(503, "the server is stopping.", FAILED)
    if call.has_tokens and isinstance(error, ValueError | LookupError | TypeError):
        logger.error(f"an answer could not be read: {printable(words)}", exc_info=error)
        return error_response(500, f"the target's answer cannot be read ({type(error).__name__}): {words}", FAILED)
    is_of_request = not call.is_queued or (error is call.error and isinstance(error, ValueError))
    # of memory, a disk or a GPU, whose errors are RuntimeErrors
    is_of_machine = isinstance(error, MemoryError | OSError | RuntimeError) and not isinstance(error, RecursionError)
    if is_of_request and not is_of_machine:
        logger.warning(f"a request was refused: {printable(words)}")
        return error_response(400, f"the request is refused: {words}")
    logger.error(f"a request failed: {printable(words)}", exc_info=error)
    return error_response(500, f"the answer failed ({type(error).__name__}); the server's log says why.", FAILED)


async def _ended(pieces: Any, call: Call, has_mark: bool) -> AsyncIterator[Any]:
    """Yields the pieces of a stream, and OpenAI's mark of its end where `has_mark`; where its answer ends by an error,
    that is the last."""
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                yield piece
            if has_mark:
                yield "data: [DONE]\n\n"
        except AnswerFailedError:
            if not call.is_gone.is_set():
                error = call.error or RuntimeError("the answer ended without a reason")
                yield f"data: {bytes(_explained(error, call).body).decode()}\n\n"


async def _wrong_method(request: Request, error: Exception) -> Response:
    return error_response(405, f"{request.url.path} takes {ROUTES[request.url.path][0]}.")


async def _failed(request: Request, error: Exception) -> Response:
    """Answers a request at which the server itself has a defect; the traceback is in the log."""
    return error_response(500, type(error).__name__, FAILED)


HANDLERS: dict[Any, Any] = {
    405: _wrong_method,
    500: _failed,
    **dict.fromkeys((RequestError, ClientDisconnect), _error_response),
}
