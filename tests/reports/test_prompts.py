"""Prompts of a report: every kind of record, as it is served, and in longer contexts."""

import json
from pathlib import Path

import pytest
import torch

from eagle31_hf import demo
from eagle31_hf.reports.prompts import NAMED_SETS, PLACEHOLDER, Prompts, Renderer, resolved, source_of
from eagle31_hf.training.kinds import parse_record

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return demo.load_target()[1]


@pytest.fixture
def chats(tokenizer, monkeypatch):
    """The tokenizer with a chat template."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    return tokenizer


def prompts_of(records, tokenizer, tmp_path, room=500, answer=10, limit=100, num_tokens=20):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    renderer = Renderer(tokenizer, num_tokens, len(tokenizer), {})
    return Prompts(str(path), renderer, limit, room, answer)


def lengthened(prompts, num_tokens):
    """The first prompt in a longer context, None where it is left out."""
    return dict(prompts.lengthened(num_tokens)).get(0)


def texts(prompts):
    return [prompts.renderer.tokenizer.decode(ids) for ids in prompts.ids]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "why?"}]},
        {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]},
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so."}]},
        {"prompt": "why?"},
        {"prompt": [{"role": "user", "content": "why?"}]},
        {"question": "why?", "answer": "so."},
        {"turns": ["why?", "and then?"], "category": "writing"},
        {"instruction": "why?", "output": "so."},
        {"messages": [], "question": "why?"},
    ],
    ids=["messages", "answered", "sharegpt", "prompt", "prompt-messages", "question", "turns", "instruction", "filled"],
)
def test_a_question_is_rendered_as_it_is_served(record, chats, tmp_path):
    assert texts(prompts_of([record], chats, tmp_path)) == ["<user>why?<answer>"]


@pytest.mark.parametrize(
    "record",
    [
        {"turns": ["why?", "", "and then?"]},
        {
            "messages": [
                {"role": "user", "content": "why?"},
                {"role": "assistant", "content": "so."},
                {"role": "user", "content": "and then?"},
            ]
        },
    ],
    ids=["turns", "messages"],
)
def test_what_the_user_asks_later_is_kept(record, chats, tmp_path):
    prompts = prompts_of([record], chats, tmp_path)
    assert texts(prompts) == ["<user>why?<answer>"]
    assert prompts.sources[0].later == ("and then?",)


# rows as the named sets have them
ROWS = {
    "speed-bench": {"question_id": "a", "category": "coding", "turns": ["why?", "so?"], "multiturn": True},
    "mt-bench": {"prompt_id": 1, "category": "writing", "prompt": ["why?", "so?"], "reference": []},
    "humaneval": {"task_id": "a", "prompt": "why?", "canonical_solution": "so", "test": "", "entry_point": "f"},
    "gsm8k": {"question": "why?", "answer": "so #### 4"},
    "longbench": {
        "_id": "a", "domain": "b", "question": "why?", "context": "Long ago.", "answer": "B",
        "choice_A": "one", "choice_B": "two", "choice_C": "three", "choice_D": "four",
    },
}  # fmt: skip


def test_named_sets_are_read_from_the_datasets_they_stand_for(chats, tmp_path, monkeypatch):
    """From folders in place of the Hub, which `datasets` reads alike."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    assert ROWS.keys() == NAMED_SETS.keys()
    renderer = Renderer(chats, 20, len(chats), {})
    for name, row in ROWS.items():
        dataset, _, config = NAMED_SETS[name][0].partition(":")
        folder = Path(dataset)
        folder.mkdir(parents=True)
        datasets.Dataset.from_list([row]).to_parquet(folder / "rows.parquet")
        if config:
            files = [{"split": NAMED_SETS[name][1], "path": "*.parquet"}]
            card = json.dumps([{"config_name": config, "data_files": files}])
            (folder / "README.md").write_text(f"---\nconfigs: {card}\n---\n")
        [found] = texts(Prompts(name, renderer, 10, 500, 10))
        expected = "Long ago.\n\nwhy?\n(A) one\n(B) two\n(C) three\n(D) four" if name == "longbench" else "why?"
        assert found == f"<user>{expected}<answer>"
    Path("gsm8k").write_text("a text of my own")
    assert resolved("gsm8k", None) == ("gsm8k", "train")
    assert resolved("humaneval", "other") == ("openai/openai_humaneval", "other")


def test_placeholders_of_prompts_are_left_out(chats, tmp_path):
    rows = [{"turns": [f"{PLACEHOLDER} USING SPECDEC_BENCH"]}, {"turns": ["why?"]}]
    prompts = prompts_of(rows, chats, tmp_path)
    assert texts(prompts) == ["<user>why?<answer>"]
    assert "placeholder" in prompts.skips.first[0]


def test_a_chat_for_a_tokenizer_without_a_template_is_its_words(tokenizer, tmp_path):
    assert texts(prompts_of([{"prompt": "why?"}], tokenizer, tmp_path)) == ["<|begin|>why?"]


def test_a_text_is_cut_and_goes_on_in_a_longer_context(tokenizer, tmp_path):
    text = " ".join(f"name_{i} = {i}" for i in range(100))
    prompts = prompts_of([{"text": text}], tokenizer, tmp_path, num_tokens=12)
    whole = tokenizer(text, return_tensors="pt")["input_ids"][0]
    assert torch.equal(prompts.ids[0], whole[:12])
    assert torch.equal(lengthened(prompts, 200), whole[:200])
    assert lengthened(prompts, len(whole) + 1) is None
    assert lengthened(prompts, 12) is None  # it is as long already


def test_a_chat_in_a_longer_context_has_other_prompts_in_front_of_its_question(chats, tmp_path):
    records = [{"prompt": " ".join([word] * 30)} for word in ("import", "return", "class")]
    prompts = prompts_of(records, chats, tmp_path)
    short, longer = prompts.ids[0], lengthened(prompts, len(prompts.ids[0]) + 40)
    assert abs(len(longer) - len(short) - 40) < 8  # words are joined anew
    text = chats.decode(longer)
    assert text.startswith("<user>return return")
    assert text.endswith("import import<answer>")
    assert lengthened(prompts, len(short)) is None
    assert lengthened(prompts, 10_000) is None


def test_no_prompt_is_longer_than_leaves_room_for_an_answer(chats, tmp_path):
    """A chat's words, joined anew, may be some tokens more than were asked for."""
    prompts = prompts_of([{"prompt": " ".join([word] * 30)} for word in ("import", "return")], chats, tmp_path)
    lengths = range(len(prompts.ids[0]) + 1, len(prompts.ids[0]) + 20)
    assert any(len(lengthened(prompts, length)) > length for length in lengths)
    for length in lengths:
        prompts.room = length + prompts.answer
        assert all(len(ids) <= length for _, ids in prompts.lengthened(length))


def test_a_template_that_refuses_long_chats_leaves_them_out(chats, tmp_path, monkeypatch):
    refusing = TEMPLATE + "{% if messages[0].content|length > 60 %}{{ raise_exception('too long') }}{% endif %}"
    monkeypatch.setattr(chats, "chat_template", refusing)
    prompts = prompts_of([{"prompt": word * 5} for word in ("import ", "return ")], chats, tmp_path)
    assert lengthened(prompts, len(prompts.ids[0]) + 5) is None


def test_tokens_of_training_data_end_where_the_answer_begins(tokenizer, tmp_path):
    record = {"input_ids": [5, 6, 7, 8], "answers": [0, 0, 1, 1]}
    assert prompts_of([record], tokenizer, tmp_path).ids[0].tolist() == [5, 6]


def test_tokens_alone_are_a_prompt(tokenizer, tmp_path):
    records = [{"input_ids": [5, 6, 7]}, {"input_ids": []}, {"input_ids": [5, 10**6]}, {"input_ids": "abc"}]
    prompts = prompts_of(records, tokenizer, tmp_path)
    assert [ids.tolist() for ids in prompts.ids] == [[5, 6, 7]]
    assert sum(prompts.skips.taken().values()) == 3


def test_an_empty_text_is_no_prompt_although_a_tokenizer_begins_it(tokenizer, tmp_path):
    prompts = prompts_of([{"text": ""}, {"text": "why?"}], tokenizer, tmp_path)
    assert len(prompts) == 1
    assert prompts.skips.taken()["empty prompt"] == 1


def test_prompts_without_room_for_an_answer_are_counted(tokenizer, tmp_path):
    records = [{"prompt": "x " * 400}, {"prompt": "why?"}, {"nothing": 1}]
    prompts = prompts_of(records, tokenizer, tmp_path, room=100)
    assert len(prompts) == 1
    assert dict(prompts.skips.taken()) == {"over-long prompt": 1, "of no known kind": 1}


def test_records_are_read_as_training_reads_them(chats, tmp_path, monkeypatch):
    """An instruction with its input, a question with its tools, and what prepare-data has written."""
    monkeypatch.setattr(chats, "chat_template", TEMPLATE + "{% if tools %}<{{ tools[0].name }}>{% endif %}")
    alpaca = {"instruction": "Translate.", "input": "Bonjour", "output": "Hello"}
    tools = {"prompt": "sum?", "completion": "3", "tools": [{"name": "add"}]}
    found = texts(prompts_of([alpaca, tools], chats, tmp_path))
    assert found == ["<user>Translate.\n\nBonjour<answer>", "<user>sum?<answer><add>"]
    openorca = {"system_prompt": "Be brief.", "question": "why?", "response": "So."}
    (asked,) = prompts_of([openorca], chats, tmp_path).sources
    assert [message["content"] for message in asked.chat.messages] == ["Be brief.", "why?"]
    assert asked.chat.messages == parse_record(openorca).messages[:-1]
    formatted = {"prompt": "Add one to 2. ### Answer: 3", "instruction": "Add one.", "input": "2", "output": "3"}
    assert texts(prompts_of([formatted], chats, tmp_path)) == ["<user>Add one.\n\n2<answer>"]
    assert texts(prompts_of([{"prompt": "why?", "tools": "a file"}], chats, tmp_path)) == ["<user>why?<answer>"]
    stored = {"input_ids": torch.tensor([1, 2, 3, 4]), "answers": torch.tensor([False, False, True, True])}
    assert source_of(stored).ids.tolist() == [1, 2]


def test_later_turns_that_are_no_text_are_left_out(chats, tmp_path):
    prompts = prompts_of([{"turns": ["why?", 3, "and then?"]}, {"turns": ["why?", "\ud800"]}], chats, tmp_path)
    assert [source.later for source in prompts.sources] == [("and then?",)]


@pytest.mark.parametrize("record", [{"prompt": ""}, {"question": None}, {"turns": []}, {"turns": [""]}])
def test_an_empty_question_is_told_as_one(record, tokenizer, tmp_path):
    (name,) = record
    with pytest.raises(ValueError, match=rf"line 1: the column '{name}' is empty; expected a question"):
        prompts_of([record], tokenizer, tmp_path)


def test_no_prompt_at_all_is_refused_with_the_reason(tokenizer, tmp_path):
    with pytest.raises(
        ValueError, match=r"gives no prompt \(.*line 1: a record has nothing; expected one of: input_ids; .* question"
    ):
        prompts_of([{"nothing": 1}], tokenizer, tmp_path)


def test_no_more_prompts_are_read_than_asked_for(tokenizer, tmp_path):
    assert len(prompts_of([{"prompt": "why?"}] * 5, tokenizer, tmp_path, limit=2)) == 2


def test_the_built_in_set_is_pythons_library(tokenizer):
    prompts = Prompts("python", Renderer(tokenizer, 16, len(tokenizer), {}), 3, 500, 10)
    assert [len(ids) for ids in prompts.ids] == [16, 16, 16]
    assert len(lengthened(prompts, 300)) == 300
