"""Measures what each class of segments takes, by running each once in every round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from swaptrain.capture.captured import Captured
from swaptrain.capture.head.trained_rows import all_rows
from swaptrain.capture.ranges.expert_operations import even_bounds
from swaptrain.compute.known_products import KnownProducts
from swaptrain.compute.operations import Operations
from swaptrain.memory.malloc import release, retain
from swaptrain.observe.memory_usage import reset_peak, resident_bytes
from swaptrain.planning.measure.measured import Measured, kind_of
from swaptrain.planning.measure.sampler import Sampler
from swaptrain.program.instructions import Instruction, Kind, Operation, Program
from swaptrain.program.step import StepBuilder
from swaptrain.store.format.object_layouts import Layouts

__all__ = ["dry_run"]

_ROUNDS = 3


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
    sampler = Sampler(
        captured, layouts, operations, batch, clipped=builder.deferred, products=products
    )
    with closing(sampler) as run, all_rows(), even_bounds(), run.decoding():
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


def _covers(known: Measured, captured: Captured, instructions: Iterable[Instruction]) -> bool:
    """Whether each kind of these has its seconds."""
    return all(kind_of(captured, instruction) in known.seconds for instruction in instructions)


def _as_known(found: Measured, known: Measured, taken_bytes: int) -> Measured:
    """Return the figures of an earlier start, with what this one counted."""
    own = {
        kind: max(value, found.own_bytes.get(kind, 0)) for kind, value in known.own_bytes.items()
    }
    return replace(known, arena_bytes=taken_bytes, saved_count=found.saved_count, own_bytes=own)


def _slab_bytes(layouts: Layouts, instructions: Iterable[Instruction]) -> int:
    """Return the bytes of slabs that instructions touch together."""
    return sum(layouts.size_bytes(key) for key in {k for i in instructions for k in i.touches})


def _saving_pairs(
    run: Sampler, samples: list[Instruction], builder: StepBuilder, limit_bytes: int
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


def _has_room(run: Sampler, pair: tuple[Instruction, Instruction], step: int) -> bool:
    """Sample a forward that saves and its backward, and say whether the device has the memory."""
    try:
        run.sample(list(pair), step)
    except torch.OutOfMemoryError:
        _forget_saved(run, pair[0])
        return False
    return True


def _forget_saved(run: Sampler, forward: Instruction) -> None:
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
