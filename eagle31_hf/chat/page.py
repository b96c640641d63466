"""A chat in a browser, as a Gradio page: the answer, its accepted tokens marked, and how fast they came."""

import json
import queue
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from .conversation import (
    LEAST_NODES,
    MOST_DEPTH,
    MOST_NODES,
    TREE_DEPTH,
    TREE_NODES,
    TREE_TOP_K,
    Answer,
    Conversation,
    Figures,
    Piece,
    Show,
)

# ways of drafting
AUTO = "as far as pays"
CHAIN = "chains"
TREE = "trees"
# Accepted tokens have a line beneath them, for who does not see the colour; both colours stand out from their ground.
CSS = """
.tokens { white-space: pre-wrap; font-family: ui-monospace, monospace; line-height: 1.9; margin: 0 }
.tokens .accepted { color: #14622b; border-bottom: 2px solid currentColor }
.dark .tokens .accepted { color: #7ddf9a }
.min_value, .max_value { color: inherit !important }
"""
FONT, FONT_MONO = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]  # none from the network


class Page:
    """The page of a pair. Every visitor has a conversation of their own, made by `make`; answers are made one after
    another, by one thread."""

    def __init__(self, make: Callable[[], Conversation], title: str):
        self.make = make
        self.title = title
        self.worker = ThreadPoolExecutor(1, "generate")
        self.served: gr.Blocks | None = None
        self.folder = tempfile.TemporaryDirectory(prefix="eagle31-")  # of saved conversations, as long as the page

    def blocks(self) -> gr.Blocks:
        """Builds the page."""
        with gr.Blocks(title=self.title, analytics_enabled=False, delete_cache=(3600, 86400)) as page:
            state, knobs = gr.State({}), self.make().knobs  # every visitor has a copy, filled by `of`
            gr.Markdown(f"# {self.title}")
            with gr.Row():
                with gr.Column(scale=3):
                    chat = gr.Chatbot(label="Conversation", height=420, feedback_options=None, buttons=[])
                    words = gr.Textbox(label="Your words", placeholder="Enter sends", lines=1, autofocus=True)
                    with gr.Row():
                        send, stop = gr.Button("Send", variant="primary"), gr.Button("Stop")
                        compare, clear = gr.Button("Compare with the target alone"), gr.Button("New conversation")
                with gr.Column(scale=2):
                    figures = gr.Markdown("Nothing was asked yet.", label="Figures", elem_id="figures")
                    gr.Markdown("Tokens of the answer; those that were drafted and accepted are underlined:")
                    tokens = gr.HTML(tokens_html([]), label="Tokens")
                    begun = settings_of(knobs)
                    way = gr.Radio([AUTO, CHAIN, TREE], value=begun[0], label="Draft")
                    depth = gr.Slider(1, MOST_DEPTH, begun[1], step=1, label="Depth of chains and trees")
                    nodes = gr.Slider(
                        LEAST_NODES, MOST_NODES, begun[2], step=1, label="Nodes of a tree, the root included"
                    )
                    save = gr.Button("Save the conversation")
                    saved = gr.File(label="The conversation as JSON", visible=False)
            shown = [chat, tokens, figures]
            for trigger in (send.click, words.submit):
                trigger(self.ask, [state, words, way, depth, nodes], [words, *shown], concurrency_id="generate")
            compare.click(self.compare, [state], shown, concurrency_id="generate")
            stop.click(self.halt, [state], queue=False)
            for trigger in (clear.click, chat.clear):
                trigger(self.cleared, [state], shown)
            save.click(self.saved_file, [state], [saved])
        return page

    def of(self, visitor: dict[str, Conversation]) -> Conversation:
        """Returns a visitor's conversation, made at the first word."""
        if not visitor:
            visitor["conversation"] = self.make()
        return visitor["conversation"]

    def ask(self, visitor: dict, words: str, way: str, depth: int, nodes: int) -> Iterator[tuple]:
        """Answers words, round by round: what is left in the text box, and what is shown."""
        conversation = self.of(visitor)
        if not words.strip():
            yield words, messages_of(conversation), tokens_html([]), "Say something first."
            return
        conversation.knobs = knobs_of(way, depth, nodes)
        asked = [*messages_of(conversation), {"role": "user", "content": words}]
        for pieces, line in self._rounds(conversation, lambda show: conversation.ask(words, show)):
            if self.of(visitor) is not conversation:
                return  # a new one was begun meanwhile
            text = "".join(piece.text for piece in pieces)
            yield "", [*asked, {"role": "assistant", "content": text}], tokens_html(pieces), line

    def compare(self, visitor: dict) -> Iterator[tuple]:
        """Answers the last words by the target alone, and says what the drafter gained."""
        conversation = self.of(visitor)
        kept = messages_of(conversation)

        def work(show: Show) -> Answer:
            return conversation.again(show, with_drafter=False)

        for pieces, line in self._rounds(conversation, work, conversation.compared):
            yield kept, tokens_html(pieces), f"By the target alone: {line}"
        yield gr.skip(), tokens_html(conversation.answers[-1].pieces), gr.skip()

    def _rounds(
        self, conversation: Conversation, work: Callable[[Show], Answer], verdict: Callable[[Answer], str] | None = None
    ) -> Iterator[tuple[list[Piece], str]]:
        """Yields the pieces so far and their figures, of an answer that is made in the other thread; it is stopped
        where nobody waits for it any more. Raises gr.Error with what went wrong."""
        told = queue.Queue[tuple[list[Piece], Figures] | Answer | Exception]()

        def run() -> None:
            try:
                told.put(work(lambda pieces, figures: told.put((pieces, replace(figures)))))
            except Exception as error:
                told.put(error)

        job, pieces = self.worker.submit(run), list[Piece]()
        is_over = False
        try:
            while not isinstance(found := told.get(), Answer | Exception):
                pieces += found[0]
                yield pieces, found[1].line
            is_over = True
        finally:
            if not is_over and not job.cancel():
                conversation.stop.set()
        if isinstance(found, Exception):
            raise gr.Error(str(found), print_exception=not isinstance(found, ValueError)) from found
        line = found.figures.line + (", stopped" if found.was_stopped else "")
        yield found.pieces, f"{line}; {verdict(found)}" if verdict else line

    def saved_file(self, visitor: dict) -> Any:
        """Writes the conversation as JSON for the visitor to download."""
        file = Path(tempfile.mkdtemp(dir=self.folder.name)) / "conversation.json"
        text = json.dumps(self.of(visitor).record(), indent=2, ensure_ascii=False, default=str)
        file.write_text(text, encoding="utf-8")
        return gr.File(str(file), visible=True)

    def halt(self, visitor: dict) -> None:
        """Stops the answer that is being made."""
        if self.of(visitor).is_answering:
            self.of(visitor).stop.set()

    def cleared(self, visitor: dict) -> tuple[list, str, str]:
        """Forgets what was said, and stops the answer that is being made; it ends in the conversation before."""
        self.halt(visitor)
        visitor.clear()
        return [], tokens_html([]), "Nothing was asked yet."

    def serve(self, host: str, port: int) -> str:
        """Serves the page, from threads of its own, until `close`; returns its address."""
        page = self.served = self.blocks()
        theme = gr.themes.Default(primary_hue="blue", font=FONT, font_mono=FONT_MONO)
        page.queue(default_concurrency_limit=1).launch(
            server_name=host,
            server_port=port,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            run_history=False,
            footer_links=[],
            css=CSS,
            theme=theme.set(button_primary_background_fill="*primary_700"),
        )
        return page.local_url

    def close(self) -> None:
        """Serves no longer, makes no more answers, and deletes the files of saved conversations."""
        if self.served is not None:
            self.served.close(verbose=False)
        self.worker.shutdown(wait=False, cancel_futures=True)
        self.folder.cleanup()


def knobs_of(way: str, depth: int, nodes: int) -> dict[str, Any]:
    """Returns the arguments of generate() of a way of drafting."""
    if way == AUTO:
        return {"num_assistant_tokens": "auto"}
    tree = {"draft_tree_top_k": TREE_TOP_K, "draft_tree_total_tokens": int(nodes)}
    return {"num_assistant_tokens": int(depth)} | (tree if way == TREE else {})


def settings_of(knobs: dict[str, Any]) -> tuple[str, int, int]:
    """Returns the way of drafting, depth and nodes that the page begins with."""
    depth, nodes = (knobs.get(name) for name in ("num_assistant_tokens", "draft_tree_total_tokens"))
    is_tree = isinstance(knobs.get("draft_tree_top_k"), int) and knobs["draft_tree_top_k"] > 1
    way = TREE if is_tree else CHAIN if isinstance(depth, int) else AUTO
    return way, depth if isinstance(depth, int) else TREE_DEPTH, nodes if isinstance(nodes, int) else TREE_NODES


def messages_of(conversation: Conversation) -> list[dict[str, str]]:
    """Returns what was said, without the system prompt."""
    return [message for message in conversation.messages if message["role"] != "system"]


def tokens_html(pieces: list[Piece]) -> str:
    """Returns the tokens as HTML, each in its place."""
    spans = [
        f'<span class="accepted" title="drafted and accepted">{escape(piece.text)}</span>'
        if piece.is_accepted
        else f'<span title="the target\'s own token">{escape(piece.text)}</span>'
        for piece in pieces
    ]
    return f'<p class="tokens">{"".join(spans)}</p>'
