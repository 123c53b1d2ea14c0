"""A run keeps inside base + memory.host, also under a hard limit of the kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from tests.support.matrix import proof_but

pytestmark = pytest.mark.trains

MIB = 1 << 20
HOST_MIB = 192
SLACK_MIB = 64
"""Beyond the budget a hard limit leaves room for page tables, thread stacks and kernel slab."""

CONFIG = {
    "model": {
        "hf": {
            "model_type": "llama", "vocab_size": 4096, "hidden_size": 512,
            "num_hidden_layers": 8, "intermediate_size": 1408, "num_attention_heads": 8,
            "num_key_value_heads": 4, "max_position_embeddings": 128,
        }
    },
    "data": {"python": "tests.support.datasets:text", "micro_batch": 2, "micro_batches": 2},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "train": {"steps": 2, "threads": 1},
    "device": "cpu",
    "memory": {"host": f"{HOST_MIB}MiB"},
}  # fmt: skip


def command(run_dir: Path, *, recompute: bool = True, checkpoint: Path | None = None) -> list[str]:
    """Write the config; return the command that trains it."""
    path = run_dir.with_suffix(".yaml")
    tree: dict[str, Any] = {**CONFIG, "run": {"dir": str(run_dir)}}
    if checkpoint is not None:
        tree["model"] = {"hf": str(checkpoint)}
    if not recompute:  # many graphs at once, whose tensors do not fit into memory
        tree["data"] = {**tree["data"], "micro_batches": 12}
    tree["train"] = {**tree["train"], "recompute": recompute}
    path.write_text(yaml.safe_dump(tree))
    return [sys.executable, "-m", "swaptrain", "--config", str(path)]


def resident_bytes(pid: int) -> int:
    """Return what a process has in RAM now; 0 when it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def base_bytes(output: str) -> int:
    """Return the base that train printed in its summary."""
    found = re.search(r"base ([\d.]+) (MiB|GiB)", output)
    assert found, output
    return int(float(found[1]) * (MIB if found[2] == "MiB" else 1 << 30))


def run_sampled(
    arguments: list[str], entered: Path | None = None
) -> tuple[int, str, list[tuple[float, int]]]:
    """Run a process, inside a cgroup if one is given; return exit code, output, resident sizes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if entered is not None:
        shell = f'echo $$ > {entered}/cgroup.procs && exec "$0" "$@"'
        arguments = ["sh", "-c", shell, *arguments]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    samples: list[tuple[float, int]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            samples.append((time.monotonic(), resident_bytes(process.pid)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    output, _ = process.communicate(timeout=240)
    done.set()
    sampler.join()
    return process.returncode, output, samples


def memory_controller() -> Path | None:
    """Return the directory in which this process may make cgroups that limit memory (v1)."""
    root = Path("/sys/fs/cgroup/memory")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory" and os.access(root / path.lstrip("/"), os.W_OK):
            return root / path.lstrip("/")
    return None


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """Make a cgroup with a hard limit and without swap; skip, with the reason, where not."""
    parent = memory_controller()
    if parent is None:
        pytest.skip("no memory cgroup (v1) in which this process may make another")
    group = parent / f"swaptrain-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:  # the kernel still counts the process that has just ended
                time.sleep(0.1)


@dataclass(frozen=True)
class FreeRun:
    """A run without a limit, sampled: its output and its resident sizes."""

    recompute: bool
    output: str
    samples: list[tuple[float, int]]


@pytest.fixture(
    scope="module",
    params=proof_but([True, False], True, whole=[False]),
    ids=["recomputing", "saving"],
)
def free_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> FreeRun:
    """Run once each way."""
    directory = tmp_path_factory.mktemp("memory")
    code, output, samples = run_sampled(command(directory / "run", recompute=request.param))
    assert code == 0, output
    assert request.param or not re.search("of which 0 save", output), output
    return FreeRun(request.param, output, samples)


def test_the_resident_set_stays_below_base_plus_budget(free_run: FreeRun) -> None:
    """No sample of a run whose state is larger than its budget passes base + memory.host."""
    output, samples = free_run.output, free_run.samples
    bound = base_bytes(output) + HOST_MIB * MIB
    peak = max(resident for _, resident in samples)
    assert peak <= bound, f"peak {peak / MIB:.1f} MiB, bound {bound / MIB:.1f} MiB"
    assert len(samples) > 100


@pytest.mark.proof
def test_a_run_finishes_under_a_hard_limit(free_run: FreeRun, tmp_path: Path) -> None:
    """The kernel's limit, which counts page cache too, does not kill the run."""
    limit_bytes = base_bytes(free_run.output) + (HOST_MIB + SLACK_MIB) * MIB
    with limited_group(limit_bytes) as group:
        arguments = command(tmp_path / "run", recompute=free_run.recompute)
        code, output, _ = run_sampled(arguments, entered=group)
    assert code == 0, output


@pytest.mark.proof
def test_a_checkpoint_is_begun_from_under_a_hard_limit(free_run: FreeRun, tmp_path: Path) -> None:
    """The pages that are read of its file are resident too, and stay within the budget."""
    if not free_run.recompute:
        pytest.skip("what is saved later has no part in how a run begins")
    fields = dict(CONFIG["model"]["hf"])  # type: ignore[call-overload]
    config = transformers.CONFIG_MAPPING[fields.pop("model_type")](**fields)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "checkpoint")
    limit_bytes = base_bytes(free_run.output) + (HOST_MIB + SLACK_MIB) * MIB
    with limited_group(limit_bytes) as group:
        arguments = command(tmp_path / "run", checkpoint=tmp_path / "checkpoint")
        code, output, samples = run_sampled(arguments, entered=group)
    assert code == 0, output
    assert f"initial weights of {tmp_path / 'checkpoint'}" in output.replace("\n", "")
    peak = max(resident for _, resident in samples)
    assert peak <= base_bytes(output) + HOST_MIB * MIB


@pytest.mark.proof
def test_a_factory_that_took_and_freed_gigabytes_leaves_the_budget_whole(
    free_run: FreeRun, tmp_path: Path
) -> None:
    """Its holes in the heap, and many graphs that wait for their backward, stay within it."""
    if free_run.recompute:
        pytest.skip("graphs wait only where segments save")
    run_dir = tmp_path / "run"
    path = run_dir.with_suffix(".yaml")
    arguments = command(run_dir, recompute=False)
    tree = yaml.safe_load(path.read_text())
    fields = {k: v for k, v in tree["model"]["hf"].items() if k != "model_type"}
    kwargs = {"passes": 16, "at_once_mib": 128, "fields": fields}
    tree["model"] = {"python": "tests.support.loading:llama", "kwargs": kwargs}
    path.write_text(yaml.safe_dump(tree))
    limit_bytes = base_bytes(free_run.output) + (HOST_MIB + SLACK_MIB) * MIB
    with limited_group(limit_bytes) as group:
        code, output, _ = run_sampled(arguments, entered=group)
    assert code == 0, output
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["peak_host_bytes"] <= HOST_MIB * MIB for row in rows] == [True, True], rows
