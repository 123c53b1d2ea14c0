"""Several processes give the rows in order, and a template that does not end is stopped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from swaptrain.chat import EncodeSettings, encode_files, pool
from swaptrain.errors import ConfigError
from tests.chat.conftest import MakeTokenizer
from tests.chat.templates import CHATML, CONVERSATION

pytestmark = pytest.mark.trains  # starts processes


def write(path: Path, rows: int) -> str:
    """Write conversations of growing length."""
    lines = []
    for number in range(rows):
        messages = [*CONVERSATION, {"role": "user", "content": "x" * number}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return str(path)


def test_the_rows_do_not_depend_on_the_processes(
    tmp_path: Path, make_tokenizer: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, and the same tokens, for one process and for two."""
    monkeypatch.setattr(pool, "_CHUNK_ROWS", 3)
    paths = [write(tmp_path / "a.jsonl", 20), write(tmp_path / "b.jsonl", 5)]
    settings = EncodeSettings(make_tokenizer(CHATML))
    one, two = (list(encode_files(paths, settings, key="data.chat", processes=n)) for n in (1, 2))
    assert [len(row.ids) for row in one[:20]] == sorted(len(row.ids) for row in one[:20])
    assert len(one) == len(two) == 25
    for left, right in zip(one, two, strict=True):
        assert np.array_equal(left.ids, right.ids)
        assert np.array_equal(left.trained, right.trained)


def test_the_first_row_that_is_refused_is_named(
    tmp_path: Path, make_tokenizer: MakeTokenizer
) -> None:
    """Rows before it are given, nothing after it."""
    path = tmp_path / "rows.jsonl"
    write(path, 3)
    path.write_text(path.read_text() + '\n\n{"text": 1}\n{"text": 2}')
    rows = encode_files(
        [str(path)], EncodeSettings(make_tokenizer(CHATML)), key="data.chat", processes=2
    )
    given = [next(rows) for _ in range(3)]
    assert len(given) == 3
    with pytest.raises(ConfigError, match=r"data\.chat: .*rows\.jsonl, line 5: its text is a num"):
        next(rows)


@pytest.mark.parametrize(
    ("template", "most_row_s", "message"),
    [
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            1.0,
            "line 1: it takes more than .* s: does the chat template end",
            id="loops",
        ),
        pytest.param(
            "{{ 'x' * 20000000000 }}",
            1.0,
            "line 1: it takes more than 4 GiB: is it the template",
            id="allocates",
        ),
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            1000.0,
            "line 1 to line 2: the process that encodes these rows was ended",
            id="is not to be interrupted",
            marks=pytest.mark.proof,
        ),
    ],
)
def test_a_template_is_stopped(
    tmp_path: Path,
    make_tokenizer: MakeTokenizer,
    template: str,
    most_row_s: float,
    message: str,
) -> None:
    """Whatever it does, the start says so, and goes on to its end."""
    path = write(tmp_path / "rows.jsonl", 2)
    settings = EncodeSettings(make_tokenizer(template), most_row_s=most_row_s, most_chunk_s=3)
    with pytest.raises(ConfigError, match=message):
        list(encode_files([path], settings, key="data.chat", processes=1))
