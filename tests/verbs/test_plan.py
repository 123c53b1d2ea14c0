"""The verb plan: what a run takes, before it takes it."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import BudgetError, ConfigError
from swaptrain.machine.speeds import Machine, known_machine
from swaptrain.planning import forecast
from swaptrain.planning.planner import Plan, Planner
from swaptrain.planning.step_cost import Price, price
from swaptrain.program.cost import Disk, IOWork
from swaptrain.units import MIB
from swaptrain.verbs.plan import PlanReport, plan
from swaptrain.verbs.plans import planned as planned_module
from swaptrain.verbs.plans.table import show
from swaptrain.verbs.train import train
from tests.support.matrix import proof_but
from tests.support.runs import config_of, rows

pytestmark = pytest.mark.trains

ROOT = Path(__file__).parents[2]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 4,
    "intermediate_size": 512, "num_attention_heads": 4, "tie_word_embeddings": True,
    "max_position_embeddings": 32,
}  # fmt: skip
TEXT = {"python": "tests.support.datasets:text"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model": {"hf": LLAMA}, "data": TEXT},
    "gpt": {
        "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 4, "width": 256}},
        "data": {"python": "tests.support.datasets:tokens"},
        "optimizer": {"clip_norm": 1.0},
    },
}


def job(tmp_path: Path, name: str, **sections: Any) -> Config:
    """Return the config of a model of some three million parameters."""
    return config_of(tmp_path / "run", {**MODELS[name], **sections})


def parameters_of(report: PlanReport) -> int:
    return sum(segment.parameters for segment in report.segments)


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    """Neither in run.dir nor beside it; and its figures hang together."""
    config = job(tmp_path, "llama", memory={"host": "64MiB", "segment": "4MiB"})
    before = sorted(tmp_path.rglob("*"))
    report = plan(config)
    assert sorted(tmp_path.rglob("*")) == before
    assert not report.resumes and len(report.segments) > 4
    assert parameters_of(report) == report.parameters
    assert report.pool_bytes + report.arena_bytes == 64 * 2**20
    assert report.instruction_bytes <= report.pool_bytes
    (need,) = report.disk
    state_bytes = sum(segment.state_bytes for segment in report.segments)
    assert need.slots_bytes > state_bytes >= 12 * report.parameters
    assert report.traffic is not None
    assert report.traffic.total_bytes >= report.least_traffic_bytes * 0.999
    assert report.step_write_bytes >= state_bytes


@pytest.mark.parametrize("name", proof_but(MODELS, whole=[*MODELS][1:]))
def test_the_least_budget_works(name: str, tmp_path: Path) -> None:
    """A refusal names N; a new process starts and finishes with N, and stays within base + N."""
    with pytest.raises(BudgetError) as refusal:
        plan(job(tmp_path, name, memory={"host": "20MiB"}))
    size = str(refusal.value).partition("set memory.host to ")[2].split(",")[0]
    config = job(tmp_path, name, memory={"host": size}, train={"steps": 2})
    command = [sys.executable, "-m", "swaptrain", "--config", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks = [row["peak_host_bytes"] for row in rows(config.run.dir)]
    assert len(peaks) == 2 and max(peaks) <= config.memory.host


@pytest.mark.proof
def test_a_run_that_exists_keeps_its_cut(tmp_path: Path) -> None:
    """Its plan has the recorded segments, whatever the budget is now."""
    config = job(tmp_path, "llama", memory={"host": "64MiB"}, train={"steps": 1})
    small = plan(config)
    train(config)
    more = config.memory.model_copy(update={"host": 2**30})
    report = plan(config.model_copy(update={"memory": more}))
    assert report.resumes and report.segments == small.segments
    fresh = config.model_copy(update={"memory": more, "run": config.run.model_copy(
        update={"dir": tmp_path / "other"})})  # fmt: skip
    assert len(plan(fresh).segments) < len(report.segments)
    machine = known_machine(config.run.dir, torch.device("cpu"))
    assert machine is not None and report.machine == machine and report.step_s is not None
    assert all(0 < row["roofline_fraction"] <= 1 for row in rows(config.run.dir))


@pytest.mark.proof
def test_what_is_rehearsed_is_what_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in the middle of a run moves the bytes that its start rehearsed, within a tenth.

    In slabs of one size, not of what the measured arena leaves: in some 22 MiB a busy processor,
    beside which commits are durable sooner, reads up to an eighth less than was rehearsed.
    """
    cut = Planner.plan

    def in_slabs(planner: Planner) -> Plan:
        return dataclasses.replace(cut(planner), pool_bytes=17 * MIB)

    monkeypatch.setattr(Planner, "plan", in_slabs)
    prices: list[Price] = []

    def noted(*args: Any) -> Price:
        prices.append(price(*args))
        return prices[-1]

    monkeypatch.setattr(forecast, "price", noted)
    memory = {"host": "48MiB", "segment": "4MiB"}
    config = job(tmp_path, "llama", memory=memory, train={"steps": 6})
    train(config)
    (priced,) = prices
    steps = rows(config.run.dir)[2:]
    assert priced.traffic is not None and priced.traffic.read_bytes > 0
    read, written = (
        statistics.median(row[kind] for row in steps) for kind in ("read_bytes", "write_bytes")
    )
    assert read == pytest.approx(priced.traffic.read_bytes, rel=0.1)
    assert written == pytest.approx(priced.traffic.write_bytes, rel=0.1)


def test_the_command_shows_what_a_person_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Segments, memory, disk, traffic, wear and the least budget; exit code 0."""
    job(tmp_path, "gpt")
    assert main(["plan", "--config", str(tmp_path / "run.yaml")]) == 0
    shown = capsys.readouterr().out
    for word in (
        "segment",
        "embedding",
        "base",
        "memory.host",
        "least that works",
        "slots",
        "free",
    ):
        assert word in shown
    for word in ("a step moves", "600 TBW", "read", "written", "bytes a parameter"):
        assert word in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"tokens": ["{folder}/ids.npy"], "micro_batch": 10**9}},
            r"data\.micro_batch is 1,000,000,000: its items alone take [0-9,.]+ GiB, ",
        ),
        ({"data": {**TEXT, "micro_batch": 10**9}}, r"data\.micro_batch is 1,000,000,000: "),
        (
            {"data": {**TEXT, "micro_batches": 10**9}},
            r"data\.micro_batches is 1,000,000,000: that makes [0-9,]+ instructions",
        ),
    ],
)
def test_counts_that_no_memory_holds_are_refused(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """At once, and not when the memory of the machine is full."""
    np.save(tmp_path / "ids.npy", np.zeros(10_000, np.uint8))
    tree = json.loads(json.dumps(sections).replace("{folder}", str(tmp_path)))
    config = job(tmp_path, "llama", **tree)
    with pytest.raises(ConfigError, match=message):
        plan(config)


@pytest.mark.parametrize(("recompute", "said"), [(None, True), (True, False)])
def test_a_plan_without_the_machines_speed_says_what_it_leaves_out(
    recompute: bool | None,
    said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What segments save, which is chosen by price, is not in its bytes."""
    monkeypatch.setattr(planned_module, "known_machine", lambda *_: None)
    config = job(tmp_path, "gpt", train={"steps": 1, "recompute": recompute})
    show(plan(config), config)
    assert ("segments that save" in capsys.readouterr().out) == said


@pytest.mark.proof
@pytest.mark.parametrize("lag", [1, 2])
def test_it_says_when_a_kill_may_repeat_two_segments(
    lag: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the config says, or as was chosen."""
    disk = Disk(2e8, 2e8, 2e8)
    monkeypatch.setattr(
        planned_module, "known_machine", lambda *_: Machine(disk, 0.0, IOWork(), {})
    )
    config = job(tmp_path, "gpt", store={"commit": {"lag": lag}})
    show(plan(config), config)
    assert ("two segments' backwards" in capsys.readouterr().out) == (lag == 2)


@pytest.mark.whole
def test_billions_of_parameters_plan_in_little_memory(tmp_path: Path) -> None:
    """configs/big.yaml plans in less than 2 GiB of resident memory."""
    script = (
        "import resource, sys; from swaptrain.cli import main; code = main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
    )
    command = [sys.executable, "-c", script, "plan", "--config", "configs/big.yaml"]
    command.append(f"run.dir={tmp_path / 'big'}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2.60 B parameters" in done.stdout
    assert int(done.stdout.split()[-1]) * 1024 < 2 * 2**30


@pytest.mark.proof
def test_waiting_for_data_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run whose last steps waited long for it; of another one nothing is said."""
    machine = Machine(Disk(2e8, 2e8, 2e8), 0.0, IOWork(), {})
    monkeypatch.setattr(planned_module, "known_machine", lambda *_: machine)
    config = job(tmp_path, "llama", train={"steps": 2})
    assert plan(config).data_share is None
    train(config)
    metrics = config.run.dir / "metrics.jsonl"
    assert (plan(config).data_share or 0.0) < 0.1
    waiting = [{**row, "step_s": 2.0, "data_wait_s": 0.5} for row in rows(config.run.dir)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in waiting))
    report = plan(config)
    assert report.data_share == 0.25
    capsys.readouterr()
    show(report, config)
    assert "waited for data for 25%" in " ".join(capsys.readouterr().out.split())
