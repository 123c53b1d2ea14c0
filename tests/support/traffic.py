"""The traffic of a step whose cache makes room at the last moment: what a plan decides, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swaptrain.program.durability import Durability, barriers
from swaptrain.program.instructions import Instruction, ObjectKey, Program
from swaptrain.program.residency import NextUse, Traffic, _Cache

__all__ = ["durable_objects", "simulate"]


def simulate(
    program: Program,
    size_bytes: Callable[[ObjectKey], int],
    cache_bytes: int,
    *,
    durable: Callable[[Instruction], Iterable[ObjectKey]],
    rounds: int = 2,
) -> Traffic:
    """Return the traffic of a step with a cache of `cache_bytes`, without moving anything.

    The decisions are those of `plan_residency`. `durable` names what an instruction makes durable
    (written whether or not it stays in memory). Of `rounds` equal steps the last one counts, so
    that the cache is warm.
    """
    steps = program * (rounds + 1)
    at = barriers(steps, lag=1)
    cache = _Cache(NextUse(steps), size_bytes, cache_bytes, {}, at)
    before = Traffic(0, 0, 0)
    for round_ in range(rounds):
        before = Traffic(cache.read_bytes, cache.write_bytes, cache.commit_bytes)
        for offset, instruction in enumerate(program):
            cache.run(instruction, round_ * len(program) + offset, durable(instruction))
    return Traffic(
        cache.read_bytes - before.read_bytes,
        cache.write_bytes - before.write_bytes,
        cache.commit_bytes - before.commit_bytes,
    )


def durable_objects(
    program: Program, *, keeps_activations: bool = False
) -> Callable[[Instruction], Iterable[ObjectKey]]:
    """Return the objects that each instruction of a program makes durable, by instruction."""
    durability = Durability(program, keeps_activations=keeps_activations)
    made = {id(i): durability.made(position).written for position, i in enumerate(program)}
    return lambda instruction: made[id(instruction)]
