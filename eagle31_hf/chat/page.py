"""A chat in a browser, as a Gradio page: the answer, its accepted tokens marked, and how fast they came."""

import json
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request

from ..bench import AUTO_SHAPE, TREE_SHAPE, Shape
from ..generation.planning.costs import MAX_DEPTH
from ..json_file import parse_value
from ..printable import printable
from ..web.address import bound, url_of
from ..web.gate import Gate, error_response
from .conversation import MAX_NODES, MIN_NODES, Answer, Conversation, Figures, Piece, Show, trees

# ways of drafting; BEGUN: by the arguments of the command line, or the drafter's own
BEGUN = "by default"
AUTO = "automatically"
CHAIN = "chains"
TREE = "trees"
ENDING = 1  # seconds that answers under way have once the page is closed
AT_ONCE = 16  # visitors who may wait for an answer; others wait in Gradio's queue, where no button reaches them
# Accepted tokens have a line beneath them, for who does not see the colour; both colours stand out from their ground.
# The ends of a slider do not, in Gradio's own grey, which its style sheet insists on.
CSS = """
.tokens { white-space: pre-wrap; font-family: ui-monospace, monospace; line-height: 1.9; margin: 0 }
.tokens .accepted { color: #14622b; border-bottom: 2px solid currentColor }
.dark .tokens .accepted { color: #7ddf9a }
.min_value, .max_value { color: inherit !important }
"""
FONT, FONT_MONO = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]  # none from the network
# what the page asks for; Gradio has more: uploads, a proxy, the source of its functions, files of this machine
PATHS = {
    "GET": re.compile(
        r"/|/(assets|static)/.+|/(theme\.css|favicon\.ico|config)|/gradio_api/(startup-events|queue/data|heartbeat/\w+)"
        r"|/gradio_api/file=(?:/(?!\.\.)[^/:?#%\\]+)+/conversation\.json"
    ),
    "POST": re.compile(r"/gradio_api/(queue/join|run/predict|cancel|reset)"),
}
# Nothing is fetched from elsewhere or sent there, whatever an answer holds, and no other page may frame this one.
# Gradio's own scripts and styles stand in the page.
POLICY = "; ".join(
    [
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "font-src 'self' data:",
        "object-src 'none'",
        "frame-src 'none'",
        "frame-ancestors 'none'",
        "form-action 'none'",
        "base-uri 'self'",
    ]
)
HEADERS = [(b"content-security-policy", POLICY.encode()), (b"referrer-policy", b"no-referrer")]
# what a browser may send
MOST_WORDS = 2**20  # bytes of an event
FIELDS = ("data", "event_id", "fn_index", "session_hash", "trigger_id")  # of Gradio's events; others are left out
WRONG = error_response(400, "expected an event of this page.", code="no_event")


class Page:
    """The page of a pair. Every visitor has a conversation of their own, made by `make`; answers are made one after
    another, by one thread.

    A `visitor` is what Gradio keeps for each: their "conversation", and "stops", the events that end the answers for
    which they wait.
    """

    def __init__(self, make: Callable[[], Conversation], title: str):
        self.make = make
        self.begun = make().knobs
        self.title = title
        self.worker = ThreadPoolExecutor(1, "generate")
        self.listener: Listener | None = None
        self.stops = set[threading.Event]()  # of all answers that are made or waited for
        self.folder = tempfile.TemporaryDirectory(prefix="eagle31-")  # of saved conversations, as long as the page

    def blocks(self) -> gr.Blocks:
        """Builds the page."""
        with gr.Blocks(title=self.title, analytics_enabled=False, delete_cache=(3600, 86400)) as page:
            state = gr.State({})  # of which every visitor has a copy
            gr.Markdown(f"<h1>{as_html(self.title)}</h1>")
            with gr.Row():
                with gr.Column(scale=3):
                    # what models write is text: as Markdown it would hold pictures, which a browser fetches
                    chat = gr.Chatbot(
                        label="Conversation",
                        height=420,
                        feedback_options=None,
                        buttons=[],
                        render_markdown=False,
                        latex_delimiters=[],
                        allow_file_downloads=False,
                    )
                    words = gr.Textbox(label="Your words", placeholder="Enter sends", lines=1, autofocus=True)
                    with gr.Row():
                        send, stop = gr.Button("Send", variant="primary"), gr.Button("Stop")
                        compare, clear = gr.Button("Compare with the target alone"), gr.Button("New conversation")
                with gr.Column(scale=2):
                    figures = gr.Markdown("Nothing was asked yet.", label="Figures", elem_id="figures")
                    gr.Markdown("Tokens of the answer; those that were drafted and accepted are underlined:")
                    tokens = gr.Markdown(tokens_html([]), label="Tokens", latex_delimiters=[])
                    way = gr.Radio([BEGUN, AUTO, CHAIN, TREE], value=BEGUN, label="Draft")
                    depth = gr.Slider(1, MAX_DEPTH, TREE_SHAPE.depth, step=1, label="Depth of chains and trees")
                    label = "Nodes of a tree, the root included"
                    nodes = gr.Slider(MIN_NODES, MAX_NODES, TREE_SHAPE.total_tokens, step=1, label=label)
                    save = gr.Button("Save the conversation")
                    saved = gr.File(label="The conversation as JSON", visible=False)
            shown = [chat, tokens, figures]
            for trigger in (send.click, words.submit):
                trigger(self.ask, [state, words, way, depth, nodes], [words, *shown])
            compare.click(self.compare, [state], shown)
            stop.click(self.halt, [state], queue=False)
            for trigger in (clear.click, chat.clear):
                trigger(self.clear, [state], shown, queue=False)
            save.click(self.saved_file, [state], [saved])
        return page

    def conversation_of(self, visitor: dict[str, Any]) -> Conversation:
        """Returns a visitor's conversation, made at the first word."""
        if "conversation" not in visitor:
            visitor["conversation"] = self.make()
        return visitor["conversation"]

    def ask(self, visitor: dict, words: str, way: str, depth: int, nodes: int) -> Iterator[tuple]:
        """Answers words, round by round: what is left in the text box, and what is shown."""
        conversation = self.conversation_of(visitor)
        if not isinstance(words, str) or not words.strip():
            yield words, messages_of(conversation), tokens_html([]), "Say something first."
            return
        said = list[dict[str, str]]()

        def work(show: Show, stop: threading.Event) -> Answer:
            said.extend([*messages_of(conversation), bubble("user", words)])
            conversation.knobs = self.knobs_of(way, depth, nodes)
            return conversation.ask(words, show, stop)

        for pieces, line in self._rounds(visitor, work):
            if self.conversation_of(visitor) is not conversation:
                return  # a new one was begun meanwhile
            text = "".join(piece.text for piece in pieces)
            yield "", [*said, bubble("assistant", text)], tokens_html(pieces), line

    def compare(self, visitor: dict) -> Iterator[tuple]:
        """Answers the last words by the target alone, and says what the drafter gained."""
        conversation = self.conversation_of(visitor)
        for pieces, line in self._rounds(visitor, conversation.answer_alone, conversation.describe_speedup):
            if self.conversation_of(visitor) is not conversation:
                return
            yield gr.skip(), tokens_html(pieces), f"By the target alone: {line}"
        # the answer that the conversation has is the drafted one: its tokens are shown again
        yield gr.skip(), tokens_html(conversation.answers[-1].pieces), gr.skip()

    def _rounds(
        self,
        visitor: dict,
        work: Callable[[Show, threading.Event], Answer],
        verdict: Callable[[Answer], str] | None = None,
    ) -> Iterator[tuple[list[Piece], str]]:
        """Yields the pieces so far and their figures, of an answer that is made in the other thread; it is stopped
        where nobody waits for it any more. Raises gr.Error with what went wrong."""
        events = queue.Queue[tuple[list[Piece], Figures] | Answer | Exception]()
        stop, stops = threading.Event(), visitor.setdefault("stops", [])
        stops.append(stop)
        self.stops.add(stop)

        def run() -> None:
            try:
                events.put(work(lambda pieces, figures: events.put((pieces, replace(figures))), stop))
            except Exception as error:
                events.put(error)

        job, pieces = self.worker.submit(run), list[Piece]()
        job.add_done_callback(lambda done: events.put(ValueError("the page is closed")) if done.cancelled() else None)
        try:
            while not isinstance(event := events.get(), Answer | Exception):
                pieces += event[0]
                yield pieces, event[1].line
        finally:
            job.cancel()
            stop.set()
            stops.remove(stop)
            self.stops.discard(stop)
        if isinstance(event, Exception):
            raise gr.Error(
                escape(printable(str(event)), quote=False), print_exception=not isinstance(event, ValueError)
            ) from event
        line = event.figures.line + (", stopped" if event.was_stopped else "")
        yield event.pieces, f"{line}; {verdict(event)}" if verdict else line

    def saved_file(self, visitor: dict) -> Any:
        """Writes the conversation as JSON for the visitor to download."""
        file = Path(tempfile.mkdtemp(dir=self.folder.name)) / "conversation.json"
        file.write_text(self.conversation_of(visitor).as_json(), encoding="utf-8")
        return gr.File(str(file), visible=True)

    def halt(self, visitor: dict) -> None:
        """Stops the answers for which a visitor waits."""
        for stop in [*visitor.get("stops", [])]:
            stop.set()

    def clear(self, visitor: dict) -> tuple[list, str, str]:
        """Begins a new conversation, and stops the answer that is being made, which stays in the one before."""
        self.halt(visitor)
        visitor.clear()
        return [], tokens_html([]), "Nothing was asked yet."

    def knobs_of(self, way: str, depth: int, nodes: int) -> dict[str, Any]:
        """Returns the arguments of generate() of a way of drafting. Gradio has refused numbers that no slider gives."""
        tree = trees(int(depth), int(nodes), self.begun)
        ways = {BEGUN: self.begun, AUTO: AUTO_SHAPE.knobs, CHAIN: Shape(int(depth)).knobs, TREE: tree}
        if way not in ways:
            raise ValueError(f"there is no way of drafting {way!r}; expected one of {', '.join(ways)}.")
        return ways[way]

    def serve(self, host: str, port: int, hosts: Sequence[str] = ()) -> str:
        """Serves the page, from threads of its own, until `close`; returns its address. `hosts`: names that it is known
        by, besides the host."""
        theme = gr.themes.Default(primary_hue="blue", font=FONT, font_mono=FONT_MONO)
        page = self.blocks().queue(default_concurrency_limit=AT_ONCE)
        app = gr.mount_gradio_app(
            FastAPI(openapi_url=None),
            page,
            "/",
            server_name=host,
            server_port=port,
            show_error=False,
            ssr_mode=False,
            run_history=False,
            footer_links=[],
            css=CSS,
            theme=theme.set(button_primary_background_fill="*primary_700"),
        )
        page.has_launched = True  # before that Gradio reads any file for whoever names it
        events = PlainEvents(app, {number: len(function.inputs) for number, function in page.fns.items()})
        self.listener = Listener(Gate(events, [host, *hosts], has_route, headers=HEADERS), host, port)
        return url_of(host, port)

    def close(self) -> None:
        """Serves no longer, makes no more answers, and deletes the files of saved conversations."""
        for stop in [*self.stops]:
            stop.set()
        if self.listener is not None:
            self.listener.close()
        self.worker.shutdown(wait=False, cancel_futures=True)
        self.folder.cleanup()


class PlainEvents:
    """An ASGI application around Gradio's, to which a browser may send events that hold the values of the page's
    components, text, numbers and nothing else. Gradio takes more: an object that looks like a file has it read that
    file, or an address, before any function is called. `inputs`: how many values each of the page's functions takes, by
    Gradio's number of it."""

    def __init__(self, app: Any, inputs: Mapping[int, int]):
        self.app = app
        self.inputs = inputs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            body = b""
            async for part in Request(scope, receive).stream():
                body += part
                if len(body) > MOST_WORDS:
                    break
        except ClientDisconnect:
            return
        event = self.event(body)
        if event is None:
            await WRONG(scope, receive, send)
            return
        body = json.dumps(event).encode()
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        left = [{"type": "http.request", "body": body}]

        async def receiving() -> Any:
            return left.pop() if left else await receive()

        await self.app({**scope, "headers": headers}, receiving, send)

    def event(self, body: bytes) -> dict[str, Any] | None:
        """Returns an event of the page, of the fields that it has, None for anything else."""
        try:
            value = parse_value(body.decode()) if len(body) <= MOST_WORDS else None
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


class Listener:
    """Serves an application at an address from a thread of its own, as soon as it is made."""

    def __init__(self, app: Any, host: str, port: int):
        config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=ENDING)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=(bound(host, port),), name="listener", daemon=True
        )
        self._thread.start()
        while self._thread.is_alive() and not self._server.started:
            time.sleep(0.01)
        if not self._server.started:
            raise RuntimeError(f"nothing can be served at {host}, port {port}; what went wrong is in the log above.")

    def close(self) -> None:
        """Takes no more requests, and ends those under way."""
        self._server.should_exit = True
        self._thread.join()


def has_route(method: str, path: str) -> bool:
    """Returns whether the page asks for a path."""
    return method in PATHS and PATHS[method].fullmatch(path) is not None


def messages_of(conversation: Conversation) -> list[dict[str, str]]:
    """Returns what was said, without the system prompt, as Gradio shows it."""
    return [bubble(m["role"], m["content"]) for m in conversation.messages if m["role"] != "system"]


def bubble(role: str, text: str) -> dict[str, str]:
    """Returns a message as Gradio shows it: as HTML, even where that is no Markdown."""
    return {"role": role, "content": escape(printable(text), quote=False)}


def tokens_html(pieces: list[Piece]) -> str:
    """Returns the tokens as HTML, each in its place. It is one line: a component for Markdown shows it, to which HTML
    ends at an empty one."""
    spans = [
        f'<span class="accepted" title="drafted and accepted">{as_html(piece.text)}</span>'
        if piece.is_accepted
        else f'<span title="the target&#39;s own token">{as_html(piece.text)}</span>'
        for piece in pieces
    ]
    return f'<p class="tokens">{"".join(spans)}</p>'


def as_html(text: str) -> str:
    """Returns text that HTML and Markdown show as it is, in one line: all signs but ASCII letters and digits as
    references to characters."""
    return re.sub("[^0-9A-Za-z]", lambda found: f"&#{ord(found[0])};", printable(text))
