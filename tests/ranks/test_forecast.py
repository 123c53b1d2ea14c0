"""What `plan --ranks` says of a step is what the ranks of a run do."""

from __future__ import annotations

from pathlib import Path

import pytest

from swaptrain.store.paths import rank_dir
from swaptrain.verbs.plans.planned import planned
from swaptrain.verbs.plans.ranks import rank_tables
from tests.support.ranks import together
from tests.support.runs import rows, step_write_bytes
from tests.support.serving import Server
from tests.support.together import rank_config

pytestmark = [pytest.mark.trains, pytest.mark.whole]


def test_bytes_are_those_of_a_run(tmp_path: Path, server: Server) -> None:
    """Exchanged to the byte, by each rank; written, but for what a start leaves to do."""
    tree = {"train": {"steps": 4, "recompute": True}}
    found = planned(rank_config(tmp_path / "plan", tree))
    (table,) = rank_tables(found, [2], [], lambda _: None)
    config = rank_config(tmp_path / "run", tree)
    ended = together(server, config, 2)
    assert ended.codes == [0, 0], ended.said
    last = [rows(rank_dir(config.run.dir, rank))[-1] for rank in range(2)]
    planned_bytes = table.rows[1]
    assert [row["exchange_bytes"] for row in last] == [planned_bytes.exchanged_bytes] * 2
    written = max(step_write_bytes(rank_dir(config.run.dir, rank)) for rank in range(2))
    assert written == pytest.approx(planned_bytes.write_bytes, rel=0.1)
