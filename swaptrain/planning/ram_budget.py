"""Whether the RAM that `memory.host` promises is there, before a run writes anything."""

from __future__ import annotations

from collections.abc import Callable

from swaptrain.errors import BudgetError
from swaptrain.memory.limits import (
    address_space_bytes,
    available_bytes,
    cgroup_limit,
    machine_bytes,
)
from swaptrain.memory.mapping import touch
from swaptrain.planning.planner import Plan
from swaptrain.units import MIB, format_size, roomy_size

__all__ = ["check_memory", "useful_bytes"]

_SLACK_BYTES = 64 * MIB  # page tables, stacks of threads, the kernel's own: a limit counts them


def check_memory(
    host_bytes: int, plan: Plan, note: Callable[[str], None], *, processes: int = 1
) -> None:
    """Refuse a budget that a limit of this process does not allow; touch what the pool will take.

    So many `processes` of this machine take as much each.

    A limit that is only met in the middle of a run kills the process there without a word. RAM that
    other programs hold now is only said. Raises BudgetError.
    """
    base_bytes = plan.base_bytes
    limit = cgroup_limit()
    if limit is not None and limit.limit_bytes < processes * (base_bytes + host_bytes):
        needed = roomy_size(processes * (base_bytes + host_bytes + _SLACK_BYTES))
        have = (
            f"this process may take {format_size(limit.limit_bytes)} of RAM (its control group, "
            f"{limit.path})"
        )
        raise _too_little(
            plan, have, limit.limit_bytes, host_bytes, f"raise the limit to {needed}", processes
        )
    left_bytes = address_space_bytes()
    if left_bytes is not None and left_bytes < host_bytes:
        raise BudgetError(
            f"this process may map {format_size(max(left_bytes, 0))} more of memory (ulimit -v), "
            f"and memory.host is {format_size(host_bytes)}: raise the limit, or lower memory.host"
        )
    pool_bytes = min(plan.pool_bytes, useful_bytes(plan))
    all_bytes = machine_bytes()
    taken_bytes = processes * (base_bytes + pool_bytes + plan.arena_bytes)
    if all_bytes is not None and all_bytes < taken_bytes:
        have = f"this machine has {format_size(all_bytes)} of RAM and swap"
        raise _too_little(plan, have, all_bytes, host_bytes, "take another machine", processes)
    if processes > 1:
        note(
            f"{processes} ranks on this machine take {format_size(host_bytes)} of RAM each "
            f"(memory.host), {format_size(processes * host_bytes)} together, beside "
            f"{format_size(base_bytes)} each for torch, the graph and the data"
        )
    free_bytes = available_bytes()
    if free_bytes is not None and free_bytes < processes * (pool_bytes + plan.arena_bytes):
        note(
            f"{format_size(free_bytes)} of RAM are free, and the run may take "
            f"{format_size(processes * (pool_bytes + plan.arena_bytes))} more (memory.host is "
            f"{format_size(host_bytes)}): the machine may swap, or end the run; end other programs "
            "or lower memory.host"
        )
        return
    try:
        touch(pool_bytes)
    except OSError as error:
        raise BudgetError(
            f"the machine does not give the {format_size(pool_bytes)} of RAM that memory.host of "
            f"{format_size(host_bytes)} leaves for slabs ({error.strerror}): lower memory.host, or "
            "end other programs"
        ) from error


def _too_little(
    plan: Plan, have: str, limit_bytes: int, host_bytes: int, otherwise: str, processes: int
) -> BudgetError:
    """Return the refusal of a budget that no more than `limit_bytes` of all processes allow."""
    room_bytes = limit_bytes // processes - plan.base_bytes - _SLACK_BYTES
    advice, enough = otherwise, None
    if processes > 1:
        advice = f"start fewer ranks here, or {advice}"
    if room_bytes >= plan.least_host_bytes:
        enough = format_size(room_bytes)
        advice = f"set memory.host to {enough} or less, or {advice}"
    who = "the run would take" if processes == 1 else f"{processes} ranks on it would each take"
    return BudgetError(
        f"{have}, and {who} {format_size(plan.base_bytes)} for torch, the graph and the data "
        f"beside memory.host of {format_size(host_bytes)}: {advice}",
        enough=enough,
    )


def useful_bytes(plan: Plan) -> int:
    """Return the bytes of all objects of a step: a larger pool stays empty."""
    keys = {key for instruction in plan.step for key in instruction.touches}
    return sum(plan.layouts.size_bytes(key) for key in keys)
