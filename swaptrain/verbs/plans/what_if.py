"""A step on another machine, by the rehearsal: for those who think of buying one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from swaptrain.config.schema import Config
from swaptrain.errors import BudgetError, ConfigError
from swaptrain.machine.speeds import Machine
from swaptrain.planning.choose import choose_plan
from swaptrain.planning.planner import Plan
from swaptrain.planning.step_cost import PlanSeconds, instruction_seconds, price
from swaptrain.program.cost import Disk, IOWork
from swaptrain.program.instructions import Instruction, Kind, Operation
from swaptrain.units import GIB, format_duration, format_size, parse_size
from swaptrain.verbs.plans.bound import bounding
from swaptrain.verbs.plans.planned import Planned

__all__ = ["OtherMachine", "WhatIf", "parse_machine", "print_what_ifs", "seconds_on"]
__all__ += ["speeds_of", "what_if", "with_ram"]

_SYSTEM_BYTES = 2 * GIB
"""Of a machine's RAM, for what runs beside swaptrain."""
_RATE = re.compile(r"([0-9.]+\s*[a-zA-Z]+)/s\s*(read|write|written|both)?", re.ASCII)
_FLOPS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([GTP])FLOPS", re.ASCII | re.IGNORECASE)
_FACTORS = {"g": 1e9, "t": 1e12, "p": 1e15}
_FORM = '"disk 7GB/s read, 5GB/s write; 100 TFLOPS; pcie 25GB/s; ram 64GiB; link 10Gb/s"'
_BITS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(?:b|bit|Bit)(?:/s|ps)", re.ASCII)
_BITS_FACTORS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class OtherMachine:
    """What is said of a machine; None where it is as this one."""

    text: str
    disk: Disk | None = None
    flops_per_s: float | None = None
    """Of matrix products in `model.dtype`, as reached, which a data sheet's is not."""
    link_bytes_per_s: float | None = None
    """Between RAM and a device that computes, each way; None: there is no such device."""
    ram_bytes: int | None = None
    network_bytes_per_s: float | None = None
    """Between this machine and all others, each way: of a run of several ranks."""

    @property
    def is_this_one(self) -> bool:
        """Whether nothing is said but its network, which a run of one process does not use."""
        said = (self.disk, self.flops_per_s, self.link_bytes_per_s, self.ram_bytes)
        return self.network_bytes_per_s is not None and not any(said)


@dataclass(frozen=True)
class WhatIf:
    """A step on another machine."""

    machine: OtherMachine
    host_bytes: int
    """What memory.host would be."""
    step_s: float
    token_s: float
    compute_s: float
    """With what the tier does on the processor, which is taken to be as fast as here."""
    io_s: float
    read_bytes: int
    write_bytes: int
    disk_bytes: int
    """Reserved on all disks."""
    bound: str
    """`disk`, `processor` or `memory`."""
    left_s: float
    """Of the steps to come."""


def parse_machine(text: str) -> OtherMachine:
    """Read a machine such as `disk 7GB/s read, 5GB/s write; 100 TFLOPS; pcie 25GB/s; ram 64GiB`.

    Parts in any order; those left out are as this machine has them. Of a disk of which only one
    speed is given it is that of reads and of writes; of both together, unless said, half of the
    bytes each take the time of both alone. `link` is the network, whose `Gb` are 10^9 bits. Raises
    ConfigError with what is wrong.
    """
    found = OtherMachine(text)
    for part in filter(None, (part.strip() for part in text.split(";"))):
        word, _, rest = part.partition(" ")
        if word.lower() == "disk":
            found = replace(found, disk=_disk(part, rest))
        elif word.lower() == "pcie":
            found = replace(found, link_bytes_per_s=_rate(part, rest))
        elif word.lower() == "link":
            found = replace(found, network_bytes_per_s=_network(part, rest.strip()))
        elif word.lower() == "ram":
            found = replace(found, ram_bytes=parse_size(rest))
        elif match := _FLOPS.fullmatch(part):
            number, factor = match.groups()
            if not float(number):
                raise _wrong(part)
            found = replace(found, flops_per_s=float(number) * _FACTORS[factor.lower()])
        else:
            raise _wrong(part)
    if found.link_bytes_per_s is not None and found.flops_per_s is None:
        raise ConfigError(f"--what-if {text!r}: pcie is of a device: say its TFLOPS too")
    return found


def _disk(part: str, rest: str) -> Disk:
    speeds: dict[str, float] = {}
    for each in rest.split(","):
        match = _RATE.fullmatch(each.strip())
        if match is None:
            raise _wrong(part)
        way = {"written": "write", None: "alone"}.get(match[2], match[2])
        assert way is not None
        speeds[way] = _rate(part, each.replace(match[2] or "", "").strip())
    read = speeds.get("read", speeds.get("alone", speeds.get("write")))
    write = speeds.get("write", speeds.get("alone", read))
    if read is None or write is None:
        raise _wrong(part)
    return Disk(read, write, speeds.get("both", 2 / (1 / read + 1 / write)))


def _rate(part: str, text: str) -> float:
    if not text.strip().lower().endswith("/s"):
        raise _wrong(part)
    speed = float(parse_size(text.strip()[:-2]))
    if speed <= 0:
        raise _wrong(part)
    return speed


def _network(part: str, text: str) -> float:
    """Return bytes a second of `10Gb/s`, which are bits, or `1.2GB/s`."""
    match = _BITS.fullmatch(text)
    if match is None:
        return _rate(part, text)
    if not float(match[1]):
        raise _wrong(part)
    return float(match[1]) * _BITS_FACTORS[match[2]] / 8


def _wrong(part: str) -> ConfigError:
    return ConfigError(f"--what-if: {part!r} is not understood: write {_FORM}, or some of it")


def what_if(found: Planned, machine: OtherMachine) -> WhatIf:
    """Return what a step would take on `machine`, with the cut that was made here.

    Which segments save is chosen for that machine: a fast processor computes again what a slow one
    reads. Its disk has as much room as this one.

    Computing: with `flops_per_s` the matrix products of each instruction at that speed, and on a
    device (`link_bytes_per_s`) not less than what the instruction's objects take on the link, an
    update included; without a device updates and what was measured beside matrix products stay.
    Raises BudgetError where `ram_bytes` are too few, ConfigError where nothing is known of a disk.
    """
    config, other, seconds = found.config, speeds_of(found, machine), seconds_on(found, machine)
    fitted, host_bytes = with_ram(found.unchosen, config, machine)
    there = choose_plan(fitted, config, other, disk_bytes=found.scratch_bytes, seconds=seconds)
    cost = price(there, config, other, seconds=seconds(there))
    if cost.step_s is None or cost.traffic is None:
        raise ConfigError("--what-if: a step of this config has too many instructions to rehearse")
    io_s = other.disk.seconds(cost.traffic.read_bytes, cost.traffic.write_bytes)
    work_s = cost.compute_s + there.tier_s * len(there.step)
    return WhatIf(
        machine=machine,
        host_bytes=host_bytes,
        step_s=cost.step_s,
        token_s=cost.step_s / found.tokens,
        compute_s=work_s,
        io_s=io_s,
        read_bytes=cost.traffic.read_bytes,
        write_bytes=cost.traffic.write_bytes,
        disk_bytes=found.disk_bytes_of(there, config),
        bound=bounding(io_s, work_s, cost.step_s),
        left_s=found.steps_left * cost.step_s,
    )


def with_ram(made: Plan, config: Config, machine: OtherMachine) -> tuple[Plan, int]:
    """Return the plan with the pool that a machine's RAM leaves, and what memory.host would be.

    Raises BudgetError where `ram_bytes` are too few.
    """
    host_bytes = config.memory.host
    if machine.ram_bytes is not None:
        host_bytes = machine.ram_bytes - made.base_bytes - _SYSTEM_BYTES
    pool_bytes = host_bytes - made.arena_bytes
    if pool_bytes < made.peaks.instruction_bytes:
        need = made.arena_bytes + made.peaks.instruction_bytes + made.base_bytes + _SYSTEM_BYTES
        raise BudgetError(
            f"--what-if {machine.text!r}: this cut needs {format_size(need)} of RAM, "
            f"{format_size(_SYSTEM_BYTES)} of them for the system"
        )
    return replace(made, pool_bytes=pool_bytes), host_bytes


def speeds_of(found: Planned, machine: OtherMachine) -> Machine:
    """Return the speeds of a machine. Raises ConfigError where nothing is known of its disk."""
    here = found.machine
    disk = machine.disk or (None if here is None else here.disk)
    if disk is None:
        raise ConfigError(
            f"--what-if {machine.text!r}: the disk of this machine was never measured: say one, as "
            f"in {_FORM}"
        )
    return Machine(
        disk=disk,
        sigma=here.sigma if here is not None else 0.0,
        io_work=here.io_work if here is not None else IOWork(),
        flops_per_s=dict(here.flops_per_s) if here is not None else {},
    )


def print_what_ifs(found: Planned, others: list[WhatIf], console: Console) -> None:
    """Print a step here and on other machines, by the same rehearsal."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    names = ("machine", "memory.host", "step", "a token", "computing", "disk", "bound by")
    for name in (*names, "steps to come"):
        left = name in ("machine", "bound by")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "machine")
    here, io_s = found.price, found.io_s
    if here.step_s is not None and io_s is not None:
        table.add_row(
            "this one",
            format_size(found.config.memory.host),
            format_duration(here.step_s),
            format_duration(here.step_s / found.tokens),
            format_duration(found.work_s),
            format_duration(io_s),
            bounding(io_s, found.work_s, here.step_s),
            format_duration(found.steps_left * here.step_s),
        )
    for other in others:
        table.add_row(
            other.machine.text,
            format_size(other.host_bytes),
            format_duration(other.step_s),
            format_duration(other.token_s),
            format_duration(other.compute_s),
            format_duration(other.io_s),
            other.bound,
            format_duration(other.left_s),
        )
    console.print(table, markup=False, highlight=False)


def seconds_on(found: Planned, machine: OtherMachine) -> PlanSeconds:
    """Return what gives, for a plan of the model, what an instruction's computing would take."""
    flops_per_s = machine.flops_per_s
    if flops_per_s is None:
        return instruction_seconds
    here = found.machine
    own = None if here is None else here.flops_per_s.get(found.config.model.dtype)
    return lambda made: _seconds(made, flops_per_s, machine.link_bytes_per_s, own)


def _seconds(
    made: Plan, flops_per_s: float, link: float | None, own: float | None
) -> Callable[[Instruction], float]:
    """Return the seconds of a plan's instructions; `own` are the flops a second of this machine."""
    measured = instruction_seconds(made)
    layouts, model = made.layouts, made.captured.model

    def seconds(instruction: Instruction) -> float:
        took_s = measured(instruction)
        if not instruction.segment or instruction.operation is Operation.LOAD:
            return took_s
        flops = _passes(instruction) * model.segment(instruction.segment).flops
        needs_s = flops / flops_per_s
        if link is None:
            products_s = min(took_s, flops / own) if own else 0.0
            return took_s - products_s + needs_s
        stays = instruction.micro_batch > 0  # weights and sums, from micro-batch to micro-batch
        moved_bytes = sum(
            layouts.size_bytes(key)
            for key in set(instruction.touches)
            if not (stays and key.kind in (Kind.STATE, Kind.SHARED, Kind.ACCUMULATOR))
        )
        return max(needs_s, moved_bytes / link)

    return seconds


_PASSES = {Operation.FORWARD: 1, Operation.TURN: 3, Operation.BACKWARD: 3}
"""Forwards that an operation costs; a backward recomputes its own, unless that was saved."""


def _passes(instruction: Instruction) -> int:
    passes = _PASSES.get(instruction.operation, 0)
    saved = any(key.kind is Kind.SAVED for key in instruction.touches)
    return passes - (saved and instruction.operation is Operation.BACKWARD)
