"""`distributed.dirs`: each rank's directory on a disk of its own, and the run is what it was."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.program.ranks import Ranks
from swaptrain.ranks.launch import Launch
from swaptrain.ranks.own_disk import RANKS, OwnDisk, check_rank_links
from swaptrain.store.paths import rank_links
from swaptrain.store.slots.slot_disks import run_token
from swaptrain.verbs.train import train
from tests.support.ranks import together
from tests.support.runs import assert_same_bits, config_of, reference
from tests.support.serving import Server
from tests.support.together import GPT, assert_same_as, rank_config

pytestmark = pytest.mark.trains


def job(tmp_path: Path, steps: int = 2, disks: str = "xy", run: str = "run") -> Config:
    dirs = [str(tmp_path / name) for name in disks]
    tree = {"train": {"steps": steps}, "distributed": {"dirs": dirs or None}}
    return rank_config(tmp_path / run, tree)


def own(config: Config, rank: int) -> OwnDisk:
    """Return that of a rank of two on one machine."""
    return OwnDisk(config, Launch(Ranks(rank, 2), rank, 2))


def place(tmp_path: Path, disk: str, rank: int, run: str = "run") -> Path:
    return tmp_path / disk / RANKS / run_token(tmp_path / run) / f"rank-{rank:03d}"


@pytest.mark.proof
def test_a_run_on_two_disks(
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It goes on, is exported and verified, loses no disk in silence, and is divided anew."""
    run, y = tmp_path / "run", tmp_path / "y"
    for steps in (2, 4):
        config = job(tmp_path, steps)
        ended = together(server, config, 2)
        assert ended.codes == [0, 0], ended.said
        assert_same_as(config, reference(config, ranks=2), ranks=2)
    places = [place(tmp_path, "x", 0), place(tmp_path, "y", 1)]
    assert [link.readlink() for link in sorted(run.iterdir())] == places

    exported = tmp_path / "weights.safetensors"
    export = ["export", str(run), "--to", str(exported), "--dtype", "float32"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", _other_device)
        assert main(export) == 0
    assert_same_bits(load_file(exported), reference(config, ranks=2).parameters)
    assert main(["verify", str(run)]) == 0
    assert main(["report", str(run)]) == 0
    assert main(["export", str(places[1]), "--to", str(exported)]) == 2

    capsys.readouterr()
    y.rename(tmp_path / "unplugged")
    for verb in ("verify", "inspect", "report"):
        assert main([verb, str(run)]) == 2
        assert "which is not there: mount its disk" in capsys.readouterr().err
    for disks in ("xy", ""):
        for arguments in ((), ("--fresh",)):
            ended = together(server, job(tmp_path, 6, disks), 2, arguments=arguments)
            assert ended.codes == [2, 2], ended.said
            assert f"leads to {places[1]}, which is not there" in ended.said[0]
    assert not y.exists()
    (tmp_path / "x").rename(tmp_path / "unplugged-too")
    held_out = ["eval.every=1", "eval.python=tests.support.datasets:tokens"]
    assert main(["eval", "--config", str(run.with_suffix(".yaml")), *held_out]) == 2
    assert "mount its disk" in capsys.readouterr().err
    (tmp_path / "unplugged-too").rename(tmp_path / "x")
    (tmp_path / "unplugged").rename(y)

    assert main(["reshard", str(run), "--ranks", "4"]) == 2
    assert f"mv -T {places[0]} {run / 'rank-000'}.new && rm " in capsys.readouterr().err
    for link in rank_links(run):
        there = link.readlink()
        link.unlink()
        there.rename(link)
    assert main(["reshard", str(run), "--ranks", "4"]) == 0
    ended = together(server, job(tmp_path, 6, "xyxy"), 4)
    assert ended.codes == [2, 2, 2, 2]
    assert "lies in the run directory, and distributed.dirs says" in ended.said[0]
    ended = together(server, job(tmp_path, 6, ""), 4)
    assert ended.codes == [0, 0, 0, 0], ended.said


def _other_device(*_: Any, **__: Any) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.proof
def test_a_refused_start_leaves_nothing(tmp_path: Path, server: Server) -> None:
    """Where one rank finds that memory does not suffice, when the links are there."""
    (tmp_path / "x").mkdir()
    config = job(tmp_path)
    paths = [config.run.dir.with_suffix(".yaml")] * 2
    ended = together(server, paths, 2, arguments=("memory.host=1MiB",), agent=True)
    assert ended.codes == [2, 2], ended.said
    assert (tmp_path / "x").is_dir() and not list((tmp_path / "x").iterdir())
    assert not (tmp_path / "y").exists() and not config.run.dir.exists()


def test_a_directory_for_each_rank(tmp_path: Path) -> None:
    """One too few is refused, and so is a place that is not where the rank is."""
    with pytest.raises(ConfigError, match="1 directory for the 2 ranks of this machine, and none"):
        own(job(tmp_path, disks="x"), 1).make()
    first, link = own(job(tmp_path), 1), tmp_path / "run" / "rank-001"
    first.make()
    assert link.resolve() == place(tmp_path, "y", 1)
    own(job(tmp_path), 1).make()
    own(job(tmp_path, disks=""), 1).make()  # whoever leaves it out finds the rank all the same
    with pytest.raises(ConfigError, match=f"leads to {place(tmp_path, 'y', 1)}, and distributed"):
        own(job(tmp_path, disks="xz"), 1).make()
    first.withdraw()
    assert not (tmp_path / "y").exists() and not link.is_symlink()
    own(job(tmp_path), 1).make()
    (link / "lock").touch()
    first.withdraw()
    assert link.is_dir(), "a run that has begun stays"


def test_what_is_in_the_way_is_refused(tmp_path: Path) -> None:
    """A directory in the run, one that no link names, a file, a parent that is not there."""
    link = tmp_path / "run" / "rank-001"
    link.mkdir(parents=True)
    with pytest.raises(ConfigError, match="lies in the run directory, and distributed"):
        own(job(tmp_path), 1).make()
    same = [str(tmp_path / "x"), str(tmp_path / "run")]
    own(rank_config(tmp_path / "run", {"distributed": {"dirs": same}}), 1).make()
    link.rmdir()
    own(rank_config(tmp_path / "run", {"distributed": {"dirs": same}}), 1).make()
    assert not link.is_symlink(), "it is where it would be without"
    place(tmp_path, "y", 1).mkdir(parents=True)
    (place(tmp_path, "y", 1) / "lock").touch()
    with pytest.raises(ConfigError, match=r"holds something, .* if it is this run's, ln -s"):
        own(job(tmp_path), 1).make()
    shutil.rmtree(tmp_path / "y")
    (tmp_path / "y").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        own(job(tmp_path), 1).make()
    with pytest.raises(ConfigError, match="not-there is no directory: mount its disk, or make it"):
        own(job(tmp_path, disks=["x", "not-there/y"]), 1).make()  # type: ignore[arg-type]


def test_links_that_this_run_has_not_made_are_not_followed(tmp_path: Path) -> None:
    """Of a copy, of a run that was moved, of somebody else."""
    own(job(tmp_path), 0).make()
    check_rank_links(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    with pytest.raises(ConfigError, match="which is not where this run has a rank"):
        own(job(tmp_path, run="copy"), 0).make()
    assert main(["verify", str(tmp_path / "copy")]) == 2
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="was moved, give the folder that name") as refused:
        check_rank_links(tmp_path / "moved")
    here, there = (place(tmp_path, "x", 0, run).parent for run in ("run", "moved"))
    here.rename(there)
    command = str(refused.value).rpartition("say so: ")[2].replace("DIR", str(tmp_path / "x"))
    assert os.system(command) == 0
    check_rank_links(tmp_path / "moved")
    hostile = tmp_path / "run" / "rank-000"
    hostile.parent.mkdir()
    hostile.symlink_to(place(tmp_path, "x", 0, "moved"))
    for arguments in (["reshard", "--ranks", "1"], ["export", "--to", str(tmp_path / "w")]):
        assert main([arguments[0], str(hostile.parent), *arguments[1:]]) == 2


@pytest.mark.parametrize("text", ["{there}/../rank-000", "rank-000", "{x}/elsewhere"])
def test_a_link_has_one_form(text: str, tmp_path: Path) -> None:
    """No steps upwards, nothing relative, and no link on the way."""
    own(job(tmp_path), 0).make()
    link, there = tmp_path / "run" / "rank-000", place(tmp_path, "x", 0)
    link.unlink()
    link.symlink_to(text.format(there=there, x=tmp_path / "x"))
    with pytest.raises(ConfigError, match="which is not where this run has a rank"):
        own(job(tmp_path), 0).make()
    link.unlink()
    there.parent.rename(tmp_path / "elsewhere")
    there.parent.symlink_to(tmp_path / "elsewhere")
    link.symlink_to(there)
    with pytest.raises(ConfigError, match="is a link, and a rank is reached by the one in the run"):
        own(job(tmp_path), 0).make()
    link.unlink()
    with pytest.raises(ConfigError, match=f"itself there, which is {tmp_path}/elsewhere"):
        own(job(tmp_path), 0).make()


def test_a_relative_directory_is_the_same_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step upwards too, as one gives it in the directory of the config."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tree = {"distributed": {"dirs": ["../x", "../y"]}}
    for _ in range(2):
        own(rank_config(tmp_path / "run", tree), 1).make()
        check_rank_links(tmp_path / "run")
    assert (tmp_path / "run" / "rank-001").readlink() == place(tmp_path, "y", 1)


def test_ranks_of_other_machines_may_be_out_of_sight(tmp_path: Path) -> None:
    """In a run directory that both share: each machine looks at the links of its own ranks."""
    for rank in range(4):
        config = job(tmp_path, disks="xy")
        OwnDisk(config, Launch(Ranks(rank, 4), rank % 2, 2)).make()
    (tmp_path / "y").rename(tmp_path / "of the other machine")
    OwnDisk(job(tmp_path), Launch(Ranks(2, 4), 0, 2)).make()
    with pytest.raises(ConfigError, match="mount its disk"):
        OwnDisk(job(tmp_path), Launch(Ranks(3, 4), 1, 2)).make()


@pytest.mark.parametrize("name", ["joined", "reshard.moving", "reshard.old"])
def test_no_link_in_the_place_of_what_all_ranks_have(name: str, tmp_path: Path) -> None:
    """What somebody else's run leads to is neither read nor deleted."""
    (tmp_path / "run" / "rank-000").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine").touch()
    (tmp_path / "run" / name).symlink_to(tmp_path / "home")
    for arguments in (["inspect"], ["reshard", "--ranks", "1"], ["verify"]):
        assert main([arguments[0], str(tmp_path / "run"), *arguments[1:]]) == 3
    assert (tmp_path / "home" / "mine").exists()


def test_slots_on_paths_of_the_store_stay(tmp_path: Path) -> None:
    """Whose names have the path of the rank in them: its directory is not moved."""
    slot = tmp_path / "run" / "rank-000" / "slots" / "0123abcd-000"
    slot.parent.mkdir(parents=True)
    slot.symlink_to(tmp_path / "anywhere")
    with pytest.raises(
        ConfigError, match=r"has slots on store\.paths: leave distributed\.dirs out"
    ):
        own(job(tmp_path), 0).make()


def test_one_process_does_not_pass_them_over(tmp_path: Path) -> None:
    """It would fill another disk than the config names."""
    config = job(tmp_path)
    with pytest.raises(ConfigError, match=r"this is one process, which writes to run\.dir alone"):
        train(config)
    assert not config.run.dir.exists()


def test_not_beside_paths_of_the_store(tmp_path: Path) -> None:
    """Which all ranks share."""
    tree = {**GPT, "distributed": {"dirs": ["x"]}, "store": {"paths": ["y"]}}
    with pytest.raises(ConfigError, match="leave one of them out"):
        config_of(tmp_path / "run", tree)
