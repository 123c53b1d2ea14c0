"""Files of rows: JSON Lines, JSON, CSV, Parquet, saved datasets; and what is damaged in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swaptrain.chat.files import read_rows
from swaptrain.errors import ConfigError

ROWS = [{"text": "a"}, {"text": "b\u00e4"}]


def read(path: Path) -> list[tuple[str, object]]:
    """Return the places and the rows of a file."""
    return [(place, json.loads(row)) for place, row in read_rows(str(path), "data.chat")]


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "a"}\n{"text": "b\xc3\xa4"}\n',
        b'\xef\xbb\xbf{"text": "a"}\n{"text": "b\xc3\xa4"}',
        b'{"text": "a"}\r\n{"text": "b\xc3\xa4"}\r\n',
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "rows.json"])
def test_lines(tmp_path: Path, name: str, content: bytes) -> None:
    """With a byte order mark or none, with either line end; `.json` of lines too."""
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == [("line 1", ROWS[0]), ("line 2", ROWS[1])]


def test_empty_lines_keep_the_numbers(tmp_path: Path) -> None:
    """A place is where an editor shows it."""
    (tmp_path / "rows.jsonl").write_text('\n{"text": "a"}\n\n{"text": "b\u00e4"}\n\n')
    assert [place for place, _ in read(tmp_path / "rows.jsonl")] == ["line 2", "line 4"]


def test_a_list(tmp_path: Path) -> None:
    """A JSON file holds a list of rows."""
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    assert read(tmp_path / "rows.json") == [("row 1", ROWS[0]), ("row 2", ROWS[1])]


def test_a_table(tmp_path: Path) -> None:
    """The first line of CSV names the columns; texts may hold commas and lines."""
    (tmp_path / "rows.csv").write_text('prompt,completion\n"a, b","c\nd"\n', encoding="utf-8-sig")
    assert read(tmp_path / "rows.csv") == [("line 3", {"prompt": "a, b", "completion": "c\nd"})]


def test_parquet_and_a_saved_dataset(tmp_path: Path) -> None:
    """Nested columns come as they were."""
    reason = "pyarrow is not installed: swaptrain[data]"
    pyarrow = pytest.importorskip("pyarrow", reason=reason)
    parquet = pytest.importorskip("pyarrow.parquet", reason=reason)
    rows = [{"messages": [{"role": "user", "content": "a"}]}, {"messages": []}]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == [("row 1", rows[0]), ("row 2", rows[1])]
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    with pyarrow.ipc.new_stream(str(tmp_path / "data-0.arrow"), table.schema) as stream:
        stream.write_table(table)
    assert read(tmp_path) == [("row 1", rows[0]), ("row 2", rows[1])]
    whole = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cut\.parquet, row 1: it is damaged"):
        read(tmp_path / "cut.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b'{\n"text": "a"\n}', "it holds one object: write a list of rows"),
        ("rows.json", b"[1, 2", "it is not JSON"),
        ("rows.json", b"3", "it holds no list of rows"),
        ("rows.csv", b"text\na\nb,c\n", "line 3: it has another number of columns"),
        ("rows.csv", b"text\n\xff\n", "line"),
        ("rows.jsonl.gz", b"\x1f\x8b", "compressed files have to be unpacked first"),
        ("rows.txt", b"a", "what it holds does not show in its name"),
    ],
)
def test_what_is_no_file_of_rows_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """With the file, and the line where there is one."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(refusal.value)


def test_a_directory_names_its_splits(tmp_path: Path) -> None:
    """One that holds several datasets is not one of them."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="name one of its splits: train"):
        read(tmp_path)
    (tmp_path / "train" / "state.json").write_text('{"_data_files": [{"filename": "../x"}]}')
    with pytest.raises(ConfigError, match="it names files outside of its directory"):
        read(tmp_path / "train")
