"""Incremental detokenization: the text of tokens that come one by one."""

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what the bytes of a character are shown as that is not complete


class Detokenizer:
    """Returns the text that each token adds. Put together that is the text of all of them, although a token's text may
    depend on the token before it, and a character may take several tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        # those of the text returned last, which the next one's may depend on, and those after them
        self._ids = list[int]()
        self._known = 0  # how many of them are of the text returned last

    def add(self, token: int) -> str:
        """Returns what the token adds to the text; nothing while a character is not complete."""
        self._ids.append(token)
        text = self._new_text()
        if text.endswith(UNFINISHED):
            return ""
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return text

    def end(self) -> str:
        """Returns the text that is left: the beginning of a character that never was completed."""
        return self._new_text() if len(self._ids) > self._known else ""

    def _new_text(self) -> str:
        return self._text(self._ids)[len(self._text(self._ids[: self._known])) :]

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
