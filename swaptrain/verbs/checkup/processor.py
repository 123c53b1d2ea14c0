"""The processor and the CUDA device, and what they mean for bfloat16."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from swaptrain.config.schema import Config
from swaptrain.machine.fingerprint import this_machine
from swaptrain.units import GIB, format_size, how_many
from swaptrain.verbs.checkup.result import CheckResult, checked, noted, wrong

__all__ = ["check_device", "check_processor", "instructions"]

_SHOWN = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "sve", "bf16")
_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")
_LEAST_CAPABILITY = (5, 0)


def check_processor(config: Config | None) -> Iterator[CheckResult]:
    """Yield what is found of cores, instructions and load."""
    found = this_machine(torch.device("cpu"))
    allowed, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    text = f"{found['processor']}, {how_many(cores, 'core')}"
    if allowed < cores:
        advice = "torch takes as many threads; taskset or the container says which"
        yield noted("processor", "cores", f"{text}, {allowed} of them for this process", advice)
    else:
        yield checked("processor", "cores", text)
    yield from _quota(allowed)
    yield instructions(found["instructions"].split(), found["kernels"], _dtype(config))
    load = os.getloadavg()[0]
    if load > allowed:
        advice = "end other programs: they slow the run, and the measurement of the disk"
        yield noted("processor", "load", f"{load:.1f} processes want to run", advice)
    else:
        yield checked("processor", "load", f"{load:.1f} processes want to run")


def instructions(found: list[str], kernels: str, dtype: str | None) -> CheckResult:
    """Judge instructions for a dtype; None: no config names one."""
    own = [name for name in _SHOWN if name in found]
    text = f"{', '.join(own) or 'none of avx2, avx512, sve'}; torch's kernels: {kernels}"
    fast = [name for name in _BFLOAT16 if name in own]
    if fast:
        return checked("processor", "instructions", f"{text}; bfloat16 products by {fast[0]}")
    text += "; no instruction for bfloat16 products"
    if dtype == "bfloat16":
        advice = "model.dtype: float32 may compute faster here; bfloat16 halves bytes of weights"
        return noted("processor", "instructions", text, advice)
    if "avx2" not in own and "sve" not in own and "asimd" not in found:
        advice = "expect slow products: torch has no fast kernels for this processor"
        return noted("processor", "instructions", text, advice)
    return checked("processor", "instructions", text)


def check_device(config: Config | None) -> Iterator[CheckResult]:
    """Yield what is found of CUDA."""
    wanted = config.device if config is not None else "auto"
    if not torch.cuda.is_available():
        has_driver = Path("/dev/nvidiactl").exists()
        built = torch.version.cuda
        said = "none" if built is None or not has_driver else "a driver, which torch cannot use"
        text = f"{said} (torch {'without CUDA' if built is None else f'for CUDA {built}'})"
        if wanted.startswith("cuda"):
            advice = "install torch for CUDA and the driver, or set device to cpu"
            yield wrong("device", "CUDA", text, advice)
        elif has_driver:
            advice = "install torch for CUDA, or a newer driver, to use the GPU (nvidia-smi)"
            yield noted("device", "CUDA", text, advice)
        else:
            yield checked("device", "CUDA", f"{text}: runs compute on the processor")
        return
    for index in range(torch.cuda.device_count()):
        yield _cuda(index, _dtype(config))


def _cuda(index: int, dtype: str | None) -> CheckResult:
    facts = torch.cuda.get_device_properties(index)
    free_bytes = torch.cuda.mem_get_info(index)[0]
    capability = facts.major, facts.minor
    with torch.cuda.device(index):
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    text = (
        f"{facts.name}, {format_size(facts.total_memory)} ({format_size(free_bytes)} free), "
        f"compute capability {capability[0]}.{capability[1]}, "
        f"{'' if has_bfloat16 else 'no '}bfloat16, CUDA {torch.version.cuda}{_driver()}"
    )
    name = f"cuda:{index}"
    if capability < _LEAST_CAPABILITY:
        return wrong("device", name, text, "torch has no kernels for it: set device to cpu")
    if dtype == "bfloat16" and not has_bfloat16:
        return noted("device", name, text, "set model.dtype to float16: bfloat16 is emulated")
    if free_bytes < GIB:
        return noted("device", name, text, "end what else uses the device (nvidia-smi)")
    return checked("device", name, text)


def _driver() -> str:
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    numbers = [word for word in line.split() if word[:1].isdigit() and "." in word]
    return f", driver {numbers[0]}" if numbers else ""


def _quota(cores: int) -> Iterator[CheckResult]:
    """Yield what a container's quota of processor time leaves, where it is less than the cores."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = int(quota) / int(period)
    except (OSError, ValueError):
        return  # version 1, no quota, or no such file
    if allowed < cores:
        text = f"{allowed:g} cores' time (control group), {how_many(cores, 'core')}"
        advice = f"set train.threads to {max(1, int(allowed))}: more threads wait for each other"
        yield noted("processor", "quota", text, advice)


def _dtype(config: Config | None) -> str | None:
    return None if config is None else config.model.dtype
