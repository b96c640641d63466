"""The target makes up whole chats: it asks as its users would, and answers."""

import copy
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from engine_server import EngineServer
from letters import END, build_tokenizer, generator_of, write_data

from eagle31_hf.seeding import seeded
from eagle31_hf.training import self_prompts
from eagle31_hf.training.answers import AnswerGenerator
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import prepare_data
from eagle31_hf.training.recipe import asked_data
from eagle31_hf.training.regenerate import regenerate
from eagle31_hf.training.self_prompts import (
    ASKED_BEFORE,
    ENDLESS,
    NUM_TURNS,
    REPEATING,
    TEMPERATURES,
    SelfPrompt,
    SelfPrompts,
    asking,
    question,
    repeats_itself,
)
from eagle31_hf.training.servers import EngineOptions
from eagle31_hf.training.skipped import Skipped
from eagle31_hf.training.store import HiddenStateStore

USER, ASSISTANT = 8, 9  # "i" and "j"
# As ChatML: a turn of the user's is closed as one of the assistant's is.
CLOSED = (
    "{% for m in messages %}{{ {'system': 'h', 'user': 'i', 'assistant': 'j'}[m.role] }}{{ m.content }}k{% endfor %}"
    "{{ 'j' if add_generation_prompt }}"
)


@pytest.fixture
def tokenizer():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CLOSED
    return tokenizer


@pytest.fixture(autouse=True)
def _words(monkeypatch):
    """System messages in the tokenizer's letters."""
    monkeypatch.setattr(self_prompts, "SYSTEM_MESSAGES", (None, "ab", "c"))


@pytest.fixture
def target(make_target):
    return make_target("llama", eos_token_id=END)


def source_of(target, tokenizer, length: int = 160, tokens: int = 30) -> AnswerGenerator:
    return generator_of(target, tokenizer, length, tokens, 4)


LETTERS = (None, None, None, "a")  # openings of words that the tokenizer has


@pytest.fixture(autouse=True)
def openings(monkeypatch):
    monkeypatch.setattr("eagle31_hf.training.self_prompts.OPENINGS", LETTERS)


def made(target, tokenizer, chats: list[SelfPrompt], seed: int = 0, **lengths) -> tuple[list[list[dict]], Counter]:
    skipped = Counter()
    with seeded(seed):
        found = regenerate(
            source_of(target, tokenizer, **lengths), chats, lambda index, refusal: skipped.update([str(refusal)])
        )
    return found, skipped


def runs(example: dict) -> list[tuple[bool, str]]:
    """Returns the words of an example, cut where answers begin and end."""
    letters = ["abcdefghijk"[token] for token in example["input_ids"].tolist()]
    pairs = zip(example["answers"].tolist(), letters, strict=True)
    return [(is_answer, "".join(letter for _, letter in run)) for is_answer, run in groupby(pairs, lambda p: p[0])]


def test_chats_are_as_the_template_has_them(target, tokenizer):
    chats = [SelfPrompt(system, 2, 1.0) for system in ("ab", None) for _ in range(6)]
    found, _ = made(target, tokenizer, chats)
    examples = [(chat, example) for chat, own in zip(chats, found, strict=True) for example in own]
    assert len(examples) > 3
    for chat, example in examples:
        begin = "habki" if chat.system else "i"
        for number, (is_answer, words) in enumerate(runs(example)):
            assert is_answer == bool(number % 2)
            if not is_answer:
                assert words.startswith("i" if number else begin)
                assert words.endswith("kj")


def test_questions_are_drawn_from_the_target_s_own_distribution(target, tokenizer):
    """The first token of a question is distributed as the target has it after the text up to where the user speaks."""
    prompt, temperature, after = next(question(source_of(target, tokenizer), [], "", set()))
    assert (prompt.tolist(), temperature, after) == ([USER], 1.0, "kj")
    with torch.no_grad():
        expected = target(prompt[None]).logits[0, -1].softmax(-1)
    drawn = Counter()
    with seeded(3):
        source = generator_of(target, tokenizer, 160, 1, 500)
        drawn.update(int(answer[0]) for answer in source.answers([prompt] * 4000, [1.0] * 4000))
    for token, share in enumerate(expected.tolist()):
        assert abs(drawn[token] / 4000 - share) < 5 * (share * (1 - share) / 4000) ** 0.5 + 1e-3


def test_an_open_turn_of_the_user_s_ends_where_the_answer_would_begin(target):
    """As in templates without a token after the user's words: what follows them in the template ends a question."""
    tokenizer = build_tokenizer()  # "j" begins the answer, and is no special token
    found, _ = made(target, tokenizer, [SelfPrompt(None, 1, 0.7)] * 20)
    questions = [runs(example)[0][1] for own in found for example in own]
    assert questions
    assert all(
        question.startswith("i") and question.endswith("j") and question.count("j") == 1 for question in questions
    )


def questions_of(
    target, tokenizer, answers: list[str], chats: list[list[dict]] | None = None, openings: list[str] | None = None
) -> list[str | Skipped]:
    """Returns what becomes of questions that the target is made to say, or why they are refused."""
    source, asked, found = source_of(target, tokenizer), set(), []
    chats, openings = chats or [[] for _ in answers], openings or [""] * len(answers)
    for words, said, opening in zip(answers, chats, openings, strict=True):
        talk = question(source, said, opening, asked)
        ids = torch.tensor(["abcdefghijk".index(letter) for letter in words])
        is_ended = asking(source, {next(talk).after}).is_ended(ids)
        try:
            talk.send((ids, is_ended))
        except StopIteration as end:
            found.append(end.value)
        except Skipped as refusal:
            found.append(refusal)
    return found


def test_what_no_user_would_ask_is_refused(target, tokenizer):
    found = questions_of(target, tokenizer, ["abk", "ab", "k", "abk", "abak"])
    assert [str(one) for one in found] == ["ab", ENDLESS, "an empty question", ASKED_BEFORE, "aba"]
    assert [isinstance(one, Skipped) for one in found] == [False, True, True, True, False]


def test_an_opening_begins_the_first_question_and_a_text_that_it_quotes_may_break_off(target, tokenizer, monkeypatch):
    monkeypatch.setattr("eagle31_hf.training.self_prompts.QUOTING", ("e",))  # ":" is no letter of the tokenizer's
    said = ["abk", "ab", "ab", "k", "ab" * 30]
    found = questions_of(target, tokenizer, said, openings=["c", "c", "ce", "ce", "ce"])
    assert [str(one) for one in found] == ["cab", ENDLESS, "ceab", "an empty question", ENDLESS]
    chats = [SelfPrompt(None, 2, 1.0, "fg")] * 15
    answered, _ = made(target, tokenizer, chats)
    questions = [words for own in answered for example in own for is_answer, words in runs(example) if not is_answer]
    firsts = [words for words in questions if words.startswith("ifg")]
    assert firsts
    assert len(firsts) >= len([own for own in answered if own])
    assert len(questions) > len(firsts)  # later questions are the target's own from their first word


def test_a_quoted_text_does_not_end_within_a_character(target, tokenizer, monkeypatch):
    monkeypatch.setattr("eagle31_hf.training.self_prompts.QUOTING", ("e",))
    monkeypatch.setattr(type(tokenizer), "decode", lambda *args, **options: "ab \ufffd\ufffd")
    assert questions_of(target, tokenizer, ["ab"], openings=["ce"]) == ["ceab"]


def test_a_question_is_not_asked_again_in_its_own_chat_but_in_another(target, tokenizer):
    said = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    again, other, same = questions_of(target, tokenizer, ["abk", "cdk", "cdk"], [said, said, said])
    assert isinstance(again, Skipped)
    assert (other, same) == ("cd", "cd")


def test_a_chat_without_a_question_ends_and_is_counted(target, tokenizer):
    ends_never = copy.deepcopy(target)
    ends_never.generation_config.eos_token_id = None
    plain = copy.deepcopy(tokenizer)
    plain.eos_token = None
    plain.chat_template = CLOSED.replace("k{% endfor %}", "{% endfor %}").replace(
        "{{ 'j' if add_generation_prompt }}", ""
    )
    found, skipped = made(ends_never, plain, [SelfPrompt(None, 2, 1.0)] * 3)
    assert found == [[], [], []]
    assert skipped == {ENDLESS: 3}


@pytest.mark.parametrize("period", [1, 2, 7, 20])
def test_a_loop_is_told_from_text(period):
    draw = random.Random(period)
    text = [draw.randrange(1000) for _ in range(100)]
    loop = [draw.randrange(1000) for _ in range(period)] * (60 // period + 3)
    assert repeats_itself(torch.tensor(text + loop))
    assert not repeats_itself(torch.tensor(text))
    assert not repeats_itself(torch.tensor(loop + text))
    assert not repeats_itself(torch.tensor(text + loop[: 2 * period]))


def test_answers_that_repeat_themselves_are_left_out(make_target, tokenizer):
    """The target is indifferent: what it samples is varied, and its greedy answers are one letter."""
    target = copy.deepcopy(make_target("llama", eos_token_id=END))
    with torch.no_grad():
        target.lm_head.weight.zero_()
    for temperature, is_varied in ((0.0, False), (1.0, True)):
        found, skipped = made(
            target, tokenizer, [SelfPrompt(None, 1, temperature)] * 10, length=1000, tokens=200 if is_varied else 120
        )
        assert (skipped[REPEATING] > 2) != is_varied
        assert (sum(map(len, found)) > 2) == is_varied


def test_an_engine_ends_an_answer_that_repeats_itself(make_target, tokenizer, tmp_path):
    """Fewer tokens, the same store: what repeats itself is left out either way, and all else is as it was."""
    target = copy.deepcopy(make_target("llama", eos_token_id=END))
    with torch.no_grad():
        target.lm_head.weight.zero_()
    stores, longest, skipped = [], [], []
    for heeds_loops in (True, False):
        server = EngineServer(target, tokenizer, max_model_len=320)
        server.heeds_loops = heeds_loops
        engine = EngineOptions((server.url,), timeout=20.0)
        options = PreparationOptions(
            regenerate=True, self_prompts=8, max_length=320, max_new_tokens=70, records_per_shard=8, engine=engine
        )
        try:
            skipped.append(prepare_data(target, tokenizer, None, tmp_path / str(heeds_loops), options).skipped)
        finally:
            server.stop()
        longest.append(server.longest_greedy)
        stores.append(ids_in(tmp_path / str(heeds_loops)))
    assert stores[0] == stores[1]
    assert skipped[0] == skipped[1]
    assert skipped[0][REPEATING] > 1
    assert longest == [48, 70]


def test_at_a_given_temperature_too_answers_that_repeat_themselves_end_and_are_left_out(
    make_target, tokenizer, tmp_path
):
    target = copy.deepcopy(make_target("llama", eos_token_id=END))
    with torch.no_grad():
        target.lm_head.weight.zero_()
    server = EngineServer(target, tokenizer, max_model_len=320)
    server.heeds_loops = True
    options = {"max_length": 320, "max_new_tokens": 70, "engine": EngineOptions((server.url,), timeout=20.0)}
    try:
        with pytest.raises(ValueError, match=f"none of its 12 records makes a row .*{REPEATING}"):
            prepared(target, tokenizer, tmp_path, generation={"do_sample": False}, **options)
    finally:
        server.stop()
    assert server.longest_greedy == 48


def test_plans_are_mixed_and_the_same_whoever_reads_them():
    plans = [*SelfPrompts(400, 5)]
    assert plans == [SelfPrompts(1000, 5)[i] for i in range(400)]
    assert plans != [*SelfPrompts(400, 6)]
    assert {plan.temperature for plan in plans} == {*TEMPERATURES}
    assert {plan.num_turns for plan in plans} == {*NUM_TURNS}
    assert {plan.system for plan in plans} > {None}
    assert {plan.opening for plan in plans} == {opening or "" for opening in LETTERS}


# -- stores


def prepared(target, tokenizer, folder, num: int = 12, data: str | None = None, **options):
    options = {"max_length": 160, "max_new_tokens": 30, "records_per_shard": 5} | options
    return prepare_data(
        target, tokenizer, data, folder, PreparationOptions(regenerate=True, self_prompts=num, **options)
    )


def ids_in(folder) -> list[list[int]]:
    store = HiddenStateStore(folder)
    return [store[i]["input_ids"].tolist() for i in range(len(store))]


def test_a_store_of_self_prompts_goes_on_where_it_was_stopped(target, tokenizer, tmp_path):
    done = prepared(target, tokenizer, tmp_path / "whole")
    assert done.num_shards == done.shards == 3
    assert done.rows > 5
    for part in (1, 0):
        options = PreparationOptions(
            regenerate=True, self_prompts=12, max_length=160, max_new_tokens=30, records_per_shard=5
        )
        prepare_data(target, tokenizer, None, tmp_path / "parts", options, part=(part, 2))
    assert ids_in(tmp_path / "parts") == ids_in(tmp_path / "whole")
    asked = asked_data(None, None, options)
    assert asked_data(str(tmp_path / "parts"), None, PreparationOptions()) == asked
    assert asked_data(None, None, replace(options, self_prompts=13)) != asked
    with pytest.raises(ValueError, match="num_records is 12, expected 13"):
        prepared(target, tokenizer, tmp_path / "whole", 13)


def test_data_and_self_prompts_stand_in_one_store(target, tokenizer, tmp_path):
    records = [{"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}]}] * 3
    data = write_data(tmp_path / "data.jsonl", records)
    done = prepared(target, tokenizer, tmp_path / "store", data=data)
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["num_records"] == 15
    assert manifest["source"]["self_prompts"] == 12
    begins = [tokenizer.decode(ids)[:5] for ids in ids_in(tmp_path / "store")]
    assert begins[:3] == ["iabck"] * 3
    assert done.rows > 3


def test_a_given_temperature_wins(target, tokenizer, tmp_path):
    prepared(target, tokenizer, tmp_path / "store", 20, generation={"do_sample": False})
    for ids, answers in ((e["input_ids"], e["answers"]) for e in HiddenStateStore(tmp_path / "store")):
        begin = int(answers.int().argmax())
        with torch.no_grad():
            assert int(target(ids[None, :begin]).logits[0, -1].argmax()) == ids[begin]


def test_without_a_template_texts_begin_from_bos(target, tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = None, "h"
    prepared(target, tokenizer, tmp_path / "store")
    store = HiddenStateStore(tmp_path / "store")
    assert len(store) > 4
    for i in range(len(store)):
        assert store[i]["input_ids"][0] == 7
        assert store[i]["answers"].tolist() == [False] + [True] * (len(store[i]["answers"]) - 1)
    prepared(target, tokenizer, tmp_path / "cold", generation={"do_sample": True, "temperature": 1e-3})
    assert len({*map(tuple, ids_in(tmp_path / "cold"))}) == 1


def test_neither_template_nor_beginning_is_an_error(target, tmp_path):
    target, tokenizer = copy.deepcopy(target), build_tokenizer()
    tokenizer.chat_template = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no chat template, no BOS and no EOS"):
        prepared(target, tokenizer, tmp_path / "store")


def test_a_template_without_system_messages_is_given_none(target, tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CLOSED
    )
    done = prepared(target, tokenizer, tmp_path / "store")
    assert done.rows > 4
    assert not any("template" in reason for reason in done.skipped)


def test_self_prompts_need_answers_by_the_target(target, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="self_prompts is 3 and regenerate False"):
        PreparationOptions(self_prompts=3)
    with pytest.raises(ValueError, match="no data and self_prompts is 0"):
        prepare_data(target, tokenizer, None, tmp_path / "store", PreparationOptions(regenerate=True))
    assert not (tmp_path / "store").exists()
