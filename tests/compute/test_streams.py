"""The road of a device with memory of its own, on ordinary memory with queues that are late.

Without a GPU this is what its tests can show: that nothing is computed with, written to the disk
or given back before the copy that it needs was waited for.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swaptrain.compute.copy_streams import StreamDevice
from swaptrain.compute.slab_tensors import Slabs
from swaptrain.config.schema import Config
from swaptrain.errors import StoppedBySignal
from swaptrain.planning import prepare
from swaptrain.planning.measure.sampler import Sampler
from swaptrain.planning.prepare import Prepared
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from swaptrain.program.overlap import side_by_side
from swaptrain.run import assemble
from swaptrain.run.steps.executor import Executor
from swaptrain.run.steps.training import Training
from swaptrain.run.watch import Watch
from swaptrain.units import MIB
from swaptrain.verbs.train import train
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, losses, trained, weights
from tests.support.streams import LateStreams
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model": {"hf": LLAMA}, "data": {"python": "tests.support.datasets:text"}},
    "bfloat16": {
        "model": {"hf": LLAMA, "dtype": "bfloat16"},
        "data": {"python": "tests.support.datasets:text"},
    },
    "float16": {
        "model": {"python": "tests.support.models:gpt", "dtype": "float16"},
        "data": {"python": "tests.support.datasets:tokens"},
    },
    "tied": {
        "model": {"python": "tests.support.models:gpt"},
        "data": {"python": "tests.support.datasets:tokens"},
    },
    "masked": {
        "model": {"python": "tests.support.models:masked"},
        "data": {"python": "tests.support.datasets:tokens"},
    },
    "batch-norm": {
        "model": {"python": "tests.support.models:convolutional"},
        "data": {"python": "tests.support.datasets:image_labels"},
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fused": {},
    "parts": {"store": {"chunk": "8KiB"}, "memory": {"segment": "200KiB"}},
    "parts-clipped": {
        "store": {"chunk": "8KiB"}, "memory": {"segment": "200KiB"},
        "optimizer": {"clip_norm": 0.3},
    },
    "8bit": {
        "store": {"chunk": "8KiB"}, "memory": {"segment": "200KiB"},
        "optimizer": {"state": "8bit"},
    },
    "clipped": {"optimizer": {"clip_norm": 0.3}},
    "trees": {"store": {"commit": {"every": 2}}},
    "evaluated": {
        "eval": {"python": "tests.support.datasets:text", "every": 1, "batches": 2},
    },
}  # fmt: skip


def _config(run_dir: Path, model: str, settings: str, host_bytes: int = 512 * MIB) -> Config:
    tree = {**MODELS[model], **SETTINGS[settings]}
    if "eval" in tree:
        tree["eval"] = {**tree["eval"], "python": MODELS[model]["data"]["python"]}
    tree["train"] = {"steps": 3, "seed": 3, "threads": 1, **tree.get("train", {})}
    memory = {"host": f"{host_bytes >> 10}KiB", "segment": "64KiB"}
    tree["memory"] = {**memory, **tree.get("memory", {})}
    return config_of(run_dir, tree)


def _leave(monkeypatch: pytest.MonkeyPatch, *, instructions: float) -> None:
    """Let a run have slabs for so many of its largest instruction."""
    run = Training.run

    def with_little(training: Training) -> None:
        training.pool.shrink(int(instructions * training.plan.peaks.instruction_bytes))
        run(training)

    monkeypatch.setattr(Training, "run", with_little)


@pytest.mark.parametrize(
    ("model", "settings"),
    proof_but(
        [
            *(("llama", settings) for settings in SETTINGS),
            ("bfloat16", "fused"),
            ("bfloat16", "parts"),
            ("tied", "clipped"),
            ("tied", "8bit"),
            ("float16", "fused"),
            ("masked", "fused"),
            ("batch-norm", "fused"),
            ("batch-norm", "clipped"),
            ("batch-norm", "evaluated"),
        ],
        ("llama", "parts-clipped"),
        ("batch-norm", "evaluated"),
        whole=[
            *(
                ("llama", settings)
                for settings in ("fused", "parts", "8bit", "clipped", "evaluated")
            ),
            *[("bfloat16", "parts"), ("batch-norm", "fused"), ("batch-norm", "clipped")],
            *[("tied", "clipped"), ("masked", "fused"), ("float16", "fused")],
        ],
    ),
)
def test_late_copies_change_no_bit(
    model: str, settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little host memory, so that slabs are given to other objects as soon as they may."""
    plain = trained(_config(tmp_path / "plain", model, settings))
    late = LateStreams(limit_bytes=1 << 30)
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(late))

    def after_its_copies(instruction: Instruction, slabs: Slabs) -> None:
        sums = instruction.operation is Operation.NORMS
        for key in instruction.touches if sums else (*instruction.changes, *instruction.writes):
            stays = not sums and key.kind is Kind.ACCUMULATOR  # the next one goes on with it
            memory = slabs[key].tensor(torch.uint8, slabs[key].nbytes)
            assert stays or not late.reaches(memory), "it may not have reached its slab"

    monkeypatch.setattr(assemble, "Executor", partial(Executor, computed=after_its_copies))
    _leave(monkeypatch, instructions=2)
    copied = trained(_config(tmp_path / "copied", model, settings))
    assert late.ahead > 0 and late.overlapped > 0
    assert losses(copied) == losses(plain)
    assert_same_bits(weights(copied), weights(plain))


@pytest.mark.parametrize(
    "settings",
    proof_but(["fused", "clipped", "trees", "parts-clipped"], whole=["fused", "clipped", "trees"]),
)
def test_a_stop_finds_nothing_under_way(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind every instruction: the one that is begun already is ended, and the run goes on."""
    plain = trained(_config(tmp_path / "plain", "llama", settings))
    streams = LateStreams(limit_bytes=1 << 30)
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(streams))
    config = _config(tmp_path / "run", "llama", settings)
    tick, left, run = Watch.tick, [0], Executor.run
    under_way: list[int] = []

    def noted(*args: Any, **options: Any) -> None:
        try:
            run(*args, **options)
        except StoppedBySignal:
            under_way.append(streams.under_way)
            raise

    monkeypatch.setattr(Executor, "run", noted)
    for instructions in (1, 2, 5, 9, 14, 23):
        left[0] = instructions

        def stopped(watch: Watch, instruction: Instruction) -> None:
            left[0] -= 1
            if not left[0]:
                raise StoppedBySignal(2, f"stopped after {instruction}")
            tick(watch, instruction)

        monkeypatch.setattr(Watch, "tick", stopped)
        with pytest.raises(StoppedBySignal):
            trained(config)
        assert under_way.pop() == 0
    monkeypatch.setattr(Watch, "tick", tick)
    assert losses(trained(config)) == losses(plain)
    assert_same_bits(weights(config.run.dir), weights(plain))


@pytest.mark.proof
def test_the_host_waits_for_one_micro_batch_while_the_next_one_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the last one of a visit, where the host has budget for two of them."""
    streams = LateStreams(limit_bytes=1 << 30)
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(streams))
    config = _config(tmp_path / "planned", "llama", "fused")
    plan = Prepared(config, None, lambda _: None).plan
    pairs = sum(side_by_side(*pair) for pair in pairwise(plan.step))
    overlapped: list[int] = []
    for instructions in (20, 1):
        with monkeypatch.context() as patch:
            _leave(patch, instructions=instructions)
            streams.overlapped = 0
            trained(_config(tmp_path / str(instructions), "llama", "fused"))
            overlapped.append(streams.overlapped)
    assert overlapped[0] == config.train.steps * pairs
    assert overlapped[1] < overlapped[0] / 2
    clipped = Prepared(_config(tmp_path / "clipped", "llama", "clipped"), None, lambda _: None).plan
    # But behind each batch, and behind what turns; clipped, before it, whose sums are made anew.
    for planned, alone in (plan, 1), (clipped, 2):
        beside = sum(side_by_side(*pair) for pair in pairwise(planned.step))
        assert len(planned.step) - 1 - beside == config.data.micro_batches + alone


def test_nothing_comes_ahead_where_the_device_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateStreams(limit_bytes=1)
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(late))
    plain = trained(_config(tmp_path / "run", "llama", "fused"))
    assert late.brought > 0 and late.ahead == 0
    assert len(losses(plain)) == 3


@pytest.mark.proof
def test_what_comes_ahead_is_left_where_the_device_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody counts all that libraries keep there: the run goes on, with the same bits."""
    plain = trained(_config(tmp_path / "plain", "llama", "fused"))

    class Full(LateStreams):
        asked = False

        def empty(self, view: Tensor) -> Tensor:
            if self.asked:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
            return super().empty(view)

    class Asking(StreamDevice):
        def fetch_ahead(self, *args: Any) -> bool:
            streams.asked = True
            try:
                return super().fetch_ahead(*args)
            finally:
                streams.asked = False

    streams = Full(limit_bytes=1 << 30)
    monkeypatch.setattr(prepare, "open_device", lambda *_: Asking(streams))
    full = trained(_config(tmp_path / "full", "llama", "fused"))
    assert streams.brought > 0 and streams.ahead == 0
    assert losses(full) == losses(plain)
    assert_same_bits(weights(full), weights(plain))


@pytest.mark.parametrize("recompute", proof_but([True, False], whole=[False]))
def test_a_visit_of_many_micro_batches_takes_no_more_memory(
    recompute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one micro-batch brought is dropped before the next one's comes."""
    most: dict[int, int] = {}

    class Counting(StreamDevice):
        def fetch(self, *args: Any, **kwargs: Any) -> Tensor:
            tensor = super().fetch(*args, **kwargs)
            held = sum(copy.tensor.nbytes for copy in self._copies.values())
            most[micro_batches] = max(most.get(micro_batches, 0), held)
            return tensor

    monkeypatch.setattr(
        prepare, "open_device", lambda *_: Counting(LateStreams(limit_bytes=1 << 30))
    )
    for micro_batches in (4, 16):
        config = _config(tmp_path / str(micro_batches), "llama", "fused")
        data = config.data.model_copy(update={"micro_batches": micro_batches})
        train = config.train.model_copy(update={"recompute": recompute})
        trained(config.model_copy(update={"data": data, "train": train}))
    # Of an update's state three quarters are there before the last of 4, 15 sixteenths of 16.
    assert 0 < most[16] < 1.25 * most[4]


def test_what_autograd_saves_crosses_once_and_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each forward that saves one copy leaves, and one comes back; some while others compute."""
    crossed: dict[str, list[int]] = {"left": [], "came": []}
    streams = LateStreams(limit_bytes=1 << 30)
    bring, send = streams.bring, streams.send

    def noted(way: str, slab: Tensor) -> None:
        if slab.dtype == torch.uint8:
            crossed[way].append(slab.nbytes)

    monkeypatch.setattr(streams, "bring", lambda t, v, b: (noted("came", v), bring(t, v, b))[1])
    monkeypatch.setattr(streams, "send", lambda v, s: (noted("left", v), send(v, s))[1])
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(streams))
    run = Training.run
    saving = 0

    def counted(training: Training) -> None:
        nonlocal saving
        saving = len(training.plan.builder.saves)
        for sizes in crossed.values():
            sizes.clear()  # the dry run's
        run(training)

    monkeypatch.setattr(Training, "run", counted)
    config = _config(tmp_path / "run", "llama", "fused")
    train = config.train.model_copy(update={"recompute": False})
    trained(config.model_copy(update={"train": train}))
    expected = config.train.steps * config.data.micro_batches * saving
    assert saving > 1
    assert len(crossed["left"]) == len(crossed["came"]) == expected
    assert sum(crossed["left"]) == sum(crossed["came"])


@pytest.mark.proof
def test_what_the_next_segment_needs_comes_spread_over_the_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instruction waits for what is copied beside it: no more than it computes long enough for.

    With one micro-batch a segment's state comes beside one instruction; with eight beside eight.
    """
    largest: dict[int, int] = {}

    class Counting(StreamDevice):
        beside = 0

        def begin(self, segment: int) -> None:
            self.beside = 0
            super().begin(segment)

        def fetch_ahead(self, segment: int, key: ObjectKey, name: str, view: Tensor) -> bool:
            other = segment != self._segment and not self.has(segment, key, name)
            if other and key.kind is Kind.STATE:
                self.beside += view.nbytes
                largest[micro_batches] = max(largest.get(micro_batches, 0), self.beside)
            return super().fetch_ahead(segment, key, name, view)

    monkeypatch.setattr(
        prepare, "open_device", lambda *_: Counting(LateStreams(limit_bytes=1 << 30))
    )
    for micro_batches in (1, 8):
        config = _config(tmp_path / str(micro_batches), "llama", "fused")
        data = config.data.model_copy(update={"micro_batches": micro_batches})
        train = config.train.model_copy(update={"recompute": True})
        trained(config.model_copy(update={"data": data, "train": train}))
    assert 0 < largest[8] <= largest[1] / 2


@pytest.mark.parametrize("settings", proof_but(["fused", "clipped"], whole=["clipped"]))
def test_sums_leave_the_device_once_in_a_visit_or_not_at_all(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More micro-batches send no more; an update takes the sums where they are."""
    sent: dict[int, int] = {}
    put_bytes = 0

    class Counting(StreamDevice):
        def put(self, view: Tensor, tensor: Tensor) -> None:
            nonlocal put_bytes
            if view.dtype != torch.uint8:  # what autograd saves is of each micro-batch
                put_bytes += view.nbytes
            super().put(view, tensor)

    monkeypatch.setattr(
        prepare, "open_device", lambda *_: Counting(LateStreams(limit_bytes=1 << 30))
    )
    run = Training.run

    def counted(training: Training) -> None:
        nonlocal put_bytes
        put_bytes = 0  # what the dry run sent does not count
        run(training)

    monkeypatch.setattr(Training, "run", counted)
    for micro_batches in (4, 8):
        config = _config(tmp_path / str(micro_batches), "llama", settings)
        data = config.data.model_copy(update={"micro_batches": micro_batches})
        trained(config.model_copy(update={"data": data}))
        sent[micro_batches] = put_bytes
    assert sent[4] == sent[8]
    steps = len(losses(tmp_path / "8"))
    state_bytes = 12 * sum(tensor.numel() for tensor in weights(tmp_path / "8").values())
    sums_bytes = {"fused": 0, "clipped": state_bytes // 3}[settings]
    assert sent[8] == steps * (state_bytes + sums_bytes)


@pytest.mark.proof
def test_what_is_pinned_is_unpinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its memory goes: an address may come again, and is another slab's then.

    A run pins its slabs once, no more than it can use however much it may take.
    """
    pinned: dict[int, int] = {}
    sizes: list[int] = []
    counts: set[int] = set()

    class Pinning(LateStreams):
        def pin(self, address: int, nbytes: int) -> None:
            assert not pinned
            pinned[address] = nbytes
            sizes.append(nbytes)

        def unpin(self, address: int, nbytes: int) -> None:
            assert pinned.pop(address) == nbytes

    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(Pinning(1 << 30)))
    plan = Prepared(_config(tmp_path / "planned", "llama", "clipped"), None, lambda _: None).plan
    assert sizes
    assert not pinned, "the dry run has left some"
    for host_bytes in plan.least_host_bytes + 4 * MIB, 4 << 30:
        sizes.clear()
        counts.clear()
        config = _config(tmp_path / str(host_bytes), "llama", "clipped", host_bytes)
        train(config, observe=lambda *_: counts.add(len(sizes)))
        assert counts == {len(sizes)}, "a slab was pinned in the middle"
        assert sizes[-1] < min(host_bytes, 100 * MIB)
        assert not pinned


def test_a_start_pins_no_memory_anew_for_each_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where one needs more than those before it, and all of it is unpinned again."""
    pins: list[int] = []
    streams = LateStreams(limit_bytes=1 << 30)
    monkeypatch.setattr(streams, "pin", lambda _, nbytes: pins.append(nbytes))
    monkeypatch.setattr(streams, "unpin", lambda _, nbytes: pins.append(-nbytes))
    monkeypatch.setattr(prepare, "open_device", lambda *_: StreamDevice(streams))
    samples, sample = list[int](), Sampler.sample

    def noted(run: Sampler, instructions: list[Instruction], step: int) -> None:
        samples.append(len(instructions))
        sample(run, instructions, step)

    def planned(training: Training) -> None:
        raise StoppedBySignal(2, "planned")

    monkeypatch.setattr(Sampler, "sample", noted)
    monkeypatch.setattr(Training, "run", planned)
    with pytest.raises(StoppedBySignal):
        train(_config(tmp_path / "run", "llama", "fused"))
    sizes = [nbytes for nbytes in pins if nbytes > 0]
    assert sizes == sorted(set(sizes)) and len(sizes) < len(samples) / 4
    assert sum(pins) == 0
