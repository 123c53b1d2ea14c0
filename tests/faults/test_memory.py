"""RAM that is not there: numbers and a way out before anything is written, or one message later."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from swaptrain.errors import BudgetError, CaptureError, ConfigError, RunError
from swaptrain.memory.limits import CgroupLimit
from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import Slab
from swaptrain.planning import ram_budget as ram
from swaptrain.run.os_failures import named_failures
from swaptrain.verbs.plans.planned import planned
from tests.support.killing import final_state, metrics_key
from tests.support.runs import config_of, trained

pytestmark = pytest.mark.trains

MIB = 1 << 20
JOB: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 1}},
    "data": {"python": "tests.support.datasets:tokens", "micro_batches": 1},
    "memory": {"host": "96MiB", "segment": "64KiB"},
    "train": {"steps": 3},
}


def test_a_control_group_below_the_budget_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit, what the run would take, and both ways out; nothing is left behind."""
    config = config_of(tmp_path / "run", JOB)
    limit = CgroupLimit(128 * MIB, Path("/sys/fs/cgroup/job/memory.max"))
    monkeypatch.setattr(ram, "cgroup_limit", lambda: limit)
    with pytest.raises(BudgetError, match=r"128.0 MiB of RAM .*job/memory.max.*raise the limit to"):
        trained(config)
    assert not config.run.dir.exists()


def test_ranks_of_a_machine_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control group, and the machine itself, that hold one process and not two."""
    config = config_of(tmp_path / "run", JOB)
    host_bytes, plan = config.memory.host, planned(config).prepared.plan
    one_bytes = plan.base_bytes + host_bytes
    limit = CgroupLimit(one_bytes * 3 // 2, Path("/sys/fs/cgroup/job/memory.max"))
    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(ram, "cgroup_limit", lambda: limit)
        ram.check_memory(host_bytes, plan, said.append)
        with pytest.raises(BudgetError, match=r"2 ranks on it would each .* start fewer ranks"):
            ram.check_memory(host_bytes, plan, said.append, processes=2)
    needed = plan.base_bytes + plan.arena_bytes + ram.useful_bytes(plan)
    monkeypatch.setattr(ram, "cgroup_limit", lambda: None)
    monkeypatch.setattr(ram, "machine_bytes", lambda: needed * 3 // 2)
    ram.check_memory(host_bytes, plan, said.append)
    with pytest.raises(BudgetError, match=r"this machine has .* of RAM and swap, and 2 ranks"):
        ram.check_memory(host_bytes, plan, said.append, processes=2)


def test_a_limit_on_addresses_below_the_budget_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path / "run", JOB)
    monkeypatch.setattr(ram, "address_space_bytes", lambda: 50 * MIB)
    with pytest.raises(BudgetError, match=r"50.0 MiB more .*ulimit -v.*memory.host is 96.0 MiB"):
        trained(config)
    assert not config.run.dir.exists()


def test_little_free_memory_is_said_and_no_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ram, "available_bytes", lambda: 5 * MIB)
    trained(config_of(tmp_path / "run", JOB))
    assert "5.0 MiB of RAM are free" in capsys.readouterr().out


def test_memory_that_ends_in_the_middle_is_one_message_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab of the run's pool fails in its second step; the same command gives the same bits."""
    good = trained(config_of(tmp_path / "good", JOB))
    config = config_of(tmp_path / "run", JOB)

    class Failing(PagePool):
        def take(self, nbytes: int) -> Slab:
            if (config.run.dir / "metrics.jsonl").exists() and metrics_key(config.run.dir):
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return super().take(nbytes)

    with monkeypatch.context() as patched:
        patched.setattr("swaptrain.compute.device.PagePool", Failing)
        with pytest.raises(RunError, match=r"no more memory.*memory.host is 96.0 MiB"):
            trained(config)
    trained(config)
    assert final_state(config.run.dir) == final_state(good)
    assert metrics_key(config.run.dir) == metrics_key(good)


@pytest.mark.parametrize("kind", ["torch", "python", "inside another"])
def test_each_allocator_that_fails_is_told_from_a_bug(kind: str, tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", JOB)
    with pytest.raises(RunError, match=r"memory.host is 96.0 MiB"), named_failures(config):
        if kind == "torch":
            torch.empty(1 << 60, dtype=torch.uint8)
        if kind == "python":
            raise MemoryError
        try:
            raise MemoryError
        except MemoryError as error:
            raise CaptureError("the model cannot be captured") from error
    with pytest.raises(RunError, match=r"the device failed .CUDA error"), named_failures(config):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    with pytest.raises(ConfigError, match="device-side assert"), named_failures(config):
        raise ConfigError(
            "the model fails on the first micro-batch: CUDA error: device-side assert"
        )
    with pytest.raises(ZeroDivisionError), named_failures(config):
        _ = 1 // 0
