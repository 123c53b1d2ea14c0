"""Measures what each class of segments takes: torch's own memory, seconds, what autograd saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from swaptrain.capture.captured import Captured
from swaptrain.capture.checks.operation import unchecked
from swaptrain.capture.ranges.expert_operations import even_bounds
from swaptrain.capture.ranges.expert_products import has_products
from swaptrain.capture.trained_rows import all_rows
from swaptrain.compute.known_products import KnownProducts
from swaptrain.compute.object_tensors import copy_into, view, views
from swaptrain.compute.operations import Operations, Slabs
from swaptrain.memory.malloc import release, retain, trim
from swaptrain.memory.slab import PAGE_BYTES, Slab, SlabPool
from swaptrain.observe.memory_usage import peak_resident_bytes, reset_peak, resident_bytes
from swaptrain.program.evaluation import is_evaluated
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation, Program
from swaptrain.program.step import StepBuilder
from swaptrain.store.format.object_layouts import Layouts

__all__ = ["DryRun", "Measured", "dry_run", "kind_of"]

_ROUNDS = 3
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


@dataclass
class Measured:
    """What was seen of one instruction of each kind and class."""

    arena_bytes: int = 0
    """What torch takes beyond slabs, at the most."""
    saved_count: dict[int, int] = field(default_factory=dict)
    """By isomorphism class: the tensors that autograd saves in a forward."""
    seconds: dict[tuple[Operation, int, bool], float] = field(default_factory=dict)
    """By operation, isomorphism class, and whether autograd's tensors are saved for the backward:
    the median of several rounds."""
    decoding_s: dict[int, float] = field(default_factory=dict)
    """By isomorphism class: what a visit takes to decode weights, for all its micro-batches."""
    own_bytes: dict[tuple[Operation, int, bool], int] = field(default_factory=dict)
    """The most that torch takes for one such instruction where it finds no free block."""
    tier_s: float = 0.0
    """Seconds that the tier takes for an instruction, as an earlier start measured; 0: none did."""


class DryRun:
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
        if key.kind is not Kind.VALUE:
            return _NO_OUTPUT
        evaluated = is_evaluated(key.name)
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


def dry_run(
    captured: Captured,
    layouts: Layouts,
    operations: Operations,
    builder: StepBuilder,
    batch: Mapping[str, Tensor],
    *,
    host_bytes: int,
    saving: bool,
    products: KnownProducts,
    known: Measured | None = None,
) -> Measured:
    """Run a forward, a backward, an update, and what an evaluation computes, on weights of zero.

    Each isomorphism class once in every round; what takes seconds in fewer rounds. `products` keep
    what is known of matrix products from one cut to the next: large segments leave out those.

    Values between segments are zeros too, but for whole numbers: they are what a forward of the
    producer's class made.
    In the order of the program and several times over, under the allocator's rules of training,
    since what is taken also depends on how freed blocks fit together. The resident set's high-water
    mark shows it, kernels' own scratch included; where it cannot be reset (no write access to
    /proc/self/clear_refs), twice the graph's own sizes is returned.

    With `saving`, `layouts` learns what autograd saves in the segments whose forward and backward
    with it fit `host_bytes` beside the rest.

    With `known`, what an earlier start measured of the same, one round is enough: it shows that the
    instructions run, and what they take here where that is more.
    """
    program = builder.step(pending_updates=layouts.updated if builder.deferred else ())
    samples = _samples(captured, (*program, *builder.evaluation()))
    dry = DryRun(captured, layouts, operations, batch, clipped=builder.deferred, products=products)
    with closing(dry) as run, all_rows(), even_bounds(), run.decoding():
        marks = reset_peak()
        release()
        floor_bytes = resident_bytes()
        retain()
        steps = range(1, _ROUNDS + 1)
        if known is not None and not _covers(known, captured, samples):
            known = None
        for step in steps if known is None else steps[:1]:
            for instruction in samples:
                if not run.is_enough(instruction):
                    run.sample([instruction], step)
        taken = run.peak_bytes - floor_bytes
        if known is not None:
            taken = max(taken, known.arena_bytes)
        pairs = _saving_pairs(run, samples, builder, host_bytes - taken) if saving else []
        plain = [i for i in samples if i.operation in (Operation.FORWARD, Operation.BACKWARD)]
        if known is not None and _covers(known, captured, [i for pair in pairs for i in pair]):
            operations.device.begin(-1)  # the copies it keeps are of slabs that are gone
            release()
            return _as_known(run.measured, known, taken)
        if pairs:  # the two are compared, and the machine may have been slower before
            run.forget_seconds(plain)
        for step in steps if pairs else ():
            pairs = [
                pair
                for pair in pairs
                if all(map(run.is_enough, pair)) or _has_room(run, pair, step)
            ]
            for instruction in plain:
                if not run.is_enough(instruction):
                    run.sample([instruction], step)
        taken = run.peak_bytes - floor_bytes
        operations.device.begin(-1)  # the copies it keeps are of slabs that are gone
        release()
        if not marks:
            taken = max(
                2 * (captured.computed_by(i).at_once_bytes + _decoded_bytes(captured, i))
                for i in samples
            )
            run.measured.own_bytes.clear()
    return replace(run.measured, arena_bytes=taken)


def _first(tensor: Tensor) -> Tensor:
    """Return the first rows of a large tensor: a change in them shows as well as in all."""
    if tensor.numel() <= _MOST_DRAWN:
        return tensor
    return tensor[: max(1, _MOST_DRAWN * len(tensor) // tensor.numel())]


def _covers(known: Measured, captured: Captured, instructions: Iterable[Instruction]) -> bool:
    """Whether each kind of these has its seconds."""
    return all(kind_of(captured, instruction) in known.seconds for instruction in instructions)


def _as_known(found: Measured, known: Measured, taken_bytes: int) -> Measured:
    """Return the figures of an earlier start, with what this one counted."""
    own = {
        kind: max(value, found.own_bytes.get(kind, 0)) for kind, value in known.own_bytes.items()
    }
    return replace(known, arena_bytes=taken_bytes, saved_count=found.saved_count, own_bytes=own)


def kind_of(captured: Captured, instruction: Instruction) -> tuple[Operation, int, bool]:
    """Return an instruction's operation, its class, and whether autograd's tensors are saved."""
    isomorphism = captured.computed_by(instruction).isomorphism
    saves = any(key.kind is Kind.SAVED for key in instruction.touches)
    return instruction.operation, isomorphism, saves


def _slab_bytes(layouts: Layouts, instructions: Iterable[Instruction]) -> int:
    """Return the bytes of slabs that instructions touch together."""
    return sum(layouts.size_bytes(key) for key in {k for i in instructions for k in i.touches})


def _saving_pairs(
    run: DryRun, samples: list[Instruction], builder: StepBuilder, limit_bytes: int
) -> list[tuple[Instruction, Instruction]]:
    """Return a forward that saves and its backward, by class, where both fit `limit_bytes`.

    The layouts take note of what the segments of these classes save.
    """
    model, layouts = run.captured.model, run.layouts
    learning = [s for s in model.segments[:-1] if builder.objects.learns(s)]
    classes = {segment.isomorphism for segment in learning}
    found = {
        isomorphism: run.measure_saved(sample)
        for sample in samples
        if sample.operation is Operation.FORWARD
        and (isomorphism := model.segment(sample.segment).isomorphism) in classes
    }
    for segment in learning:  # what the last one saves is used at once
        saved_bytes = found[segment.isomorphism]
        if saved_bytes is not None:
            layouts.note_saved(segment.index, saved_bytes)
    program = replace(builder, saves=frozenset(layouts.saved)).step()
    pairs = []
    for forward, backward in _pairs(run.captured, program):
        if _slab_bytes(layouts, (forward, backward)) <= limit_bytes:
            pairs.append((forward, backward))
        else:
            _forget_saved(run, forward)
    return pairs


def _has_room(run: DryRun, pair: tuple[Instruction, Instruction], step: int) -> bool:
    """Sample a forward that saves and its backward, and say whether the device has the memory."""
    try:
        run.sample(list(pair), step)
    except torch.OutOfMemoryError:
        _forget_saved(run, pair[0])
        return False
    return True


def _forget_saved(run: DryRun, forward: Instruction) -> None:
    """Let no segment of a forward's class save."""
    model = run.captured.model
    own = model.segment(forward.segment).isomorphism
    run.layouts.forget_saved(s.index for s in model.segments if s.isomorphism == own)


def _samples(captured: Captured, program: Iterable[Instruction]) -> list[Instruction]:
    """Return one instruction of each kind and class, in the order of the program.

    Of a class whose segments differ in what they have to decode, the one with the most.
    """
    chosen: dict[tuple[int, Operation], Instruction] = {}
    for instruction in program:
        if instruction.segment and not instruction.is_exchange:
            key = captured.computed_by(instruction).isomorphism, instruction.operation
            known = chosen.setdefault(key, instruction)
            if _decoded_bytes(captured, instruction) > _decoded_bytes(captured, known):
                chosen[key] = instruction
    return list(chosen.values())


def _decoded_bytes(captured: Captured, instruction: Instruction) -> int:
    return captured.model.decoded_bytes(captured.computed_by(instruction).parameters)


def _pairs(captured: Captured, program: Program) -> list[tuple[Instruction, Instruction]]:
    """Return a forward that saves, and the backward of the same segment, of each class."""
    forwards: dict[int, Instruction] = {}
    pairs: dict[int, tuple[Instruction, Instruction]] = {}
    for instruction in program:
        if any(key.kind is Kind.SAVED for key in instruction.touches):
            isomorphism = captured.model.segment(instruction.segment).isomorphism
            if instruction.operation is Operation.FORWARD:
                forwards.setdefault(isomorphism, instruction)
            elif isomorphism not in pairs:
                forward = forwards[isomorphism]
                where = instruction.segment, instruction.micro_batch
                if where == (forward.segment, forward.micro_batch):
                    pairs[isomorphism] = forward, instruction
    return list(pairs.values())
