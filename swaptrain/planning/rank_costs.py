"""Plans and prices a step of several ranks: the tier of each on a clock, and all of them together.

The ranks meet at each exchange, as they do in a run: none goes on before the last one has come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

from swaptrain.config.schema import Config
from swaptrain.machine.speeds import Machine
from swaptrain.planning.choose import choose_plan, with_saves
from swaptrain.planning.cuts import Cut, Cutter
from swaptrain.planning.measure.measured import kind_of
from swaptrain.planning.other_ranks import FixedCut, check_divisible, check_whole
from swaptrain.planning.planner import Plan, Planner
from swaptrain.planning.prepare import Prepared
from swaptrain.planning.step_cost import PlanSeconds, instruction_seconds, moved_bytes, price
from swaptrain.program.instructions import Instruction, Operation
from swaptrain.program.ranks import STAGING_BYTES, Ranks
from swaptrain.program.residency import Traffic

__all__ = ["RankCost", "StepOfRanks", "choose_together", "plans_of_ranks", "price_ranks"]

Seconds = Callable[[Instruction], float]


@dataclass(frozen=True)
class RankCost:
    """What a step takes of one rank."""

    traffic: Traffic | None
    """None where the program is too long for a rehearsal."""
    exchanged_bytes: int
    """That it gets of others, and sends to them."""


@dataclass(frozen=True)
class StepOfRanks:
    """What a step of several ranks takes."""

    ranks: tuple[RankCost, ...]
    step_s: float | None
    """At most: each exchange by itself, with nothing computed beside it."""
    link_s: float
    """Of the exchanges, one after the other, each until the last rank has all of it."""
    busy_s: float
    """In which the link of the rank that sends or gets most is busy with them."""
    work_s: float
    """Of computing; all updates, since the others wait for the rank that makes one."""
    io_s: float | None
    """What the disk of the rank that moves most needs."""

    @property
    def best_s(self) -> float | None:
        """At best: all that is computed, read and written beside the exchanges, or these alone."""
        return None if self.step_s is None else max(self.step_s - self.link_s, self.busy_s)

    @property
    def bound(self) -> str | None:
        """What takes longest: `disk`, `link` or `computing`."""
        if self.io_s is None:
            return None
        taken = {"disk": self.io_s, "link": self.link_s, "computing": self.work_s}
        return max(taken, key=lambda name: taken[name])


def plans_of_ranks(
    alone: Plan,
    config: Config,
    prepared: Prepared,
    count: int,
) -> list[Plan]:
    """Return the plan of each of `count` ranks, cut as rank 0 would cut at a start, without saves.

    `alone` is the plan of one process, without saves: with the same cut its measurements hold.
    Raises ConfigError for a model of which several ranks cannot compute parts, and BudgetError.
    """
    check_whole(prepared.built.uncut, Ranks(0, count))
    zeroth = _zeroth(alone, config, prepared, count)
    check_divisible(zeroth.layouts.state_arrays, Ranks(0, count))
    fixed = FixedCut(tuple(zeroth.cuts), zeroth.layouts.chunk_bytes, zeroth.ranges)
    zeroth = replace(zeroth, tier_s=alone.tier_s, load_s=alone.load_s)
    plans = []
    for rank in range(1, count):
        ranks = Ranks(rank, count)
        found = _cut(config, prepared, ranks, fixed)
        plan = _with_measures(zeroth, found, config)
        if not _covers(plan):
            measured = _planner(config, prepared, ranks, fixed).plan().measured
            seconds = {**measured.seconds, **zeroth.measured.seconds}
            decoding_s = {**measured.decoding_s, **zeroth.measured.decoding_s}
            merged = replace(zeroth.measured, seconds=seconds, decoding_s=decoding_s)
            zeroth, plan = replace(zeroth, measured=merged), replace(plan, measured=merged)
        plans.append(plan)
    return [zeroth, *plans]


def choose_together(
    plans: Sequence[Plan],
    config: Config,
    machine: Machine | None,
    *,
    disk_bytes: int,
    seconds: PlanSeconds = instruction_seconds,
) -> list[Plan]:
    """Return the plans with the saves that rank 0 would choose at a start, where they fit.

    `disk_bytes` may be reserved for them; `seconds` gives what a plan's instructions compute for.
    """
    chosen = choose_plan(plans[0], config, machine, disk_bytes=disk_bytes, seconds=seconds)
    together = [chosen]
    for plan in plans[1:]:
        saving = with_saves(plan, sorted(chosen.builder.saves))
        fits = saving.peaks.instruction_bytes <= saving.pool_bytes
        together.append(saving if fits else plan)
    return together


def price_ranks(
    plans: Sequence[Plan],
    config: Config,
    machine: Machine | None,
    link_bytes_per_s: float,
    *,
    seconds: PlanSeconds = instruction_seconds,
) -> StepOfRanks:
    """Return what a step takes of all ranks together, each on a machine of its own.

    `link_bytes_per_s` is what a machine sends, and beside it gets, of all others together;
    `seconds` gives what the instructions of a plan compute for.
    """
    costs, works_s, updates_s, between = [], list[float](), 0.0, []
    for plan in plans:
        own = _with_link(plan, seconds(plan), link_bytes_per_s)
        priced = price(plan, config, machine, seconds=own)
        exchanged = sum(moved_bytes(i, plan) for i in plan.step if i.is_exchange)
        costs.append(RankCost(priced.traffic, exchanged))
        between.append(priced.between_s)
        updates = [own(i) for i in plan.step if i.operation is Operation.UPDATE]
        updates_s += sum(updates)
        works_s.append(priced.compute_s - sum(updates) + plan.tier_s * len(plan.step))
    exchanges = [i for i in plans[0].step if i.is_exchange]
    link_s = sum(_crossing_s(i, plans[0], link_bytes_per_s) for i in exchanges)
    busy_s = sum(_crossing_s(i, plans[0], link_bytes_per_s, is_busy=True) for i in exchanges)
    step_s = io_s = None
    if machine is not None and all(between):
        step_s = link_s + sum(max(each) for each in zip(*between, strict=True))
        moved = [cost.traffic for cost in costs if cost.traffic is not None]
        io_s = max(machine.disk.seconds(t.read_bytes, t.write_bytes) for t in moved)
    return StepOfRanks(tuple(costs), step_s, link_s, busy_s, max(works_s) + updates_s, io_s)


def _with_link(plan: Plan, seconds: Seconds, link_bytes_per_s: float) -> Seconds:
    """Return the seconds of instructions, with those of exchanges on a link."""

    def own(instruction: Instruction) -> float:
        if instruction.is_exchange:
            return _crossing_s(instruction, plan, link_bytes_per_s)
        return seconds(instruction)

    return own


def _crossing_s(
    instruction: Instruction, plan: Plan, link_bytes_per_s: float, *, is_busy: bool = False
) -> float:
    """Return the seconds until the last rank has what is exchanged.

    gloo hands weights on in a tree of depth ceil(log2 N): the owner sends to so many ranks at once,
    the first of these then to one less, and so on. Sums of all others come to the owner one after
    the other. With `is_busy`: the seconds in which the owner's link is busy.
    """
    count = plan.builder.ranks.count
    depth = ceil(log2(count))
    rounds = depth if is_busy else depth * (depth + 1) // 2
    times = count - 1 if instruction.operation is Operation.COLLECT else rounds
    nbytes = sum(plan.layouts.size_bytes(key) for key in set(instruction.touches))
    return times * nbytes / link_bytes_per_s


def _zeroth(alone: Plan, config: Config, prepared: Prepared, count: int) -> Plan:
    """Return the plan that rank 0 makes, measured anew only where its cut is another one."""
    ranks = Ranks(0, count)
    found = _cut(config, prepared, ranks, None)
    same = (found.cuts, found.ranges) == (alone.cuts, alone.ranges)
    if same and found.layouts.chunk_bytes == alone.layouts.chunk_bytes:
        plan = _with_measures(alone, found, config)
        if plan.fits:
            return plan
    return _planner(config, prepared, ranks, None).plan()


def _cut(config: Config, prepared: Prepared, ranks: Ranks, fixed: FixedCut | None) -> Cut:
    """Return the first cut that a planner would try."""
    cutter = Cutter(config, prepared.built, prepared.rules, choices=fixed, ranks=ranks)
    host_bytes = config.memory.host
    targets = [t for t in cutter.targets() if cutter.meant_for(t) <= host_bytes]
    return cutter.cut(*next(cutter.ways(targets)))


def _planner(config: Config, prepared: Prepared, ranks: Ranks, fixed: FixedCut | None) -> Planner:
    return Planner(
        config,
        prepared.built,
        prepared.rules,
        prepared.device,
        dict(prepared.built.uncut.batch),
        choices=fixed,
        positions=prepared.factory.positions,
        products=prepared.planner.products,
        ranks=ranks,
    )


def _with_measures(plan: Plan, found: Cut, config: Config) -> Plan:
    """Return the plan of a rank with the same cut, of which `plan` has what was measured."""
    for k, saved in plan.layouts.saved.items():
        found.layouts.note_saved(k, saved.nbytes)
    staging_bytes = 0 if plan.builder.ranks.count > 1 else STAGING_BYTES
    arena_bytes = plan.arena_bytes + staging_bytes
    made = replace(
        plan,
        captured=found.captured,
        layouts=found.layouts,
        builder=found.builder,
        peaks=found.peaks,
        arena_bytes=arena_bytes,
        pool_bytes=config.memory.host - arena_bytes,
    )
    return replace(made, peaks=made.check())


def _covers(plan: Plan) -> bool:
    """Whether each kind of instruction of the step was measured."""
    computing = (i for i in plan.step if i.segment and not i.is_exchange)
    return all(kind_of(plan.captured, i) in plan.measured.seconds for i in computing)
