"""Variables of the environment that change a run, and the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from swaptrain.units import how_many
from swaptrain.verbs.checkup.result import CheckResult, checked, noted, wrong

__all__ = ["check_clock", "check_environment"]

_MALLOC = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")
_LEAST_YEAR = 2025
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")


def check_environment(environment: Mapping[str, str], cores: int) -> Iterator[CheckResult]:
    """Yield what is found of variables, as they were when the command began."""
    threads = environment.get("OMP_NUM_THREADS")
    if threads is None:
        yield checked("environment", "OMP_NUM_THREADS", "not set: train.threads says how many")
    elif threads.isdigit() and 0 < int(threads) <= cores:
        text = f"{threads}, for what is not trained; train.threads says how many a run takes"
        yield checked("environment", "OMP_NUM_THREADS", text)
    else:
        advice = "unset it: train.threads says how many a run takes"
        text = f"{_shown(threads)}, of {how_many(cores, 'core')}"
        yield noted("environment", "OMP_NUM_THREADS", text, advice)
    policy = environment.get("OMP_WAIT_POLICY", "")
    if policy.upper() == "ACTIVE":
        advice = "unset it: threads that spin take the cores from the I/O threads"
        yield noted("environment", "OMP_WAIT_POLICY", _shown(policy), advice)
    found = {name: environment[name] for name in _MALLOC if environment.get(name)}
    for name, value in found.items():
        advice = "unset it, unless you know why it is set: swaptrain tunes the allocator itself"
        yield noted("environment", name, _shown(value), advice)
    if not found:
        yield checked("environment", "allocator", "no setting of its own: swaptrain tunes it")
    yield _hub(environment)


def check_clock(now: float | None = None) -> Iterator[CheckResult]:
    """Yield whether the clock can be right, and whether it is a fast one."""
    now = time.time() if now is None else now
    text = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if time.gmtime(now).tm_year < _LEAST_YEAR:
        advice = "set it: times of metrics and of files are wrong"
        yield noted("clock", "time", f"{text} lies before swaptrain was written", advice)
    else:
        yield checked("clock", "time", text)
    try:
        source = Path(
            "/sys/devices/system/clocksource/clocksource0/current_clocksource"
        ).read_text()
    except OSError:
        return
    if source.strip() in _SLOW_CLOCKS:
        advice = "boot with another (tsc): each look at it takes a microsecond"
        yield noted("clock", "source", source.strip(), advice)
    else:
        yield checked("clock", "source", source.strip())


def _hub(environment: Mapping[str, str]) -> CheckResult:
    home = environment.get("HF_HOME")
    default = Path(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    path = Path(home) if home else default / "huggingface"
    said = "" if home else "not set: "
    if home and path.exists() and not path.is_dir():
        return wrong("environment", "HF_HOME", f"{_shown(home)} is a file", "name a directory")
    if home and not path.exists():
        advice = "correct it, or download into it (hf download): names of the hub are looked up "
        advice += "there, and nothing is downloaded by a run"
        return noted("environment", "HF_HOME", f"{_shown(home)}, which does not exist", advice)
    there = "" if path.exists() else ", which does not exist yet"
    return checked("environment", "HF_HOME", f"{said}{_shown(str(path))}{there}")


def _shown(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
