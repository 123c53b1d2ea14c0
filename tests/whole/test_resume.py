"""Stopping, going on, changing what may change, and being refused the rest."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from torch import Tensor, nn

from swaptrain.compute import blocks
from swaptrain.config.schema import Config
from swaptrain.errors import BudgetError, ConfigError, RunError, StoppedBySignal
from swaptrain.observe.metrics import MetricsFile
from swaptrain.program.step import StepBuilder
from swaptrain.store.access.lock import RunLock
from swaptrain.store.read.export_request import ExportRequest
from swaptrain.store.slots.commit import Committer
from swaptrain.verbs.export import export_weights
from tests.support.killing import final_state, metrics_key
from tests.support.matrix import matrix, proof_but
from tests.support.runs import config_of, losses, rows, trained

pytestmark = pytest.mark.trains

GPT: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 1}},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"segment": "16KiB"},
    "train": {"steps": 4},
}
CLIPPED = {**GPT, "optimizer": {"clip_norm": 0.3}}


class Stopped(Exception):
    """Stands for a kill: nothing of the run's own is done after it."""


def changed(tree: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with fields of some sections replaced."""
    return {**tree, **{name: {**tree.get(name, {}), **new} for name, new in sections.items()}}


def stop_in_commit(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the run fail, as a kill would, when it submits its commit of that number."""
    count = 0
    original = Committer.commit

    def commit(self: Committer, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise Stopped
        return original(self, *args, **options)

    monkeypatch.setattr(Committer, "commit", commit)


def interrupted(config: Config, number: int) -> None:
    """Train until the commit of that number."""
    with pytest.MonkeyPatch.context() as patch:
        stop_in_commit(patch, number)
        with pytest.raises(Stopped):
            trained(config)


def same_end(left: Path, right: Path) -> None:
    assert metrics_key(left) == metrics_key(right)
    assert final_state(left) == final_state(right)


@pytest.mark.parametrize(
    ("number", "tree"),
    proof_but([(signal.SIGINT, GPT), (signal.SIGTERM, CLIPPED)], (signal.SIGTERM, CLIPPED)),
    ids=["fused", "clipped"],
)
def test_a_signal_stops_after_the_instruction_and_the_run_goes_on(
    number: signal.Signals, tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 128 + the signal, and the run ends with the bits of an undisturbed one."""
    whole = trained(config_of(tmp_path / "whole", tree))
    config = config_of(tmp_path / "run", tree)
    original = MetricsFile.append

    def append(self: MetricsFile, row: Any) -> None:
        original(self, row)
        if row.step == 2:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "append", append)
        with pytest.raises(StoppedBySignal, match="run the same command") as stop:
            trained(config)
    assert stop.value.exit_code == 128 + number
    same_end(trained(config), whole)


@pytest.mark.parametrize(
    "store",
    proof_but([{}, {"store": {"commit": {"every": 3}}}], whole=[{}]),
    ids=["slots", "trees"],
)
def test_a_finished_run_is_small_says_so_and_can_be_prolonged(
    store: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 bytes per parameter are kept, and more steps equal a run that had them from the start."""
    tree = changed({**GPT, **store}, model={"kwargs": {"layers": 1, "width": 96}})
    tree = changed(tree, memory={"segment": "256KiB"})
    whole = trained(config_of(tmp_path / "whole", changed(tree, train={"steps": 5})))
    config = config_of(tmp_path / "run", tree)
    run_dir = trained(config)
    state = final_state(run_dir)
    assert "finished: step 4" in capsys.readouterr().out
    trained(config)
    trained(config_of(run_dir, changed(tree, train={"steps": 2})))
    assert capsys.readouterr().out.count("finished: step 4 of 4") == 2
    assert final_state(run_dir) == state
    parameters = sum(t.numel() for t in plain_parameters(tree))
    used_bytes = sum(
        path.lstat().st_blocks * 512 for path in run_dir.rglob("*") if not path.is_symlink()
    )
    small_files_bytes = 4096 * sum(1 for _ in run_dir.rglob("*"))
    assert 12 * parameters <= used_bytes < 13 * parameters + 2 * small_files_bytes
    group = zarr.open_group(run_dir / "store", mode="r")
    assert group["segments/001/weights"][...].any()
    trained(config_of(run_dir, changed(tree, train={"steps": 5})))
    same_end(run_dir, whole)


def plain_parameters(tree: dict[str, Any]) -> list[Tensor]:
    from tests.support import models

    return list(models.gpt(**tree["model"]["kwargs"]).parameters())


@pytest.mark.proof
def test_fresh_starts_over(tmp_path: Path) -> None:
    """With --fresh an interrupted run of another model gives way to the new one."""
    run_dir = tmp_path / "run"
    interrupted(config_of(run_dir, changed(GPT, model={"kwargs": {"layers": 2}})), 9)
    config = config_of(run_dir, GPT)
    with pytest.raises(ConfigError, match=r"model\.kwargs"):
        trained(config)
    same_end(trained(config, fresh=True), trained(config_of(tmp_path / "whole", GPT)))


def test_what_a_run_was_created_with_cannot_change(tmp_path: Path) -> None:
    """The message names every key of model, data and optimizer, and nothing is written."""
    run_dir = tmp_path / "run"
    interrupted(config_of(run_dir, GPT), 3)
    before = {path: path.lstat().st_mtime_ns for path in run_dir.rglob("*")}
    tree = changed(GPT, model={"kwargs": {"layers": 2}}, data={"micro_batch": 4})
    with pytest.raises(ConfigError) as refusal:
        trained(config_of(run_dir, changed(tree, optimizer={"betas": [0.8, 0.9]})))
    assert refusal.value.exit_code == 2
    for key in ("model.kwargs", "data.micro_batch", "optimizer.betas"):
        assert key in str(refusal.value)
    assert {path: path.lstat().st_mtime_ns for path in run_dir.rglob("*")} == before


@pytest.mark.proof
def test_the_budget_changes_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """A step that was begun with one budget is completed with another: same bits."""
    whole = trained(config_of(tmp_path / "whole", GPT))
    run_dir = tmp_path / "run"
    interrupted(config_of(run_dir, GPT), 6)
    tree = changed(GPT, memory={"host": "200MiB"})
    same_end(trained(config_of(run_dir, tree)), whole)


@pytest.mark.parametrize("tree", proof_but([GPT, CLIPPED], whole=[GPT]), ids=["fused", "clipped"])
def test_an_accepted_change_begins_with_the_next_step(tree: dict[str, Any], tmp_path: Path) -> None:
    """The interrupted step ends under the old values; config.yaml changes at the boundary only."""
    new = changed(tree, optimizer={"lr": 0.003, "weight_decay": 0.0})
    whole = config_of(tmp_path / "whole", changed(tree, train={"steps": 2}))
    trained(whole)
    trained(config_of(tmp_path / "whole", new), accept_change=True)
    run_dir = tmp_path / "run"
    config = config_of(run_dir, tree)
    segments = len(list((tmp_path / "whole" / "store" / "segments").glob("0*")))
    # The second step's commits: in its own backward, or in the forward of the third.
    interrupted(config, segments + 3)
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        trained(config_of(run_dir, new))
    with pytest.MonkeyPatch.context() as patch:
        stop_in_commit(patch, 2)
        with pytest.raises(Stopped):
            trained(config_of(run_dir, new), accept_change=True)
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):  # still inside the old step
        trained(config_of(run_dir, new))
    trained(config_of(run_dir, new), accept_change=True)
    same_end(run_dir, tmp_path / "whole")


@pytest.mark.proof
def test_a_budget_too_small_for_the_recorded_cut_is_refused_with_one_that_works(
    tmp_path: Path,
) -> None:
    """memory.host below what the segments need names a number, and that number goes on."""
    tree = changed(GPT, model={"kwargs": {"layers": 1, "width": 512}}, memory={"segment": "32MiB"})
    tree = changed(tree, train={"steps": 2})
    run_dir = tmp_path / "run"
    interrupted(config_of(run_dir, tree), 1)
    with pytest.raises(BudgetError, match=r"set memory\.host to") as refusal:
        trained(config_of(run_dir, changed(tree, memory={"host": "28MiB"})))
    found = re.search(r"set memory\.host to (\S+?),? ", str(refusal.value) + " ")
    assert found is not None
    number = found.group(1).rstrip(",")
    trained(config_of(run_dir, changed(tree, memory={"host": number})))
    assert len(losses(run_dir)) == 2


def test_a_second_process_is_refused_with_the_owner(tmp_path: Path) -> None:
    """Training a run that somebody trains names its pid and host; a fresh start too."""
    run_dir = tmp_path / "run"
    config = config_of(run_dir, GPT)
    interrupted(config, 1)
    with RunLock(run_dir):
        with pytest.raises(RunError, match=f"pid {os.getpid()}, host "):
            trained(config)
        with pytest.raises(RunError, match=f"pid {os.getpid()}, host "):
            trained(config, fresh=True)


@pytest.mark.proof
def test_a_start_waits_for_an_export_of_the_run_as_it_was(tmp_path: Path) -> None:
    """Nothing is deleted or written under it, not even by a fresh start."""
    run_dir, to = tmp_path / "run", tmp_path / "w.safetensors"
    config = config_of(run_dir, changed(GPT, train={"steps": 1}))
    trained(config)
    state = final_state(run_dir)
    request = ExportRequest(run_dir, lambda _: None)
    found = []

    def release() -> None:
        while b"ready -" not in (run_dir / "export.request").read_bytes():
            time.sleep(0.01)
        found.append(final_state(run_dir) == state)
        request.close()

    thread = threading.Thread(target=release)
    thread.start()
    trained(config, fresh=True)
    thread.join()
    assert found == [True]
    assert export_weights(run_dir, to, None) == 1


def test_lines_of_metrics_that_somebody_removed_are_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on, and says which steps its log does not have."""
    tree = {
        "model": {"python": "tests.support.models:frozen_mlp"},
        "data": {"python": "tests.support.datasets:vectors"},
    }
    run_dir = trained(config_of(tmp_path / "run", {**tree, "train": {"steps": 3}}))
    (run_dir / "metrics.jsonl").unlink()
    capsys.readouterr()
    trained(config_of(run_dir, {**tree, "train": {"steps": 5}}))
    assert "metrics.jsonl lacks the lines of steps 1 to 2" in capsys.readouterr().out
    assert [row["step"] for row in rows(run_dir)] == [3, 4, 5]


class Vanishing:
    """Vectors whose last number is 1, but for number 8, in the second step, where it is 0."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.full((16,), 0.1 * index)
        x[-1] = float(index != 8)
        return {"x": x}


def vanishing() -> Vanishing:
    return Vanishing()


class NoDerivativeAtZero(nn.Module):
    """Where the vector ends with 0, the gradients of the second half of `middle.weight` are NaN."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.middle = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        above, below = self.middle.weight.view(-1).chunk(2)
        root = (x[..., -1].amin() * below.square().sum()).sqrt()
        x = x.to(self.first.weight.dtype)  # what the root reads stays as the batch has it
        loss: Tensor = self.first(x).square().mean() + above.square().mean() + root
        return loss


def no_derivative_at_zero(width: int = 16) -> nn.Module:
    return NoDerivativeAtZero(width)


@pytest.mark.parametrize(
    ("committed", "dtype", "width"),
    matrix([(1, "1"), (3, "0")], ["float32", "bfloat16"], [16, 128], by_pairs=False),
)
def test_an_update_that_a_gradient_cuts_short_leaves_nothing(
    committed: tuple[int, str],
    dtype: str,
    width: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was updated before it is not committed: blocks, or parts that are written; twice."""
    monkeypatch.setattr(blocks, "CPU_BLOCK_ELEMENTS", 64)
    every, version = committed
    tree = {
        "model": {
            "python": "tests.whole.test_resume:no_derivative_at_zero",
            "kwargs": {"width": width},
            "dtype": dtype,
        },
        "data": {"python": "tests.whole.test_resume:vanishing", "shuffle": False},
        "memory": {"segment": "1MiB"},
        "store": {"commit": {"every": every, "lag": 1}, "chunk": "8KiB"},
        "train": {"steps": 4},
    }
    one_step = config_of(tmp_path / "one", changed(tree, train={"steps": 1}))
    trained(one_step)
    for _ in range(2):
        with pytest.raises(RunError, match=r"step 2: the gradient of middle\.weight \(segment 1\)"):
            trained(config_of(tmp_path / "run", tree))
        state = final_state(tmp_path / "run")
        assert {v for k, v in state.items() if "/" not in k} == {version}
        assert (state == final_state(tmp_path / "one")) == (every == 1)


@pytest.mark.proof
def test_export_refuses_a_run_whose_update_is_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clipped run killed between a step and its updates is finished before it is exported."""
    config = config_of(tmp_path / "run", CLIPPED)

    def flush(*_: Any) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(StepBuilder, "flush", flush)
        with pytest.raises(Stopped):
            trained(config)
    to = tmp_path / "w.safetensors"
    with pytest.raises(RunError, match="before the update of step 4"):
        export_weights(config.run.dir, to, None)
    trained(config)
    export_weights(config.run.dir, to, None)
