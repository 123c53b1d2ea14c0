"""Executes single instructions on slabs of their own, and notes seconds and memory of each kind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import Tensor

from swaptrain.capture.captured import Captured
from swaptrain.capture.checks.operation import unchecked
from swaptrain.capture.ranges.expert_products import has_products
from swaptrain.compute.known_products import KnownProducts
from swaptrain.compute.object_tensors import copy_into, view, views
from swaptrain.compute.operations import Operations
from swaptrain.compute.slab_tensors import Slabs
from swaptrain.memory.malloc import trim
from swaptrain.memory.slab import PAGE_BYTES, Slab, SlabPool
from swaptrain.observe.memory_usage import peak_resident_bytes, reset_peak, resident_bytes
from swaptrain.planning.measure.measured import Measured, kind_of
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Of, Operation
from swaptrain.store.format.object_layouts import Layouts

__all__ = ["Sampler"]

_ENOUGH = 4
"""Times what is enough to time a product: after so long a kind of instruction is run no more."""
_STD = 0.02
"""Of the random numbers, as of many models' initial weights."""
_ROUTED = (Operation.FORWARD, Operation.BACKWARD, Operation.TURN, Operation.EVALUATE)
_ROUTER_NUMBERS = 1 << 22
"""Most numbers of a weight that is drawn for a router, which is one of the small ones."""
_MOST_DRAWN = 1 << 24
"""Random numbers for one tensor; they take half a second."""
_NO_OUTPUT = (-1, -1)


class Sampler:
    """Executes instructions on slabs of their own, and notes what they take."""

    def __init__(
        self,
        captured: Captured,
        layouts: Layouts,
        operations: Operations,
        batch: Mapping[str, Tensor],
        *,
        clipped: bool,
        products: KnownProducts,
    ) -> None:
        self.captured, self.layouts, self._operations = captured, layouts, operations
        self._batch, self._clipped, self._products = batch, clipped, products
        self.measured = Measured()
        self._peaks: list[int] = []
        self._rounds: dict[tuple[Operation, int, bool], list[float]] = {}
        self._spent_s: dict[tuple[Operation, int, bool], float] = {}
        """By kind: what all its rounds took, slabs, decoding and what was left out included."""
        self._integers: dict[tuple[int, int], Tensor] = {}
        """By class and number of the output: the last one that is no floating point."""
        self._pool: SlabPool | None = None
        self._has_router = has_products(code.train for code in captured.codes)
        on_host = operations.device.device.type == "cpu"
        self._leaves_out = on_host and not self._has_router
        """Whether what is known is left out: a router needs real numbers to choose by."""

    def close(self) -> None:
        """Give the memory of slabs back."""
        if self._pool is not None:
            self._pool.trim()
            self._pool = None

    def measure_saved(self, instruction: Instruction) -> int | None:
        """Return the bytes that autograd saves in a forward; None where they cannot be kept.

        On random numbers: of zeros, a tensor that changed could not be told from what it was.
        """
        with unchecked(), self._slabs(instruction.touches) as (_, slabs):  # of random numbers
            self._draw(slabs)
            try:
                with self._products.on_random_numbers(), self._leaving_out(instruction):
                    saved = self._operations.measure_saved(instruction, slabs)
            except torch.OutOfMemoryError:  # the device's: it cannot keep them for a moment
                return None
            finally:
                self._operations.end_visit()
        isomorphism = self.captured.computed_by(instruction).isomorphism
        self.measured.saved_count[isomorphism] = saved.count
        return saved.nbytes if saved.complete else None

    def _draw(self, slabs: Slabs, *, largest: int | None = None) -> None:
        """Draw values and weights; with `largest` only weights of at most so many numbers."""
        generator = torch.Generator().manual_seed(0)
        for key, slab in slabs.items():
            if key.kind in (Kind.STATE, Kind.SHARED, Kind.VALUE):
                for tensor in views(self.layouts.array(key), slab).values():
                    small = key.kind is Kind.VALUE or not largest or tensor.numel() <= largest
                    if small and tensor.is_floating_point() and 0 not in tensor.stride():
                        _first(tensor).normal_(std=_STD, generator=generator)

    def sample(self, instructions: list[Instruction], step: int) -> None:
        """Execute instructions on slabs of their own, which they share; note time and memory.

        In `step` 1 an optimizer makes its state, which takes memory, and time that later ones do
        not take.
        """
        touched = [key for i in instructions for key in i.touches]
        begun_s = self._now_s()
        with unchecked(), self._slabs(touched) as (pool, slabs):
            for instruction in instructions:
                if step == 1:
                    trim()  # so that free blocks, which it might not find, count as taken again
                before_bytes = resident_bytes() - pool.held_bytes
                if self._has_router and instruction.operation in _ROUTED:
                    # Of zeros it chooses the first experts alone, and most of their gradient is
                    # memory that nobody touches.
                    self._draw(slabs, largest=_ROUTER_NUMBERS)
                reset_peak()
                self._decode(instruction, slabs)
                with self._leaving_out(instruction):
                    executed_s = self._now_s()
                    self._execute(instruction, slabs, step)
                    self._note_seconds(instruction, self._now_s() - executed_s)
                self._peaks.append(peak_resident_bytes() - pool.held_bytes)
                self._note_own(instruction, self._peaks[-1] - before_bytes)
                self._operations.end_visit()
                if instruction.operation in (Operation.FORWARD, Operation.EVALUATE):
                    self._keep_integers(instruction, slabs)
        for instruction in instructions:
            kind = kind_of(self.captured, instruction)
            spent_s = (self._now_s() - begun_s) / len(instructions)
            self._spent_s[kind] = self._spent_s.get(kind, 0.0) + spent_s

    def is_enough(self, instruction: Instruction) -> bool:
        """Whether the rounds of an instruction's kind have taken so long that noise is little.

        Of an update the second one is needed however long the first one was.
        """
        kind = kind_of(self.captured, instruction)
        least = 2 if instruction.operation is Operation.UPDATE else 1
        if len(self._rounds.get(kind, ())) < least:
            return False
        return self._spent_s.get(kind, 0.0) >= _ENOUGH * self._products.enough_s

    @property
    def peak_bytes(self) -> int:
        """The highest resident set seen so far, without slabs."""
        return max(self._peaks)

    def forget_seconds(self, instructions: Iterable[Instruction]) -> None:
        """Forget how long the instructions took, of which more rounds follow."""
        for instruction in instructions:
            if not self.is_enough(instruction):
                self._rounds.pop(kind_of(self.captured, instruction), None)

    def _note_own(self, instruction: Instruction, taken_bytes: int) -> None:
        key, own = kind_of(self.captured, instruction), self.measured.own_bytes
        own[key] = max(own.get(key, 0), taken_bytes)

    def _note_seconds(self, instruction: Instruction, seconds: float) -> None:
        key = kind_of(self.captured, instruction)
        rounds = self._rounds.setdefault(key, [])
        rounds.append(seconds)
        self.measured.seconds[key] = statistics.median(rounds)

    def _now_s(self) -> float:
        """Return the time on a clock that what is left out would have taken part in."""
        return time.perf_counter() + self._products.left_out_s

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Leave out decoding that is known in a `with` block."""
        own = self._operations.decode
        if self._leaves_out:
            self._operations.decode = self._products.decode
        try:
            yield
        finally:
            self._operations.decode = own

    def _leaving_out(self, instruction: Instruction) -> AbstractContextManager[object]:
        """Return a context that leaves out what is known of a large segment."""
        if instruction.operation in (Operation.UPDATE, Operation.NORMS):
            return nullcontext()  # an optimizer may look at the numbers
        if not self._leaves_out:
            return nullcontext()
        return self._products.left_out(self.captured.computed_by(instruction).flops)

    @contextmanager
    def _slabs(self, keys: Iterable[ObjectKey]) -> Iterator[tuple[SlabPool, dict[ObjectKey, Slab]]]:
        """Lend slabs for objects, of zeros but for what the batch and other segments give."""
        device = self._operations.device
        device.begin(-1)  # the copies that it keeps are of slabs that are gone
        sizes = {key: self.layouts.size_bytes(key) for key in keys}
        pool = self._pool_for(sum(sizes.values()))
        slabs = {key: pool.take(size) for key, size in sizes.items()}
        try:
            for key, slab in slabs.items():
                if device.overlaps:
                    slab.tensor(torch.uint8, slab.nbytes).zero_()
                if key.kind is Kind.VALUE and key.segment == 0:
                    load = Instruction(Operation.LOAD, 0, 0, writes=(key,))
                    items = self.layouts.array(key).entries[0].tensor.shape[0]
                    batch = {name: tensor[:items] for name, tensor in self._batch.items()}
                    self._operations.load(load, {key: slab}, batch)
                elif (made := self._integers.get(self._output(key))) is not None:
                    copy_into(view(self.layouts.array(key), slab), made)
            yield pool, slabs
        finally:
            with suppress(torch.AcceleratorError):  # which has ended the run already
                device.synchronize()
            for slab in slabs.values():
                pool.give(slab)
            if not device.overlaps:
                self.close()

    def _pool_for(self, nbytes: int) -> SlabPool:
        """Return a pool with nothing in it; on a device the last one, since to pin takes long."""
        if self._pool is None or self._pool.live_bytes or self._pool.budget_bytes < nbytes:
            self.close()
            self._pool = self._operations.device.pool(max(nbytes, PAGE_BYTES))
        return self._pool

    def _keep_integers(self, forward: Instruction, slabs: Slabs) -> None:
        """Keep what a segment made of whole numbers, for those that read what its class makes.

        They are positions, often: a mixture of experts sorts tokens and takes the order back later.
        Zeros are no order, and what comes of them may be a position that does not exist.
        """
        for key in forward.writes:
            layout = self.layouts.array(key)
            whole_numbers = not getattr(torch, layout.dtype).is_floating_point
            if whole_numbers and self._output(key) != _NO_OUTPUT:
                self._integers[self._output(key)] = view(layout, slabs[key]).clone()

    def _output(self, key: ObjectKey) -> tuple[int, int]:
        """Return the class of the segment that makes a value, and which of its outputs it is.

        Classes of an evaluation's slices, which are numbered by themselves, come below the others.
        """
        if key.kind is not Kind.VALUE or key.of is Of.BUFFERS_BEFORE:
            return _NO_OUTPUT
        evaluated = key.of is Of.EVALUATION
        if evaluated:
            graphs = (graph.spec for graph in self.captured.evaluations)
            segments = next(spec.slices for spec in graphs if key.name in spec.values)
        else:
            segments = self.captured.model.segments
        segment = segments[key.segment - 1]
        if key.name not in segment.outputs:
            return _NO_OUTPUT
        isomorphism = -2 - segment.isomorphism if evaluated else segment.isomorphism
        return isomorphism, segment.outputs.index(key.name)

    def _decode(self, instruction: Instruction, slabs: Slabs) -> None:
        """Decode the weights of a segment that trains, and note how long it took the last time."""
        if instruction.operation not in (Operation.FORWARD, Operation.BACKWARD, Operation.TURN):
            return
        segment = self.captured.computed_by(instruction)
        if not self.captured.model.decoded_bytes(segment.parameters):
            return
        begun_s = self._now_s()
        self._operations.begin_visit(instruction, slabs)
        self._operations.device.synchronize()
        self.measured.decoding_s[segment.isomorphism] = self._now_s() - begun_s

    def _execute(self, instruction: Instruction, slabs: Slabs, step: int) -> None:
        operations = self._operations
        match instruction.operation:
            case Operation.FORWARD:
                operations.forward(instruction, slabs, step)
            case Operation.UPDATE:
                coefficient = torch.tensor(1.0) if self._clipped else None
                operations.update(
                    instruction, slabs, step, rate=lambda _: 0.0, coefficient=coefficient
                )
            case Operation.EVALUATE:
                operations.evaluate(instruction, slabs)
            case Operation.NORMS:
                operations.norms(instruction, slabs, step)
            case _:
                operations.backward(instruction, slabs, step)
        operations.device.synchronize()


def _first(tensor: Tensor) -> Tensor:
    """Return the first rows of a large tensor: a change in them shows as well as in all."""
    if tensor.numel() <= _MOST_DRAWN:
        return tensor
    return tensor[: max(1, _MOST_DRAWN * len(tensor) // tensor.numel())]
