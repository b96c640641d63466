"""Text of tokens that come one by one."""

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what the bytes of a character are shown as that is not complete


class Decoding:
    """Tells the text that each token adds. Together they are the text of all: what a token means may depend on the one
    before it, and a character may take several."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._ids = list[int]()  # from the token before the last whose text is known
        self._known = 0  # how many of them have been told

    def add(self, token: int) -> str:
        """Returns what the token adds to the text; nothing while a character is not complete."""
        self._ids.append(token)
        text = self._new_text()
        if text.endswith(UNFINISHED):
            return ""
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return text

    def end(self) -> str:
        """Returns what is left: the beginning of a character that never was completed."""
        return self._new_text() if len(self._ids) > self._known else ""

    def _new_text(self) -> str:
        return self._text(self._ids)[len(self._text(self._ids[: self._known])) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
