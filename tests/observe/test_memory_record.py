"""memory.json says what the tier and the pool hold, and names what grows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from swaptrain.cli import main
from swaptrain.compute.device import CpuDevice
from swaptrain.compute.operations import Operations
from swaptrain.memory.malloc import AllocatorBytes, heap_bytes
from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import Slab, SlabPool
from swaptrain.memory.tier import Tier
from swaptrain.observe.memory_growth import MemoryGrowth
from swaptrain.observe.memory_record import (
    HOLDERS,
    MemoryRecord,
    MemoryRow,
    holder_of,
    thinned,
)
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from swaptrain.run import assemble
from swaptrain.run.memory_guard import UnusedBlocks
from swaptrain.run.steps.executor import Executor
from tests.support.datasets import tokens
from tests.support.runs import config_of, trained

MIB = 2**20
GPT = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 1}},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"host": "64MiB", "segment": "16KiB"},
    "train": {"check_capture": False},
}


def memory_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "memory.json").read_text())
    return found


def job(run: Path, **sections: Any) -> Any:
    tree = {**GPT, **sections, "run": {"dir": str(run), "memory": True}}
    return config_of(run, tree)


@pytest.mark.trains
def test_what_is_held_is_what_tier_and_pool_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each instruction of the last step: its own objects by kind, the rest, and the slabs."""
    pools: list[SlabPool] = []
    truth: list[tuple[str, int, int, dict[str, int]]] = []
    make = CpuDevice.pool

    def noted(device: CpuDevice, budget_bytes: int, **options: Any) -> SlabPool:
        pools.append(make(device, budget_bytes, **options))
        return pools[-1]

    def look(tier: Tier, instruction: Instruction, _: Mapping[ObjectKey, Slab]) -> None:
        sizes = {key: tier.in_memory(key).nbytes for key in tier.resident()}
        own = dict.fromkeys(HOLDERS, 0)
        for key in set(instruction.touches):
            name = {"value": "values", "saved": "saved", "state": "weights"}.get(key.kind)
            if key.kind == "state" and key.name in ("exp_avg", "exp_avg_sq", "step"):
                name = "state"
            own[name or "gradients"] += sizes[key]
        assert pools[-1].live_bytes >= sum(sizes.values())
        own["cache"] = pools[-1].live_bytes - sum(own.values())
        own["staging"] = pools[-1].held_bytes - pools[-1].live_bytes
        truth.append((instruction.operation, instruction.segment, instruction.micro_batch, own))

    class Looking(Executor):
        def __init__(self, tier: Tier, *args: Any, **options: Any) -> None:
            super().__init__(tier, *args, **options, computed=partial(look, tier))

    monkeypatch.setattr(CpuDevice, "pool", noted)
    monkeypatch.setattr(assemble, "Executor", Looking)
    run = trained(job(tmp_path / "run", train={"steps": 2, "check_capture": False}))
    found = memory_of(run)
    assert found["step"] == 2 and found["budget_bytes"] == 64 * MIB
    assert found["base_bytes"] > 64 * MIB and found["growth"] == []
    rows = found["instructions"]
    last = truth[-len(rows) :]
    assert len(truth) == 2 * len(rows)
    for position, (row, (operation, segment, micro_batch, held)) in enumerate(
        zip(rows, last, strict=True)
    ):
        assert row["position"] == position
        assert (row["operation"], row["segment"]) == (operation.upper(), segment)
        assert (row["micro_batch"], row["held"]) == (micro_batch, held), row
        assert row["resident_bytes"] > sum(held.values())
    asked = [row["torch"] for row in rows if row["torch"]["allocated"] is not None]
    assert asked[0] == rows[0]["torch"], "at the first instruction of a step always"
    assert all(torch["reserved"] >= torch["allocated"] > 0 for torch in asked)
    for name in ("weights", "state", "gradients", "values"):
        assert any(row["held"][name] for row in rows), name


KEPT: list[Tensor] = []


class Keeping(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Keeps 256 KiB of each item that is read."""

    def __init__(self) -> None:
        self._items: Any = tokens()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        KEPT.append(torch.ones(1 << 16))
        found: dict[str, Tensor] = self._items[index]
        return found


def keeping() -> Keeping:
    return Keeping()


@pytest.mark.trains
def test_a_dataset_that_keeps_tensors_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six items of a step are 1.5 MiB, read where a micro-batch is loaded; it is said once."""
    KEPT.clear()
    data = {"python": "tests.observe.test_memory_record:keeping"}
    run = trained(job(tmp_path / "run", data=data, train={"steps": 20, "check_capture": False}))
    KEPT.clear()
    (growth,) = memory_of(run)["growth"]
    assert (growth["operation"], growth["segment"]) == ("LOAD", 0)
    assert growth["holder"] in ("outside", "torch")
    assert 1.3 * MIB < growth["bytes_per_step"] < 1.8 * MIB
    notes = [line for line in capsys.readouterr().out.splitlines() if " a step at LOAD" in line]
    assert len(notes) == 1 and "MiB a step" in notes[0] and "keeps tensors" in notes[0]


@pytest.mark.trains
def test_what_an_instruction_keeps_is_found_at_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward of segment 2 that keeps 512 KiB: three micro-batches are 1.5 MiB a step."""
    backward, kept = Operations.backward, []

    def keeps(self: Operations, instruction: Instruction, *args: Any, **options: Any) -> Any:
        if instruction.segment == 2:
            kept.append(torch.ones(1 << 17))
        return backward(self, instruction, *args, **options)

    monkeypatch.setattr(Operations, "backward", keeps)
    run = trained(job(tmp_path / "run", train={"steps": 20, "check_capture": False}))
    (growth,) = memory_of(run)["growth"]
    assert growth["segment"] == 2 and growth["steps"] == 16
    assert 1.3 * MIB < growth["bytes_per_step"] < 1.8 * MIB


@pytest.mark.proof
def test_a_clean_run_grows_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fifty steps with evaluations, of which none is named."""
    held_out = {"python": "tests.support.datasets:tokens", "every": 7}
    config = job(tmp_path / "run", train={"steps": 50, "check_capture": False}, eval=held_out)
    assert memory_of(trained(config))["growth"] == []
    assert " a step at " not in capsys.readouterr().out


def rows_of(
    step: int, leak: Callable[[int], int], *, holder: int = 0, noise: Callable[[int], int]
) -> list[MemoryRow]:
    """Return the rows of a step whose backward of segment 1 leaves something behind."""
    rows = []
    for position, (operation, segment) in enumerate(
        [("load", 0), ("forward", 1), ("forward", 2), ("backward", 2), ("backward", 1)]
    ):
        kept = leak(step if position == 4 else step - 1)
        held = [MIB] * len(HOLDERS)
        held[holder] += kept
        graph = 4 * MIB * (position in (1, 2)) + 8 * MIB * (position == 2)
        allocated = 100 * MIB + graph + (kept if holder == 6 else 0)
        resident = 400 * MIB + sum(held) + noise(7 * step + position)
        rows.append(
            MemoryRow(
                *(position, operation, segment, 0, tuple(held)), allocated, allocated, resident
            )
        )
    return rows


def found_in(steps: int, leak: Callable[[int], int], **options: Any) -> list[Any]:
    growth = MemoryGrowth()
    options.setdefault("noise", lambda _: 0)
    for step in range(1, steps + 1):
        growth.add(step, rows_of(step, leak, **options))
    return growth.found


def test_steady_growth_is_named_at_its_holder() -> None:
    """State that grows by 1 MiB a step, in 16 steps; fewer steps say nothing."""
    assert found_in(15, lambda step: step * MIB, holder=1) == []
    (found,) = found_in(40, lambda step: step * MIB, holder=1)
    assert (found.step, found.holder, found.bytes_per_step) == (16, "state", MIB)
    text = "what is held as state grows by 1.0 MiB a step at LOAD, over the last 16 steps"
    assert found.text() == text


@pytest.mark.parametrize(
    "curve",
    [
        lambda step: 0,
        lambda step: 1000 * step,  # less than is worth a word
        lambda step: int(80 * MIB * (1 - 0.8**step)),  # a heap that comes to its size
        lambda step: 4 * MIB * min(step // 9, 3),  # some leaps
        lambda step: 10 * MIB * (step % 2),
    ],
)
def test_what_comes_to_rest_is_no_growth(curve: Callable[[int], int]) -> None:
    assert found_in(60, curve, holder=1) == []


def test_noise_hides_what_is_smaller() -> None:
    """A resident set that jumps by 40 MiB says nothing of 1 MiB a step."""

    def jumps(number: int) -> int:
        return Random(number).randrange(40 * MIB)

    assert found_in(60, lambda _: 0, noise=jumps) == []


def test_a_long_program_is_thinned_and_keeps_its_peaks() -> None:
    """Of 5,000 rows at most 200, with the most of each holder, in order."""
    rows = []
    for position in range(5000):
        held = [position * 7919 % 1009 for _ in HOLDERS]
        held[position % 7] += 5000 if position in (17, 1300, 2601, 3902) else 0
        rows.append(MemoryRow(position, "forward", 1, 0, tuple(held), 1, 2, position % 997))
    kept = thinned(rows, 200)
    assert len(kept) <= 200 and kept == sorted(kept)
    for number in range(len(HOLDERS)):
        peak = max(row.held[number] for row in rows)
        assert max(row.held[number] for row in kept) == peak
    assert max(row.resident_bytes for row in kept) == 996
    assert thinned(rows[:200], 200) == rows[:200]


def test_a_file_that_cannot_be_written_is_a_note(tmp_path: Path) -> None:
    """The run goes on without it, and says so once."""
    notes: list[str] = []

    record = MemoryRecord(
        *(tmp_path / "none" / "memory.json", PagePool(MIB)),
        staging_bytes=lambda: 0,
        allocator_bytes=lambda: None,
        budget_bytes=MIB,
        base_bytes=0,
        note=notes.append,
        clock=map(float, range(0, 1000, 5)).__next__,
    )
    for step in (1, 2, 3):
        record.weigh(Instruction(Operation.LOAD, 0, 0), {})
        record.step_done(step)
    record.close()
    assert len(notes) == 1 and "memory.json cannot be written (No such file" in notes[0]


def test_what_malloc_holds_is_counted() -> None:
    """A tensor of 64 MiB is in use while it lives."""
    before = heap_bytes()
    assert before is not None, "these tests run on glibc"
    tensor = torch.ones(16 << 20)
    during = heap_bytes()
    assert during is not None
    del tensor
    after = heap_bytes()
    assert after is not None
    assert 64 * MIB <= during.allocated_bytes - before.allocated_bytes < 66 * MIB
    assert abs(after.allocated_bytes - before.allocated_bytes) < 2 * MIB
    assert during.reserved_bytes >= during.allocated_bytes


@dataclass
class _Blocks:
    """A device whose allocator keeps free blocks."""

    reserved_bytes: int
    most_bytes: int
    given_back: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def allocator_bytes(self) -> AllocatorBytes:
        return AllocatorBytes(10 * MIB, self.reserved_bytes, self.most_bytes)

    def give_back_cached(self) -> None:
        self.given_back += 1
        self.reserved_bytes = self.most_bytes


def test_blocks_are_given_back_where_no_step_needs_them() -> None:
    """Beyond the most that was in use, by a fourth of what is reserved; and not again at once."""
    notes: list[str] = []
    plan: Any = None
    pool: Any = None
    device: Any = _Blocks(reserved_bytes=1000 * MIB, most_bytes=900 * MIB)
    unused = UnusedBlocks(device, plan, pool, notes.append)
    unused.step_done()
    assert device.given_back == 0, "the next step needs them"
    device.most_bytes = 500 * MIB
    unused.step_done()
    assert device.given_back == 1
    assert notes == [
        "gave back 500.0 MiB that the allocator kept free: it held 500.0 MiB more than a step needs"
    ]
    device.reserved_bytes = 1000 * MIB
    unused.step_done()
    assert device.given_back == 1, "a step has just taken them again"


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weighed")
    return trained(job(folder / "run", train={"steps": 2, "check_capture": False}))


@pytest.mark.trains
def test_inspect_shows_the_largest_first_or_in_order(
    weighed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each instruction has a row; the sizes of `size` fall."""
    assert main(["inspect", str(weighed), "--memory", "--order", "program"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 2: ") and "of memory.host 64.0 MiB" in lines[0]
    assert lines[1].split()[:3] == ["operation", "segment", "micro-batch"]
    rows = memory_of(weighed)["instructions"]
    shown = [line.split()[:2] for line in lines[2:]]
    assert shown == [[row["operation"], str(row["segment"] or "-")] for row in rows]
    assert main(["inspect", str(weighed), "--memory"]) == 0
    largest = capsys.readouterr().out.splitlines()[2].split()
    own = {row["position"]: sum(list(row["held"].values())[:5]) for row in rows}
    assert largest[0] == rows[max(own, key=lambda position: own[position])]["operation"]


@pytest.mark.trains
def test_inspect_refuses_what_is_not_there_or_no_record(
    weighed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the file the key is named (2); a file of something else is no traceback (1)."""
    assert main(["inspect", str(weighed), "--order", "size"]) == 2
    path = weighed / "memory.json"
    content = path.read_bytes()
    path.write_text('{"step": 1, "instructions": [{"operation": "\\u001b[31m"}]}')
    assert main(["inspect", str(weighed), "--memory"]) == 1
    assert "is not what run.memory writes" in capsys.readouterr().err
    path.unlink()
    assert main(["inspect", str(weighed), "--memory"]) == 2
    assert "train with run.memory=true" in capsys.readouterr().err
    path.write_bytes(content)


def test_each_kind_of_object_has_a_holder() -> None:
    """Weights of another rank too."""
    for kind in Kind:
        assert 0 <= holder_of(ObjectKey(kind, "weights", 1)) < len(HOLDERS)
    assert HOLDERS[holder_of(ObjectKey(Kind.SHARED, "weights", 1))] == "weights"
