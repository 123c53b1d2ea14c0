"""Which of a machine's GPUs a rank has, and which ranks of a machine speak."""

from __future__ import annotations

from pathlib import Path

import pytest

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.program.ranks import Ranks
from swaptrain.ranks.launch import Launch, launched
from swaptrain.ranks.limits import config_of_rank
from tests.support.ranks import together
from tests.support.serving import Server
from tests.support.together import rank_config


def job(tmp_path: Path, device: str = "auto") -> Config:
    config = rank_config(tmp_path / "run", {"train": {"report_to": ["tensorboard"]}})
    return config.model_copy(update={"device": device})


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_a_rank_has_the_gpu_of_its_number_on_the_machine(
    device: str, rank: int, local_rank: int, tmp_path: Path
) -> None:
    """Of two machines with two GPUs each: not that of its number in the run."""
    launch = Launch(Ranks(rank, 4), local_rank, 2)
    own = config_of_rank(job(tmp_path, device), launch, gpus=2)
    assert own.device == f"cuda:{local_rank}"
    assert own.run.dir == tmp_path / "run" / f"rank-{rank:03d}"
    assert own.store.commit.unit == "step"
    assert bool(own.train.report_to) == (rank == 0)


@pytest.mark.parametrize(
    ("device", "gpus", "expected", "processes"),
    [
        *(("auto", 0, "auto", 2), ("cuda", 0, "cuda", 2), ("cpu", 2, "cpu", 2)),
        ("cuda:1", 2, "cuda:1", 1),  # alone on its machine
    ],
)
def test_a_device_that_is_said_stays(
    device: str, gpus: int, expected: str, processes: int, tmp_path: Path
) -> None:
    """And without a GPU what is asked for is left to who opens it."""
    launch = Launch(Ranks(0, 2), 0, processes)
    assert config_of_rank(job(tmp_path, device), launch, gpus=gpus).device == expected


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    """By the one that has none, with how many to start."""
    launch = Launch(Ranks(5, 6), 2, 3)
    with pytest.raises(ConfigError, match=r"has 2 GPUs, and local rank 2 has none: start 2 proc"):
        config_of_rank(job(tmp_path), launch, gpus=2)


def test_what_torchrun_says_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number in the run and that on its machine are two numbers."""
    said = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, number in said.items():
        monkeypatch.setenv(name, number)
    assert launched() == Launch(Ranks(3, 4), 1, 2)


@pytest.mark.proof
@pytest.mark.trains
def test_the_first_rank_of_each_machine_says_what_is_wrong_there(
    tmp_path: Path, server: Server
) -> None:
    """A budget that is too small on two machines is read on both."""
    config = rank_config(tmp_path / "run", {"memory": {"host": "26MiB", "segment": None}})
    ended = together(server, config, 2, each=1)
    assert set(ended.codes) <= {1, 2} and 2 in ended.codes, ended.said
    assert [said.count("set memory.host to") for said in ended.said] == [1, 1]
    assert not config.run.dir.exists()
