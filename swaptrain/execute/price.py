"""Prices the steps of a plan, and chooses what autograd saves instead of recomputing it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swaptrain.config import Config
from swaptrain.execute.machine import Machine
from swaptrain.execute.planning import Plan
from swaptrain.memory.tier import planned_bytes
from swaptrain.program.cost import durable_objects, floor_s
from swaptrain.program.instructions import Kind, Operation
from swaptrain.program.residency import Traffic, simulate

__all__ = ["Price", "choose_saves", "price"]

_LONGEST_SIMULATED = 20_000
"""Instructions; each one that has to make room looks at everything that is held."""
_TRIALS = 8
"""Numbers of saving segments that are priced, before the best one's neighbours are."""
_NODE_BYTES = 2048
"""What autograd keeps of one node of the graph beside tensors; 1,500 seen in a Llama layer."""


@dataclass(frozen=True)
class Price:
    """What a step in the middle of a run takes."""

    traffic: Traffic | None
    """Simulated; None where the program is too long for it."""
    compute_s: float
    """Of the forwards, backwards and updates, as measured one by one with no I/O beside them."""
    step_s: float | None
    """With the disk's part; None where its speed or the traffic is not known."""


def price(plan: Plan, config: Config, machine: Machine | None) -> Price:
    """Return what a step of the plan takes; the cache is what the tier does not use to read ahead.

    With commit_every > 1 the traffic is the mean of steps that commit and steps that do not.
    """
    traffic = _traffic(plan, config)
    compute_s = _compute_s(plan)
    if machine is None or traffic is None:
        return Price(traffic, compute_s, None)
    io_s = machine.disk.seconds(traffic.read_bytes, traffic.write_bytes)
    return Price(traffic, compute_s, floor_s(io_s, compute_s, machine.sigma))


def choose_saves(plan: Plan, config: Config, machine: Machine | None, *, disk_bytes: int) -> Plan:
    """Return the plan in which those segments save what autograd needs that make a step shortest.

    The segments that the step turns round at come first: what they save is needed soonest. Without
    a machine's speeds, those whose saving moves no byte more. `disk_bytes` is what may be reserved
    for what memory does not hold. `train.recompute` decides for all or for none.
    """
    candidates = sorted(plan.layouts.saved, reverse=True)
    most = len(candidates)
    while most and not _is_possible(saving := _with_saves(plan, candidates[:most]), disk_bytes):
        most -= 1
    if config.train.recompute or not most:
        return plan
    if config.train.recompute is False:
        return saving
    if len(plan.step()) > _LONGEST_SIMULATED:
        return saving if _everything_fits(saving) else plan
    costs: dict[int, tuple[float, float]] = {}

    def cost(count: int) -> tuple[float, float]:
        if count not in costs:
            tried = _with_saves(plan, candidates[:count])
            priced = price(tried, config, machine)
            assert priced.traffic is not None, "short enough"
            moved = float(priced.traffic.total_bytes)
            costs[count] = (priced.step_s or moved, priced.compute_s)
        return costs[count]

    step = -(-most // _TRIALS)
    best = min({0, *range(step, most, step), most}, key=cost)
    while step > 1:
        step = -(-step // 2)
        near = {min(most, max(0, best + offset)) for offset in (-step, 0, step)}
        best = min(near, key=cost)
        if step == 1:
            break
    return _with_saves(plan, candidates[:best])


def _with_saves(plan: Plan, segments: list[int]) -> Plan:
    """Return the plan with these segments saving; the nodes of their graphs need memory too."""
    model, codes = plan.captured.model, plan.captured.codes
    nodes = sum(len(codes[model.segment(k).isomorphism].train.graph.nodes) for k in segments)
    graphs_bytes = nodes * plan.builder.wave * _NODE_BYTES
    plan = replace(
        plan,
        builder=replace(plan.builder, saves=frozenset(segments)),
        arena_bytes=plan.arena_bytes + graphs_bytes,
        pool_bytes=plan.pool_bytes - graphs_bytes,
    )
    return replace(plan, peaks=plan.check())


def _is_possible(plan: Plan, disk_bytes: int) -> bool:
    saved_bytes = sum(plan.layouts.saved[k].nbytes for k in plan.builder.saves)
    return (
        plan.peaks.instruction_bytes <= plan.pool_bytes
        and saved_bytes * plan.builder.micro_batches <= disk_bytes
    )


def _everything_fits(plan: Plan) -> bool:
    state_bytes = sum(layout.nbytes for layout in plan.layouts.state.values())
    return state_bytes + plan.peaks.live_bytes <= plan.pool_bytes


def _traffic(plan: Plan, config: Config) -> Traffic | None:
    program = plan.step()
    pool_bytes = planned_bytes(plan.pool_bytes)
    if len(program) > _LONGEST_SIMULATED:
        return None
    durable = durable_objects(program, keeps_values=config.store.keeps_values)
    size_bytes, m = plan.layouts.size_bytes, config.store.commit_every
    committing = simulate(program, size_bytes, pool_bytes, durable=durable)
    if m == 1:
        return committing
    between = simulate(program, size_bytes, pool_bytes, durable=lambda _: ())
    return Traffic(
        (committing.read_bytes + (m - 1) * between.read_bytes) // m,
        (committing.write_bytes + (m - 1) * between.write_bytes) // m,
        committing.commit_bytes // m,
    )


def _compute_s(plan: Plan) -> float:
    seconds, model = plan.measured.seconds, plan.captured.model
    total = 0.0
    for instruction in plan.step():
        if instruction.segment and instruction.operation is not Operation.KEEP:
            isomorphism = model.segment(instruction.segment).isomorphism
            saves = any(key.kind is Kind.SAVED for key in instruction.touches)
            total += seconds[instruction.operation, isomorphism, saves]
    return total
