"""The streamer by which `eagle31 generate` and `demo` print a text while it is made."""

from transformers import TextStreamer

from ..printable import printable


class PrintableStreamer(TextStreamer):
    """Prints a text as it is made, its control characters spelled out."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Prints what is new of the text."""
        super().on_finalized_text(printable(text), stream_end)
