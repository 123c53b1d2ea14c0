"""A device budget that cannot work is refused with the number that does."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swaptrain.compute.copy_streams import StreamDevice
from swaptrain.errors import BudgetError, ConfigError
from swaptrain.planning import prepare
from swaptrain.planning.budgets.device_budget import check_device_budget
from swaptrain.planning.budgets.remedies import remedy_of
from swaptrain.planning.planner import Plan
from swaptrain.planning.prepare import Prepared
from swaptrain.units import parse_size
from swaptrain.verbs.train import _check_choices
from tests.store.helpers import small_root
from tests.support.runs import config_of, trained
from tests.support.streams import LateStreams

pytestmark = pytest.mark.trains


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


@pytest.mark.parametrize(
    ("rows", "message"),
    [(None, r"lm_head\.weight alone decides"), (40_000, r"memory\.rows, which is 40000, to less")],
    ids=["a head", "a range"],
)
def test_a_parameter_that_decides_is_named(rows: int | None, message: str, tmp_path: Path) -> None:
    """Smaller segments and micro-batches would not help."""
    hf: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64,
        "num_attention_heads": 4, "max_position_embeddings": 32, "tie_word_embeddings": False,
        "vocab_size": 50_000,
    }  # fmt: skip
    if rows is not None:
        hf |= {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    data = "text" if rows is None else "labelled_text"
    tree = {
        "model": {"hf": hf},
        "data": {"python": f"tests.support.datasets:{data}"},
        "memory": {"rows": rows, "segment": "1MiB"},
    }
    plan = Prepared(config_of(tmp_path / "run", tree), None, lambda _: None).plan
    with pytest.raises(BudgetError, match=message):
        check_device_budget(
            1,
            plan.captured,
            plan.layouts,
            plan.builder.step(),
            remedy=lambda needed: remedy_of(plan.captured.model, needed, plan.ranges),
        )


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
        "train": {"recompute": None},
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


class Small(LateStreams):
    """A device with memory for so many bytes of copies."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.held_bytes = self.refusals = 0
        self.left_bytes: list[int] = []
        """What was held when the first copy behind a refusal was made."""

    def empty(self, view: Tensor) -> Tensor:
        if len(self.left_bytes) < self.refusals:
            self.left_bytes.append(self.held_bytes)
        if self.held_bytes + view.nbytes > self.limit_bytes:
            self.refusals += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        copy = super().empty(view)
        self._count(view.nbytes)
        weakref.finalize(copy, self._count, -view.nbytes)
        return copy

    def _count(self, nbytes: int) -> None:
        self.held_bytes += nbytes


@pytest.mark.proof
def test_a_segment_without_room_leaves_nothing_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller ones are tried next, on a device that is empty again."""
    roomy, small = Small(1 << 30), Small(600_000)
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(roomy))
    most = len(_plan(tmp_path).captured.model.segments)
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(small))
    assert len(_plan(tmp_path).captured.model.segments) > most
    assert small.refusals and set(small.left_bytes) == {0}


class WithoutRoomToSave(LateStreams):
    """A device on which what autograd saves finds no place."""

    def empty(self, view: Tensor) -> Tensor:
        if view.dtype == torch.uint8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return super().empty(view)


@pytest.mark.proof
def test_where_the_device_cannot_save_it_recomputes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which segments save is no part of a run: a device with less memory goes on with it."""
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(LateStreams(1 << 30)))
    assert _plan(tmp_path, segment="64KiB").layouts.saved
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(WithoutRoomToSave(1 << 30)))
    plan = _plan(tmp_path, segment="64KiB")
    assert not plan.layouts.saved and not plan.builder.saves
    tree: dict[str, Any] = {
        "model": {"python": "tests.support.models:gpt", "kwargs": {"width": 64}},
        "data": {"python": "tests.support.datasets:tokens"},
        "train": {"steps": 1, "recompute": None},
    }
    assert (trained(config_of(tmp_path / "run", tree)) / "metrics.jsonl").is_file()


@pytest.mark.parametrize(("now", "accepted"), [("cuda:1", True), ("cpu", False)])
def test_a_run_goes_on_on_another_gpu_but_not_on_another_kind_of_device(
    now: str, accepted: bool, tmp_path: Path
) -> None:
    root = small_root(choices={"update_device": "cuda:0"})
    prepared: Any = SimpleNamespace(device=SimpleNamespace(device=torch.device(now)))
    notes: Any = SimpleNamespace(note=lambda _: None)
    if accepted:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("swaptrain.verbs.train.note_changes", lambda *_: None)
            patch.setattr("swaptrain.verbs.train.this_machine", lambda _: {})
            _check_choices(tmp_path, root, prepared, notes)
    else:
        with pytest.raises(ConfigError, match="begun on cuda and would go on on cpu"):
            _check_choices(tmp_path, root, prepared, notes)
