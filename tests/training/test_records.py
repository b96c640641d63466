"""Records of files, folders and datasets, and their kinds."""

import importlib.util
import json
import os
import pickle

import pytest
import torch

from eagle31_hf.training.kinds import Tokens, parse_record
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import prepare_data
from eagle31_hf.training.records import Lines, identity, read_records
from eagle31_hf.training.skipped import Skipped
from eagle31_hf.training.store import HiddenStateStore

ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
RECORDS = [{"text": "one"}, {"text": "two\u2028ü"}, {"text": "three"}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
FILES = {
    "data.jsonl": LINES,
    "unended.jsonl": LINES.rstrip("\n"),
    "list.json": json.dumps(RECORDS, indent=2),
    "lines.json": LINES,
    "blank_lines.jsonl": "\n\n" + LINES.replace("\n", "\r\n \n"),
    "marked.jsonl": "\ufeff" + LINES,
    "marked.json": "\ufeff" + json.dumps(RECORDS),
}


def written(folder, name: str, content: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode())
    return str(path)


def test_good_records_cost_no_message(monkeypatch):
    """Each training step reads records of thousands of ids: to show one takes longer than to read it."""

    class Unasked:
        def repr(self, value):
            raise AssertionError(f"a message about {value} was made")

    monkeypatch.setattr("eagle31_hf.training.kinds.SHORT", Unasked())
    for ids, mask in (([3, 1, 2], [0, 1, 1]), (torch.tensor([3, 1, 2]), torch.tensor([False, True, True]))):
        tokens = parse_record({"input_ids": ids, "loss_mask": mask})
        assert tokens.input_ids.tolist() == [3, 1, 2]
    assert parse_record({"text": "one"}) == "one"
    parse_record({"messages": [ASKED, SAID]})
    with pytest.raises(AssertionError, match="a message about"):
        parse_record({"input_ids": ["three"], "loss_mask": [1]})


@pytest.mark.parametrize("name", FILES)
def test_files_of_records(tmp_path, name):
    records = read_records(written(tmp_path, name, FILES[name]))
    assert [*records] == RECORDS
    assert (len(records), records[-1]) == (3, RECORDS[2])
    assert [*pickle.loads(pickle.dumps(records))] == RECORDS


def test_the_tokens_of_stores_are_records(target, tokenizer, tmp_path):
    """Answers that an engine gave without states get them so; several stores in a folder are read together."""
    texts = ["abcdefgh", "cdefghij", "ijhgfedc"]
    for name, some in (("one", texts[:2]), ("two", texts[2:])):
        data = written(tmp_path, f"{name}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in some))
        prepare_data(target, tokenizer, data, tmp_path / "stores" / name, PreparationOptions(max_length=40))
    written(tmp_path, "stores/more/manifest.json", "[]")  # of something else
    written(tmp_path, "stores/more/more.jsonl", json.dumps({"input_ids": [1, 2, 3], "answers": [0, 1, 1]}))
    records = read_records(str(tmp_path / "stores"))
    assert [tokenizer.decode(parse_record(record).input_ids) for record in records] == ["bcd", *texts]
    assert "one/shard-00000.safetensors, row 2" in records.where(2)
    done = prepare_data(
        target, tokenizer, str(tmp_path / "stores"), tmp_path / "states", PreparationOptions(max_length=40, states=True)
    )
    assert (done.rows, done.tokens) == (4, 27)
    found, plain = HiddenStateStore(tmp_path / "states"), HiddenStateStore(tmp_path / "stores" / "one")
    for row in range(2):
        assert torch.equal(found[1 + row]["input_ids"], plain[row]["input_ids"])
        assert torch.equal(found[1 + row]["answers"], plain[row]["answers"])
        assert len(found[1 + row]["states"]) == 8


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_of_text_are_text_whatever_their_api_calls_them(kind):
    record = {"messages": [ASKED | {"content": [{"type": kind, "text": "a"}]}, SAID]}
    assert parse_record(record).messages[0]["content"] == [{"type": "text", "text": "a"}]
    thought = {"type": "reasoning_text", "text": "a"}
    assert parse_record({"messages": [ASKED | {"content": [thought]}, SAID]}).messages[0]["content"] == [thought]


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({"text": "a" * 500 + "\ud800" + "b" * 500}, r"'a{20}\\ud800b{20}'"),
        ({"messages": [ASKED, SAID], "tools": [{"name": {"f": ["\ud800"]}}]}, r".*\{\"f\": \[\"\\ud800\"\]\}.*"),
        ({"messages": [ASKED | {"\ud800": 1}, SAID]}, r".*\"\\ud800\": 1.*"),
    ],
    ids=["text", "a value", "a name"],
)
def test_half_a_surrogate_pair_is_shown_where_it_stands(record, shown):
    with pytest.raises(Skipped, match=rf"half a surrogate pair \({shown}\)"):
        parse_record(record)


def test_any_other_file_is_one_text(tmp_path):
    assert [*read_records(written(tmp_path, "poem.md", "roses\n\nred"))] == [{"text": "roses\n\nred"}]


def test_a_folder_is_its_files_in_the_order_of_their_paths(tmp_path):
    for name, content in {
        "b.jsonl": LINES,
        "a/z.txt": "first",
        "a/empty.jsonl": "",
        "c.json": '[{"text": "last"}]',
        ".git/x.txt": "no",
        "README.md": "what they are",
        "a/LICENSE": "who may use them",
    }.items():
        written(tmp_path, name, content)
    records = read_records(str(tmp_path))
    assert [*records] == [{"text": "first"}, *RECORDS, {"text": "last"}]
    assert [records[-1], records[-5]] == [{"text": "last"}, {"text": "first"}]
    with pytest.raises(IndexError):
        records[5]


def test_lines_are_parsed_when_asked_for(tmp_path):
    path = tmp_path / "data.jsonl"
    written(tmp_path, path.name, LINES + "\n{broken\n[1]\n")
    records = Lines(path)
    assert (len(records), records[2]) == (5, RECORDS[2])
    with pytest.raises(IndexError):
        records[5]
    for index, line, problem in ((3, 5, "Expecting property name"), (4, 6, "holds a list")):
        with pytest.raises(Skipped, match=rf"data\.jsonl, line {line}: {problem}.*expected one JSON object a line"):
            records[index]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", "\n", "holds no records"),
        ("a.json", "[]", "holds no records"),
        ("a.txt", " \n", "holds no records"),
        ("a.json", '[{"text": 1},', r"a\.json: Expecting .* expected a list of JSON objects"),
        ("a.jsonl.gz", "x", "is compressed; expected .jsonl"),
    ],
)
def test_bad_files(tmp_path, name, content, problem):
    with pytest.raises(ValueError, match=problem):
        read_records(written(tmp_path, name, content))


def test_bytes_and_empty_folders(tmp_path):
    with pytest.raises(ValueError, match="a folder without files"):
        read_records(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"ab\xff\x00")
    with pytest.raises(ValueError, match="byte 2 is no UTF-8"):
        read_records(str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_can_be_read_once_only(tmp_path):
    os.mkfifo(tmp_path / "chats.jsonl")
    for reader in (read_records, identity):
        with pytest.raises(ValueError, match=r"chats\.jsonl: is a pipe or a device; expected a file"):
            reader(str(tmp_path / "chats.jsonl"))


@pytest.mark.parametrize("source", ["missing.jsonl", "missing.txt", "./missing", "/a/b/missing", "a/b/missing", "~/x"])
def test_missing_files(source):
    for reader in (read_records, identity):
        with pytest.raises(FileNotFoundError, match="not found; expected a file, a folder, or a dataset"):
            reader(source)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the library is there")
def test_datasets_name_the_extra(tmp_path):
    written(tmp_path, "saved/state.json", "{}")
    for source in ("owner/name", "name:config", str(tmp_path / "saved"), written(tmp_path, "data.parquet", "PAR1")):
        with pytest.raises(ImportError, match=r"pip install eagle31_hf\[train\]"):
            read_records(source)


def test_saved_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(RECORDS)
    both = datasets.DatasetDict({"train": data, "test": data.select([0])})
    data.save_to_disk(tmp_path / "one")
    both.save_to_disk(tmp_path / "two")
    data.to_parquet(tmp_path / "data.parquet")
    for name in ("one", "two", "data.parquet"):
        assert [*read_records(str(tmp_path / name))] == RECORDS
    assert [*read_records(str(tmp_path / "two"), "test")] == RECORDS[:1]
    assert identity(str(tmp_path / "two")) != identity(str(tmp_path / "two"), "test")
    with pytest.raises(ValueError, match="has no split 'dev'; expected one of train, test"):
        read_records(str(tmp_path / "two"), "dev")


def test_the_first_records_alone(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        written(tmp_path, name, LINES)
    first = read_records(str(tmp_path), max_samples=4)
    assert [*first] == [*RECORDS, RECORDS[0]]
    assert first.where(3) == f"{tmp_path / 'b.jsonl'}, line 1"
    assert len(read_records(str(tmp_path), max_samples=99)) == 6
    with pytest.raises(IndexError):
        first[4]


def test_of_a_dataset_of_the_hub_no_more_is_read_than_is_asked_for(monkeypatch):
    datasets = pytest.importorskip("datasets")
    read = []

    def rows(name):
        for record in 9 * RECORDS:
            read.append(record)
            yield record | {"name": name}

    def load_dataset(path, name=None, *, split, streaming=False):
        assert streaming
        return datasets.IterableDataset.from_generator(rows, gen_kwargs={"name": f"{path} {name} {split}"})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    records = read_records("owner/name:config", "dev", max_samples=2)
    assert [*records] == [record | {"name": "owner/name config dev"} for record in RECORDS[:2]]
    assert records.where(1) == "owner/name:config, row 2"
    num_read = len(read)
    first = identity("owner/name:config", "dev", max_samples=2)
    assert len(read) == num_read < 9  # once, though it is read and identified
    assert first != identity("owner/name:config", "dev", max_samples=1)
    assert first != identity("owner/other:config", "dev", max_samples=2)


def test_rows_of_a_stream_may_be_of_any_kinds(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = {"mixed": [{"text": "y"}, {"prompt": "a", "response": "b"}], "empty": []}

    def load_dataset(path, *_, **__):
        return datasets.IterableDataset.from_generator(rows[path].__iter__)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [*read_records("mixed", max_samples=5)] == rows["mixed"]
    with pytest.raises(ValueError, match="empty: holds no records"):
        read_records("empty", max_samples=5)


def test_identity_is_of_the_contents(tmp_path):
    first, moved, other = (
        written(tmp_path, name, text) for name, text in (("a.txt", "x"), ("b/c.txt", "x"), ("d.txt", "y"))
    )
    assert identity(first) == identity(moved) != identity(other)
    assert identity(first) != identity(written(tmp_path, "a.jsonl", "x"))
    for name in ("e/1.txt", "f/1.txt", "g/2.txt"):
        written(tmp_path, name, "x")
    assert identity(str(tmp_path / "e")) == identity(str(tmp_path / "f")) != identity(str(tmp_path / "g"))


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [ASKED, SAID | {"tool_calls": None}], "id": 3}, [ASKED, SAID]),
        ({"prompt": "a", "messages": [ASKED, SAID]}, [ASKED, SAID]),
        ({"messages": None, "prompt": "a", "completion": "b"}, [ASKED, SAID]),
        ({"prompt": "a", "response": "b"}, [ASKED, SAID]),
        (
            {"prompt": [{"role": "system", "content": "s"}, ASKED], "completion": [SAID]},
            [{"role": "system", "content": "s"}, ASKED, SAID],
        ),
        ({"instruction": "a", "output": "b"}, [ASKED, SAID]),
        ({"instruction": "a", "input": "", "output": "b"}, [ASKED, SAID]),
        ({"instruction": "a", "input": "x", "output": "b"}, [{"role": "user", "content": "a\n\nx"}, SAID]),
        ({"conversations": [ASKED, SAID]}, [ASKED, SAID]),
        ({"instruction": "a", "context": "x", "response": "b"}, [{"role": "user", "content": "x\n\na"}, SAID]),
        ({"question": "a", "answer": "b"}, [ASKED, SAID]),
        ({"query": "a", "response": "b"}, [ASKED, SAID]),
        ({"inputs": "a", "targets": "b"}, [ASKED, SAID]),
        ({"prompt": "a formatted: b", "instruction": "a", "input": "", "output": "b"}, [ASKED, SAID]),
        ({"question": "a", "answer": "b", "context": {"title": ["c"]}}, [ASKED, SAID]),
        ({"question": "a", "answer": "b", "context": ["x", "y"]}, [{"role": "user", "content": "x\n\ny\n\na"}, SAID]),
        ({"messages": [], "prompt": "a", "completion": "b"}, [ASKED, SAID]),
        ({"problem": "a", "solution": "b", "answer": "4"}, [ASKED, SAID]),
        ({"question": "a", "answer": "", "response": "b", "text": "c"}, [ASKED, SAID]),
        ({"system_prompt": "s", "question": "a", "response": "b"}, [{"role": "system", "content": "s"}, ASKED, SAID]),
        ({"system": "s", "conversations": [ASKED, SAID]}, [{"role": "system", "content": "s"}, ASKED, SAID]),
        (
            {"system": "other", "messages": [{"role": "system", "content": "s"}, ASKED, SAID]},
            [{"role": "system", "content": "s"}, ASKED, SAID],
        ),
        ({"system": " ", "messages": [ASKED, SAID]}, [ASKED, SAID]),
    ],
)
def test_chats(record, messages):
    chat = parse_record(record)
    assert (chat.messages, chat.tools) == (messages, None)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("user", "user"),
        ("gpt", "assistant"),
        ("ChatGPT", "assistant"),
        ("bing", "assistant"),
        ("system", "system"),
        ("assistant", "assistant"),
        ("tool", "tool"),
    ],
)
def test_names_of_sharegpt(name, role):
    assert parse_record({"conversations": [{"from": name, "value": "a"}]}).messages == [{"role": role, "content": "a"}]


def test_tools_and_their_calls_are_kept():
    calls = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}],
    }
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (tools, json.dumps(tools)):
        chat = parse_record({"messages": [ASKED, calls], "tools": given})
        assert chat.tools == tools
        assert chat.messages[1] == {"role": "assistant", "tool_calls": calls["tool_calls"]}


@pytest.mark.parametrize(
    "answers",
    [
        {"answers": [False, True, True]},
        {"loss_mask": [0, 1, 1]},
        {"assistant_masks": [0, 1, 1]},
        {"labels": [-100, 0, 7]},
    ],
)
def test_tokens(answers):
    tokens = parse_record({"input_ids": [5, 0, 7]} | answers)
    assert isinstance(tokens, Tokens)
    torch.testing.assert_close(tokens.input_ids, torch.tensor([5, 0, 7]))
    torch.testing.assert_close(tokens.answers, torch.tensor([False, True, True]))


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"title": "a", "answer": "b"}, "a record has answer, title; expected one of: input_ids; messages;"),
        ({"text": None}, "a record has nothing; expected"),
        ({"input_ids": [1]}, "a row has input_ids; expected input_ids and one of answers, loss_mask"),
        ({"input_ids": [1, 2], "answers": [1]}, r"input_ids are \(2,\) and answers \(1,\); expected one mark"),
        ({"messages": [{"content": "a"}]}, "expected an object with role and content, or from and value"),
        ({"messages": "hello"}, "messages is 'hello'; expected a list of messages"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "a message is from 'alien'; expected one of system"),
    ],
)
def test_records_of_no_kind(record, problem):
    with pytest.raises(ValueError, match=problem):
        parse_record(record)
