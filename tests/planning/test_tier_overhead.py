"""What the tier takes for an instruction is measured on real memory, and a forecast contains it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from swaptrain.compute.device import CpuDevice
from swaptrain.config.schema import Config
from swaptrain.machine.speeds import Machine
from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import Slab
from swaptrain.planning import tier_overhead as tier_cost
from swaptrain.planning.planner import Plan
from swaptrain.planning.prepare import Prepared
from swaptrain.planning.step_cost import price
from swaptrain.planning.tier_overhead import with_load_cost, with_tier_cost
from swaptrain.program.cost import Disk, IOWork
from swaptrain.program.instructions import Kind, Operation
from tests.support.runs import config_of
from tests.support.traffic import durable_objects

FAST = Disk(1e15, 1e15, 1e15)
LONG = 1000.0
"""Seconds of an instruction: beside them all I/O of a step is done at once, and costs in full."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Plan]:
    """Return a config, and its plan with slabs for one instruction and a little more."""
    tree = {
        "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 3}},
        "data": {"python": "tests.support.datasets:tokens"},
        "memory": {"segment": "64KiB"},
    }
    config = config_of(tmp_path_factory.mktemp("plan") / "run", tree).resolved()
    plan = Prepared(config, None, lambda _: None, draw=False).plan
    return config, replace(plan, pool_bytes=plan.peaks.instruction_bytes * 5 // 4)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[PagePool]:
    """Return the pools that are made while the tier's part is measured."""
    found: list[PagePool] = []

    def pool(_: CpuDevice, budget_bytes: int, *, useful_bytes: int) -> PagePool:
        assert useful_bytes > budget_bytes
        found.append(PagePool(budget_bytes))
        return found[-1]

    monkeypatch.setattr(CpuDevice, "pool", pool)
    return found


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return a clock that goes on by a quarter of a second each time that it is looked at."""
    clock = count()
    monkeypatch.setattr(tier_cost, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 4))
    return clock


def test_it_is_the_mean_over_a_step_on_what_a_run_holds(
    made: tuple[Config, Plan],
    pools: list[PagePool],
    ticks: Iterator[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of a second a step by the clock; no slab, and no page, is left of it."""
    config, plan = made
    take, held = PagePool.take, []

    def noted(pool: PagePool, nbytes: int) -> Slab:
        slab = take(pool, nbytes)
        held.append(pool.held_bytes)
        return slab

    monkeypatch.setattr(PagePool, "take", noted)
    assert with_tier_cost(plan, config, CpuDevice()).tier_s == pytest.approx(0.25 / len(plan.step))
    assert next(ticks) == 2 * 4  # four steps: then a second was over
    assert plan.peaks.instruction_bytes <= max(held) <= plan.pool_bytes
    assert [pool.held_bytes for pool in pools] == [0]


def test_a_forecast_contains_what_batches_take(
    made: tuple[Config, Plan], ticks: Iterator[int]
) -> None:
    """Once for each micro-batch, as the second one took."""
    config, plan = made
    loaded = []

    class Data:
        def batch(self, step: int, m: int) -> None:
            loaded.append((step, m, next(ticks)))

    data: Any = Data()
    found = with_load_cost(plan, data)
    assert loaded == [(1, 0, 0), (1, 0, 2)], "the clock was looked at before and behind the second"
    assert found.load_s == 0.5
    machine = Machine(FAST, 0.0, IOWork(), {})
    before, after = price(plan, config, machine).step_s, price(found, config, machine).step_s
    assert before is not None and after is not None
    assert after == pytest.approx(before + 0.5 * config.data.micro_batches)


def test_a_forecast_contains_it_and_what_requests_cost(made: tuple[Config, Plan]) -> None:
    """For each instruction; for each chunk, byte, checksum and commit."""
    config, plan = made
    program = plan.step

    def step_s(tier_s: float, work: IOWork) -> float:
        found = price(replace(plan, tier_s=tier_s), config, Machine(FAST, 0.0, work, {})).step_s
        assert found is not None
        return found

    without = step_s(0.0, IOWork())
    assert step_s(0.5, IOWork()) == pytest.approx(without + 0.5 * len(program))
    free = step_s(LONG, IOWork())
    commits = [i for i in program if i.operation is Operation.UPDATE]
    assert step_s(LONG, IOWork(commit_s=1.0)) == pytest.approx(free + len(commits))
    traffic = price(plan, config, Machine(FAST, 0.0, IOWork(), {})).traffic
    assert traffic is not None
    by_bytes = step_s(LONG, IOWork(byte_s=1e-3)) - free
    assert by_bytes == pytest.approx(1e-3 * traffic.total_bytes)
    durable = durable_objects(program, keeps_activations=not config.store.commit.is_whole)
    kept = [key for i in program for key in durable(i)]
    committed = sum(plan.layouts.size_bytes(key) for key in kept)
    sums = step_s(LONG, IOWork(checksum_byte_s=1e-3)) - free
    assert 1e-3 * committed <= sums * (1 + 1e-9) and sums < by_bytes
    chunks = step_s(LONG, IOWork(request_s=1.0)) - free
    assert chunks == pytest.approx(round(chunks))
    assert chunks > sum(plan.layouts.array(key).chunks for key in kept)
    assert not any(key.kind is Kind.SAVED for key in kept)
    always = config.model_copy(
        update={"store": config.store.model_copy(update={"verify": "always"})}
    )
    machine = Machine(FAST, 0.0, IOWork(checksum_byte_s=1e-3), {})
    verified = price(replace(plan, tier_s=LONG), always, machine).step_s
    assert verified == pytest.approx(free + by_bytes)  # what is read has one, too


@pytest.mark.parametrize("limit", ["_MOST_BYTES", "_MOST_INSTRUCTIONS"])
def test_it_is_left_out_of_large_plans(
    made: tuple[Config, Plan], pools: list[PagePool], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    config, plan = made
    monkeypatch.setattr(tier_cost, limit, 2)
    assert with_tier_cost(plan, config, CpuDevice()) is plan
    assert not pools


@pytest.mark.parametrize("slabs", [0, 7])
def test_memory_that_is_refused_is_given_back(
    made: tuple[Config, Plan], pools: list[PagePool], monkeypatch: pytest.MonkeyPatch, slabs: int
) -> None:
    """At the first slab, or at a later one: the run says what is missing, in its own words."""
    config, plan = made
    take, taken = PagePool.take, []

    def refuse(pool: PagePool, nbytes: int) -> Any:
        if len(taken) == slabs:
            raise OSError(errno.ENOMEM, "no memory")
        taken.append(nbytes)
        return take(pool, nbytes)

    monkeypatch.setattr(PagePool, "take", refuse)
    assert with_tier_cost(plan, config, CpuDevice()) is plan
    assert len(taken) == slabs
    assert [pool.held_bytes for pool in pools] == [0]
