"""A device budget that cannot work is refused with the number that does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from swaptrain.errors import BudgetError
from swaptrain.execute import prepare
from swaptrain.execute.device_budget import check_device_budget
from swaptrain.execute.planning import Plan
from swaptrain.execute.prepare import Prepared
from swaptrain.execute.streams import StreamDevice
from swaptrain.units import parse_size
from tests.support.runs import config_of
from tests.support.streams import LateStreams


def test_the_number_in_the_refusal_is_accepted(tmp_path: Path) -> None:
    """One byte is refused; the size that the message names is not."""
    tree = {
        "model": {"python": "tests.support.models:gpt"},
        "data": {"python": "tests.support.datasets:tokens"},
        "memory": {"segment": "32KiB"},
    }
    plan = Prepared(config_of(tmp_path / "run", tree), None, lambda _: None).plan
    program = plan.builder.step()
    with pytest.raises(BudgetError, match="set memory") as refusal:
        check_device_budget(1, plan.captured, plan.layouts, program)
    named = str(refusal.value).split("set memory.device to ")[1].split(",")[0]
    check_device_budget(parse_size(named), plan.captured, plan.layouts, program)


class Full(LateStreams):
    """A device without memory."""

    def empty(self, view: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")


def _plan(tmp_path: Path, **memory: str) -> Plan:
    tree = {
        "model": {"python": "tests.support.models:gpt", "kwargs": {"width": 64}},
        "data": {"python": "tests.support.datasets:tokens"},
        "device": "cuda",
        "memory": memory,
    }
    return Prepared(config_of(tmp_path / "run", tree), None, lambda _: None).plan


def test_segments_are_cut_for_the_device_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device with less memory gets smaller ones; one with too little is refused with a number."""
    streams = LateStreams(limit_bytes=1 << 30)
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(streams))
    roomy, tight = (_plan(tmp_path, device=device) for device in ("1GiB", "2MiB"))
    assert 1 <= len(roomy.captured.model.segments) < len(tight.captured.model.segments)
    with pytest.raises(BudgetError, match=r"memory.device is 64.0 KiB, .* set memory.device to"):
        _plan(tmp_path, device="64KiB")
    assert streams.under_way == 0


def test_a_device_that_has_no_memory_left_is_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing says how much it takes: exit 2, before anything is written."""
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(Full(1 << 30)))
    with pytest.raises(BudgetError, match=r"no memory left for a segment .CUDA out of memory"):
        _plan(tmp_path)
