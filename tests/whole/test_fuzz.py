"""Spoilt files of a run: every verb refuses them with a message, or gives the right result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swaptrain.cli import main
from swaptrain.errors import DamagedStoreError, SwaptrainError
from swaptrain.run.os_failures import out_of_memory
from swaptrain.store.access.containment import check_contained
from swaptrain.store.disk import durable_files as files
from swaptrain.store.slots.slot import Slot
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.inspect import inspect_run
from swaptrain.verbs.inspection.tensor import read_tensors
from tests.support.mutations import metadata_files, mutate_bytes, mutate_tree, rewrite
from tests.support.stores import MLP, STATES, Job, small_run

pytestmark = pytest.mark.trains

EXAMPLES = int(os.environ.get("SWAPTRAIN_FUZZ_EXAMPLES", "0"))
"""How many examples the whole of it runs; 0: 1000."""
FEW = ["inside a step", "update pending", "coded, finished", "coded, no master"]
SOME = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
MANY = settings(SOME, max_examples=EXAMPLES or 1000, derandomize=False, database=None)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Flush nothing: no machine dies in these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "syncfs", lambda _: None)
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(os, "fdatasync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """Return what gives the small run of a state, which is made once."""
    made: dict[str, Job] = {}

    def job(state: str) -> Job:
        if state not in made:
            made[state] = small_run(tmp_path_factory.mktemp(state.replace(" ", "-")), state)
        return made[state]

    return job


def attempt(what: str, action: Callable[[], Any]) -> Any:
    """Do what a verb does; return its result, or the error that the user would see."""
    try:
        result = action()
    except SwaptrainError as error:
        message = str(error)
        assert error.exit_code in (1, 2, 3) and message, message
        assert all(letter.isprintable() or letter == "\n" for letter in message), repr(message)
        event(f"{what}: exit {error.exit_code}")
        return error
    event(f"{what}: done")
    return result


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether all tensors have the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def open_by_all(job: Job, run: Path) -> Any:
    """Look at a run, export it and go on with it; return how going on ended."""
    attempt("inspect", lambda: (check_contained(run), inspect_run(run)))
    to = run / "x.safetensors"
    attempt("export", lambda: (check_contained(run), export_weights(run, to, None, state=True)))
    attempt("tensors", lambda: (check_contained(run), read_tensors(run, job.largest)))
    return attempt("train", job.resume)


def spoil_bytes(jobs: Callable[[str], Job], state: str, data: st.DataObject) -> None:
    job = jobs(state)
    run = job.copy()
    among = metadata_files(run)
    if data.draw(st.booleans()):  # chunks as well, of which there are many
        found = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
        among = [path.relative_to(run) for path in found]
    path = run / data.draw(st.sampled_from(among))
    if data.draw(st.integers(0, 9)) == 0:
        path.unlink()
    else:
        path.write_bytes(mutate_bytes(path.read_bytes(), data.draw))
    ended = open_by_all(job, run)
    if not isinstance(ended, SwaptrainError):
        # A finished run reads its state no more; who takes it out finds what is damaged.
        found = attempt("weights", job.weights)
        assert isinstance(found, DamagedStoreError) or same(found, job.expected), path


def spoil_values(jobs: Callable[[str], Job], state: str, data: st.DataObject) -> None:
    job = jobs(state)
    run = job.copy()
    names = [p for p in metadata_files(run) if p.suffix in {".json", ".jsonl"}]
    # Records and the root first: there are few of them among many arrays.
    records = [p for p in names if p.parent.name != "c" and "spill" not in p.parts]
    path = run / data.draw(st.sampled_from(records) | st.sampled_from(names))
    for _ in range(data.draw(st.integers(1, 3))):
        rewrite(path, data.draw)
    open_by_all(job, run)


CONFIG: dict[str, Any] = {
    **MLP,
    "data": {"python": "tests.support.datasets:vectors", "micro_batch": 2, "micro_batches": 3},
    "optimizer": {
        "name": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.95], "clip_norm": None,
        "schedule": {"name": "cosine", "warmup_steps": 2},
    },
    "eval": {"python": "tests.support.datasets:vectors", "every": 2, "batches": 2},
    "train": {"steps": 5, "seed": 3, "threads": 1},
    "store": {
        "paths": None, "chunk": "64KiB", "commit": {"every": 1, "lag": None},
        "keep": {"every": 2, "last": 1},
    },
    "device": "cpu",
}  # fmt: skip


def spoil_config(tmp_path: Path, data: st.DataObject) -> None:
    """Plan by a config in which a value or two are others; nothing may be written by that."""
    tree = {**CONFIG, "run": {"dir": str(tmp_path / "run")}}
    for _ in range(data.draw(st.integers(1, 2))):
        tree = mutate_tree(tree, data.draw)
    train = tree.get("train") if isinstance(tree, dict) else None
    threads = train.get("threads") if isinstance(train, dict) else 1
    assume(threads in (1, None))  # thousands of threads are somebody's wish, and take long
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8", errors="surrogatepass")
    code = main(["plan", "--config", str(path)])
    event(f"plan: exit {code}")
    assert code in (0, 2)
    assert [found.name for found in tmp_path.iterdir()] == ["job.yaml"]


@settings(SOME, max_examples=8)
@given(data=st.data())
def test_spoilt_configs(tmp_path: Path, data: st.DataObject) -> None:
    """A config with other values is refused or planned, and never the cause of a traceback."""
    spoil_config(tmp_path, data)


@pytest.mark.whole
@pytest.mark.timeout(7200)
@MANY
@given(data=st.data())
def test_many_spoilt_configs(tmp_path: Path, data: st.DataObject) -> None:
    """The same a thousand times, and otherwise each time."""
    spoil_config(tmp_path, data)


@pytest.mark.proof
@SOME
@given(state=st.sampled_from(FEW), data=st.data())
def test_spoilt_bytes(jobs: Callable[[str], Job], state: str, data: st.DataObject) -> None:
    """Bytes changed by accident: an error with a message, or the same bits in the end."""
    spoil_bytes(jobs, state, data)


@pytest.mark.proof
@SOME
@given(state=st.sampled_from(FEW), data=st.data())
def test_spoilt_values(jobs: Callable[[str], Job], state: str, data: st.DataObject) -> None:
    """Values changed by somebody who makes the checksums right: never another error than ours."""
    spoil_values(jobs, state, data)


@pytest.mark.whole
@pytest.mark.timeout(7200)
@MANY
@given(state=st.sampled_from(sorted(STATES)), data=st.data())
def test_many_spoilt_bytes(jobs: Callable[[str], Job], state: str, data: st.DataObject) -> None:
    """The same a thousand times, and otherwise each time."""
    spoil_bytes(jobs, state, data)


@pytest.mark.whole
@pytest.mark.timeout(7200)
@MANY
@given(state=st.sampled_from(sorted(STATES)), data=st.data())
def test_many_spoilt_values(jobs: Callable[[str], Job], state: str, data: st.DataObject) -> None:
    """The same a thousand times, and otherwise each time."""
    spoil_values(jobs, state, data)


def test_a_mixture_of_steps_is_refused(jobs: Callable[[str], Job]) -> None:
    """The command ended in a loop over the error's causes: it was its own."""
    job = jobs("finished")
    run = job.copy()
    (run / "spill").mkdir()
    slot = Slot((run / "store" / "segments" / "001").resolve())
    slot.write_record({**slot.read_record(1).attributes(), "version": 4096})
    with pytest.raises(DamagedStoreError, match="mixture"):
        job.resume()
    assert out_of_memory(MemoryError())
    error = ValueError()
    error.__cause__ = error
    assert not out_of_memory(error)
