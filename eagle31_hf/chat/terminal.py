"""A chat in a terminal: lines of the user, commands that begin with a slash, and answers as they are made."""

import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..bench import AUTO_SHAPE, TREE_SHAPE, Shape
from ..generation.planning.costs import MAX_DEPTH
from ..printable import printable
from .conversation import MAX_NODES, MIN_NODES, Answer, Conversation, Figures, Piece, Show, check_text, trees

ACCEPTED = "underline green"  # a line beside the colour: for who does not see it, and for greyscale


class Screen:
    """Writes answers to a console. In a terminal the lines that are complete are written once, the one that is being
    written stands above a line of figures, and both are drawn anew with every round; elsewhere only text is written.

    Control characters of a text are shown, not sent: rich itself drops some, and sends the others.
    """

    def __init__(self, console: Console):
        self.console = console
        self.has_marks = True
        self._line = Text()
        self._live: Live | None = None

    def say(self, words: str) -> None:
        """Writes a line about the chat."""
        self.console.print(Text(printable(words), style="dim"), soft_wrap=True)

    def begin(self) -> None:
        """An answer begins."""
        self._line = Text()
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()

    def show(self, pieces: list[Piece], figures: Figures) -> None:
        """Writes what a round added."""
        if self._live is None:
            self.console.print(Text(printable("".join(piece.text for piece in pieces))), end="", soft_wrap=True)
            return
        for piece in pieces:
            self._line.append(printable(piece.text), ACCEPTED if piece.is_accepted and self.has_marks else None)
        *complete, self._line = self._line.split(allow_blank=True, include_separator=False)
        *wrapped, self._line = self._line.wrap(self.console, self.console.width, tab_size=4) or [Text()]
        for line in (*complete, *wrapped):
            self._live.console.print(line)
        below = Text(figures.line, style="dim", no_wrap=True, overflow="ellipsis")
        self._live.update(Text("\n").join([self._line, below]), refresh=True)

    def end(self, answer: Answer) -> None:
        """Writes the last line of an answer, and its figures."""
        is_live = self._live is not None
        self.drop()
        self.console.print(self._line if is_live else "")
        self.say(("stopped; " if answer.was_stopped else "") + answer.figures.line)

    def drop(self) -> None:
        """Takes the line of figures away, as where an answer ended by an error."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class TerminalChat:
    """Reads lines until the chat is left; `read` returns the next one, and raises EOFError where there is none."""

    def __init__(self, conversation: Conversation, screen: Screen, read: Callable[[], str]):
        self.conversation = conversation
        self.begun = dict(conversation.knobs)
        self.screen = screen
        self.read = read

    def run(self) -> None:
        """Goes on until /exit or the end of the input."""
        self.screen.say("Say something, or /help. Ctrl-C stops an answer, Ctrl-D ends the chat.")
        if self.conversation.tokenizer.chat_template is None:
            self.screen.say("The target has no chat template: it goes on with the text of all that was said.")
        while True:
            try:
                line = self.read()
            except EOFError:
                return
            if line.strip() == "/exit":
                return
            try:
                self.take(line)
            except (ValueError, RuntimeError) as error:  # of the words, the command or the device's memory
                self.screen.say(f"! {str(error).partition(chr(10))[0] or type(error).__name__}")

    def take(self, line: str) -> None:
        """Answers a line, or does what a command says. Raises ValueError for a command there is not."""
        check_text(line)
        if not line.startswith("/"):
            if line.strip():
                self.answer(lambda show, stop: self.conversation.ask(line, show, stop))
            return
        try:
            name, *words = shlex.split(line)  # a word with spaces stands in quotation marks
        except ValueError:
            raise ValueError(f"{line.split()[0]}: a quotation mark is not closed; expected two of them.") from None
        if name not in COMMANDS:
            raise ValueError(f"{name}: there is no such command; expected one of {' '.join(COMMANDS)} /exit.")
        command = COMMANDS[name]
        usual = command.usage.split()
        least = len([word for word in usual if not word.startswith("[")])  # the others may be left out
        if not least <= len(words) <= len(usual):
            raise ValueError(f"{name}: got {len(words)} words after it; expected {name} {command.usage}".rstrip() + ".")
        command.run(self, *words)

    def answer(self, make: Callable[[Show, threading.Event], Answer]) -> Answer:
        """Shows an answer while it is made; Ctrl-C stops it."""
        stop = threading.Event()
        self.screen.begin()
        try:
            with interruptible(stop.set):
                answer = make(self.screen.show, stop)
        except BaseException:
            self.screen.drop()
            raise
        self.screen.end(answer)
        return answer

    def compare(self) -> None:
        """Answers the last words by the target alone, and says what the drafter gained."""
        self.screen.say("by the target alone:")
        alone = self.answer(self.conversation.answer_alone)
        self.screen.say(self.conversation.describe_speedup(alone))

    def depth(self, word: str) -> None:
        """Has chains of a fixed depth drafted."""
        self.draft(Shape(number(word, "/depth", 1, MAX_DEPTH)).knobs)

    def tree(self, word: str, depth: str | None = None) -> None:
        """Has trees of so many nodes drafted."""
        before = self.conversation.knobs.get("num_assistant_tokens")
        kept = before if isinstance(before, int) else TREE_SHAPE.depth
        chosen = number(depth, "/tree", 1, MAX_DEPTH) if depth else kept
        self.draft(trees(chosen, number(word, "/tree", MIN_NODES, MAX_NODES), self.begun))

    def auto(self) -> None:
        """Has every round choose for itself how far to draft."""
        self.draft(AUTO_SHAPE.knobs)

    def draft(self, knobs: dict[str, Any]) -> None:
        """Drafts by these arguments of generate() from now on, and says so."""
        self.conversation.knobs = knobs
        self.screen.say("drafting: " + ", ".join(f"{name}={value}" for name, value in knobs.items()))

    def save(self, file: str) -> None:
        """Writes the conversation as JSON, whole or not at all. Raises ValueError for a file that is there, or cannot
        be written."""
        try:
            write_new(Path(file).expanduser(), self.conversation.as_json().encode())
        except FileExistsError:
            raise ValueError(f"/save: {file} is there already; expected a new name.") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: of `~user`, where there is no such user
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"/save: {file} cannot be written ({why}); expected another place.") from error
        self.screen.say(f"saved: {file}")

    def marks(self) -> None:
        """Turns the marks of accepted tokens on or off."""
        self.screen.has_marks = not self.screen.has_marks
        self.screen.say(f"accepted tokens are {'marked' if self.screen.has_marks else 'not marked'} from now on")

    def clear(self) -> None:
        """Begins anew."""
        self.conversation.clear()
        self.screen.say("all is forgotten")

    def help(self) -> None:
        """Lists the commands."""
        for name, command in COMMANDS.items():
            self.screen.say(f"{name} {command.usage}".ljust(24) + command.meaning)
        self.screen.say("/exit".ljust(24) + "ends the chat, as Ctrl-D does")


@dataclass(frozen=True)
class Command:
    """A command of the chat: the function that runs it, the words after its name (in brackets those that may be
    missing), and its help."""

    run: Callable[..., None]
    usage: str
    meaning: str


COMMANDS = {
    "/compare": Command(TerminalChat.compare, "", "the last answer again, by the target alone: as fast? the same?"),
    "/depth": Command(TerminalChat.depth, "TOKENS", "draft chains of so many tokens"),
    "/tree": Command(TerminalChat.tree, "NODES [DEPTH]", "draft trees of so many nodes, the root included"),
    "/auto": Command(TerminalChat.auto, "", "draft as far as pays, round by round"),
    "/marks": Command(TerminalChat.marks, "", "turn the marks of accepted tokens on or off"),
    "/save": Command(TerminalChat.save, "FILE", "write the conversation, its tokens and figures as JSON"),
    "/clear": Command(TerminalChat.clear, "", "forget what was said"),
    "/help": Command(TerminalChat.help, "", "this list"),
}


def number(word: str, command: str, least: int, most: int) -> int:
    """Reads a number of a command. Raises ValueError for any other word."""
    value = int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else 0
    if not least <= value <= most:
        raise ValueError(f"{command}: got {word!r}; expected a number from {least} to {most}.")
    return value


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that is not there yet, whole or not at all. Raises OSError."""
    with open(path, "xb") as out:
        try:
            out.write(data)
            out.flush()
        except BaseException:
            path.unlink()
            raise


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """A context in which Ctrl-C asks to stop; a second one does what it did before, wherever the program is."""

    def first(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
