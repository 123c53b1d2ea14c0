"""scripts/proof/chaos.py kills real runs, goes on with them, and sees what differs."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.trains

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "proof"


@pytest.mark.proof
def test_three_kills_change_nothing(tmp_path: Path) -> None:
    """The command as a user gives it, with fewer kills."""
    command = [sys.executable, str(SCRIPTS / "chaos.py"), "--kills", "3", "--mode", "fused"]
    ended = subprocess.run(
        [*command, "--steps", "3", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "fused: 3 kills" in ended.stdout
    assert not list(tmp_path.iterdir())


def test_it_sees_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chunk, a missing one and another loss are mismatches; the same end is none."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    differences = runpy.run_path(str(SCRIPTS / "chaos_runs.py"))["differences"]
    end = ({"001/weights/c/0": "a", "001/weights/c/1": "b"}, [[1, 0.5, 0.1, 2.0, 8]])
    assert differences(end, end) == []
    (chunks,) = differences(end, ({"001/weights/c/0": "c"}, end[1]))
    assert chunks.startswith("2 chunks differ")
    (metrics,) = differences(end, (end[0], [[1, 0.25, 0.1, 2.0, 8]]))
    assert metrics.startswith("metrics.jsonl")
