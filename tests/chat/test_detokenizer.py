"""Text of tokens that come one by one, beside the text of all."""

import pytest

from eagle31_hf import demo
from eagle31_hf.chat.conversation import Detokenizer

TEXTS = ["def main(argv):\n    return 0\n", "naïve 🦅 世界 ∑", " leading and  double  spaces", ""]


@pytest.fixture(scope="module")
def tokenizer():
    return demo.load_target()[1]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text_of_all(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer(text)["input_ids"]
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join(pieces) + detokenizer.end() == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces), "a character was told before it was complete"


def test_a_character_that_is_never_completed_is_told_at_the_end(tokenizer):
    ids = tokenizer("🦅")["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    assert len(ids) > 1
    pieces = [detokenizer.add(token) for token in ids[:-1]]
    assert "".join(pieces) + detokenizer.end() == tokenizer.decode(ids[:-1], skip_special_tokens=True)


def test_special_tokens_add_nothing(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in (tokenizer.bos_token_id, *tokenizer("a")["input_ids"])]
    assert pieces[0] == ""
    assert "".join(pieces) == "a"
