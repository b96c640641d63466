"""Bad records: each gives an example or a reason that is counted, with file and line; none ends the preparation of the
others."""

import json
import random
from collections import Counter

import pytest
import torch
from factories import target as build_target
from letters import build_tokenizer, maker_of

from eagle31_hf.training.kinds import KINDS, PAIRS
from eagle31_hf.training.preparation_options import PreparationOptions
from eagle31_hf.training.prepare import prepare_data
from eagle31_hf.training.records import read_records
from eagle31_hf.training.shard_builder import each_record
from eagle31_hf.training.skipped import SHOWN, Skips
from eagle31_hf.training.store import HiddenStateStore

GOOD = {"input_ids": [1, 2, 3, 4, 5], "answers": [0, 0, 1, 1, 1]}
ASKED, SAID = {"role": "user", "content": "abc"}, {"role": "assistant", "content": "def"}
DEEP = "[" * 100_000

# A line of a file, without its end -> why it makes no example.
LINES = {
    b'{"text": 5}': "text is no text",
    b'{"text": NaN}': "text is no text",
    b'{"text": ["a"]}': "text is no text",
    b'{"text": true}': "text is no text",
    b'{"text": {}}': "text is no text",
    b'{"text": ""}': "too short",
    b'{"text": null}': "of no known kind",
    b"{}": "of no known kind",
    b'{"\\ud800": 1}': "of no known kind",
    b'{"text": "abc\\ud800def"}': "text is not Unicode",
    b'{"text": "abc \xed\xa0\x80 def"}': "text is not Unicode",
    b'{"text": "xyz"}': "tokenizer refused it: WordLevel error: Missing [UNK] token from the vocabulary",
    b"NaN": "no JSON object",
    b"[1]": "no JSON object",
    b"null": "no JSON object",
    b'"text"': "no JSON object",
    b'{"text": "abcdef"': "no JSON",
    b"text": "no JSON",
    b"\x00\x00": "no JSON",
    b'{"text": 1' + b"0" * 5000 + b"}": "no JSON",
    b'{"text": "abc\xff"}': "no UTF-8",
    DEEP.encode(): "nested too deep",
    b'{"text": ' + DEEP.encode(): "nested too deep",
}
RECORDS = [
    ({"input_ids": [1, 2.5, 3], "answers": [1, 1, 1]}, "input_ids are no integers"),
    ({"input_ids": [1, 5.0, 3], "answers": [1, 1, 1]}, "input_ids are no integers"),
    ({"input_ids": [1, True, 3], "answers": [1, 1, 1]}, "input_ids are no integers"),
    ({"input_ids": [1, None, 3], "answers": [1, 1, 1]}, "input_ids are no integers"),
    ({"input_ids": ["1", "2"], "answers": [1, 1]}, "input_ids are no integers"),
    ({"input_ids": [2**70, 1], "answers": [1, 1]}, "input_ids are no integers"),
    ({"input_ids": [float("nan"), 1], "answers": [1, 1]}, "input_ids are no integers"),
    ({"input_ids": "123", "answers": [1, 1, 1]}, "input_ids are no integers"),
    ({"input_ids": {"a": 1}, "answers": [1]}, "input_ids are no integers"),
    ({"input_ids": [[1, 2], [3]], "answers": [1, 1]}, "input_ids are no integers"),
    ({"input_ids": [[1, 2]], "answers": [[1, 1]]}, "input_ids are no integers"),
    ({"input_ids": 3, "answers": 1}, "input_ids and answers differ in number"),
    ({"input_ids": [1, 2, 3], "answers": [1]}, "input_ids and answers differ in number"),
    ({"input_ids": [1, 2, 3]}, "input_ids without answers"),
    ({"input_ids": [], "answers": []}, "no answer"),
    ({"input_ids": [1, 2, 3], "answers": [0, 0.5, 1]}, "answers are not 0 or 1"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 2, 1]}, "loss_mask are not 0 or 1"),
    ({"input_ids": [1, 2, 3], "answers": "yes"}, "answers are not 0 or 1"),
    ({"input_ids": [1, 2, 3], "labels": [-100, 2.5, 3]}, "labels are no integers"),
    ({"input_ids": [1, -2, 3], "answers": [1, 1, 1]}, "token ids the target does not have"),
    ({"input_ids": [1, 99, 3], "answers": [1, 1, 1]}, "token ids the target does not have"),
    ({"messages": "abc"}, "messages is no list"),
    ({"messages": {"role": ["user"], "content": ["abc"]}}, "messages is no list"),
    ({"messages": []}, "no answer"),
    ({"messages": [5]}, "a message without role and content"),
    ({"messages": [None]}, "a message without role and content"),
    ({"messages": [{"role": None, "content": "abc"}]}, "a message without role and content"),
    ({"messages": [ASKED | {"role": 5}]}, "role is no text"),
    ({"messages": [ASKED, SAID | {"content": 5}]}, "content is no text"),
    ({"messages": [ASKED, SAID | {"content": {"text": "abc"}}]}, "content is no text"),
    ({"messages": [ASKED, SAID | {"content": ["abc"]}]}, "content is no text"),
    ({"messages": [ASKED, SAID | {"content": [{"type": "text", "text": 5}]}]}, "content is no text"),
    (
        {"messages": [ASKED | {"content": [{"type": "image"}, {"type": "text", "text": "abc"}]}, SAID]},
        "holds more than text",
    ),
    ({"messages": [ASKED, SAID | {"content": [{"type": ["a"], "text": "abc"}]}]}, "holds more than text"),
    ({"messages": [ASKED, SAID | {"tool_calls": "f()"}]}, "tool_calls are no list of objects"),
    ({"messages": [ASKED, SAID | {"reasoning": 5}]}, "reasoning is no text"),
    ({"messages": [ASKED, SAID], "tools": "no json"}, "tools are no list of objects"),
    ({"messages": [ASKED, SAID], "tools": {"name": "f"}}, "tools are no list of objects"),
    ({"messages": [ASKED, SAID], "tools": [5]}, "tools are no list of objects"),
    ({"messages": [ASKED | {"name": "\ud800"}, SAID]}, "text is not Unicode"),
    ({"messages": [{"role": "nobody", "content": "abc"}]}, "template refused it: can only concatenate str"),
    ({"messages": [ASKED | {"content": "bad"}, SAID]}, "template refused it: bad words"),
    ({"conversations": 5}, "conversations is no list"),
    ({"conversations": [{"from": 5, "value": "abc"}]}, "from is no text"),
    ({"conversations": [{"from": "alien", "value": "abc"}]}, "a message from nobody known"),
    ({"conversations": [{"from": "human", "value": 5}]}, "content is no text"),
    ({"conversations": [{"from": "human", "value": None}]}, "no answer"),
    ({"prompt": 5, "completion": "abc"}, "prompt is no text"),
    ({"question": "abc", "answer": ""}, "no answer"),
    ({"instruction": "abc", "output": "", "text": "abc"}, "no answer"),
    ({"prompt": "abc", "completion": {}}, "completion is no text"),
    ({"prompt": "abc", "response": 5.0}, "response is no text"),
    ({"prompt": "abc", "completion": [5]}, "a message without role and content"),
    ({"instruction": 5, "output": "abc"}, "instruction is no text"),
    ({"instruction": "abc", "input": [1], "output": "abc"}, "input is no text"),
    ({"instruction": "abc", "output": False}, "output is no text"),
]  # fmt: skip
LINES |= {json.dumps(record).encode(): reason for record, reason in RECORDS}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = build_tokenizer()
    # Not all that a template adds up is text.
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ {", "{{ 'h' + 5 if m.role == 'nobody' else {")
    return tokenizer


@pytest.fixture(scope="module")
def target():
    return build_target()


def written(path, lines: list[bytes]) -> str:
    path.write_bytes(b"\n".join(lines))
    return str(path)


def prepared(records, tokenizer, report=None) -> tuple[list[int], Counter]:
    """Returns how many examples each record gave, and the counts of reasons."""
    maker, skips = maker_of(tokenizer, 40, vocab_size=61), Skips(records.where, report)
    numbers = range(len(records))
    made = dict(each_record(records, numbers, maker.examples, skips))
    return [len(made.get(number, ())) for number in numbers], skips.taken()


@pytest.mark.parametrize(("line", "reason"), LINES.items(), ids=[line[:60].decode("latin-1") for line in LINES])
def test_a_bad_record_is_counted_with_its_place(tmp_path, tokenizer, line, reason):
    path, said = written(tmp_path / "data.jsonl", [b"", line, json.dumps(GOOD).encode()]), []
    examples, counts = prepared(read_records(path), tokenizer, said.append)
    assert examples == [0, 1]
    (found,) = counts
    assert found.startswith(reason)
    (message,) = said
    assert message.startswith(f"skipped {path}, line 2: ")
    assert len(message) < 400 + len(path)
    message.encode()


def test_of_a_list_and_of_several_files_the_place_is_named_too(tmp_path, tokenizer):
    (tmp_path / "a.json").write_text(json.dumps([GOOD, {"text": 5}, 7]))
    written(tmp_path / "b.jsonl", [json.dumps(GOOD).encode(), b"", b"{"])
    said = []
    prepared(read_records(str(tmp_path)), tokenizer, said.append)
    assert [message.split(": ")[0] for message in said] == [
        f"skipped {tmp_path}/a.json, record 2",
        f"skipped {tmp_path}/a.json, record 3",
        f"skipped {tmp_path}/b.jsonl, line 3",
    ]


def test_records_of_a_dataset(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"text": "abcdef"}, {"text": ""}, {"text": "abcdef"}])
    data.to_parquet(tmp_path / "data.parquet")
    said = []
    assert prepared(read_records(str(tmp_path / "data.parquet")), tokenizer, said.append)[0] == [1, 0, 1]
    assert said == [f"skipped {tmp_path}/data.parquet, row 2: too short"]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b'\n{"text": "ab'])
def test_good_records_among_bad_ones(tmp_path, tokenizer, end):
    """A byte order mark, blank lines, and a last line that was cut off do not hide good records."""
    lines = [b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b" \t", *LINES, b"\xef\xbb\xbf" + json.dumps(GOOD).encode()]
    examples, counts = prepared(
        read_records(written(tmp_path / "data.jsonl", [*lines[:-1], lines[-1] + end])), tokenizer
    )
    assert sum(examples) == 2
    assert counts.total() == len(LINES) + (b"{" in end)


def test_a_reason_is_told_a_few_times_and_counted_every_time(tmp_path, tokenizer):
    said = []
    examples, counts = prepared(
        read_records(written(tmp_path / "data.jsonl", [b'{"text": 5}'] * 20)), tokenizer, said.append
    )
    assert (sum(examples), counts, len(said)) == (0, {"text is no text": 20}, SHOWN)


@pytest.mark.parametrize("regenerate", [False, True])
def test_stores_are_made_of_the_others(tmp_path, tokenizer, target, regenerate):
    """The store keeps the counts of each shard, whether it was made in one go or not."""
    lines = [json.dumps({"messages": [ASKED, SAID]}).encode(), *LINES, json.dumps({"text": "abcdefgh"}).encode()]
    data, said = written(tmp_path / "data.jsonl", lines), []
    options = {"max_length": 40, "records_per_shard": 20, "regenerate": regenerate}
    options |= {"max_new_tokens": 6, "generation": {"do_sample": False}} if regenerate else {}
    made = prepare_data(
        target, tokenizer, data, tmp_path / "store", PreparationOptions(**options), progress=said.append
    )
    assert made.rows >= 2
    counts = Counter(made.skipped)
    expected = prepared(read_records(data), tokenizer)[1]
    for reason in ("text is no text", "no JSON", "input_ids are no integers", "content is no text"):
        assert counts[reason] == expected[reason]
    assert f"skipped {data}, line 2: text is 5; expected text." in said
    assert HiddenStateStore(tmp_path / "store").skipped == counts


def test_where_no_example_is_left_the_first_reasons_are_named(tmp_path, tokenizer, target):
    data = written(tmp_path / "data.jsonl", [b'{"text": 5}', b"NaN", b'{"text": "a'])
    for count in (1, 2):
        options, said = PreparationOptions(max_length=40, records_per_shard=1, processes=count), list[str]()
        with pytest.raises(ValueError, match="none of its 3 records makes a row") as caught:
            prepare_data(target, tokenizer, data, tmp_path / f"store {count}", options, progress=said.append)
        for number, text in ((1, "text is 5"), (2, "holds a float"), (3, "Unterminated string")):
            assert f"{number}) {data}, line {number}: {text}" in str(caught.value)
            assert len([line for line in said if line.startswith(f"skipped {data}, line {number}: {text}")]) == 1


# Records at random.

SCALARS = [
    *(None, True, False, 0, 1, -1, 5, 60, 61, 2**63, 10**30, 0.0, 1.0, 2.5, float("nan"), float("inf")),
    *("", "a", "abcdefgh", "k", "bad", "xyz", "\ud800", "\x00", "user", "assistant", "text", "é", "a" * 99),
]
FIELDS = [
    *sorted({*KINDS, *(name for pair in PAIRS for name in pair), "text"}),
    *("answers", "labels", "loss_mask", "assistant_masks", "tools", "role", "content", "from", "value", "tool_calls"),
    *("input", "type", "\udfff"),
]
SOUND = [
    GOOD,
    {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]},
    {"messages": [ASKED, SAID]},
    {"text": "abcdefgh"},
    {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cde"}]},
    {"prompt": "ab", "completion": "cde"},
    {"prompt": [ASKED], "response": [SAID]},
    {"instruction": "ab", "input": "c", "output": "cde"},
    {
        "messages": [ASKED, SAID | {"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}],
        "tools": [{"name": "f"}],
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}, SAID]},
]


def value(draw: random.Random, depth: int = 0):
    kind = draw.random()
    if depth > 3 or kind < 0.6:
        return draw.choice(SCALARS)
    if kind < 0.8:
        return [value(draw, depth + 1) for _ in range(draw.randrange(5))]
    return {draw.choice(FIELDS): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def changed(draw: random.Random, node, depth: int = 0):
    """The value with one place in it, at any depth, made another or dropped."""
    if depth == 0 or draw.random() < 0.75:
        if isinstance(node, dict) and node:
            name = draw.choice([*node])
            rest = {key: part for key, part in node.items() if key != name}
            return rest if draw.random() < 0.1 else rest | {name: changed(draw, node[name], depth + 1)}
        if isinstance(node, list) and node:
            at = draw.randrange(len(node))
            return node[:at] + ([] if draw.random() < 0.1 else [changed(draw, node[at], depth + 1)]) + node[at + 1 :]
    return value(draw)


def line_of(draw: random.Random) -> bytes:
    record = value(draw) if draw.random() < 0.1 else changed(draw, draw.choice(SOUND))
    line = json.dumps(record, ensure_ascii=draw.random() < 0.9).encode("utf-8", "surrogatepass")
    if draw.random() < 0.15:
        at = draw.randrange(len(line))
        line = draw.choice([line[:at], line[:at] + bytes([draw.randrange(256)]) + line[at + 1 :], line + line])
    return line.replace(b"\n", b" ") or b"0"


@pytest.mark.parametrize("seed", range(3))
def test_records_at_random(tmp_path, tokenizer, seed):
    draw, said = random.Random(seed), []
    lines = [line_of(draw) for _ in range(1500)]
    records = read_records(written(tmp_path / "data.jsonl", lines))
    maker, skips = maker_of(tokenizer, 40, vocab_size=61), Skips(records.where, said.append)
    num_good = 0
    for _, examples in each_record(records, range(len(records)), maker.examples, skips):
        num_good += 1
        for example in examples:
            ids, answers = example["input_ids"], example["answers"]
            assert (ids.dtype, answers.dtype) == (torch.long, torch.bool)
            assert 0 <= int(ids.min()) <= int(ids.max()) < 61
    counts = skips.taken()
    assert num_good + counts.total() == len(records)
    assert num_good > 50
    assert len(counts) > 15
    assert all(len(reason) < 140 for reason in counts)
    json.dumps(counts).encode()
    for message in said:
        message.encode()
