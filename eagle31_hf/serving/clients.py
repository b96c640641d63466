"""Clients, and the thread that answers them. transformers' server ends a stream whose client has gone; an answer that
is sent as a whole, and the reading of a prompt, would go on to the end, for nobody, while others wait."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from transformers import StoppingCriteria
from transformers.cli.serving.utils import GenerateManager, _StreamError

from ..targets.context import room_for
from .fields import RequestError


@dataclass
class Call:
    """A request that is answered. `is_gone` is set once its client has gone; `is_queued` once the thread that generates
    has the request, `has_tokens` once there is a token; `error` is what ended it there. `seed`: of what is sampled."""

    is_gone: threading.Event = field(default_factory=threading.Event)
    seed: int | None = None
    is_queued: bool = False
    has_tokens: bool = False
    error: Exception | None = None


# of the request that is answered in this context
_call: ContextVar[Call | None] = ContextVar("call", default=None)


class ClientGoneError(Exception):
    """Ends generate(): nobody waits for its answer any more."""


class ServerStoppingError(Exception):
    """Ends generate(): the server is asked to stop, and the answer has not begun."""


class AnswerFailedError(Exception):
    """Raised where a stream is read whose answer ended by an error."""


def current_call() -> Call:
    """Returns the request that is answered in this context; a fresh one outside of any, as in tests."""
    return _call.get() or Call()


class StopConditions(StoppingCriteria):
    """Conditions that end generate(), asked in the context of the request that is answered. `is_stopping`: set once the
    server is asked to stop; answers that have a token then go on, as long as the server waits for them."""

    def __init__(self) -> None:
        self.is_stopping = threading.Event()

    def check(self) -> None:
        """Raises ClientGoneError where the request's client has gone, ServerStoppingError where the server stops before
        there is a token."""
        call = current_call()
        if call.is_gone.is_set():
            raise ClientGoneError
        if self.is_stopping.is_set() and not call.has_tokens:
            raise ServerStoppingError

    def note_round(self, _: Any) -> None:
        """Notes that there is a token, and checks. May be given to `watch_rounds`."""
        current_call().has_tokens = True
        self.check()

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        """Notes a token of a generate() without drafter, and checks, as one of its stopping criteria: it stops none of
        the sequences by itself."""
        self.note_round(None)
        return False


@dataclass(frozen=True)
class Limits:
    """The room that a target has for a prompt and its answer. `context`: tokens of both together, None where there is
    no end; `answer`: tokens of an answer whose request names no number; `piece`: tokens of a prompt that are read at
    once, None: all. Between pieces a client's leaving is noticed."""

    context: int | None
    answer: int
    piece: int | None

    def fit(self, inputs: Any, config: Any) -> None:
        """Writes to a request's generation config how long its answer may be, and how its prompt is read. Raises
        RequestError for a prompt without tokens, and for one that fills the context."""
        length = inputs["input_ids"].shape[-1]
        try:
            config.max_new_tokens = room_for(config.max_new_tokens or self.answer, length, self.context)
        except ValueError as error:
            raise RequestError(str(error), code="context_length_exceeded" if length else None) from None
        is_text = set(inputs) <= {"input_ids", "attention_mask"}  # images are not read in pieces
        if is_text and self.piece is not None and length > self.piece:
            config.prefill_chunk_size = self.piece


class GenerationThread(GenerateManager):
    """The thread that makes all generate() calls, one after another, each in the context of the request it answers:
    there `current_call` finds that request."""

    def __init__(self, limits: Limits):
        super().__init__()
        self.limits = limits

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        """Has the thread make a call in the caller's context."""
        return super().submit(copy_context().run, fn, *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future:
        """Returns the outcome of a call, once the thread has made it in the caller's context."""
        return super().async_submit(copy_context().run, fn, *args, **kwargs)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Begins an answer; returns its pieces and what counts them. Raises RequestError for a prompt without room, and
        for beams."""
        if (gen_config.num_beams or 1) > 1:
            found = f"num_beams is {gen_config.num_beams}; expected 1 in a stream"
            raise RequestError(f"{found}: only their end tells which of the beams is the answer.", "generation_config")
        self._begin(inputs, gen_config)
        queue, streamer = super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        return _Pieces(queue), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[str, int, Any]:
        """Returns an answer: its text, the prompt's length and the new token ids. Raises RequestError for a prompt
        without room."""
        self._begin(inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    def _begin(self, inputs: Any, config: Any) -> None:
        self.limits.fit(inputs, config)
        current_call().is_queued = True


class _Pieces:
    """The pieces of a streamed answer, as a queue; the error that ended it is the last. It is raised where the next
    piece is asked for: the handlers of transformers' server would write it as text into JSON."""

    def __init__(self, queue: asyncio.Queue):
        self._queue = queue

    async def get(self) -> Any:
        """Returns the next piece, None at the end. Raises AnswerFailedError where there is none."""
        piece = await self._queue.get()
        if isinstance(piece, _StreamError):
            raise AnswerFailedError
        return piece

    def get_nowait(self) -> Any:
        """Returns the next piece. Raises QueueEmpty where it has not come, or an error has in its place."""
        piece = self._queue.get_nowait()
        if isinstance(piece, _StreamError):
            self._queue.put_nowait(piece)  # nothing comes after it
            raise asyncio.QueueEmpty
        return piece


class ClientWatch:
    """An ASGI application around another: notes when a request's client goes away. Once a request has come whole, a
    task waits for the end of the connection, all that can still come: the application does not ask for it while it
    generates."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        call = Call()
        waiting: asyncio.Task | None = None

        async def end_of_connection() -> Any:
            message = await receive()
            call.is_gone.set()
            return message

        async def watched() -> Any:
            nonlocal waiting
            if waiting is not None:
                return await asyncio.shield(waiting)
            message = await receive()
            if message["type"] == "http.disconnect":
                call.is_gone.set()
            elif not message.get("more_body"):
                waiting = asyncio.create_task(end_of_connection())
            return message

        token = _call.set(call)
        try:
            await self.app(scope, watched, send)
        finally:
            if waiting is not None:
                waiting.cancel()
            _call.reset(token)
