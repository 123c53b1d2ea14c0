"""Compare LoRA in swaptrain with PEFT in memory, checkpointing, with a mapped base, and with Soup.

Same base, adapters, tokens, threads and allocator; one system after the other on an idle machine
(--rounds: in turns). swaptrain runs under a hard limit of its base, `memory.host` and 128 MiB, the
mapped base and Soup under one of their own, the others without. Prints medians of a step after
warm-up.

    pip install -e '.[lora]'
    python -m venv .venv-soup && .venv-soup/bin/pip install 'soup-cli[train]==0.77.0'   # for Soup
    python scripts/bench/bench_lora.py
    python scripts/bench/bench_lora.py --case 270m-8 --systems swaptrain checkpointing
    python scripts/bench/bench_lora.py --device cuda --case gpu-1.3b-8
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from bench_peers import PEERS, base_bytes, disk_words, own_environment, result, slow_disk
from kernel_limits import can_limit, run_limited
from peer_results import Result, show, together

from swaptrain.machine.torch_settings import SPIN_COUNT
from swaptrain.units import MIB, parse_size

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for peers

from peers.job import LORA_ALPHA, LORA_RANK, SEQUENCE, swaptrain_config, write_job

__all__ = ["main"]

SLACK_BYTES = 128 * MIB
"""As in bench_peers, and what a start holds of the base's checkpoint; `plan` does not read it."""
OURS = ("swaptrain", "int8", "nf4")
"""swaptrain with each form of the base: bfloat16, or `model.base`."""
SYSTEMS = (*OURS, "plain", "checkpointing", "mapped", "soup")


@dataclass(frozen=True)
class Case:
    """A job, swaptrain's budget, and the limits of others' processes."""

    shape: str
    micro_batches: int
    host: str
    limits: dict[str, str]


CASES = {
    "270m-1": Case("270m", 1, "700MiB", {"mapped": "1GiB", "soup": "1.5GiB"}),
    "270m-8": Case("270m", 8, "700MiB", {"mapped": "1GiB", "soup": "2GiB"}),
    "270m-16": Case("270m", 16, "700MiB", {"mapped": "1GiB", "soup": "2GiB"}),
    "1.3b-1": Case("1.3b", 1, "2GiB", {"mapped": "3GiB", "soup": "4GiB"}),
    "gpu-1.3b-8": Case("1.3b", 8, "3GiB", {"mapped": "4GiB", "soup": "4GiB"}),
    "small": Case("4m", 2, "200MiB", {"mapped": "1GiB", "soup": "2GiB"}),
}


def write_base(job: Path, shape: str) -> None:
    """Write a job whose weights lie beside its config, in bfloat16: a base as one downloads it."""
    import torch
    from safetensors.torch import load_file, save_file

    write_job(job, shape, sequences=256)
    drawn = load_file(job / "weights" / "model.safetensors")
    shutil.rmtree(job / "weights")
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in drawn.items()}
    save_file(rounded, job / "model.safetensors", metadata={"format": "pt"})


def measure(case: Case, system: str, options: argparse.Namespace, job: Path, work: Path) -> Result:
    """Run one system on one case."""
    if system in OURS:
        return measure_swaptrain(case, system, options, job, work)
    if system == "soup":
        command = [str(options.peer_python), str(PEERS / "soup.py")]
    else:
        command = [sys.executable, str(PEERS / "lora.py")]
    command += [f"--job={job}", f"--work={work / system / case.shape}"]
    command += [f"--micro-batches={case.micro_batches}", f"--threads={options.threads}"]
    command += [f"--steps={options.warmup + options.steps}", f"--device={options.device}"]
    if system != "soup":
        command.append(system)
    limit = parse_size(case.limits[system]) if system in case.limits and options.limit else None
    done = run_limited(command, options.environment, memory_bytes=limit, disk=options.disk)
    rows = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("STEP ")]
    return result(system, limit, rows, done.returncode, done.stderr, options)


def measure_swaptrain(
    case: Case, system: str, options: argparse.Namespace, job: Path, work: Path
) -> Result:
    """Run swaptrain under base + budget + 128 MiB."""
    run_dir, config = work / "swaptrain", work / "swaptrain.yaml"
    environment = own_environment(options, work)
    steps = options.warmup + options.steps
    tree: dict[str, Any] = swaptrain_config(
        job, run_dir, micro_batches=case.micro_batches, steps=steps, device=options.device
    )
    if system != "swaptrain":
        tree["model"]["base"] = system
    tree["lora"] = {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "target_modules": "all-linear"}
    tree["train"]["threads"] = options.threads
    tree["train"]["recompute"] = True if options.recompute else None
    tree["memory"] = {"host": options.host or case.host}
    config.write_text(yaml.safe_dump(tree))
    limit = None
    if options.limit:
        host_bytes = parse_size(tree["memory"]["host"])
        limit = base_bytes(config, environment) + host_bytes + SLACK_BYTES
    command = [sys.executable, "-m", "swaptrain", "--config", str(config)]
    try:
        done = run_limited(command, environment, memory_bytes=limit, disk=options.disk)
        metrics = run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    rows = [{**(row := json.loads(line)), "peak_bytes": row["peak_host_bytes"]} for line in lines]
    return result(system, limit, rows, done.returncode, done.stderr, options)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; --help explains them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name in CASES if name != "small" and not name.startswith("gpu")]
    parser.add_argument("--case", nargs="+", choices=CASES, default=usual, metavar="CASE",
                        help=f"of {', '.join(CASES)}; default: all but small and gpu")  # fmt: skip
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="SYSTEM",
                        help=f"of {', '.join(SYSTEMS)}; default: all, and soup only with "
                             "--peer-python")  # fmt: skip
    parser.add_argument("--peer-python", type=Path, help="the Python that has Soup")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu",
                        help="what every system computes on (default cpu)")  # fmt: skip
    parser.add_argument("--host", help="memory.host instead of the case's")
    parser.add_argument("--megabytes-per-s", type=int,
                        help="of the disk, each way (needs root); default: as it is")  # fmt: skip
    parser.add_argument("--recompute", action="store_true", help="let no segment save")
    parser.add_argument("--steps", type=int, default=4, help="steps measured (default 4)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default 2)")
    parser.add_argument("--rounds", type=int, default=1, help="turns of every system (default 1)")
    parser.add_argument("--threads", type=int, default=2, help="of every system (default 2)")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="directory on the disk")
    options = parser.parse_args(argv)
    options.systems = options.systems or [
        system for system in SYSTEMS if system != "soup" or options.peer_python is not None
    ]
    if "soup" in options.systems and options.peer_python is None:
        parser.error("Soup needs --peer-python (see above); or leave it out with --systems")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print case after case."""
    options = parse(argv)
    options.limit = can_limit()
    options.environment = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(SPIN_COUNT)}
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_lora.", dir=options.work) as directory:
        work = Path(directory).resolve()
        options.disk = slow_disk(options, work)
        for name in options.case:
            case = CASES[name]
            job = work / case.shape
            if not job.exists():
                write_base(job, case.shape)
            runs: dict[str, list[Result]] = {system: [] for system in options.systems}
            for turn in range(options.rounds):
                for system in reversed(options.systems) if turn % 2 else options.systems:
                    print(f"{name}, round {turn + 1}: {system} ...", file=sys.stderr, flush=True)
                    runs[system].append(measure(case, system, options, job, work))
            show(
                f"{name}: LoRA r {LORA_RANK} on a base of {case.shape} parameters, "
                f"{case.micro_batches} micro-batches of {SEQUENCE} tokens, memory.host "
                f"{options.host or case.host}{disk_words(options)}",
                case.micro_batches * SEQUENCE,
                [together(found) for found in runs.values()],
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
