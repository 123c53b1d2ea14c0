"""The first thing a run does: version 0 of every segment on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from swaptrain.compute.object_tensors import views
from swaptrain.compute.split_master import split
from swaptrain.config.schema import Config
from swaptrain.durable.commits import record_bytes
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.durable.handoff import largest_handoff
from swaptrain.errors import DamagedStoreError
from swaptrain.machine.fingerprint import this_machine
from swaptrain.memory.pages import PagePool
from swaptrain.models.build import BuiltModel
from swaptrain.models.initial_weights import InitialWeights
from swaptrain.models.quantization import encode
from swaptrain.models.quantized_base import refused_weight
from swaptrain.models.stored.pretrained import Block
from swaptrain.planning.budgets.disk_budget import slot_counts
from swaptrain.planning.planner import Plan
from swaptrain.program.instructions import ObjectKey
from swaptrain.program.model import ParameterSpec
from swaptrain.program.quantized import quantized_tensors, scales_array
from swaptrain.program.roles import Role
from swaptrain.program.tensors import contiguous
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.layout import ArrayLayout, SegmentLayout
from swaptrain.store.format.object_layouts import Layouts
from swaptrain.store.format.record import record_size
from swaptrain.store.format.root import (
    FORMAT,
    Choices,
    QuantizedRecord,
    RootRecord,
    RootRow,
    write_buffers,
)
from swaptrain.store.format.state_record import blank_checksums, state_record
from swaptrain.store.slots.array_files import ArrayFiles
from swaptrain.store.slots.slot import Slot, create_frozen
from swaptrain.store.slots.slots import Slots

__all__ = ["Creation", "open_slots", "root_record"]


def open_slots(slots: Slots, layouts: Layouts, plan: Plan, *, trees: bool, snapshots: int) -> None:
    """Make sure that the slots of a run exist: those of `slot_counts`, and no free ones more."""
    handoff = _largest_handoff(plan)
    for members, count in slot_counts(layouts, trees=trees, snapshots=snapshots):
        record = max(_record_bytes(plan, k, handoff) for k in members)
        slots.create(layouts.state[members[0]], count, record_bytes=record)


def _largest_handoff(plan: Plan) -> list[ObjectKey]:
    return largest_handoff(plan.builder.step())


def root_record(
    config: Config, plan: Plan, built: BuiltModel, *, threads: int, device: torch.device
) -> RootRecord:
    """Return what holds for the life of a store that is created now."""
    model, ranks = plan.captured.model, plan.builder.ranks
    return RootRecord(
        **({"rank": ranks.rank, "ranks": ranks.count} if ranks.count > 1 else {}),
        fingerprint=model.fingerprint,
        segments=tuple(
            RootRow(
                segment=segment.index,
                module=segment.module,
                isomorphism=segment.isomorphism,
                parameters=tuple(segment.owns) if ranks.owns(segment.index) else (),
                state=segment.index in plan.layouts.state,
                frozen=segment.index in plan.layouts.frozen,
            )
            for segment in model.segments
        ),
        commit_every=config.store.commit.every,
        unit="step" if config.store.commit.is_whole else "segment",
        choices=Choices(
            cuts=tuple(plan.cuts),
            experts=plan.ranges.experts,
            rows=plan.ranges.rows,
            content=built.content,
            thawed=tuple(built.thawed),
            model=built.description,
            trained=built.trained.line(),
            chunk=plan.layouts.chunk_bytes,
            threads=threads,
            dtype=config.model.dtype,
            torch=torch.__version__,
            update_device=str(device),
            deferred=plan.builder.deferred,
            machine=this_machine(device),
        ),
        adapter=built.adapter,
        quantized={
            name: QuantizedRecord(form=p.quantized, shape=p.tensor.shape, dtype=p.tensor.dtype)
            for name, p in model.parameters.items()
            if p.quantized is not None
        },
        step=0,
        format=FORMAT,
    )


def _record_bytes(plan: Plan, k: int, handoff: list[ObjectKey]) -> int:
    return record_bytes(
        plan.layouts,
        k,
        plan.captured.model.fingerprint,
        micro_batches=plan.builder.micro_batches * plan.builder.ranks.count,
        handoff=handoff,
    )


class Creation:
    """Writes version 0, segment by segment; what an interrupted creation left is kept."""

    def __init__(
        self, run_dir: Path, plan: Plan, slots: Slots, backing: DiskBacking, io: DirectIO
    ) -> None:
        self._run_dir, self._plan, self._slots = run_dir, plan, slots
        self._backing, self._io = backing, io
        self._model, self._layouts = plan.captured.model, plan.layouts
        self._scales: dict[str, Tensor] = {}

    def write(self, initial: InitialWeights, tick: Callable[[int], None], *, trees: bool) -> None:
        """Write everything but the root, which makes the store exist.

        The initial values are made one array of one segment at a time.
        """
        self._spill_files()
        for segment in self._model.segments:
            k = segment.index
            if k in self._layouts.frozen:
                self._write_frozen(k, initial)
            if k in self._layouts.state and not self._is_written(k, trees=trees):
                self._write_segment(k, initial, trees=trees)
            tick(k)
        self._write_buffers(initial)

    def open(self) -> None:
        """Make sure that the files outside the slots exist: a finished run has deleted them."""
        self._spill_files()

    def _spill_files(self) -> None:
        handoff = _largest_handoff(self._plan)
        self._backing.files.create(lambda k: _record_bytes(self._plan, k, handoff))

    def _is_written(self, k: int, *, trees: bool) -> bool:
        try:
            record = self._slots.live(k, tree="a" if trees else None).read_record(k)
        except DamagedStoreError:
            return False
        return record.version == 0 and record.fingerprint == self._model.fingerprint

    def _write_segment(self, k: int, initial: InitialWeights, *, trees: bool) -> None:
        layout = self._layouts.state[k]
        slot = self._slots.take(layout.shape_class)
        assert slot is not None, "every segment has a slot"
        slot.write_record(self._record(k, 0, layout, self._fill(slot, layout, initial)))
        self._slots.switch(k, slot, tree="a" if trees else None)

    def _write_frozen(self, k: int, initial: InitialWeights) -> None:
        layout = self._layouts.frozen[k]
        blank = self._record(k, 0, layout, blank_checksums(layout))
        slot = create_frozen(self._run_dir, k, layout, record_bytes=record_size(blank))
        slot.write_record(self._record(k, 0, layout, self._fill(slot, layout, initial)))

    def _record(
        self, k: int, version: int, layout: SegmentLayout, sums: dict[str, list[int]]
    ) -> dict[str, object]:
        return state_record(
            segment=k,
            version=version,
            fingerprint=self._model.fingerprint,
            layout=layout,
            checksums=sums,
        )

    def _fill(
        self, slot: Slot, layout: SegmentLayout, initial: InitialWeights
    ) -> dict[str, list[int]]:
        """Write the arrays of a slot, flushed; return the checksums of their chunks."""
        sums: dict[str, list[int]] = {}
        for array in layout.arrays:
            files = slot.array(array.name)
            if array.role.begins_with_values:
                sums[array.name] = self._write_array(files, array, initial)
            else:
                # Zeros are what the reserved files read as.
                zeros = np.zeros(array.chunk_bytes, np.uint8)
                sums[array.name] = [xxhash.xxh3_64_intdigest(zeros.data)] * array.chunks
        return sums

    def _write_array(
        self, files: ArrayFiles, array: ArrayLayout, initial: InitialWeights
    ) -> list[int]:
        pool = PagePool(array.nbytes)
        slab = pool.take(array.nbytes)
        for name, target in views(array, slab).items():
            if name in self._plan.captured.buffers:
                target.copy_(self._plan.captured.buffers[name])
                continue
            parameter = self._model.parameters[name]
            if parameter.quantized is not None:
                self._write_quantized(parameter, array, target, initial)
                continue
            if not parameter.split:
                initial.fill(name, target)
                continue
            with torch.no_grad():
                if array.dtype in ("float32", "float16"):
                    initial.fill(name, target)
                    continue
                for rows, value in _masters(initial, parameter):
                    part = target[rows]
                    if array.role is Role.REMAINDER:
                        upper = torch.empty_strided(part.shape, part.stride(), dtype=torch.bfloat16)
                        split(value, upper, part)
                    else:
                        lower = torch.empty_strided(part.shape, part.stride(), dtype=torch.int16)
                        split(value, part, lower)
        futures: list[Future[int]] = files.write(self._io, slab.memory, flush=True)
        sums = [future.result() for future in futures]
        pool.give(slab)
        return sums

    def _write_quantized(
        self, parameter: ParameterSpec, array: ArrayLayout, target: Tensor, initial: InitialWeights
    ) -> None:
        """Write the codes of a weight, or its scales, which are kept until their array comes."""
        form, tensor = parameter.quantized, parameter.tensor
        assert form is not None
        if array.name == scales_array(form):
            target.copy_(self._scales.pop(tensor.name))
            return
        weight = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        initial.fill(tensor.name, weight)
        _, scales = quantized_tensors(tensor, form).values()
        kept = self._scales.setdefault(tensor.name, torch.empty(scales.shape))
        with refused_weight(initial.construction.base_names.get(tensor.name, tensor.name)):
            encode(weight, form, target, kept)

    def _write_buffers(self, initial: InitialWeights) -> None:
        """Keep the buffers that belong to the model's state dict and never change."""
        kept = {
            name: tensor.detach().numpy()
            for name, tensor in initial.module.state_dict().items()
            if name not in self._model.parameters
            and name not in self._model.buffers
            and not isinstance(tensor, torch.nn.Parameter)
            and name in dict(initial.module.named_buffers())
        }
        if kept:
            write_buffers(self._run_dir, kept)


def _masters(initial: InitialWeights, parameter: ParameterSpec) -> Iterator[Block]:
    """Yield the initial value of a weight as float32 masters, laid out as its halves are."""
    shape, stride = parameter.tensor.shape, parameter.tensor.stride
    if stride == contiguous(shape):
        for rows, value in initial.blocks(parameter.name):
            yield rows, value.float().contiguous()
        return
    value = initial.value(parameter.name)
    if (value.stride(), value.dtype) != (stride, torch.float32):
        value = torch.empty_strided(shape, stride, dtype=torch.float32).copy_(value)
    yield ..., value
