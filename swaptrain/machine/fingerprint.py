"""What of a machine the last bits of a run depend on, and what of it changed since the last start.

Matrix products are summed in an order that the kernels choose by the processor's instructions, the
device and the version of torch; threads are recorded and used again, so they do not matter. A run
goes on wherever it is started, and says once what may make its bits differ.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.format.root import RootRecord
from swaptrain.store.paths import RunPaths
from swaptrain.strict_json import read_json

__all__ = ["note_changes", "this_machine"]

_INSTRUCTIONS = frozenset({
    "amx_bf16", "amx_fp16", "amx_int8", "amx_tile", "asimd", "avx", "avx2", "avx512_bf16",
    "avx512_fp16", "avx512_vnni", "avx512bw", "avx512dq", "avx512f", "avx512vl", "avx_vnni", "bf16",
    "fma", "sve", "sve2",
})  # fmt: skip
_OVERRIDES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
_MOST_BYTES = 2**16
_NAMES = {
    "processor": "the processor",
    "instructions": "its instructions",
    "kernels": "the kernels that torch chooses",
    "device": "the device",
    "torch": "torch",
}


def this_machine(device: torch.device) -> dict[str, str]:
    """Return what the bits depend on, each as text that can be shown."""
    processor, instructions = _processor()
    overrides = [f"{name}={os.environ[name]}" for name in _OVERRIDES if name in os.environ]
    cuda = device.type == "cuda"
    return {
        "processor": processor,
        "instructions": " ".join(sorted(instructions & _INSTRUCTIONS)),
        "kernels": " ".join([torch.backends.cpu.get_cpu_capability(), *overrides]),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": str(torch.__version__),
    }


def note_changes(
    run_dir: Path, root: RootRecord, now: Mapping[str, str], note: Callable[[str], None]
) -> None:
    """Say what is another than at the last start, once: it is written down. Raises RunError."""
    before = _last(run_dir, root)
    changed = [key for key in _NAMES if key in before and before[key] != now.get(key)]
    if not changed:
        return
    lines = ", ".join(f"{_NAMES[key]} ({before[key]} -> {now.get(key)})" for key in changed)
    note(
        f"since the last start of this run these have changed: {lines}. It goes on; from here on "
        "the last bits of its results may differ from those of the machine before"
    )
    write_aside(RunPaths(run_dir).last_machine, json.dumps(dict(now)).encode())


def _last(run_dir: Path, root: RootRecord) -> dict[str, str]:
    """Return the machine of the last start; what cannot be read of it counts as not changed."""
    try:
        found = read_json(RunPaths(run_dir).last_machine, _MOST_BYTES)
    except (OSError, ValueError):
        found = root.choices.machine
    if not isinstance(found, dict):
        found = {"torch": root.choices.torch}
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, str) and value.isprintable() and len(value) < 1024
    }


def _processor() -> tuple[str, set[str]]:
    """Return the name of the processor and its instructions, as Linux shows them."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip().lower(), value.strip())
    except OSError:
        fields = {}  # no /proc: the name of the architecture has to do
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, set((fields.get("flags") or fields.get("features") or "").split())
