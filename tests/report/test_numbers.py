"""The numbers behind a report: they are the rows of the run, thinned or not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from swaptrain.report.chart import Chart, Curve, said, scale_of
from swaptrain.report.figures import Bound, Quantity, over_steps, parts_over_steps
from swaptrain.report.measured import compared, floor_s, gaps, least_traffic, rest_s
from swaptrain.report.read import RunFiles, RunState, read_run_files
from swaptrain.report.rows import read_columns
from swaptrain.report.sections import sections
from swaptrain.report.thinning import MOST_POINTS, extremes, stretch_means
from tests.report.making import BEGAN, full_run, metrics_rows, new_run, start_line, write_lines

LOSS = Quantity("loss", lambda run: run.rows["loss"])


def files(path: Path, label: str = "run") -> RunFiles:
    """Return what a report reads of a run whose store is not looked at."""
    return read_run_files(path, label, RunState("done", (), 256 << 20, 60))


def test_columns_are_the_rows(tmp_path: Path) -> None:
    """Each number of each row, by name; NaN where a row says nothing or null."""
    rows = metrics_rows(30)
    rows[7]["loss"] = None
    write_lines(tmp_path / "metrics.jsonl", rows)
    found = read_columns(tmp_path / "metrics.jsonl")
    assert found.steps.tolist() == list(range(1, 31)) and found.refused == 0
    for name in ("loss", "lr", "step_s", "read_bytes", "ended_at", "eval_loss"):
        expected = [row.get(name) for row in rows]
        assert [None if np.isnan(v) else v for v in found[name].tolist()] == expected
    assert not found.has("peak_device_bytes") and np.isnan(found["nothing"]).all()


@pytest.mark.parametrize(
    ("content", "steps", "refused"),
    [
        (b"", [], 0),
        (b'{"step": 1}\n{"step": 2}', [1], 0),
        (b'{"step": 1}\n\x00\x00\n{"step": 3}\n', [1, 3], 1),
        (b'{"step": 1}\n{"step": 1}\n{"step": 2, "loss": "x"}\n[]\n', [1, 2], 2),
        (b'{"step": 0}\n{"step": true}\n{"step": 1.0}\n{"loss": 1}\n', [], 4),
        (b'{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1e999}\n', [2], 1),
    ],
)
def test_what_is_no_row_is_counted(
    content: bytes, steps: list[int], refused: int, tmp_path: Path
) -> None:
    """A last line that is being written is none of them."""
    (tmp_path / "metrics.jsonl").write_bytes(content)
    found = read_columns(tmp_path / "metrics.jsonl")
    assert found.steps.tolist() == steps and found.refused == refused


def test_a_chart_has_every_row_until_there_are_many(tmp_path: Path) -> None:
    """And then the first, the last, and of each stretch the least and the most."""
    few = files(new_run(tmp_path / "few", metrics_rows(40)))
    (chart,) = over_steps([few], "Loss", "number", [LOSS])
    assert chart.thinned() is chart
    assert chart.curves[0].y.tolist() == few.rows["loss"].tolist()
    many = files(new_run(tmp_path / "many", metrics_rows(5_000, spike=1_234)))
    (chart,) = over_steps([many], "Loss", "number", [LOSS])
    thin = chart.thinned().curves[0]
    assert len(thin.x) <= 2 * MOST_POINTS and {1, 1_234, 5_000} <= set(thin.x.tolist())
    by_step = dict(zip(many.rows.steps.tolist(), many.rows["loss"].tolist(), strict=True))
    assert all(by_step[x] == y for x, y in zip(thin.x.tolist(), thin.y.tolist(), strict=True))
    assert (thin.y.min(), thin.y.max()) == (many.rows["loss"].min(), 40.0)
    assert "of 5,000 points" in chart.thinned().note


def test_curves_over_the_same_steps_keep_the_same_steps() -> None:
    """So that what is shown at one place is of one step."""
    x = np.arange(4_000.0)
    first, second = np.sin(x), np.cos(x / 7)
    curves = [Curve("a", x, first, 1), Curve("b", x, second, 2)]
    thin = Chart("t", "number", curves).thinned().curves
    assert np.array_equal(thin[0].x, thin[1].x)
    assert (thin[0].y.max(), thin[1].y.min()) == (first.max(), second.min())


def test_what_is_not_known_stays_a_gap() -> None:
    """The last number before it and the first behind it are kept."""
    column = np.arange(3_000.0)
    column[1_000:1_100] = np.nan
    kept = set(extremes([column]).tolist())
    assert {999, 1_000, 1_099, 1_100} <= kept
    assert np.isnan(stretch_means(np.full(3_000, np.nan), 10)).all()


def test_the_parts_of_a_step_add_up_to_its_time(tmp_path: Path) -> None:
    """With the rest; and means of stretches add up to the mean."""
    run = files(new_run(tmp_path / "run", metrics_rows(1_000)))
    names = ("compute_s", "update_s", "io_wait_s", "data_wait_s")
    taken = sum(run.rows[name] for name in names) + rest_s(run)
    assert np.allclose(taken, run.rows["step_s"])
    parts = [Quantity(n, lambda run, n=n: run.rows[n]) for n in names]
    parts.append(Quantity("rest", rest_s))
    floor = Bound("floor", floor_s)
    (chart,) = parts_over_steps([run], "Time", "seconds", parts, (1, 2, 3, 4, 5), floor)
    *stacked, line = chart.curves
    assert np.allclose(sum(c.y for c in stacked).mean(), run.rows["step_s"].mean())
    assert np.isclose(line.y.mean(), (run.rows["roofline_fraction"] * run.rows["step_s"]).mean())
    assert "mean of about 5 steps" in chart.note


def test_a_table_has_the_numbers_of_its_chart(tmp_path: Path) -> None:
    """Few rows whole; of many, sixty that are evenly taken, and it says so."""
    run = files(new_run(tmp_path / "run", metrics_rows(12)))
    (chart,) = over_steps([run], "Read", "bytes", [Quantity("r", lambda r: r.rows["read_bytes"])])
    grid = chart.table()
    assert [row[0] for row in grid.rows] == [str(step) for step in range(1, 13)]
    assert {row[1] for row in grid.rows} == {"300.0 MiB"} and grid.note == ""
    x = np.arange(1.0, 1_001.0)
    long = Chart("t", "number", [Curve("a", x, x, 1)]).table()
    assert len(long.rows) == 60 and long.note == "60 of 1,000 rows"
    assert long.rows[0] == ["1", "1"] and long.rows[-1] == ["1,000", "1,000"]


def test_two_runs_share_their_charts(tmp_path: Path) -> None:
    """A chart for each quantity, with a curve of each run over its own steps."""
    runs = [
        files(new_run(tmp_path / "a", metrics_rows(10)), "a"),
        files(new_run(tmp_path / "b", metrics_rows(20, offset=1.0)), "b"),
    ]
    held_out = Quantity("held-out", lambda run: run.rows["eval_loss"], "Held out", "none")
    charts = over_steps(runs, "Loss", "number", [LOSS, held_out])
    assert [chart.title for chart in charts] == ["Loss", "Held out"]
    assert [curve.name for curve in charts[0].curves] == ["a", "b"]
    for run, curve in zip(runs, charts[0].curves, strict=True):
        assert curve.x.tolist() == run.rows.steps.tolist()
        assert curve.y.tolist() == run.rows["loss"].tolist()
    assert charts[1].curves[1].x.tolist() == list(range(2, 21, 2))


def test_the_held_out_loss_before_step_1_is_at_0(tmp_path: Path) -> None:
    """What the run began from is the first point."""
    rows = metrics_rows(10)
    rows[0]["eval_loss_before"] = 7.5
    run = files(new_run(tmp_path / "run", rows))
    charts = sections([run])[0].groups[0].charts
    held_out = charts[0].curves[1]
    assert (held_out.x[0], held_out.y[0]) == (0.0, 7.5)
    assert "eval_loss_before" not in {chart.title for chart in charts}


def test_a_forecast_is_compared_with_the_steps_of_its_start(tmp_path: Path) -> None:
    """By the time at which they ended; the first of a start is left out, as are other starts."""
    rows = metrics_rows(20)
    for row in rows[10:]:
        row["step_s"], row["ended_at"] = 9.0, row["ended_at"] + 1_000
    rows[10]["step_s"] = 50.0
    run_dir = new_run(tmp_path / "run", rows)
    starts = [
        start_line(BEGAN, 1),
        start_line(rows[10]["ended_at"] - 60, 11, step_s=4.5, least_traffic_bytes=7.0),
        start_line(rows[-1]["ended_at"] + 60, 21),
    ]
    write_lines(run_dir / "starts.jsonl", starts)
    run = files(run_dir)
    found = compared(run)
    assert found is not None
    start, count, numbers = found
    assert (start.time, count) == (starts[1]["time"], 9)
    by_name = {number.name: number.texts() for number in numbers}
    assert by_name["step"] == ["step", "4.5 s", "9.0 s", "2.00"]
    assert by_name["read"][1:3] == ["310.0 MiB", "300.0 MiB"]
    assert least_traffic(run)[[0, 9, 10, 19]].tolist() == [480.0 * 2**20] * 2 + [7.0] * 2


def test_a_run_that_stood_still_has_a_gap(tmp_path: Path) -> None:
    """From the end of a step to the begin of the next; a break in the curve, not a slope."""
    run = files(full_run(tmp_path / "run", 60))
    (gap,) = gaps(run)
    assert gap.row == 30
    assert gap.end - gap.begin == pytest.approx(4_000 + 2 - run.rows["step_s"][30])
    starts = next(section for section in sections([run]) if section.name == "starts")
    curve = starts.groups[0].charts[0].curves[0]
    assert np.isnan(curve.y[30]) and len(curve.y) == 61
    assert "in 2 starts; it stood still once" in starts.groups[0].text
    assert "1 step was resumed inside" in starts.groups[0].text


def test_an_older_run_without_starts_says_so(tmp_path: Path) -> None:
    """Its forecast was not recorded; its rows, without newer keys, are drawn all the same."""
    rows = [{"step": k, "loss": 1.0 / k} for k in range(1, 6)]
    run = files(new_run(tmp_path / "run", rows))
    found = {section.name: section for section in sections([run])}
    assert "did not record its forecast" in found["forecast"].groups[0].text
    assert found["learning"].groups[0].charts[0].curves[0].y.tolist() == [
        1 / k for k in range(1, 6)
    ]
    assert "run.trace=5 records" in found["step"].groups[0].text


def test_what_memory_json_says_is_stacked(tmp_path: Path) -> None:
    """Part by part over the instructions, beside the budget; and a key that is not there is not."""
    run_dir = full_run(tmp_path / "run")
    memory = next(s for s in sections([files(run_dir)]) if s.name == "memory")
    chart = memory.groups[1].charts[0]
    curves = {curve.name: curve for curve in chart.curves}
    assert set(curves) == {
        "weights", "state", "values", "torch", "resident beyond the base", "memory.host",
    }  # fmt: skip
    assert curves["values"].y.tolist() == [k * 2**20 // 4 for k in range(40)]
    assert curves["resident beyond the base"].y[0] == 90 * 2**20
    assert chart.x_names[4] == "forward of segment 1, micro-batch 1"
    (run_dir / "memory.json").write_text('{"instructions": [{}, {"held": 3}, 4]}')
    memory = next(s for s in sections([files(run_dir)]) if s.name == "memory")
    assert "run.memory=true" in memory.groups[1].text
    (run_dir / "memory.json").write_text(json.dumps([1]))
    assert "memory.json is not what a run writes" in files(run_dir).problems[0]


def test_numbers_have_their_units() -> None:
    """As a person reads them; an axis has the largest unit that its numbers reach."""
    assert said(1536.0, "bytes") == "1.5 KiB" and said(float("nan"), "share") == "-"
    assert said(0.125, "share") == "12.5%" and said(BEGAN, "time") == "2025-06-15 15:06:40"
    assert scale_of("bytes", 3 * 2**30).name == "GiB" and scale_of("seconds", 90.0).name == "s"
    assert scale_of("seconds", 0.2).name == "ms" and scale_of("seconds", 200.0).name == "min"
