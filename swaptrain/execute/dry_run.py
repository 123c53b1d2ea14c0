"""Measures the arena: what torch itself allocates while a segment computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swaptrain.capture.capture import Captured
from swaptrain.execute.layouts import Layouts
from swaptrain.execute.operations import Operations
from swaptrain.memory.slab import Pool
from swaptrain.observe.memory_usage import peak_resident_bytes, reset_peak, resident_bytes
from swaptrain.program.instructions import Instruction, Kind, Operation, Program

__all__ = ["measure_arena"]


def measure_arena(
    captured: Captured,
    layouts: Layouts,
    operations: Operations,
    program: Program,
    batch: Mapping[str, Tensor],
) -> int:
    """Return the bytes that torch takes beyond slabs in a forward and a backward of any class.

    Runs one forward and one backward (or turn) of each isomorphism class of `program` on weights
    of zero, the largest first, so that the others fit into what it leaves free; the resident set's
    high-water mark shows what was taken, kernels' own scratch included. Where the mark cannot be
    reset (no write access to /proc/self/clear_refs), twice the graph's own sizes is returned.
    """
    samples = _samples(captured, program)
    if not reset_peak():
        return max(2 * captured.model.segment(i.segment).activation_bytes for i in samples)
    taken = 0
    floor_bytes = resident_bytes()
    for instruction in samples:
        pool = Pool(sum(layouts.size_bytes(key) for key in set(instruction.touches)) or 4096)
        slabs = {key: pool.take(layouts.size_bytes(key)) for key in set(instruction.touches)}
        for key, slab in slabs.items():
            if key.kind is Kind.VALUE and key.segment == 0:
                loading = Instruction(Operation.LOAD, 0, 0, writes=(key,))
                operations.load(loading, {key: slab}, batch)
        reset_peak()
        held_bytes = pool.held_bytes
        if instruction.operation is Operation.FORWARD:
            operations.forward(instruction, slabs, 0)
        else:
            operations.backward(instruction, slabs, 0)
        taken = max(taken, peak_resident_bytes() - held_bytes - floor_bytes)
        for slab in slabs.values():
            pool.give(slab)
        del slabs, slab
        pool.trim()
    torch.set_grad_enabled(True)
    return max(taken, 0)


def _samples(captured: Captured, program: Program) -> list[Instruction]:
    """Return one instruction of each kind and class, those with the most activations first."""
    chosen: dict[tuple[int, Operation], Instruction] = {}
    for instruction in program:
        if instruction.operation in (Operation.FORWARD, Operation.BACKWARD, Operation.TURN):
            isomorphism = captured.model.segment(instruction.segment).isomorphism
            chosen.setdefault((isomorphism, instruction.operation), instruction)
    return sorted(
        chosen.values(),
        key=lambda i: (
            i.operation is not Operation.FORWARD,
            captured.model.segment(i.segment).activation_bytes,
        ),
        reverse=True,
    )
