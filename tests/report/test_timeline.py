"""What a report makes of trace.json: lanes, and whose state was in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swaptrain.program.instructions import Operation
from swaptrain.report.lanes import KINDS, busy_s, lanes_of
from swaptrain.report.timeline import Busy, read_trace
from swaptrain.verbs.train import train
from tests.report.making import MIB, trace_events, write_trace
from tests.support.runs import config_of, rows


def test_lanes_are_the_events_of_their_step(tmp_path: Path) -> None:
    """Each in seconds from the begin of the step; what goes on behind it is cut."""
    write_trace(tmp_path / "trace.json", trace_events(2))
    trace = read_trace(tmp_path / "trace.json")
    assert trace is not None and trace.problem is None
    first, second = trace.steps
    assert (first.step, second.step) == (1, 2)
    assert first.seconds == pytest.approx(0.170)
    kinds = [busy.what for busy in first.computing]
    assert kinds.count("forward") == 8 and kinds.count("turn") == 2
    assert kinds.count("backward") == 6 and kinds.count("update") == 4
    assert first.computing[0].begin_s == pytest.approx(0.0015)
    assert sum(busy.nbytes for busy in first.reads) == 12 * MIB
    assert max(busy.end_s for busy in first.commits) <= first.seconds
    assert len(first.commits) == 3
    assert len(second.commits) == 4, "the last one of the step before is in it"
    lanes = lanes_of(first)
    assert [lane.name for lane in lanes.lanes] == [
        "computing", "waiting for the disk", "reads: up to 1 at once", "writes: up to 1 at once",
        "commits",
    ]  # fmt: skip
    waited = lanes.lanes[1].pieces[0].spans
    assert (waited[:, 1] - waited[:, 0]).sum() == pytest.approx(4 * 0.0015)
    depth = lanes.lanes[2].depth
    assert depth is not None
    assert depth.sum() * first.seconds / len(depth) == pytest.approx(4 * 0.004)


def test_time_under_way_counts_once() -> None:
    """However many are under way at once."""
    found = [Busy(0.0, 1.0, ""), Busy(0.5, 2.0, ""), Busy(3.0, 4.0, ""), Busy(3.2, 3.3, "")]
    assert busy_s(found) == pytest.approx(3.0)


def test_hits_are_by_segment(tmp_path: Path) -> None:
    """The first use behind a read was read; the uses behind that one found it."""
    write_trace(tmp_path / "trace.json", trace_events(1))
    trace = read_trace(tmp_path / "trace.json")
    assert trace is not None
    (step,) = trace.steps
    found = {k: (h.found_bytes // MIB, h.read_bytes // MIB) for k, h in step.forward.items()}
    assert found == {1: (3, 3), 2: (6, 0), 3: (3, 3), 4: (6, 0)}
    found = {k: (h.found_bytes // MIB, h.read_bytes // MIB) for k, h in step.backward.items()}
    assert found == {1: (6, 3), 2: (9, 0), 3: (6, 3), 4: (9, 0)}


def test_a_torn_trace_keeps_its_whole_steps(tmp_path: Path) -> None:
    """A process that was killed while it wrote leaves the steps before."""
    path = tmp_path / "trace.json"
    write_trace(path, trace_events(2))
    whole = path.read_text()
    path.write_text(whole[: int(len(whole) * 0.8)])
    trace = read_trace(path)
    assert trace is not None and [step.step for step in trace.steps] == [1]
    assert trace.problem is not None and "torn" in trace.problem
    path.write_text("[]\n")
    trace = read_trace(path)
    assert trace is not None and trace.problem == "the trace holds no whole step yet"
    path.write_text('{"traceEvents": 3}')
    trace = read_trace(path)
    assert trace is not None and not trace.steps
    assert read_trace(tmp_path / "none.json") is None


@pytest.mark.trains
def test_the_hits_of_a_run_are_what_its_metrics_count(tmp_path: Path) -> None:
    """State that was read for a use is no more than what the step read; all used state is there."""
    tree = {
        "model": {"python": "tests.support.models:gpt"},
        "data": {"python": "tests.support.datasets:tokens"},
        "memory": {"host": "64MiB", "segment": "16KiB"},
        "run": {"dir": str(tmp_path / "run"), "trace": 4},
    }
    config = config_of(tmp_path / "run", tree)
    train(config)
    trace = read_trace(config.run.dir / "trace.json")
    assert trace is not None and [step.step for step in trace.steps] == [1, 2, 3, 4]
    for step, row in zip(trace.steps, rows(config.run.dir), strict=False):
        used = [*step.forward.values(), *step.backward.values()]
        assert sum(hits.read_bytes for hits in used) <= row["read_bytes"] + 2**20
        assert set(step.backward) >= set(step.forward)
        assert np.isclose(
            sum(b.nbytes for b in step.reads), row["read_bytes"], rtol=0.05, atol=2**16
        )
        assert sum(hits.found_bytes for hits in used) > 0
    first = trace.steps[0]
    assert all(hits.read_bytes for hits in first.forward.values()), "memory is empty at first"


def test_each_operation_has_a_colour() -> None:
    """Exchanges between ranks too: what has none would not be drawn, and nobody would know."""
    drawn = [operation for _, _, operations in KINDS for operation in operations]
    assert sorted(drawn) == sorted(Operation)
