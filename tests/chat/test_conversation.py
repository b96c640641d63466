"""A conversation, beside the target's own answers and the statistics of `track_acceptance`."""

import json
from threading import Event

import pytest
import torch
from chat.conversations import conversation

from eagle31_hf import track_acceptance
from eagle31_hf.chat.conversation import Answer

WORDS = "class Parser(object):"


def silent(pieces, figures):
    """Shows nothing."""


def alone(chat, messages, count=24):
    """The target's own answer to messages."""
    ids = chat.prompt_ids(messages)
    return chat.target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)[
        0, ids.shape[1] :
    ].tolist()


@pytest.mark.parametrize(
    "knobs",
    [
        {"num_assistant_tokens": 4},
        {"num_assistant_tokens": 4, "draft_tree_top_k": 3, "draft_tree_total_tokens": 12},
        {"num_assistant_tokens": "auto"},
    ],
    ids=["chain", "tree", "auto"],
)
def test_an_answer_is_the_targets_own_and_its_pieces_are_its_text(knobs):
    chat, shown = conversation(knobs=knobs), []
    with track_acceptance() as stats:
        answer = chat.ask(WORDS, lambda pieces, figures: shown.extend(pieces), Event())
    assert answer.ids == alone(chat, [{"role": "user", "content": WORDS}])
    assert answer.text == chat.tokenizer.decode(answer.ids, skip_special_tokens=True)
    assert shown == answer.pieces
    figures = answer.figures
    assert figures.tokens == len(answer.ids) == stats.generated_tokens
    assert figures.accepted == sum(piece.is_accepted for piece in shown) == sum(stats.accepted_per_position)
    assert figures.drafted == sum(stats.drafted_per_position)
    assert figures.forwards == stats.target_forwards
    assert figures.accepted_length == pytest.approx(stats.mean_accepted_length)
    assert figures.tokens_per_second == pytest.approx(figures.tokens / figures.seconds)
    assert not answer.was_stopped


def test_the_next_turn_reads_the_answer_before_it():
    chat = conversation(system="be brief")
    first = chat.ask(WORDS, silent, Event())
    second = chat.ask("def __init__(self):", silent, Event())
    said = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": WORDS},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "def __init__(self):"},
    ]
    assert chat.messages == [*said, {"role": "assistant", "content": second.text}]
    assert second.ids == alone(chat, said)
    chat.clear()
    assert chat.messages == said[:1]


def test_a_turn_reads_what_is_new():
    """Over four turns, one of them stopped: what the target reads is the prompt less what it has read."""
    chat, read = conversation(knobs={"num_assistant_tokens": 2}), list[int]()
    conversation().ask(WORDS, silent, Event())  # before a target's first call is over it has been tried
    handle = chat.target.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    stop, known = Event(), 0
    try:
        for turn in range(4):
            messages = [*chat.messages, {"role": "user", "content": f"{WORDS} # {turn}"}]
            read.clear()
            show = (lambda pieces, figures: stop.set()) if turn == 2 else silent
            answer = chat.ask(messages[-1]["content"], show, stop if turn == 2 else Event())
            prompt = chat.prompt_ids(messages)
            assert read[0] == prompt.shape[1] - answer.figures.reused
            # an answer's text may make other tokens than its own
            assert known <= answer.figures.reused < prompt.shape[1]
            known = prompt.shape[1] - 1  # the last token of a prompt is read with the next turn, at least
            assert json.loads(chat.as_json())["messages"][-1]["figures"]["reused"] == answer.figures.reused
            assert answer.ids == alone(chat, messages)[: len(answer.ids)]
    finally:
        handle.remove()


def test_what_the_template_reads_besides_reaches_it():
    plain, thoughtful = conversation(), conversation(thinking="hmm")
    messages = [{"role": "user", "content": WORDS}]
    text = thoughtful.tokenizer.decode(thoughtful.prompt_ids(messages)[0])
    assert text == plain.tokenizer.decode(plain.prompt_ids(messages)[0]) + "hmm"


HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>",
    "analysishmassistantfinalyes",
)


@pytest.mark.parametrize(
    ("raw", "words"), [("hm</think>\n\nyes", "hm</think>\n\nyes"), HARMONY], ids=["tag", "channels"]
)
def test_a_later_prompt_has_an_answer_without_its_thoughts(raw, words):
    """As templates leave them out that find them in a field of their own: the prompt may have begun the thinking."""
    chat = conversation()
    chat.answers = [Answer(ids=chat.tokenizer(raw)["input_ids"])]
    messages = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": words}]
    assert chat.tokenizer.decode(chat.prompt_ids(messages)[0]).endswith("<assistant>yes\n")


def test_without_a_template_the_text_goes_on():
    chat = conversation(template=None)
    first = chat.ask(WORDS, silent, Event())
    chat.ask("\n    def f(", silent, Event())
    text = chat.tokenizer.decode(chat.prompt_ids(chat.messages[:3])[0], skip_special_tokens=True)
    assert text == WORDS + first.text + "\n    def f("


def test_once_more_by_the_target_alone():
    chat = conversation()
    with pytest.raises(ValueError, match="nothing has been asked"):
        chat.answer_alone(silent, Event())
    answer = chat.ask(WORDS, silent, Event())
    again = chat.answer_alone(silent, Event())
    assert again.ids == answer.ids
    assert again.text == answer.text
    assert (again.figures.drafted, again.figures.accepted) == (0, 0)
    assert again.figures.accepted_length == 1.0
    assert len(chat.messages) == 2


@pytest.mark.parametrize("with_drafter", [True, False])
def test_a_stopped_answer_keeps_what_was_told_and_the_next_one_is_right(with_drafter):
    chat, stop = conversation(), Event()
    whole = chat.ask(WORDS, silent, Event())

    def show(pieces, figures):
        if figures.tokens > 6:
            stop.set()

    stopped = chat.generate_answer(chat.messages[:-1], show, stop, with_drafter)
    assert stopped.was_stopped
    assert 6 < len(stopped.ids) < len(whole.ids)
    assert stopped.ids == whole.ids[: len(stopped.ids)]
    assert chat.generate_answer(chat.messages[:-1], silent, Event(), with_drafter).ids == whole.ids


def test_a_stop_before_an_answer_is_begun_counts():
    chat, stop = conversation(), Event()
    stop.set()
    answer = chat.ask(WORDS, silent, stop)
    assert answer.was_stopped
    assert len(answer.ids) == 1
    assert chat.messages[-1]["content"] == answer.text


def fits(chat, words, since=0):
    """How many tokens the conversation has with these words, 0 where that is more than the target reads."""
    before = chat.messages[: len(chat.messages) - 2 * since]
    length = chat.prompt_ids([*before, {"role": "user", "content": words}]).shape[1]
    return length if length < 2048 else 0


def test_a_conversation_that_fills_the_context():
    chat = conversation()
    chat.ask(WORDS, silent, Event())
    before = list(chat.messages)
    with pytest.raises(ValueError, match=r"has \d+ tokens; expected fewer than 2048"):
        chat.ask("x = 1\n" * 3000, silent, Event())
    assert chat.messages == before, "words that could not be answered stay in the conversation"
    words = max(("x = 1\n" * n for n in range(390, 420)), key=lambda words: fits(chat, words))
    assert 2048 - 24 < fits(chat, words) < 2048
    nearly = chat.ask(words, silent, Event())
    assert len(nearly.ids) == 2048 - fits(chat, words, since=1)


def test_words_without_tokens():
    chat = conversation(template="{# says nothing #}")
    with pytest.raises(ValueError, match="makes no tokens"):
        chat.ask("", silent, Event())


def test_what_the_template_refuses_is_told_and_forgotten():
    chat = conversation(template="{{ raise_exception('no such role') }}")
    with pytest.raises(ValueError, match="chat template refuses the conversation: no such role"):
        chat.ask(WORDS, silent, Event())
    assert chat.messages == []


def test_its_record_is_json():
    chat = conversation()
    answer = chat.ask(WORDS, silent, Event())
    record = json.loads(chat.as_json())
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
    told = record["messages"][1]
    assert "".join(text for text, _ in told["pieces"]) == told["content"] == answer.text
    assert told["figures"]["accepted"] == sum(is_accepted for _, is_accepted in told["pieces"])
    assert told["drafting"] == {"num_assistant_tokens": 4}
    chat.knobs = {"num_assistant_tokens": 2}
    chat.ask(WORDS, silent, Event())
    assert [json.loads(chat.as_json())["messages"][k]["drafting"]["num_assistant_tokens"] for k in (1, 3)] == [4, 2]
