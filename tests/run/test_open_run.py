"""What a start chooses for its steps, and what it does where the disk does not go along."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swaptrain.durable.spill_files import SpillFiles
from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.planning import forecast
from swaptrain.planning.planner import Plan
from swaptrain.run import assemble
from swaptrain.run.steps.executor import Executor
from tests.support.runs import config_of, losses, trained

pytestmark = pytest.mark.trains

NOTE = "a killed run may repeat two segments"


def job(run_dir: Path, **store: Any) -> Any:
    tree = {
        "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 3}},
        "data": {"python": "tests.support.datasets:tokens"},
        "memory": {"segment": "64KiB"},
        "train": {"steps": 2, "recompute": False},
        "store": store,
    }
    return config_of(run_dir, tree)


@pytest.mark.proof
@pytest.mark.parametrize("said", [None, 2])
def test_a_start_says_what_it_lets_a_kill_repeat(
    said: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where it has chosen that itself, and the executor is told; the bits are the same."""
    plain = losses(trained(job(tmp_path / "plain", commit={"lag": 1})))
    assert NOTE not in capsys.readouterr().out
    choose, lags = forecast.choose_plan, []

    def twice(*args: Any, **options: Any) -> Plan:
        return replace(choose(*args, **options), lag=2)

    class Told(Executor):
        def __init__(self, *args: Any, **options: Any) -> None:
            lags.append(options["lag"])
            super().__init__(*args, **options)

    monkeypatch.setattr(forecast, "choose_plan", twice)
    monkeypatch.setattr(assemble, "Executor", Told)
    assert losses(trained(job(tmp_path / "run", commit={"lag": said}))) == plain
    assert (NOTE in capsys.readouterr().out) == (said is None)
    assert lags == [2]


@pytest.mark.proof
def test_where_no_room_can_be_reserved_it_recomputes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quota, which no free space shows; what a kill may repeat is chosen anew for that."""
    plain = losses(trained(job(tmp_path / "plain")))
    assert "recomputes" not in capsys.readouterr().out
    reserve, plans = SpillFiles.reserve_saved, []
    choose = forecast.choose_plan

    def refused(self: SpillFiles, saves: Collection[int]) -> None:
        if saves:
            raise RunError("Disk quota exceeded")
        reserve(self, saves)

    def chosen(*args: Any, **options: Any) -> Plan:
        plans.append(choose(*args, **options))
        return plans[-1]

    monkeypatch.setattr(SpillFiles, "reserve_saved", refused)
    monkeypatch.setattr(forecast, "choose_plan", chosen)
    assert losses(trained(job(tmp_path / "run"))) == plain
    assert "the backward recomputes all that it needs: Disk quota" in capsys.readouterr().out
    assert [bool(plan.builder.saves) for plan in plans] == [True, False]


def test_a_start_that_finds_damage_leaves_no_thread(tmp_path: Path) -> None:
    """It is found when threads write already: each of them is ended."""
    config = job(tmp_path / "run")
    trained(config)
    link = next((config.run.dir / "store" / "segments").iterdir())
    chunk = next(link.glob("*/c/0"))
    os.truncate(chunk, 100)
    again = job(tmp_path / "run")
    again = again.model_copy(update={"train": again.train.model_copy(update={"steps": 3})})
    with pytest.raises(DamagedStoreError, match="100 bytes instead of"):
        trained(again)
    assert [t.name for t in threading.enumerate() if t.name.startswith("swaptrain")] == []
