"""`reshard`: a run goes on with other ranks, to the bits of plain PyTorch that does so too."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swaptrain.cli import main
from swaptrain.config.load import load_config
from swaptrain.ranks.layout import read_ranks
from swaptrain.reference import ReferenceResult
from swaptrain.store.access.containment import POOL
from swaptrain.store.access.lock import is_held_by_this_thread
from swaptrain.store.paths import RunPaths, rank_dir, rank_dirs
from swaptrain.store.slots.slot_disks import run_token
from swaptrain.verbs import reshard as reshard_module
from swaptrain.verbs.reshard import reshard_run
from tests.support.matrix import proof_but
from tests.support.ranks import together
from tests.support.runs import assert_same_bits, losses, norms, reference, trained, weights
from tests.support.serving import Server
from tests.support.together import ADAPTERS, rank_config

pytestmark = [pytest.mark.trains, pytest.mark.proof]

COUNTS = {1: 2, 2: 2, 3: 4, 4: 4, 5: 1, 6: 1}
"""Ranks of each step."""
DIVIDED: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, clipped": {"model": {"dtype": "bfloat16"}, "optimizer": {"clip_norm": 0.3}},
    "adapters": ADAPTERS,
    "state of 8 bits": {"optimizer": {"state": "8bit"}},
    "other disks": {"optimizer": {"clip_norm": 0.3}},
}


@pytest.mark.parametrize(
    "name",
    proof_but(
        DIVIDED,
        whole=[name for name in DIVIDED if name not in ("bfloat16, clipped", "other disks")],
    ),
)
def test_steps_of_other_ranks_have_the_bits_of_the_reference(
    name: str, tmp_path: Path, server: Server
) -> None:
    """Two steps of two ranks, of four and of one process: losses, norms, weights and moments."""
    run = tmp_path / "run"
    disks = [tmp_path / "x", tmp_path / "y"] if name == "other disks" else []
    tree = {**DIVIDED[name], "store": {"paths": [str(disk) for disk in disks] or None}}
    for last, count in ((2, 2), (4, 4), (6, 1)):
        config = rank_config(run, {**tree, "train": {"steps": last}})
        if last > 2:
            assert main(["reshard", str(run), "--ranks", str(count)]) == 0
            _assert_own_pools_alone(run, disks)
        if count > 1:
            ended = together(server, config, count)
            assert ended.codes == [0] * count, ended.said
        else:
            trained(load_config(run.with_suffix(".yaml")))
        directories = [rank_dir(run, rank) for rank in range(count)] if count > 1 else [run]
        _assert_same(directories, reference(config, ranks=COUNTS.__getitem__))
        _assert_own_pools_alone(run, disks)
        assert main(["verify", str(run)]) == 0


def _assert_same(directories: list[Path], plain: ReferenceResult) -> None:
    """Assert that losses, norms, weights and the optimizer's state are those of plain PyTorch."""
    found: dict[str, torch.Tensor] = {}
    for directory in directories:
        assert losses(directory) == plain.losses
        assert norms(directory) == plain.grad_norms
        found.update(weights(directory, state=True))
    moments = {f"optimizer.{name}": value for name, value in plain.state.items()}
    held = {n: v for n, v in found.items() if not n.startswith("optimizer.") or v.ndim}
    assert_same_bits(held, plain.parameters | moments)


def _assert_own_pools_alone(run: Path, disks: list[Path]) -> None:
    """Assert that other disks hold the slots of the run's directories, and nothing else."""
    directories = rank_dirs(run) or [run]
    tokens = {run_token(directory) for directory in directories}
    for disk in disks:
        names = {path.name for path in (disk / POOL).iterdir() if path.is_dir()}
        assert names <= tokens
    for link in (link for one in directories for link in RunPaths(one).slots.iterdir()):
        assert link.is_symlink() == bool(disks)
        assert link.is_dir()


class Begun:
    """A run of two ranks that ended behind its second step, and how to have it again."""

    def __init__(self, folder: Path, server: Server, tree: dict[str, Any]) -> None:
        """`tree` has `store.paths` below `folder`."""
        self.folder, self.run = folder, folder / "there" / "run"
        self.config = rank_config(self.run, {**tree, "train": {"steps": 2}})
        ended = together(server, self.config, 2)
        assert ended.codes == [0, 0], ended.said
        self.weights = reference(self.config, ranks=2).parameters
        shutil.rmtree(self.run.with_name("run-reference"))
        shutil.copytree(folder / "there", folder / "kept", symlinks=True)

    def again(self) -> Path:
        """Return the directory of the run as it was at its end."""
        shutil.rmtree(self.folder / "there")
        shutil.copytree(self.folder / "kept", self.folder / "there", symlinks=True)
        return self.run

    def assert_kept(self) -> None:
        """Assert that the run has the weights of the reference."""
        to = self.folder / "weights.safetensors"
        assert main(["export", str(self.run), "--to", str(to), "--dtype", "float32"]) == 0
        assert_same_bits(load_file(to), self.weights)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Begun:
    return Begun(tmp_path_factory.mktemp("begun"), server, {"data": {"micro_batches": 12}})


@pytest.fixture(scope="module")
def on_disks(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Begun:
    folder = tmp_path_factory.mktemp("disks")
    paths = [str(folder / "there" / name) for name in ("x", "y")]
    tree = {"data": {"micro_batches": 12}, "store": {"paths": paths}}
    return Begun(folder, server, tree)


class _Cut(BaseException):
    """In place of a kill."""


@contextmanager
def _calls(cut: int | None) -> Iterator[list[str]]:
    """Yield the names of the calls that change names; from number `cut` on each fails."""
    made: list[str] = []

    def counted(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def inner(*given: Any, **named: Any) -> None:
            if cut is not None and len(made) >= cut:
                raise _Cut
            made.append(name)
            call(*given, **named)

        return inner

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "unlink", "rmdir"):
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield made


@pytest.mark.parametrize(
    ("kind", "count", "nth"),
    proof_but(
        [*product(["begun", "on_disks"], [1, 3], [1]), ("on_disks", 1, 5)],
        # Each cut takes two reshards and an export: 20 s to 70 s for all of them.
        whole=product(["begun", "on_disks"], [1, 3], [1]),
    ),
)
def test_a_cut_is_completed(
    kind: str, count: int, nth: int, request: pytest.FixtureRequest
) -> None:
    """By the same command: before every nth of the names that move, and some of those deleted."""
    found: Begun = request.getfixturevalue(kind)
    run = found.again()
    disks = [run.with_name("x"), run.with_name("y")] if kind == "on_disks" else []
    with _calls(None) as made:
        reshard_run(run, count, lambda _: None)
    found.assert_kept()
    some = range(len(made) % 7, len(made), max(7, len(made) // 12))
    renames = [number for number, name in enumerate(made) if name == "rename"]
    assert len(renames) > 4 and len(made) > 100
    cuts = sorted({*some, *renames, *(n + 1 for n in renames), len(made) - 1})
    for cut in cuts[::-nth]:
        found.again()
        with pytest.raises(_Cut), _calls(cut):
            reshard_run(run, count, lambda _: None)
        assert main(["reshard", str(run), "--ranks", str(count)]) == 0
        names = {path.name for path in run.iterdir()}
        assert not {name for name in names if name.startswith("reshard")}
        assert len(rank_dirs(run)) == (0 if count == 1 else count)
        assert count == 1 or names == {path.name for path in rank_dirs(run)}
        _assert_own_pools_alone(run, disks)
        found.assert_kept()


def test_what_a_kill_left_of_the_old_ranks_goes(begun: Begun) -> None:
    """A kill while they were deleted leaves a directory in which there is still something."""
    run = begun.again()
    left = RunPaths(run).reshard_old / "rank-000" / "slots"
    left.mkdir(parents=True)
    (left / "something").touch()
    reshard_run(run, 3, lambda _: None)
    assert [path.name for path in sorted(run.iterdir())] == ["rank-000", "rank-001", "rank-002"]
    begun.assert_kept()


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (5, "data.micro_batches of this run is 12, which 5 ranks cannot divide"),
        (24, "would own no segment that is trained"),
        (2000, "would own no segment that is trained"),
    ],
)
def test_a_number_that_cannot_train_is_refused(
    count: int, words: str, begun: Begun, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit 2, before anything is changed; the message has the numbers that can."""
    run = begun.again()
    assert main(["reshard", str(run), "--ranks", str(count)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "micro_batches" not in words or "give one of 1, 2, 3, 4, 6, 12" in said
    assert [path.name for path in sorted(run.iterdir())] == ["rank-000", "rank-001"]
    begun.assert_kept()


def test_ranks_that_are_elsewhere_are_missed(
    begun: Begun, capsys: pytest.CaptureFixture[str]
) -> None:
    """One directory of a run of two ranks is no run of one process."""
    run = begun.again()
    rank_dir(run, 1).rename(run.with_name("elsewhere"))
    assert main(["reshard", str(run), "--ranks", "1"]) == 2
    assert "bring those of all machines together" in capsys.readouterr().err


def test_the_stores_are_read_under_their_locks(
    begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start between the look and the lock would train on, and its steps would be lost."""
    run = begun.again()
    looked: list[bool] = []

    def noted(run_dir: Path) -> Any:
        looked.extend(is_held_by_this_thread(directory) for directory in rank_dirs(run_dir))
        return read_ranks(run_dir)

    monkeypatch.setattr(reshard_module, "read_ranks", noted)
    reshard_run(run, 3, lambda _: None)
    assert looked == [True, True]


def test_where_there_is_no_room_nothing_is_left(
    on_disks: Begun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that cannot be linked are copied; a disk that is full then has the room it had."""
    run = on_disks.again()
    before = sorted(on_disks.folder.joinpath("there").rglob("*"))
    left = [40]

    def full(*_: Any) -> None:
        left[0] -= 1
        raise OSError(errno.EXDEV if left[0] else errno.ENOSPC, "no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", full)
        assert main(["reshard", str(run), "--ranks", "3"]) == 1
    assert "make room" in capsys.readouterr().err
    now = sorted(on_disks.folder.joinpath("there").rglob("*"))
    assert [path for path in now if path.name != "lock"] == [p for p in before if p.name != "lock"]
    on_disks.assert_kept()


def test_one_that_was_moved_is_completed_where_it_was(
    on_disks: Begun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it has on other disks goes by the name of the place, and would be lost."""
    run = on_disks.again()
    rename = os.rename

    def cut(source: Path, target: Path) -> None:
        rename(source, target)
        if target == RunPaths(run).reshard_ready:
            raise _Cut

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", cut)
        with pytest.raises(_Cut):
            reshard_run(run, 3, lambda _: None)
    moved = run.rename(run.with_name("moved"))
    assert main(["reshard", str(moved), "--ranks", "3"]) == 1
    assert "was moved while it was divided anew" in capsys.readouterr().err
    moved.rename(run)
    assert main(["reshard", str(run), "--ranks", "3"]) == 0
    on_disks.assert_kept()


def test_what_a_killed_verb_left_goes(begun: Begun) -> None:
    """Links of ranks that are no more would make a run of one process one that links outside."""
    run = begun.again()
    left = RunPaths(run).joined
    left.mkdir()
    (left / "store").symlink_to(rank_dir(run, 0) / "store")
    assert main(["reshard", str(run), "--ranks", "1"]) == 0
    assert not left.exists()
    begun.assert_kept()


def test_slots_of_another_run_are_no_place(
    on_disks: Begun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another run, which was moved away, may have left its own where a new rank's would lie."""
    run = on_disks.again()
    other = run.with_name("x") / POOL / run_token(rank_dir(run, 2)) / "0123abcd-000"
    other.mkdir(parents=True)
    assert main(["reshard", str(run), "--ranks", "3"]) == 1
    assert "holds slots of another run" in capsys.readouterr().err
    assert other.is_dir()
    on_disks.assert_kept()
