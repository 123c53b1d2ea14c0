"""RAM and the limits that this process has."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.memory.limits import address_space_bytes, cgroup_limit, meminfo
from swaptrain.units import GIB, format_size
from swaptrain.verbs.checkup.result import CheckResult, checked, noted, wrong

__all__ = ["check_memory_limits", "meminfo"]

_LEAST_RAM = 2 * GIB
_FEW_FILES, _TOO_FEW_FILES = 1024, 128
_BASE_BYTES = GIB
"""About what torch and a graph take beside memory.host."""


def check_memory_limits(config: Config | None) -> Iterator[CheckResult]:
    """Yield what is found of RAM, and whether `memory.host` of a config fits into it."""
    fields = meminfo()
    total, free = fields.get("MemTotal"), fields.get("MemAvailable")
    if total is None or free is None:
        yield noted("memory", "RAM", "the kernel does not say how much there is", "see to it")
    else:
        found = f"{format_size(total)}, {format_size(free)} available"
        if free < _LEAST_RAM:
            yield noted("memory", "RAM", found, "end other programs before a run")
        else:
            yield checked("memory", "RAM", found)
    limit = cgroup_limit()
    if limit is None:
        yield checked("memory", "control group", "no limit")
    else:
        version = 2 if limit.path.name == "memory.max" else 1
        text = f"{format_size(limit.limit_bytes)} (cgroup v{version}, {limit.path})"
        yield checked("memory", "control group", text)
    bounds = [] if total is None else [total]
    bounds += [] if limit is None else [limit.limit_bytes]
    if config is not None and bounds:
        yield _budget(config.memory.host, min(bounds), free)
    yield from _swap(fields)
    yield from _limits()


def _budget(host_bytes: int, bound: int, free: int | None) -> CheckResult:
    found = f"{format_size(host_bytes)} of {format_size(bound)}"
    if host_bytes >= bound:
        advice = "lower memory.host: torch and the graph come on top of it"
        return wrong("memory", "memory.host", found, advice)
    if host_bytes + _BASE_BYTES > min(bound, free if free is not None else bound):
        advice = "end other programs, or lower memory.host: torch and the graph come on top of it"
        return noted("memory", "memory.host", f"{found}, tight", advice)
    return checked("memory", "memory.host", found)


def _swap(fields: dict[str, int]) -> Iterator[CheckResult]:
    total, free = fields.get("SwapTotal", 0), fields.get("SwapFree", 0)
    if not total:
        yield checked("memory", "swap", "none; swaptrain needs none")
    elif total - free > total / 2:
        text = f"{format_size(total - free)} of {format_size(total)} are in use"
        yield noted("memory", "swap", text, "end other programs: a run that is swapped is slow")
    else:
        yield checked("memory", "swap", f"{format_size(total)}, {format_size(free)} free")
    try:
        mode = Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    except OSError:
        return
    if mode == "2":
        advice = "set vm.overcommit_memory to 0 or 1, if allocations fail: what is mapped counts"
        yield noted("memory", "overcommit", "strict (vm.overcommit_memory is 2)", advice)
    else:
        yield checked("memory", "overcommit", f"vm.overcommit_memory is {mode}")


def _limits() -> Iterator[CheckResult]:
    left = address_space_bytes()
    if left is not None:
        text = f"{format_size(max(0, left))} left (ulimit -v)"
        yield noted("memory", "addresses", text, "raise it above memory.host and 10 GiB of torch's")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    said = "unlimited" if unlimited else format_size(locked)
    yield checked("memory", "ulimit -l", f"{said}; only drivers lock memory here")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}"
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        judge = wrong if files < _TOO_FEW_FILES else noted
        yield judge("memory", "ulimit -n", f"{said} open files", f"ulimit -n {min(4096, most)}")
    else:
        yield checked("memory", "ulimit -n", f"{said} open files")
