"""metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swaptrain.errors import RunError
from swaptrain.observe.eval_result import EvalResult
from swaptrain.observe.metrics import MetricsFile, StepMetrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def fill(path: Path, steps: int) -> None:
    with MetricsFile(path) as file:
        for step in range(1, steps + 1):
            file.append({"step": step, "loss": 1.0 / step})


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_come_back_in_order(path: Path) -> None:
    """What is appended is there line by line, and a later process goes on after it."""
    with MetricsFile(path) as file:
        assert file.last_step() is None
        assert list(file.rows()) == []
    fill(path, 2)
    with MetricsFile(path) as file:
        assert file.last_step() == 2
        file.append({"step": 3, "loss": 0.1})
        assert list(file.rows())[1:] == [{"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.1}]
    assert steps(path) == [1, 2, 3]


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_torn_last_line_is_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut at any byte, the file opens with the rows that were whole, and takes the next step."""
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    fill(path, 5)
    content = path.read_bytes()
    kept = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:kept])
    whole = content[:kept].count(b"\n")
    with MetricsFile(path) as file:
        assert file.last_step() == (whole or None)
        file.append({"step": whole + 1})
    assert steps(path) == list(range(1, whole + 2))


def test_a_torn_line_longer_than_a_piece_is_cut(path: Path) -> None:
    """The last newline is found however far from the end it is."""
    fill(path, 2)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "note": "' + b"x" * 200_000)
    with MetricsFile(path) as metrics:
        assert metrics.last_step() == 2
    assert steps(path) == [1, 2]


def test_a_step_appears_once(path: Path) -> None:
    """The same step or an earlier one is refused and nothing is written."""
    fill(path, 3)
    with MetricsFile(path) as file:
        for step in (3, 1):
            with pytest.raises(RunError, match=f"step {step} cannot be added"):
                file.append({"step": step})
    assert steps(path) == [1, 2, 3]


@pytest.mark.parametrize(("after", "left"), [(0, []), (2, [1, 2]), (9, [1, 2, 3, 4])])
def test_later_steps_are_cut(path: Path, after: int, left: list[int]) -> None:
    """Steps that a crash took back are removed, and come again."""
    fill(path, 4)
    with MetricsFile(path) as file:
        file.cut_after(after)
        assert file.last_step() == (left[-1] if left else None)
        assert steps(path) == left
        file.append({"step": len(left) + 1})
    assert steps(path) == [*left, len(left) + 1]


def test_numbers_that_json_cannot_say_are_null(path: Path) -> None:
    """NaN and infinities are null, so that every reader can read the file."""
    with MetricsFile(path) as file:
        file.append({"step": 1, "loss": math.nan, "more": [math.inf, {"x": -math.inf}]})
        assert next(file.rows()) == {"step": 1, "loss": None, "more": [None, {"x": None}]}


def test_a_last_line_whose_beginning_was_not_written_is_cut(path: Path) -> None:
    """The end of a line, newline and all, can be on the disk before its beginning."""
    path.write_bytes(b'{"step": 1}\n' + bytes(8) + b"2}\n")
    with MetricsFile(path) as metrics:
        assert metrics.last_step() == 1
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_damaged_line_is_named(path: Path) -> None:
    """A line that is no row is an error with its number."""
    path.write_text('{"step": 1}\n{"loss": 2}\n')
    with pytest.raises(RunError, match="line 2"):
        MetricsFile(path)


def test_a_place_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """No directory, no file: RunError with the path."""
    with pytest.raises(RunError, match=r"missing/metrics\.jsonl"):
        MetricsFile(tmp_path / "missing" / "metrics.jsonl")


def test_a_step_has_the_documented_fields(path: Path) -> None:
    """The row has the fields of the design; eval_loss and resumed only where there is something."""
    plain = StepMetrics(step=1, loss=2.0, lr=0.1, tokens=10, step_s=1.5)
    more = StepMetrics(
        step=2, loss=2.0, lr=0.1, tokens=10, step_s=1.5, held_out=EvalResult(math.inf), resumed=True
    )
    with MetricsFile(path) as file:
        file.append(plain)
        file.append(more)
        first, second = file.rows()
    assert list(first) == [
        "step",
        "loss",
        "lr",
        "grad_norm",
        "tokens",
        "step_s",
        "epoch",
        "ended_at",
        "compute_s",
        "update_s",
        "io_wait_s",
        "data_wait_s",
        "read_bytes",
        "write_bytes",
        "cache_hit_fraction",
        "peak_host_bytes",
        "peak_device_bytes",
        "roofline_fraction",
    ]
    assert second.keys() - first.keys() == {"eval_loss", "resumed"}
    assert (second["eval_loss"], second["resumed"]) == (None, True)


def test_each_field_is_documented() -> None:
    """docs/metrics.md has a row for each key that a line may have, and for nothing else."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    first = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    keys = re.findall(r"`(\w+)`", " ".join(first))
    expected = [field.name for field in fields(StepMetrics) if "held_out" not in field.name]
    found = EvalResult(1.0, by_tokens=True, scalars={"accuracy": 0.5, "NAME": 1.0})
    expected[-1:-1] = [*found.row(), "eval_loss_before"]
    assert keys == expected


def test_short_reads_cut_no_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that gives a part of what was asked for is asked for the rest."""
    fill(path, 3)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda handle, size, at: pread(handle, min(size, 5), at))
    with MetricsFile(path) as file:
        assert file.last_step() == 3
    assert steps(path) == [1, 2, 3]


def test_a_bit_that_is_read_wrong_once_costs_no_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks torn is read again before it is cut."""
    fill(path, 3)
    pread, seen = os.pread, []

    def wrong_once(handle: int, size: int, at: int) -> bytes:
        content = pread(handle, size, at)
        if content:
            seen.append(content)
        return content.replace(b"step", b"st\x00p") if content and len(seen) == 3 else content

    monkeypatch.setattr(os, "pread", wrong_once)
    with MetricsFile(path) as file:
        assert file.last_step() == 3
    assert steps(path) == [1, 2, 3] and any(b"step" in content for content in seen[2:3])
