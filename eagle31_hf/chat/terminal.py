"""A chat in a terminal: lines of the user, commands that begin with a slash, and answers as they are made."""

import json
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .conversation import LEAST_NODES, MOST_DEPTH, MOST_NODES, TREE_DEPTH, TREE_TOP_K, Answer, Conversation
from .screen import Screen


class TerminalChat:
    """Reads lines until the chat is left; `read` returns the next one, and raises EOFError where there is none."""

    def __init__(self, conversation: Conversation, screen: Screen, read: Callable[[], str]):
        self.conversation = conversation
        self.screen = screen
        self.read = read

    def run(self) -> None:
        """Goes on until /exit or the end of the input."""
        self.screen.say("Say something, or /help. Ctrl-C stops an answer, Ctrl-D ends the chat.")
        if not self.conversation.has_template:
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
            except ValueError as error:  # of the words or the command; the chat goes on
                self.screen.drop()
                self.screen.say(f"! {error}")

    def take(self, line: str) -> None:
        """Answers a line, or does what a command says. Raises ValueError for a command there is not."""
        if not line.startswith("/"):
            if line.strip():
                self.answer(lambda: self.conversation.ask(line, self.screen.show))
            return
        name, *words = split(line)
        if name not in COMMANDS:
            raise ValueError(f"{name}: there is no such command; expected one of {' '.join(COMMANDS)} /exit.")
        does, usage, _ = COMMANDS[name]
        least = sum(1 for word in usage.split() if not word.startswith("["))
        if not least <= len(words) <= len(usage.split()):
            raise ValueError(f"{name}: got {len(words)} words behind it; expected {name} {usage}".rstrip() + ".")
        does(self, *words)

    def answer(self, make: Callable[[], Answer]) -> Answer:
        """Shows an answer while it is made."""
        self.screen.begin()
        with interruptible(self.conversation.stop.set):
            answer = make()
        self.screen.end(answer)
        return answer

    def compare(self) -> None:
        """Answers the last words by the target alone, and says what the drafter gained."""
        self.screen.say("by the target alone:")
        alone = self.answer(lambda: self.conversation.again(self.screen.show, with_drafter=False))
        self.screen.say(self.conversation.compared(alone))

    def depth(self, word: str) -> None:
        """Has chains of a fixed depth drafted."""
        self.conversation.knobs = {"num_assistant_tokens": number(word, "/depth", 1, MOST_DEPTH)}
        self.tell()

    def tree(self, word: str, depth: str | None = None) -> None:
        """Has trees of so many nodes drafted."""
        kept = self.conversation.knobs.get("num_assistant_tokens")
        self.conversation.knobs = {
            "num_assistant_tokens": number(depth, "/tree", 1, MOST_DEPTH) if depth else kept_depth(kept),
            "draft_tree_top_k": TREE_TOP_K,
            "draft_tree_total_tokens": number(word, "/tree", LEAST_NODES, MOST_NODES),
        }
        self.tell()

    def auto(self) -> None:
        """Has every round choose for itself how far to draft."""
        self.conversation.knobs = {"num_assistant_tokens": "auto"}
        self.tell()

    def tell(self) -> None:
        """Says how drafts are made from now on."""
        self.screen.say("drafting: " + ", ".join(f"{name}={value}" for name, value in self.conversation.knobs.items()))

    def save(self, file: str) -> None:
        """Writes the conversation as JSON, whole or not at all. Raises ValueError for a file that is there, or cannot
        be written."""
        text = json.dumps(self.conversation.record(), indent=2, ensure_ascii=False, default=str)
        path = Path(file).expanduser()
        try:
            with open(path, "x", encoding="utf-8") as out:
                out.write(text)
        except FileExistsError:
            raise ValueError(f"/save: {file} is there already; expected a new name.") from None
        except OSError as error:
            with suppress(OSError):
                path.unlink()  # the part that was written
            raise ValueError(f"/save: {file} cannot be written ({error.strerror}); expected another place.") from error
        self.screen.say(f"saved: {file}")

    def marks(self) -> None:
        """Marks accepted tokens, or does no longer."""
        self.screen.has_marks = not self.screen.has_marks
        self.screen.say(f"accepted tokens are {'marked' if self.screen.has_marks else 'not marked'} from now on")

    def clear(self) -> None:
        """Begins anew."""
        self.conversation.clear()
        self.screen.say("all is forgotten")

    def help(self) -> None:
        """Lists the commands."""
        for name, (_, usage, meaning) in COMMANDS.items():
            self.screen.say(f"{name} {usage}".ljust(24) + meaning)
        self.screen.say("/exit".ljust(24) + "ends the chat, as Ctrl-D does")


# name: what it does, the words behind it, what it is for
COMMANDS: dict[str, tuple[Callable[..., None], str, str]] = {
    "/compare": (TerminalChat.compare, "", "the last answer again, by the target alone: as fast? the same?"),
    "/depth": (TerminalChat.depth, "TOKENS", "draft chains of so many tokens"),
    "/tree": (TerminalChat.tree, "NODES [DEPTH]", "draft trees of so many nodes, the root included"),
    "/auto": (TerminalChat.auto, "", "draft as far as pays, round by round"),
    "/marks": (TerminalChat.marks, "", "mark accepted tokens, or no longer"),
    "/save": (TerminalChat.save, "FILE", "write the conversation, its tokens and figures as JSON"),
    "/clear": (TerminalChat.clear, "", "forget what was said"),
    "/help": (TerminalChat.help, "", "this list"),
}


def split(line: str) -> list[str]:
    """Returns the words of a command; a word with spaces stands in quotation marks. Raises ValueError for one mark
    without another."""
    try:
        return shlex.split(line)
    except ValueError:
        raise ValueError(f"{line.split()[0]}: a quotation mark has no other one; expected two of them.") from None


def number(word: str, command: str, least: int, most: int) -> int:
    """Reads a number of a command. Raises ValueError for any other word."""
    value = int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else 0
    if not least <= value <= most:
        raise ValueError(f"{command}: got {word!r}; expected a number from {least} to {most}.")
    return value


def kept_depth(chosen: Any) -> int:
    """Returns the depth that was chosen before, or the usual one of trees."""
    return chosen if isinstance(chosen, int) else TREE_DEPTH


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """A context in which Ctrl-C asks to stop; a second one raises KeyboardInterrupt, wherever the program is."""

    def first(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
