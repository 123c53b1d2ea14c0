"""What the tier takes for an instruction is measured on real memory, and a forecast contains it."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pytest

from swaptrain.config import Config
from swaptrain.execute import tier_cost
from swaptrain.execute.machine import Machine
from swaptrain.execute.planning import Plan
from swaptrain.execute.prepare import Prepared
from swaptrain.execute.price import price
from swaptrain.execute.tier_cost import with_tier_cost
from swaptrain.memory.slab import Pool, Slab
from swaptrain.program.cost import Disk, IOWork
from tests.support.runs import config_of

FAST = Disk(1e15, 1e15, 1e15)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Plan]:
    tree = {
        "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 3}},
        "data": {"python": "tests.support.datasets:tokens"},
        "memory": {"segment": "64KiB"},
    }
    config = config_of(tmp_path_factory.mktemp("plan") / "run", tree).resolved()
    return config, Prepared(config, None, lambda _: None, draw=False).plan


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """Return the pools that are made while the tier's part is measured."""
    found: list[Pool] = []

    def pool(budget_bytes: int) -> Pool:
        found.append(Pool(budget_bytes))
        return found[-1]

    monkeypatch.setattr(tier_cost, "Pool", pool)
    return found


def test_it_is_measured_on_what_a_run_holds_and_given_back(
    made: tuple[Config, Plan], pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slab, and no page, is left of it."""
    config, plan = made
    take, most = Pool.take, []

    def noted(pool: Pool, nbytes: int) -> Slab:
        slab = take(pool, nbytes)
        most.append(pool.held_bytes)
        return slab

    monkeypatch.setattr(Pool, "take", noted)
    found = with_tier_cost(replace(plan, tier_s=0.0), config)
    assert 0 < found.tier_s < 0.1
    assert plan.peaks.instruction_bytes <= max(most) <= plan.pool_bytes
    assert [pool.held_bytes for pool in pools] == [0]


def test_a_forecast_contains_it_and_what_requests_cost(made: tuple[Config, Plan]) -> None:
    """For each instruction, with a disk that takes no time."""
    config, plan = made
    free, slow = IOWork(0.0, 0.0), IOWork(1e-3, 0.0)
    seconds = {
        (tier_s, work): price(
            replace(plan, tier_s=tier_s), config, Machine(FAST, 0.0, work, {})
        ).step_s
        for tier_s in (0.0, 0.5)
        for work in (free, slow)
    }
    without = seconds[0.0, free]
    assert without is not None
    assert seconds[0.5, free] == pytest.approx(without + 0.5 * len(plan.step()))
    assert (seconds[0.5, slow] or 0) > (seconds[0.5, free] or 0)


def test_it_is_left_out_where_it_would_not_show(
    made: tuple[Config, Plan], pools: list[Pool]
) -> None:
    """Beside instructions of a second."""
    config, plan = made
    seconds = dict.fromkeys(plan.measured.seconds, 1.0)
    long = replace(plan, tier_s=0.0, measured=replace(plan.measured, seconds=seconds))
    assert with_tier_cost(long, config) is long
    assert not pools


@pytest.mark.parametrize("refused", ["by a limit", "by the kernel"])
def test_memory_that_is_not_there_is_not_touched(
    made: tuple[Config, Plan], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The run says what is missing, in its own words; a plan is shown all the same."""
    config, plan = made
    plan = replace(plan, tier_s=0.0)

    def take(*_: Any) -> Any:
        assert refused == "by the kernel"
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(Pool, "take", take)
    if refused == "by a limit":
        monkeypatch.setattr("swaptrain.execute.ram.available_bytes", lambda: plan.arena_bytes)
    assert with_tier_cost(plan, config) is plan
