"""Shows answers in a terminal while they are made: accepted tokens marked, and how fast they come."""

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..printable import printable
from .conversation import Answer, Figures, Piece

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
