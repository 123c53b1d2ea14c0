"""Chooses which segments save what autograd needs, and how much a kill may repeat."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from swaptrain.config.schema import Config
from swaptrain.machine.speeds import Machine
from swaptrain.planning.planner import Plan
from swaptrain.planning.step_cost import PlanSeconds, instruction_seconds, price

__all__ = ["choose_plan", "choose_saves", "with_saves"]

_LONGEST_SEARCHED = 5_000
"""Instructions of a step: a rehearsal takes half a minute there, more than in proportion beyond."""
_LONGEST_REFINED = 1_000
"""Instructions of a step: up to here a rehearsal takes a second, and some fifteen are made."""
_TRIALS = 8
"""Numbers of saving segments that are priced, before the best one's neighbours are."""
_NEAR = 1.02
"""Times the shortest step: as good, as far as a rehearsal can tell."""
_WORTH_REPEATING, _NO_GAIN = 0.95, 0.99
"""Times a step in which a kill repeats one segment's backward: what is worth a second one, and
above what it is not looked for which segments should save then."""
_CONTENTION = 0.1
"""Of the seconds of computing, added to a step's: what a rehearsal leaves out (requests that wait
for a processor, moments in which all is slower) costs those more that compute more."""
TENSOR_BYTES = 2560
"""What autograd keeps beside a saved tensor, its node and the tensor's place; 1,800 to 2,200 were
seen in a Llama and in a GRU of 512 steps."""


def choose_plan(
    plan: Plan,
    config: Config,
    machine: Machine | None,
    *,
    disk_bytes: int,
    seconds: PlanSeconds = instruction_seconds,
) -> Plan:
    """Return the plan with what makes its steps shortest: what segments save, `store.commit.lag`.

    `disk_bytes` is what may be reserved for what is saved and memory does not hold. Where
    `store.commit.lag` is null, two segments' backwards may be repeated where that is worth it: not
    where nothing is known of the machine, nor where a rehearsal takes minutes. `seconds` gives what
    a plan's instructions compute for.
    """

    def best(lag: int) -> Plan:
        again = replace(plan, lag=lag)
        return choose_saves(again, config, machine, disk_bytes=disk_bytes, seconds=seconds)

    def step_s(chosen: Plan) -> float:
        priced_s = price(chosen, config, machine, seconds=seconds(chosen)).step_s
        assert priced_s is not None, "the machine is known, and the program short enough"
        return priced_s

    if config.store.commit.is_whole:
        return best(1)
    if config.store.commit.lag is not None:
        return best(config.store.commit.lag)
    strict = best(1)
    if machine is None or len(plan.step) > _LONGEST_SEARCHED:
        return strict
    strict_s = step_s(strict)
    if step_s(replace(strict, lag=2)) > _NO_GAIN * strict_s:
        return strict
    lax = best(2)
    return lax if step_s(lax) < _WORTH_REPEATING * strict_s else strict


def choose_saves(
    plan: Plan,
    config: Config,
    machine: Machine | None,
    *,
    disk_bytes: int,
    seconds: PlanSeconds = instruction_seconds,
) -> Plan:
    """Return the plan in which those segments save what autograd needs that make a step shortest.

    The segments that the step turns round at come first: what they save is needed soonest. Of
    steps that are as good as equally long the one that computes least is taken, and a step that
    computes less may be a little longer. Without a machine's speeds, those save whose saving moves
    no byte more. `disk_bytes` is what may be reserved for what memory does not hold.
    `train.recompute` decides for all or for none.
    """
    if config.train.recompute:
        return plan
    candidates = _candidates(plan, disk_bytes)
    if not candidates or config.train.recompute is False:
        return with_saves(plan, candidates)
    if len(plan.step) > _LONGEST_SEARCHED:
        saving = with_saves(plan, candidates)
        return saving if _everything_fits(saving) else plan
    costs: dict[int, tuple[float, float]] = {}

    def cost(count: int) -> tuple[float, float]:
        if count not in costs:
            saving = with_saves(plan, candidates[:count])
            priced = price(saving, config, machine, seconds=seconds(saving))
            assert priced.traffic is not None, "short enough"
            moved = float(priced.traffic.total_bytes)
            step_s = priced.step_s
            costs[count] = (
                moved if step_s is None else step_s + _CONTENTION * priced.compute_s,
                priced.compute_s,
            )
        return costs[count]

    most = len(candidates)
    refined = len(plan.step) <= _LONGEST_REFINED
    step = -(-most // (_TRIALS if refined else 2))
    best = min({*range(0, most, step), most}, key=cost)
    while refined and step > 1:
        step = -(-step // 2) if step > 2 else 1
        best = min({min(most, max(0, best + offset)) for offset in (-step, 0, step)}, key=cost)
    if machine is not None:
        near = [count for count, (price_s, _) in costs.items() if price_s <= costs[best][0] * _NEAR]
        best = min(near, key=lambda count: costs[count][1])
    return with_saves(plan, candidates[:best])


def _candidates(plan: Plan, disk_bytes: int) -> list[int]:
    """Return the segments that may save, the uppermost first, as many as memory and disk hold."""
    layouts, builder = plan.layouts, plan.builder
    chosen: list[int] = []
    alone: dict[int, bool] = {}
    for k in sorted(layouts.saved, reverse=True):
        isomorphism = plan.captured.model.segment(k).isomorphism
        if isomorphism not in alone:
            alone[isomorphism] = _fits_memory(plan, [k])
        disk_bytes -= layouts.saved[k].nbytes * builder.micro_batches
        if disk_bytes < 0:
            break
        if alone[isomorphism]:
            chosen.append(k)
    # The more save, the less memory is left beside their graphs.
    too_many = bisect_left(
        range(1, len(chosen) + 1), True, key=lambda n: not _fits_memory(plan, chosen[:n])
    )
    return chosen[:too_many]


def with_saves(plan: Plan, segments: list[int]) -> Plan:
    """Return the plan with these segments saving; the nodes of their graphs take torch's memory."""
    if not segments:
        return plan
    model, counts = plan.captured.model, plan.measured.saved_count
    each = sum(counts[model.segment(k).isomorphism] for k in segments)
    tensors = each * plan.builder.micro_batches
    graphs_bytes = tensors * TENSOR_BYTES
    plan = replace(
        plan,
        builder=replace(plan.builder, saves=frozenset(segments)),
        arena_bytes=plan.arena_bytes + graphs_bytes,
        pool_bytes=plan.pool_bytes - graphs_bytes,
        saved_tensors=tensors,
    )
    return replace(plan, peaks=plan.check())


def _fits_memory(plan: Plan, segments: list[int]) -> bool:
    saving = with_saves(plan, segments)
    return saving.peaks.instruction_bytes <= saving.pool_bytes


def _everything_fits(plan: Plan) -> bool:
    state_bytes = sum(layout.nbytes for layout in plan.layouts.state.values())
    return state_bytes + plan.peaks.live_bytes <= plan.pool_bytes
