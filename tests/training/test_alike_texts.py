"""Token ids of texts that begin alike are those of the tokenizer, however it cuts and normalizes."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eagle31_hf.training.alike_texts import AlikeTexts

SHORT = 40  # characters
MARKS = ("<|im_start|>", "<|im_end|>", "<think>")
TEXT = "a turn of words, and\nof others: banana bandana  two  spaces\n\nends " * 20
PIPELINES = {
    "bytes": (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "bytes after a space": (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
    "metaspace at the beginning": (pre_tokenizers.Metaspace(prepend_scheme="first"), None),
    "metaspace everywhere": (pre_tokenizers.Metaspace(prepend_scheme="always"), None),
    "prepended": (None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "stripped and in lower case": (
        pre_tokenizers.Whitespace(),
        normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase(), normalizers.NFKC()]),
    ),
}


def build(name: str, **flags) -> PreTrainedTokenizerFast:
    """A tokenizer of its own, trained on some words, whose marks have these flags."""
    before, normalizer = PIPELINES[name]
    tokenizer = Tokenizer(models.BPE(unk_token="?", byte_fallback=False))
    if before is not None:
        tokenizer.pre_tokenizer = before
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=200, special_tokens=["?"], show_progress=False)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    made.add_tokens([AddedToken(mark, **flags) for mark in MARKS], special_tokens=True)
    return made


def chats(seed: int):
    """Texts of turns as a template renders them: the whole, its prefixes, and some that part within a word."""
    draw = random.Random(seed)
    words = TEXT.split(" ")
    turns = [" ".join(draw.choices(words, k=draw.randint(0, 9))) for _ in range(5)]
    whole = "".join(f"<|im_start|>user\n{turn}<|im_end|>\n" for turn in turns)
    ends = [draw.randint(0, len(whole)) for _ in range(8)]
    parts = [whole[:end] + draw.choice(["", "<|im_start|>assistant\n", "x", " banana", "<|im_e"]) for end in ends]
    return whole, [*parts, whole, "", "nothing alike", "<|im_start|>user\nthe next<|im_end|>\n"]


@pytest.mark.parametrize("flags", [{}, {"normalized": True}, {"lstrip": True}, {"rstrip": True}], ids=str)
@pytest.mark.parametrize("name", PIPELINES)
def test_ids_are_those_of_the_tokenizer(name, flags):
    tokenizer = build(name, **{"normalized": False} | flags)
    alike = AlikeTexts(tokenizer)
    for seed in range(12):
        whole, others = chats(seed)
        assert alike.set_reference(whole) == tokenizer(whole, add_special_tokens=False)["input_ids"]
        for text in others:
            assert alike.ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"], text
    assert alike._reuses_prefix


def counted(tokenizer, monkeypatch) -> list[int]:
    """The lengths of the texts that are tokenized, as they come."""
    lengths, whole = [], type(tokenizer)._encode_plus

    def noted(self, text, *args, **options):
        lengths.append(len(text))
        return whole(self, text, *args, **options)

    monkeypatch.setattr(type(tokenizer), "_encode_plus", noted)
    return lengths


def test_what_texts_share_is_tokenized_once(monkeypatch):
    alike = AlikeTexts(build("bytes", normalized=False))
    whole, _ = chats(0)
    places = [place for place in range(len(whole)) if whole.startswith("<|im_start|>", place)]
    for text in (whole, *(whole[:place] for place in places)):  # compared
        alike.set_reference(whole)
        alike.ids(text)
    lengths = counted(alike.tokenizer, monkeypatch)
    alike.set_reference(whole)
    for place in places[1:]:
        alike.ids(whole[:place] + "<|im_start|>assistant\n")
    assert sum(lengths) < len(whole) + 80, "the header of an answer, once, besides"


def looking(at: str):
    """A tokenizer that changes each text by itself, as no tokenizer of parts does."""
    tokenizer = build("bytes", normalized=False)

    class LooksAround(type(tokenizer)):
        def _encode_plus(self, text, **options):
            changed = {
                "the beginning": f"? {text}",
                "the beginning of long texts": f"? {text}" if len(text) > SHORT else text,
                "the length": text + "ab" * (len(text) % 3 + 1),
            }[at]
            return super()._encode_plus(changed, **options)

    tokenizer.__class__ = LooksAround
    return tokenizer


def test_an_end_that_does_not_begin_with_the_special_token_is_not_taken():
    """Where the first texts did not show it."""
    tokenizer = looking("the beginning of long texts")
    alike = AlikeTexts(tokenizer)
    alike.set_reference("a<|im_start|>banana")
    texts = ["a<|im_start|>" + word for word in ("a", "turn", "of", "words", TEXT)]
    for text in texts:
        assert alike.ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert alike._reuses_prefix


@pytest.mark.parametrize("at", ["the beginning", "the length"])
def test_a_tokenizer_that_looks_around_tokenizes_all_of_every_text(at):
    tokenizer = looking(at)
    alike = AlikeTexts(tokenizer)
    for seed in range(4):
        whole, others = chats(seed)
        alike.set_reference(whole)
        for text in others:
            assert alike.ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
