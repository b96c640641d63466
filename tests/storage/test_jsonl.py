"""JSON lines: values by their number, each with the line it stands on, and parsed when it is asked for."""

import pytest

from eagle31_hf.storage.jsonl import JsonLines


def test_values_know_their_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('\n{"text": "one\u2028two"}\n  \n[1]\r\n{broken\n3'.encode())
    lines = JsonLines(path)
    assert len(lines) == 4
    assert [lines.line_number(i) for i in range(4)] == [2, 4, 5, 6]
    assert [lines[0], lines[1], lines[-1]] == [{"text": "one\u2028two"}, [1], 3]
    with pytest.raises(ValueError, match="Expecting property name"):
        lines[2]
    with pytest.raises(IndexError):
        lines[4]


def test_how_a_line_is_read_is_the_callers_choice(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("a\n\nbc\n")
    assert [*JsonLines(path, len)] == [2, 3]


def test_an_empty_file_has_no_values_and_a_missing_one_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert [*JsonLines(tmp_path / "empty.jsonl")] == []
    with pytest.raises(FileNotFoundError):
        JsonLines(tmp_path / "none.jsonl")
