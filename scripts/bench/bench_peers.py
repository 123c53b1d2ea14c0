"""Compare swaptrain with ZeRO-Infinity, memory-mapped PyTorch and PyTorch in memory.

Same model, weights, data, number of threads and allocator; one system after the other on an idle
machine (--rounds: in turns), each as a process under a hard memory limit. Prints, for each case,
medians of a step after warm-up and how many times as long as swaptrain each system takes, and as
swaptrain's floor (`roofline_fraction` 1: the most that could be reached with its own computing and
bytes); the losses beside them show that all did the same job. With --device cuda, the model fully
on the GPU is what is in memory, and the GPU's busy share of the measured steps is a column.

    bash scripts/peers/environment.sh                     # once, for ZeRO-Infinity
    python scripts/bench/bench_peers.py --peer-python .venv-deepspeed/bin/python
    python scripts/bench/bench_peers.py --case 270m-1 270m-4 --systems swaptrain mapped
    python scripts/bench/bench_peers.py --systems swaptrain bfloat16 8bit --megabytes-per-s 200
    python scripts/bench/bench_peers.py --device cuda --systems swaptrain in_memory
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from gpu_busy import GpuBusy
from kernel_limits import SlowDisk, can_limit, run_limited
from peer_results import Result, show, together

from swaptrain.config.load import load_config
from swaptrain.machine.torch_settings import SPIN_COUNT
from swaptrain.memory.malloc import restart_without_cache, tune
from swaptrain.units import GIB, MIB, format_size
from swaptrain.verbs.plan import plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for peers

from peers.job import SEQUENCE, swaptrain_config, write_job

__all__ = ["CASES", "Case", "main"]

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "scripts" / "peers"
OURS = {"swaptrain": "float32", "bfloat16": "bfloat16", "8bit": "8bit"}
"""swaptrain with each form of the optimizer's state."""
SLACK_BYTES = 64 * MIB
"""Beyond base and budget the kernel counts page tables, thread stacks and slab."""


@dataclass(frozen=True)
class Case:
    """A job and what each system gets for it: name -> GiB of memory, None for no limit."""

    shape: str
    micro_batches: int
    host_gib: int
    limits_gib: dict[str, int | None]
    commit_every: int = 1
    device_gib: int | None = None
    """Of swaptrain on a GPU; the others take what they need of it."""


CASES = {
    "270m-1": Case("270m", 1, 2, {"zero_infinity": 3, "mapped": 3, "in_memory": None}),
    "270m-4": Case("270m", 4, 2, {"zero_infinity": 3, "mapped": 3, "in_memory": None}),
    "270m-16": Case("270m", 16, 2, {"in_memory": None}),
    "270m-4-fits": Case("270m", 4, 6, {"in_memory": None}, commit_every=100),
    "1.3b-1": Case("1.3b", 1, 4, {"zero_infinity": 7, "mapped": 7, "in_memory": None}),
    "1.3b-1-every-10": Case("1.3b", 1, 4, {}, commit_every=10),
    "1.3b-4": Case("1.3b", 4, 4, {"zero_infinity": 7, "in_memory": None}),
    "small": Case("4m", 2, 1, {"zero_infinity": 3, "mapped": 3, "in_memory": None}),
    "gpu-16": Case("1.3b", 16, 7, {"zero_infinity": None, "in_memory": None}, device_gib=6),
    "gpu-64": Case("1.3b", 64, 7, {"zero_infinity": None, "in_memory": None}, device_gib=6),
}
DEFAULT = {
    "cpu": [name for name in CASES if name != "small" and not name.startswith("gpu")],
    "cuda": ["gpu-16", "gpu-64"],
}
"""On a GPU the state is twice memory.host, and the model fits on the GPU, to compare."""


def measure(case: Case, system: str, options: argparse.Namespace, job: Path, work: Path) -> Result:
    """Run one system on one case, and look at the GPU meanwhile if it is one's."""
    with GpuBusy() if options.device == "cuda" else nullcontext() as gpu:
        if system in OURS:
            found = measure_swaptrain(case, system, options, job, work)
        else:
            found = measure_peer(case, system, options, job, work)
    if gpu is None or found.failure:
        return found
    begin_s = found.rows[0]["ended_at"] - found.rows[0]["step_s"]
    return replace(found, gpu_busy=gpu.fraction(begin_s, found.rows[-1]["ended_at"]))


def measure_peer(
    case: Case, system: str, options: argparse.Namespace, job: Path, work: Path
) -> Result:
    """Run another system under the limit of the case."""
    gib = case.limits_gib[system]
    python = options.peer_python if system == "zero_infinity" else Path(sys.executable)
    command = [str(python), str(PEERS / f"{system}.py"), f"--job={job}", f"--work={work / system}"]
    command += [f"--micro-batches={case.micro_batches}", f"--threads={options.threads}"]
    command += [f"--steps={options.warmup + options.steps}", f"--device={options.device}"]
    if options.clip_norm is not None:
        command.append(f"--clip-norm={options.clip_norm}")
    limit = None if gib is None or not options.limit else gib * GIB
    done = run_limited(command, options.environment, memory_bytes=limit, disk=options.disk)
    rows = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("STEP ")]
    return result(system, limit, rows, done.returncode, done.stderr, options)


def measure_swaptrain(
    case: Case, system: str, options: argparse.Namespace, job: Path, work: Path
) -> Result:
    """Run swaptrain under base + budget + 64 MiB."""
    run_dir, environment = work / "swaptrain", own_environment(options, work)
    config = work / "swaptrain.yaml"
    steps = options.warmup + options.steps
    tree = swaptrain_config(
        job, run_dir, micro_batches=case.micro_batches, steps=steps, device=options.device
    )
    tree["optimizer"].update(clip_norm=options.clip_norm, state=OURS[system])
    tree["train"]["threads"] = options.threads
    tree["memory"] = {"host": f"{case.host_gib}GiB"}
    if options.device == "cuda" and case.device_gib is not None:
        tree["memory"]["device"] = f"{case.device_gib}GiB"
    tree["store"] = {"commit": {"every": case.commit_every}}
    config.write_text(yaml.safe_dump(tree))
    limit = None
    if options.limit:
        limit = base_bytes(config, environment) + case.host_gib * GIB + SLACK_BYTES
    command = [sys.executable, "-m", "swaptrain", "--config", str(config)]
    try:
        done = run_limited(command, environment, memory_bytes=limit, disk=options.disk)
        metrics = run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    rows = [{**(row := json.loads(line)), "peak_bytes": row["peak_host_bytes"]} for line in lines]
    found = result(system, limit, rows, done.returncode, done.stderr, options)
    return replace(found, commit_every=case.commit_every)


def slow_disk(options: argparse.Namespace, work: Path) -> SlowDisk | None:
    """Return the limit of the disk that holds `work`, for every system; None: it has none.

    Cgroups of version 1 do not slow writes through the page cache, which `mapped` makes.
    """
    speed = options.megabytes_per_s
    return None if speed is None else SlowDisk(speed * 10**6, [work])


def own_environment(options: argparse.Namespace, work: Path) -> dict[str, str]:
    """Return swaptrain's environment: the figures of a slow disk are measured, and stay in `work`.

    Others keep their cache, where compiled parts lie.
    """
    environment: dict[str, str] = options.environment
    if options.disk is None:
        return environment
    return {**environment, "XDG_CACHE_HOME": str(work / "figures")}


def disk_words(options: argparse.Namespace) -> str:
    """Return the end of a title, with the disk's limit where it has one."""
    speed = options.megabytes_per_s
    return "" if speed is None else f", {speed} + {speed} MB/s"


def base_bytes(config: Path, environment: dict[str, str]) -> int:
    """Return what a run's process takes before its budget, with the allocator that it will have."""
    command = [sys.executable, __file__, "--base-of", str(config)]
    done = run_limited(command, environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(done.stdout)


def result(
    system: str,
    limit: int | None,
    rows: list[dict[str, Any]],
    code: int,
    errors: str,
    options: argparse.Namespace,
) -> Result:
    """Return the measured steps, or what went wrong."""
    shown = "none" if limit is None else format_size(limit)
    failure = ""
    if code:
        last = (errors.strip().splitlines() or [""])[-1]
        failure = "killed: out of memory" if code in (-9, 137) else f"exit {code}: {last}"
    elif len(rows) <= options.warmup + 1:
        failure = "ended before its second measured step"
    return Result(system, shown, rows[options.warmup :], failure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; --help explains them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = ["swaptrain", "zero_infinity", "mapped", "in_memory"]
    systems = [*OURS, *usual[1:]]
    parser.add_argument("--case", nargs="+", choices=CASES, metavar="CASE",
                        help=f"of {', '.join(CASES)}; default: {', '.join(DEFAULT['cuda'])} on a "
                             "GPU, else all others but small")  # fmt: skip
    parser.add_argument("--systems", nargs="+", choices=systems, metavar="SYSTEM",
                        help=f"of {', '.join(systems)}; default: swaptrain, zero_infinity, "
                             "in_memory, and on a CPU mapped")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu",
                        help="what every system computes on (default cpu)")  # fmt: skip
    parser.add_argument("--peer-python", type=Path, help="the Python that has DeepSpeed")
    parser.add_argument("--steps", type=int, default=5, help="steps measured (default 5)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default 2)")
    parser.add_argument("--rounds", type=int, default=1,
                        help="times that every system has its turn, in alternating order, for a "
                             "machine whose speed changes within minutes (default 1)")  # fmt: skip
    parser.add_argument("--megabytes-per-s", type=int,
                        help="of the disk, each way (needs root); default: as it is")  # fmt: skip
    parser.add_argument("--clip-norm", type=float, help="clip by the global norm; default: not")
    parser.add_argument("--threads", type=int, default=2, help="of every system (default 2)")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="directory on the disk")
    parser.add_argument("--out", type=Path, help="append each step of each system, as JSON lines")
    parser.add_argument("--base-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.case = options.case or DEFAULT[options.device]
    options.systems = options.systems or [
        system for system in usual if options.device == "cpu" or system != "mapped"
    ]
    if options.base_of is not None:
        return options
    if options.rounds < 1:
        parser.error("--rounds is 1 or more")
    if options.steps < 2:
        parser.error("--steps is 2 or more: one of them may be the only one that commits")
    if options.device == "cuda" and "mapped" in options.systems:
        parser.error("mapped computes on the CPU only: leave it out with --systems")
    if options.device == "cuda" and shutil.which("nvidia-smi") is None:
        parser.error("--device cuda needs nvidia-smi, which comes with the GPU's driver")
    if "zero_infinity" in options.systems and options.peer_python is None:
        parser.error(
            "ZeRO-Infinity needs --peer-python (bash scripts/peers/environment.sh makes one); or "
            "leave it out with --systems"
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print case after case."""
    options = parse(argv)
    if options.base_of is not None:
        restart_without_cache()  # as the command does
        tune()
        print(plan(load_config(options.base_of, ())).base_bytes)
        return 0
    options.limit = can_limit()
    if not options.limit:
        print("no cgroup can be made here: the systems run without a hard limit", file=sys.stderr)
    allocator = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    options.environment = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(SPIN_COUNT)}
    if allocator is None:
        print("tcmalloc is not installed: all systems use glibc's allocator", file=sys.stderr)
    else:
        options.environment["LD_PRELOAD"] = allocator
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench_peers.", dir=options.work) as directory:
        work = Path(directory).resolve()
        options.disk = slow_disk(options, work)
        for name in options.case:
            case = CASES[name]
            job = work / case.shape
            if not job.exists():
                for other in {c.shape for c in CASES.values()}:
                    shutil.rmtree(work / other, ignore_errors=True)
                write_job(job, case.shape, sequences=256)
            systems = [s for s in options.systems if s in OURS or s in case.limits_gib]
            runs: dict[str, list[Result]] = {system: [] for system in systems}
            for turn in range(options.rounds):
                for system in reversed(systems) if turn % 2 else systems:
                    print(f"{name}, round {turn + 1}: {system} ...", file=sys.stderr, flush=True)
                    runs[system].append(measure(case, system, options, job, work))
                    if options.out:
                        tags = {"case": name, "round": turn + 1, "system": system}
                        with options.out.open("a") as file:
                            for row in runs[system][-1].rows:
                                print(json.dumps({**tags, **row}), file=file)
            show(
                f"{name}: {case.shape} parameters, {case.micro_batches} micro-batches of "
                f"{SEQUENCE} tokens, memory.host {case.host_gib} GiB, "
                f"commit.every {case.commit_every}{disk_words(options)}",
                case.micro_batches * SEQUENCE,
                [together(found) for found in runs.values()],
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
