"""Prices the steps of a plan: bytes that they move, seconds that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swaptrain.config.schema import Config
from swaptrain.machine.speeds import Machine
from swaptrain.planning.planner import Plan
from swaptrain.planning.simulation import Access, Rehearsal, Rehearsed, Room
from swaptrain.program.cost import IOWork
from swaptrain.program.durability import CommitUnit, Durability
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Operation
from swaptrain.program.residency import Traffic

__all__ = ["PlanSeconds", "Price", "instruction_seconds", "moved_bytes", "price"]
__all__ += ["usual_durability"]

PlanSeconds = Callable[[Plan], Callable[[Instruction], float]]
"""Gives for a plan what its instructions compute for."""

_LONGEST_REHEARSED = 10_000
"""Instructions; each one looks at all that is held, and ahead at all that comes."""


@dataclass(frozen=True)
class Price:
    """What a step in the middle of a run takes."""

    traffic: Traffic | None
    """Rehearsed; None where the program is too long for it."""
    compute_s: float
    """Of the forwards, backwards and updates, as measured one by one with no I/O beside them."""
    step_s: float | None
    """With the disk's part; None where its speed or the traffic is not known."""
    between_s: tuple[float, ...] = ()
    """Seconds before the first exchange with other ranks, between each two, after the last one."""


def price(
    plan: Plan,
    config: Config,
    machine: Machine | None,
    *,
    seconds: Callable[[Instruction], float] | None = None,
) -> Price:
    """Return what a step of the plan takes, as a rehearsal finds it.

    With store.commit.every > 1 it is the mean of steps that commit and steps that do not. `seconds`
    are what instructions compute for; None: as measured.
    """
    program = plan.step
    seconds = seconds or instruction_seconds(plan)
    compute_s = sum(seconds(i) for i in program if not i.is_exchange)
    if len(program) > _LONGEST_REHEARSED:
        return Price(None, compute_s, None)
    m = config.store.commit.every  # more than 1 only where the store is committed as a whole
    work = IOWork() if machine is None else machine.io_work
    rehearsal = Rehearsal(
        plan.layouts.size_bytes,
        Room(plan.pool_bytes),
        seconds=lambda instruction: plan.tier_s + seconds(instruction),
        disk=None if machine is None else machine.disk,
        work=_work(plan, config, work),
        commit_work_s=work.commit_s,
    )
    durability = usual_durability(plan, config)
    rehearsal.run(program, program, durability)  # memory holds then what a step leaves in it
    usual = rehearsal.run(program, program, durability)
    exchanges_s = [seconds(i) for i in program if i.is_exchange]
    traffic, step_s, between_s = usual.traffic, usual.seconds, _between(usual, exchanges_s)
    if m > 1:
        whole = Durability(program, program, unit="step", lag=plan.lag)
        last = rehearsal.run(program, program, whole)
        traffic = Traffic(
            (last.traffic.read_bytes + (m - 1) * usual.traffic.read_bytes) // m,
            (last.traffic.write_bytes + (m - 1) * usual.traffic.write_bytes) // m,
            last.traffic.commit_bytes // m,
        )
        step_s = (last.seconds + (m - 1) * usual.seconds) / m
        both = zip(_between(last, exchanges_s), between_s, strict=True)
        between_s = tuple((one + (m - 1) * other) / m for one, other in both)
    if machine is None:
        return Price(traffic, compute_s, None)
    return Price(traffic, compute_s, step_s, between_s)


def _between(step: Rehearsed, exchanges_s: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of a step without those of its exchanges: before, between, after them."""
    begins = (*step.meetings, step.seconds)
    ends = (0.0, *(at + s for at, s in zip(step.meetings, exchanges_s, strict=True)))
    return tuple(begin - end for begin, end in zip(begins, ends, strict=True))


def usual_durability(plan: Plan, config: Config) -> Durability:
    """Return what a usual step makes durable; nothing, where most steps commit nothing."""
    commit = config.store.commit
    unit: CommitUnit = "segment"
    if commit.is_whole:
        unit = "nothing" if commit.every > 1 else "step"
    return Durability(
        plan.step, plan.step, unit=unit, keeps_activations=not commit.is_whole, lag=plan.lag
    )


def instruction_seconds(plan: Plan) -> Callable[[Instruction], float]:
    """Return what an instruction's computing was measured to take."""
    measured, decoding_s = plan.measured.seconds, plan.measured.decoding_s
    model, link = plan.captured.model, plan.link_bytes_per_s

    def seconds(instruction: Instruction) -> float:
        if instruction.operation is Operation.LOAD:
            return plan.load_s
        if instruction.is_exchange:
            return 0.0 if link is None else moved_bytes(instruction, plan) / link
        if not instruction.segment:
            return 0.0
        isomorphism = model.segment(instruction.segment).isomorphism
        saves = any(key.kind is Kind.SAVED for key in instruction.touches)
        first = instruction.micro_batch == 0  # of a visit, in which weights are decoded once
        decoding = decoding_s.get(isomorphism, 0.0) if first else 0.0
        return decoding + measured[instruction.operation, isomorphism, saves]

    return seconds


def moved_bytes(instruction: Instruction, plan: Plan) -> int:
    """Return the bytes that an exchange brings to this rank, or takes from it.

    Of sums the owner gets those of all other ranks, one after the other.
    """
    nbytes = sum(plan.layouts.size_bytes(key) for key in set(instruction.touches))
    if instruction.operation is Operation.COLLECT and instruction.changes:
        return nbytes * (plan.builder.ranks.count - 1)
    return nbytes


def _work(plan: Plan, config: Config, work: IOWork) -> Callable[[ObjectKey, Access], float]:
    """Return what says which seconds computing loses while an object is read or written."""
    always = config.store.verify == "always"

    def seconds(key: ObjectKey, access: Access) -> float:
        array = plan.layouts.array(key)
        # What is read was verified when it was read first; what autograd saved has no checksum.
        made = access == "commit" or (access == "spill" and key.kind is not Kind.SAVED)
        return work.seconds(array.chunks, array.nbytes, checksum=made or always)

    return seconds
