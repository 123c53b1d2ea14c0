"""A step of several ranks, each on a machine of its own: when a second machine pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.machine.speeds import Machine
from swaptrain.planning.planner import Plan
from swaptrain.planning.rank_costs import (
    choose_together,
    plans_of_ranks,
    price_ranks,
)
from swaptrain.planning.step_cost import PlanSeconds, instruction_seconds
from swaptrain.program.ranks import MOST_RANKS
from swaptrain.ranks.limits import check_possible, step_committed
from swaptrain.units import format_count, format_duration, format_size
from swaptrain.verbs.plans.planned import Planned
from swaptrain.verbs.plans.what_if import OtherMachine, seconds_on, speeds_of, what_if, with_ram

__all__ = ["RanksRow", "RanksTable", "check_ranks_asked", "print_ranks", "rank_plans"]
__all__ += ["rank_tables"]

_USUAL_LINK_BYTES_PER_S = 10e9 / 8
"""Of the network, where nothing is said: that of a common data center."""
_WORDS = {"disk": "the disk", "link": "the link", "computing": "computing"}


@dataclass(frozen=True)
class RanksRow:
    """A step of so many ranks. Bytes are those of the rank that has most of each."""

    ranks: int
    micro_batches: int
    """Of a rank."""
    disk_bytes: int
    """Reserved by a rank."""
    memory_bytes: int
    """Of a machine: memory.host, and the base beside it."""
    read_bytes: int | None
    """None where the step has too many instructions to be rehearsed."""
    write_bytes: int | None
    exchanged_bytes: int
    """Got of other ranks, or sent to them."""
    step_s: float | None
    """With nothing computed beside an exchange; None where the speed of a disk is not known."""
    best_s: float | None
    """With all beside the exchanges that can be."""
    tokens_per_s: float | None
    """By `step_s`, as are the next two; items, of data without tokens."""
    efficiency: float | None
    """Against one process with all micro-batches: 1 is so many times its tokens a second."""
    bound: str | None
    """`disk`, `link` or `computing`: what takes longest."""


@dataclass(frozen=True)
class RanksTable:
    """A run of one process, and of several ranks, on machines of one kind."""

    machine: str | None
    """In the words of `--what-if`; None: as this one."""
    link_bytes_per_s: float
    is_link_assumed: bool
    rows: tuple[RanksRow, ...]


def check_ranks_asked(config: Config, counts: Sequence[int]) -> None:
    """Raise ConfigError for numbers of ranks with which a config cannot be trained."""
    for count in counts:
        if not 1 <= count <= MOST_RANKS:
            raise ConfigError(f"--ranks is {count}: give 1 to {MOST_RANKS}")
        if count > 1:
            check_possible(config, count)


def rank_tables(
    found: Planned,
    counts: Sequence[int],
    machines: Sequence[OtherMachine],
    note: Callable[[str], None],
) -> list[RanksTable]:
    """Return a table for this machine, or for each of `machines`; one process comes first.

    Raises ConfigError for a run that exists and a model that several ranks cannot compute, and
    BudgetError where a rank does not fit `memory.host`.
    """
    if found.root is not None:
        raise ConfigError(
            f"--ranks: {found.config.run.dir} holds a run of one process, which is not divided: "
            "set run.dir to another directory"
        )
    plans = {count: _unchosen(found, count, note) for count in sorted(set(counts)) if count > 1}
    return [_table(found, plans, machine) for machine in machines or (None,)]


def rank_plans(found: Planned, count: int, note: Callable[[str], None]) -> list[Plan]:
    """Return the plans of so many ranks, with what memory and disk let their segments save."""
    return _chosen(found, _unchosen(found, count, note), found.machine, instruction_seconds)


def _unchosen(found: Planned, count: int, note: Callable[[str], None]) -> list[Plan]:
    """Return the plans of so many ranks before it is chosen which segments save."""
    note(f"rehearsing {count} ranks")
    alone = replace(found.prepared.plan, tier_s=found.made.tier_s, load_s=found.made.load_s)
    try:
        return plans_of_ranks(alone, step_committed(found.config), found.prepared, count)
    except ConfigError as error:
        error.is_echo = False  # said once, by the only process there is
        raise


def _chosen(
    found: Planned, plans: Sequence[Plan], machine: Machine | None, seconds: PlanSeconds
) -> list[Plan]:
    """Return the plans with the saves that make a step on a machine shortest."""
    config, free_bytes = step_committed(found.config), found.scratch_bytes
    return choose_together(plans, config, machine, disk_bytes=free_bytes, seconds=seconds)


def _table(
    found: Planned, plans: dict[int, list[Plan]], machine: OtherMachine | None
) -> RanksTable:
    link = None if machine is None else machine.network_bytes_per_s
    speed = link or _USUAL_LINK_BYTES_PER_S
    alone = _alone(found, machine)
    rows = [alone]
    for count, of_ranks in plans.items():
        rows.append(_row(found, count, of_ranks, machine, speed, alone.tokens_per_s))
    return RanksTable(None if machine is None else machine.text, speed, link is None, tuple(rows))


def _alone(found: Planned, machine: OtherMachine | None) -> RanksRow:
    """Return the row of one process, as the config has it."""
    config, step_s, io_s, work_s = found.config, found.price.step_s, found.io_s, found.work_s
    host_bytes, made = config.memory.host, found.made
    read_bytes, write_bytes, disk_bytes = found.read_bytes, found.write_bytes, found.disk_bytes
    if machine is not None and not machine.is_this_one:
        other = what_if(found, machine)
        step_s, io_s, work_s = other.step_s, other.io_s, other.compute_s
        host_bytes, disk_bytes = other.host_bytes, other.disk_bytes
        read_bytes, write_bytes = other.read_bytes, other.write_bytes
    return RanksRow(
        ranks=1,
        micro_batches=config.data.micro_batches,
        disk_bytes=disk_bytes,
        memory_bytes=made.base_bytes + host_bytes,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        exchanged_bytes=0,
        step_s=step_s,
        best_s=step_s,
        tokens_per_s=None if step_s is None else found.tokens / step_s,
        efficiency=None if step_s is None else 1.0,
        bound=None if io_s is None else "disk" if io_s > work_s else "computing",
    )


def _row(
    found: Planned,
    count: int,
    plans: Sequence[Plan],
    machine: OtherMachine | None,
    link_bytes_per_s: float,
    alone_per_s: float | None,
) -> RanksRow:
    config = step_committed(found.config)
    host_bytes, speeds, there = config.memory.host, found.machine, list(plans)
    seconds: PlanSeconds = instruction_seconds
    if machine is not None and not machine.is_this_one:
        speeds, seconds = speeds_of(found, machine), seconds_on(found, machine)
        fitted = [with_ram(plan, config, machine) for plan in plans]
        there, host_bytes = [plan for plan, _ in fitted], fitted[0][1]
    there = _chosen(found, there, speeds, seconds)
    step = price_ranks(there, config, speeds, link_bytes_per_s, seconds=seconds)
    traffics = [cost.traffic for cost in step.ranks if cost.traffic is not None]
    per_s = None if step.step_s is None else found.tokens / step.step_s
    efficiency = None
    if per_s is not None and alone_per_s is not None:
        efficiency = per_s / alone_per_s / count
    return RanksRow(
        ranks=count,
        micro_batches=plans[0].builder.micro_batches,
        disk_bytes=max(found.disk_bytes_of(plan, config) for plan in there),
        memory_bytes=found.made.base_bytes + host_bytes,
        read_bytes=max((t.read_bytes for t in traffics), default=None),
        write_bytes=max((t.write_bytes for t in traffics), default=None),
        exchanged_bytes=max(cost.exchanged_bytes for cost in step.ranks),
        step_s=step.step_s,
        best_s=step.best_s,
        tokens_per_s=per_s,
        efficiency=efficiency,
        bound=step.bound,
    )


def print_ranks(found: Planned, tables: Sequence[RanksTable], console: Console) -> None:
    """Print what so many ranks take, and whether the first number of them pays."""
    for number, one in enumerate(tables):
        if number:
            console.print()
        for line in _head(one):
            console.print(line, markup=False, highlight=False)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        names = (
            *("ranks", "micro-\nbatches", "disk", "memory", "read", "written", "exchanged"),
            *("step", "at best", f"{found.counted}\na second", "effi-\nciency", "bound by"),
        )
        for name in names:
            table.add_column(name, justify="left" if name == "bound by" else "right", no_wrap=True)
        for row in one.rows:
            table.add_row(*_cells(row))
        console.print(table, markup=False, highlight=False)
        for line in _verdict(one):
            console.print(line, markup=False, highlight=False)


def _head(one: RanksTable) -> Iterator[str]:
    each = "each rank on a machine of its own, "
    each += "like this one" if one.machine is None else f"like this one but {one.machine}"
    if one.is_link_assumed:
        assumed = f"link {one.link_bytes_per_s * 8 / 1e9:g}Gb/s"
        yield f'{each}; {assumed} is assumed (--what-if "link 25Gb/s" says another)'
    else:
        yield each


def _cells(row: RanksRow) -> Iterator[str]:
    sizes = (row.disk_bytes, row.memory_bytes, row.read_bytes, row.write_bytes, row.exchanged_bytes)
    yield from (str(row.ranks), str(row.micro_batches))
    yield from ("-" if size is None else format_size(size) for size in sizes)
    yield from ("-" if s is None else format_duration(s) for s in (row.step_s, row.best_s))
    yield "-" if row.tokens_per_s is None else format_count(row.tokens_per_s)
    yield "-" if row.efficiency is None else f"{row.efficiency:.0%}"
    yield row.bound or "-"


def _verdict(one: RanksTable) -> Iterator[str]:
    """Yield what the first number of ranks above one gains."""
    for row in one.rows[1:2]:
        if row.efficiency is None:
            yield "seconds are not known: the first run on this machine measures its disk"
            return
        times = row.efficiency * row.ranks
        pays = f"{times:.2f} times the speed of one process"
        pays += ", and" if times > 1 else ", which does not pay:"
        yield f"{row.ranks} ranks: {pays} {_WORDS[row.bound or 'disk']} takes longest"
