"""Measures the arena: what torch itself allocates while a segment computes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from swaptrain.capture.capture import Captured
from swaptrain.execute.layouts import Layouts
from swaptrain.execute.operations import Operations
from swaptrain.memory.malloc import release, retain
from swaptrain.memory.slab import Pool
from swaptrain.observe.memory_usage import peak_resident_bytes, reset_peak, resident_bytes
from swaptrain.program.instructions import Instruction, Kind, Operation, Program

__all__ = ["measure_arena"]

_ROUNDS = 3


def measure_arena(
    captured: Captured,
    layouts: Layouts,
    operations: Operations,
    program: Program,
    batch: Mapping[str, Tensor],
) -> int:
    """Return the bytes that torch takes beyond slabs in a forward and a backward of any class.

    Runs one forward, backward and update of each isomorphism class of `program`, in its order and
    three times over, on weights of zero and under the allocator's rules of training, since what is
    taken also depends on how freed blocks fit together. The resident set's high-water mark shows
    it, kernels' own scratch included. Where the mark cannot be reset (no write access to
    /proc/self/clear_refs), twice the graph's own sizes is returned.
    """
    samples = _samples(captured, program)
    if not reset_peak():
        return max(2 * captured.model.segment(i.segment).activation_bytes for i in samples)
    release()
    floor_bytes = resident_bytes()
    taken = 0
    retain()
    for instruction in samples * _ROUNDS:
        taken = max(taken, _sample(operations, layouts, instruction, batch) - floor_bytes)
    operations.device.begin(-1)  # the copies it keeps are of slabs that are gone
    release()
    return taken


def _sample(
    operations: Operations,
    layouts: Layouts,
    instruction: Instruction,
    batch: Mapping[str, Tensor],
) -> int:
    """Execute one instruction on slabs of its own; return the peak resident set without them."""
    keys = set(instruction.touches)
    pool = Pool(max(sum(layouts.size_bytes(key) for key in keys), 4096))
    slabs = {key: pool.take(layouts.size_bytes(key)) for key in keys}
    for key, slab in slabs.items():
        if key.kind is Kind.VALUE and key.segment == 0:
            operations.load(Instruction(Operation.LOAD, 0, 0, writes=(key,)), {key: slab}, batch)
    held_bytes = pool.held_bytes
    reset_peak()
    match instruction.operation:
        case Operation.FORWARD:
            operations.forward(instruction, slabs, 0)
        case Operation.UPDATE:
            operations.norms(instruction, slabs, 0)
            operations.update(instruction, slabs, updates_before=0, lr=0.0, coefficient=None)
        case Operation.SETTLE:
            operations.norms(instruction, slabs, 0)
        case _:
            operations.backward(instruction, slabs, 0)
    return peak_resident_bytes() - held_bytes


def _samples(captured: Captured, program: Program) -> list[Instruction]:
    """Return one instruction of each kind and class, in the order of the program."""
    chosen: dict[tuple[int, Operation], Instruction] = {}
    for instruction in program:
        if instruction.segment and instruction.operation is not Operation.KEEP:
            isomorphism = captured.model.segment(instruction.segment).isomorphism
            chosen.setdefault((isomorphism, instruction.operation), instruction)
    return list(chosen.values())
