"""What I/O costs short instructions is measured on them, and a forecast contains it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swaptrain.config import Config
from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.execute import io_cost
from swaptrain.execute.dry_run import DryRun, sample_groups
from swaptrain.execute.io_cost import with_io_cost
from swaptrain.execute.machine import Machine
from swaptrain.execute.prepare import Prepared
from swaptrain.execute.price import price
from swaptrain.program.cost import Disk, IOWork
from swaptrain.program.instructions import Instruction, Operation
from swaptrain.program.residency import Traffic
from swaptrain.store.direct import DirectIO
from tests.support.runs import config_of

SLOW = Machine(Disk(1e6, 1e6, 1e6), 0.0, IOWork(), {})
"""Its steps take long enough to be worth the measurement."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Prepared]:
    tree = {
        "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 3}},
        "data": {"python": "tests.support.datasets:tokens"},
        "memory": {"segment": "64KiB"},
        "optimizer": {"clip_norm": 1.0},  # so that there are all operations
    }
    config = config_of(tmp_path_factory.mktemp("plan") / "run", tree).resolved()
    made = Prepared(config, None, lambda _: None, draw=False)
    # Little enough that a step reads.
    made.plan = replace(made.plan, pool_bytes=made.plan.peaks.instruction_bytes * 5 // 2)
    return config, made


@pytest.fixture
def io() -> Iterator[DirectIO]:
    with DirectIO() as opened:
        yield opened


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a step's I/O made again and again while a millisecond is computed."""
    beside = io_cost._StepIO.beside
    monkeypatch.setattr(io_cost._StepIO, "beside", lambda load, moved, _: beside(load, moved, 1e-3))


def ask(prepared: tuple[Config, Prepared], io: DirectIO, folder: Path, **store: object) -> Any:
    config, made = prepared
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": folder}),
            "store": config.store.model_copy(update=store),
        }
    )
    return with_io_cost(made.plan, config, SLOW, made.planner.batch, io)


@pytest.mark.parametrize("seconds_beside", [3.0, 1.5])
def test_every_kind_is_executed_alone_and_beside_io(
    prepared: tuple[Config, Prepared],
    io: DirectIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hurry: None,
    seconds_beside: float,
) -> None:
    """Once a round each, turn about; nothing is left on the disk, and only the ratio is new.

    It counts where it is more than what is reckoned.
    """
    _, made = prepared
    loaded: list[bool] = [False]
    seen: list[tuple[bool, Operation]] = []
    moved: list[int] = []
    sample, beside = DryRun.sample, io_cost._StepIO.beside

    def noted(run: DryRun, instructions: list[Instruction], step: int) -> None:
        seen.extend((loaded[0], i.operation) for i in instructions)
        sample(run, instructions, step)
        for key in run.measured.seconds:
            run.measured.seconds[key] = seconds_beside if loaded[0] else 2.0

    @contextmanager
    def loading(load: io_cost._StepIO, traffic: Traffic, seconds: float) -> Iterator[None]:
        before = io.read_bytes + io.write_bytes
        with beside(load, traffic, seconds):
            loaded[0] = True
            yield
            loaded[0] = False
        moved.append(io.read_bytes + io.write_bytes - before)

    monkeypatch.setattr(DryRun, "sample", noted)
    monkeypatch.setattr(io_cost._StepIO, "beside", loading)
    found = ask(prepared, io, tmp_path)
    assert found.beside_io == (pytest.approx(1.5) if seconds_beside > 2 else None)
    assert replace(found, beside_io=None) == made.plan
    assert all(moved), "the disk was at work each time"
    assert not list(tmp_path.iterdir())
    kinds = {i.operation for i in made.plan.step} - {Operation.LOAD}
    assert {operation for _, operation in seen} == kinds
    assert sum(busy for busy, _ in seen) == len(seen) // 2
    turns = [busy for n, (busy, _) in enumerate(seen) if not n or seen[n - 1][0] != busy]
    assert turns == [False, True] * io_cost._ROUNDS


def test_a_forecast_contains_it_instead_of_what_is_reckoned(
    prepared: tuple[Config, Prepared],
) -> None:
    config, made = prepared
    fast = Disk(1e15, 1e15, 1e15)

    def step_s(beside_io: float | None, work: IOWork) -> float:
        plan = replace(made.plan, beside_io=beside_io)
        found = price(plan, config, Machine(fast, 0.0, work, {})).step_s
        assert found is not None
        return found

    alone = step_s(None, IOWork())
    assert step_s(None, IOWork(request_s=1.0)) > 2 * alone
    assert step_s(3.0, IOWork(request_s=1.0)) == pytest.approx(3 * alone, rel=1e-3)


def test_forwards_that_save_come_with_their_backwards(prepared: tuple[Config, Prepared]) -> None:
    _, made = prepared
    plan = made.plan
    builder = replace(plan.builder, saves=frozenset(sorted(plan.layouts.saved)[:2]))
    program = builder.step(pending_updates=plan.pending)
    groups = sample_groups(plan.captured, program)
    pairs = [[i.operation for i in group] for group in groups if len(group) > 1]
    assert pairs == [[Operation.FORWARD, Operation.BACKWARD]] * len(pairs) and pairs
    assert all(len({(i.segment, i.micro_batch) for i in group}) == 1 for group in groups)

    def kind(instruction: Instruction) -> tuple[Operation, int, bool]:
        saves = any(key.kind.name == "SAVED" for key in instruction.touches)
        isomorphism = plan.captured.model.segment(instruction.segment).isomorphism
        return instruction.operation, isomorphism, saves

    computed = [i for i in program if i.operation is not Operation.LOAD]
    assert sorted(kind(i) for group in groups for i in group) == sorted(set(map(kind, computed)))


@pytest.mark.parametrize(("written", "committed"), [(0, 0), (1, 1), (3, 1), (4, 0), (4, 2)])
def test_reads_and_writes_come_in_the_step_s_proportion(
    tmp_path: Path, written: int, committed: int
) -> None:
    """Flushed is what a commit writes; no more are under way than of a run."""
    done, asked = threading.Event(), []
    under_way: deque[Future[int]] = deque()
    most = [0]

    class Disk:
        def ask(self, kind: str) -> Future[int]:
            asked.append(kind)
            under_way.append(Future())
            most[0] = max(most[0], len(under_way))
            request = under_way[-1]
            if len(under_way) == io_cost._UNDER_WAY:  # ends none before it has to
                under_way.popleft().set_result(0)
            if len(asked) == 400:
                done.set()
                while under_way:
                    under_way.popleft().set_result(0)
            return request

        def read(self, *_: object, **__: object) -> Future[int]:
            return self.ask("read")

        def write(self, *_: object, flush: bool, checksum: bool, **__: object) -> Future[int]:
            assert flush == checksum
            return self.ask("commit" if flush else "spill")

    disk: Any = Disk()
    step_io = io_cost._StepIO(disk, tmp_path / "file", 4096, 16)
    step_io._run(Traffic((4 - written) << 20, written << 20, committed << 20), 1e-9, done)
    assert len(asked) == 400
    assert asked.count("read") == pytest.approx(100 * (4 - written), abs=2)
    assert asked.count("commit") == pytest.approx(100 * committed, abs=2)
    assert most[0] == io_cost._UNDER_WAY


LIMITS = {"_LONGEST_S": 0, "_SHORTEST_S": 1e9, "_LEAST_PIECES": 1000, "_MOST_INSTRUCTIONS": 9}


@pytest.mark.parametrize("limit", [*LIMITS, "free", "gpu", "verified"])
def test_it_is_left_out(
    prepared: tuple[Config, Prepared],
    io: DirectIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
) -> None:
    """Where it would say little, take long, find no room, or be of no use."""
    _, made = prepared
    if limit == "free":
        monkeypatch.setattr(io_cost, "free_bytes", lambda _: 4096)
    elif limit == "gpu":
        monkeypatch.setattr(made.plan.operations, "device", _Gpu())
    elif limit in LIMITS:
        monkeypatch.setattr(io_cost, limit, LIMITS[limit])
    monkeypatch.setattr(DryRun, "sample", None)
    (tmp_path / "speed.tmp").write_bytes(bytes(4096))  # of a start that was killed
    verify = "always" if limit == "verified" else "first_read"
    assert ask(prepared, io, tmp_path, verify=verify) is made.plan
    assert not list(tmp_path.iterdir())


class _Gpu:
    class device:
        type = "cuda"


@pytest.mark.parametrize("refused", ["write", "read", "gone"])
def test_a_disk_that_refuses_ends_no_run(
    prepared: tuple[Config, Prepared],
    io: DirectIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hurry: None,
    refused: str,
) -> None:
    """What it refuses, a run says when it needs it."""
    asked = threading.Event()

    def refuse(*_: object, **__: object) -> Future[int]:
        request: Future[int] = Future()
        error = DamagedStoreError("a file is missing") if refused == "gone" else RunError("no")
        request.set_exception(error)
        asked.set()
        return request

    monkeypatch.setattr(io, "write" if refused == "write" else "read", refuse)
    assert ask(prepared, io, tmp_path) is prepared[1].plan
    assert asked.is_set()
    assert not list(tmp_path.iterdir())


def test_another_disk_is_measured_under_the_run_s_own_name(
    prepared: tuple[Config, Prepared],
    io: DirectIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hurry: None,
) -> None:
    """Several runs may keep their slots in one directory."""
    written: list[Path] = []
    write = io.write

    def noted(path: Path, *arguments: Any, **options: Any) -> Future[int]:
        written.append(path)
        return write(path, *arguments, **options)

    monkeypatch.setattr(io, "write", noted)
    run, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    ask(prepared, io, run, paths=(disk,))
    (path,) = set(written)
    assert path.parent == disk and path.name.startswith("run-")
    assert not list(disk.iterdir())
