"""What a machine can do is measured in a moment, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from swaptrain.machine import probe
from swaptrain.program.cost import IOWork
from swaptrain.store.access.containment import check_contained
from swaptrain.store.disk.direct import DirectIO

CPU = torch.device("cpu")


def test_all_is_measured_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the real disk, for hundredths of a second; what is known already is kept."""
    for name in ("_DISK_S", "_BURST_S", "_COMPUTE_S"):
        monkeypatch.setattr(probe, name, 0.01)
    found = probe.measure(tmp_path, CPU, ["float32"], {"bfloat16": 5.0})
    assert not list(tmp_path.iterdir())
    assert all(speed > 0 for speed in vars(found.disk).values())
    assert 0 <= found.sigma <= 1
    assert found.flops_per_s["bfloat16"] == 5.0 and found.flops_per_s["float32"] > 0
    assert found.io_work.request_s + found.io_work.byte_s > 0
    assert found.io_work.checksum_byte_s > 0 and found.io_work.commit_s > 0


@pytest.mark.parametrize("last", [1, 2, 3, 4, 5, 6])
def test_a_start_goes_on_after_a_kill_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Whatever a killed measuring leaves, a start takes the directory, and measures it again."""

    def measured() -> None:
        if os.fork():
            assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
            return
        left = count(1)
        for name in ("replace", "unlink"):
            real = getattr(Path, name)

            def call(*args: Any, real: Any = real, **kwargs: Any) -> Any:
                if next(left) == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            setattr(Path, name, call)
        with suppress(BaseException):
            probe._commit_s(tmp_path)
            (tmp_path / "speed.tmp").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)

    (tmp_path / "speed.tmp").write_bytes(bytes(4096))
    measured()
    check_contained(tmp_path)
    for name in ("_DISK_S", "_BURST_S", "_COMPUTE_S"):
        monkeypatch.setattr(probe, name, 0.01)
    probe.measure(tmp_path, CPU, [], {})
    assert not list(tmp_path.iterdir())


def test_requests_are_counted(tmp_path: Path) -> None:
    """The file is written once as a whole; what a request takes is measured on 64."""
    (tmp_path / "file").write_bytes(bytes(probe.FILE_BYTES))
    with DirectIO(2) as io:
        load = probe._Load(io, tmp_path / "file")
        load.fill()
        assert io.write_bytes == probe.FILE_BYTES
        assert load.work_s(4096) > 0
        assert (io.read_bytes, io.write_bytes) == (32 * 4096, probe.FILE_BYTES + 32 * 4096)


def test_a_request_is_made_however_late_it_is(tmp_path: Path) -> None:
    """Also where the time was up before the first one."""
    (tmp_path / "file").write_bytes(bytes(probe.FILE_BYTES))
    with DirectIO(2) as io:
        load = probe._Load(io, tmp_path / "file")
        assert load.run(lambda _: False, lambda: True, nbytes=4096) > 0
        assert load.requests == 1 and io.read_bytes == 4096


class Load:
    """Takes 3 seconds for a request and 2 for each byte of it, and 5 for a byte's checksum."""

    def work_s(self, nbytes: int) -> float:
        return 3.0 + 2.0 * nbytes

    def checksum_s(self) -> float:
        return 5.0


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_a_processors_seconds_count_as_far_as_computing_loses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    """By requests and bytes; all where threads have every core, none on a GPU."""
    load: Any = Load()
    busy_s = count(0, 7 * probe._COMMITS)  # it asks before the first commit and after the last one
    monkeypatch.setattr(time, "process_time", lambda: float(next(busy_s)))
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: part * cores)
    found = probe._io_work(load, tmp_path, CPU)
    assert vars(found) == pytest.approx(vars(IOWork(3 * part, 2 * part, 5 * part, 7 * part)))
    assert probe._io_work(load, tmp_path, torch.device("cuda")) == IOWork()
    assert found.seconds(2, 10, checksum=False) == pytest.approx(part * (2 * 3 + 10 * 2))
    assert found.seconds(2, 10, checksum=True) == pytest.approx(part * (2 * 3 + 10 * 7))
