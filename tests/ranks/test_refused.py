"""What several ranks cannot do together is refused by name, before anything is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from swaptrain.cli import main
from swaptrain.errors import ConfigError
from swaptrain.program.ranks import Ranks
from swaptrain.ranks.launch import Launch
from swaptrain.ranks.limits import config_of_rank
from swaptrain.units import MIB
from tests.support.ranks import together
from tests.support.runs import config_of, trained
from tests.support.serving import Server
from tests.support.together import GPT, rank_config

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "indivisible": ({"data": {"micro_batches": 3}}, "2 ranks cannot divide"),
    "segments": ({"store": {"commit": {"unit": "segment"}}}, "store.commit.unit is segment"),
    "snapshots": ({"store": {"keep": {"every": 1}}}, "no snapshots yet"),
    "float16": ({"model": {"dtype": "float16"}}, "float16"),
    "batch norm": (
        {"model": {"python": "tests.support.models:convolutional"},
         "data": {"python": "tests.support.datasets:image_labels"}}, "changes the buffer",
    ),
    "one segment": ({"memory": {"segment": "64MiB"}}, "would own none"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_yet(name: str, tmp_path: Path, server: Server) -> None:
    """With exit 2, one message, and no directory left."""
    tree, words = REFUSED[name]
    config = rank_config(tmp_path / "run", tree)
    ended = together(server, config, 2)
    assert ended.codes == [2, 2], ended.said
    assert words in ended.said[0]
    assert "".join(ended.said).count("swaptrain: error") == 1, ended.said
    assert not config.run.dir.exists()


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("optimizer", "lr", 0.5, "rank 1: optimizer.lr is 0.5, and 0.01 in rank 0"),
        ("data", "kwargs", {"length": 39}, "data.kwargs"),
    ],
)
def test_a_rank_with_another_config(
    section: str, key: str, value: Any, words: str, tmp_path: Path, server: Server
) -> None:
    """It is named, with the key and both values."""
    config = rank_config(tmp_path / "run", {})
    path = config.run.dir.with_suffix(".yaml")
    tree = yaml.safe_load(path.read_text())
    tree[section][key] = value
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(tree))
    ended = together(server, [path, other], 2)
    assert ended.codes == [2, 2], ended.said
    assert words in ended.said[0]
    assert not config.run.dir.exists()


_OTHER = "rank 1: {} has other values in ids of item 13 than in rank 0"
_LENGTH = "another length or layout of its items than in rank 0"


@pytest.mark.proof
@pytest.mark.trains
@pytest.mark.parametrize(
    ("section", "lacks", "words"),
    [
        ("data", 0, _OTHER.format("data")),
        ("data", 2, _LENGTH),
        ("eval", 0, _OTHER.format("eval")),
        ("eval", 2, _LENGTH),
    ],
)
def test_a_rank_with_other_data(
    section: str, lacks: int, words: str, tmp_path: Path, server: Server
) -> None:
    """Under the same config: nothing is left of the start, and with mended data it trains."""
    mark = tmp_path / "differs"
    mark.touch()
    kwargs = {"mark": str(mark), "lacks": lacks}
    tree: dict[str, Any] = {"train": {"steps": 1}}
    if section == "eval":
        tree["eval"] = {"every": 1, "batches": "all"}
    tree[section] = {
        **tree.get(section, {}),
        "python": "tests.support.datasets:of_rank",
        "kwargs": kwargs,
    }
    config = rank_config(tmp_path / "run", tree)
    ended = together(server, config, 2)
    assert ended.codes == [2, 2], ended.said
    assert "different data" in ended.said[0]
    assert words in ended.said[0]
    assert "".join(ended.said).count("swaptrain: error") == 1, ended.said
    assert not config.run.dir.exists()
    mark.unlink()
    ended = together(server, config, 2)
    assert ended.codes == [0, 0], ended.said


@pytest.mark.parametrize("agent", [pytest.param(False, marks=pytest.mark.proof), True])
def test_what_one_rank_alone_cannot_do_is_said_by_all(
    agent: bool, tmp_path: Path, server: Server
) -> None:
    """Its directory, on a disk of its own machine, holds a run of one process: nobody waits."""
    config = rank_config(tmp_path / "run", {})
    path = config.run.dir.with_suffix(".yaml")
    there = tmp_path / "there"
    there.mkdir()
    (there / "config.yaml").touch()
    tree = yaml.safe_load(path.read_text())
    tree["run"]["dir"] = str(there)
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(tree))
    ended = together(server, [path, other], 2, agent=agent)
    assert ended.codes == [2, 2], ended.said
    assert f"rank 1: {there} holds a run of one process" in ended.said[0]
    assert "".join(ended.said).count("swaptrain: error") == 1, ended.said
    assert not config.run.dir.exists()


def test_ranks_do_not_share_a_gpu(tmp_path: Path) -> None:
    """One that the config names is that of one rank of a machine; `cuda` gives each its own."""
    config = rank_config(tmp_path / "run", {})
    one = config.model_copy(update={"device": "cuda:1"})
    with pytest.raises(ConfigError, match=r"device is cuda:1, which the 2 ranks of this machine"):
        config_of_rank(one, Launch(Ranks(1, 4), 1, 2), gpus=2)
    assert config_of_rank(one, Launch(Ranks(1, 2)), gpus=2).device == "cuda:1"
    each = config.model_copy(update={"device": "cuda"})
    found = [config_of_rank(each, Launch(Ranks(r, 2), r, 2), gpus=2).device for r in range(2)]
    assert found == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="local rank 2 has none"):
        config_of_rank(each, Launch(Ranks(2, 3), 2, 3), gpus=2)


@pytest.mark.proof
def test_ranks_need_room_on_their_disk_together(tmp_path: Path, server: Server) -> None:
    """Where each alone would fit: refused with the sum, before anything is written."""
    config = rank_config(tmp_path / "run", {})
    ended = together(server, config, 2, free_bytes=0)
    needed = re.search(r"needs ([\d.]+) MiB of disk there for ranks 0, 1", ended.said[0])
    assert needed is not None, ended.said
    ended = together(server, config, 2, free_bytes=int(0.75 * float(needed[1]) * MIB))
    assert ended.codes == [2, 2], ended.said
    assert "of disk there for ranks 0, 1" in ended.said[0]
    assert "".join(ended.said).count("swaptrain: error") == 1, ended.said
    assert not config.run.dir.exists()


@pytest.mark.proof
def test_another_number_of_ranks(tmp_path: Path, server: Server) -> None:
    """Two ranks cannot go on as three, nor as one process; nor one process as two ranks."""
    config = rank_config(tmp_path / "run", {"data": {"micro_batches": 6}, "train": {"steps": 1}})
    assert together(server, config, 2).codes == [0, 0]
    for count, words in ((3, "3 were started"), (1, "holds a run of 2 ranks")):
        ended = together(server, config, count)
        assert ended.codes == [2] * count, ended.said
        assert words in ended.said[0]
    alone = config_of(tmp_path / "alone", {**GPT, "train": {"steps": 1}})
    trained(alone)
    ended = together(server, alone, 2)
    assert ended.codes == [2, 2]
    assert "a run of one process" in ended.said[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--config", "job.yaml"],
        ["export", "run", "--to", "weights.safetensors"],
        ["verify", "run", "--repair"],
        ["compare", "--config", "job.yaml"],
        ["reshard", "run", "--ranks", "1"],
        ["--config", "no-such-file.yaml"],
        ["--config", "job.yaml", "--fressh"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_each_process_would_do_is_refused_once(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verb under torchrun, a command line that is wrong: the first of a machine says it."""
    for local_rank, count in ((0, 1), (1, 0)):
        said = {"RANK": 2 + local_rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank}
        for name, number in said.items():
            monkeypatch.setenv(name, str(number))
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.err.count("swaptrain: error") == count
        assert not printed.out
    if not arguments[0].startswith("-"):
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert main(arguments) == 2
        assert f"{arguments[0]} is done by one process" in capsys.readouterr().err


@pytest.mark.whole
@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"memory": {"host": "26MiB", "segment": None}}, "set memory.host to"),
        ({"data": {"python": "tests.support.nothing:here"}}, "tests.support.nothing"),
    ],
)
def test_what_is_wrong_in_all_ranks_is_said_once(
    tree: dict[str, Any], words: str, tmp_path: Path, server: Server
) -> None:
    """By the first rank of the machine; nothing is left behind."""
    config = rank_config(tmp_path / "run", tree)
    ended = together(server, config, 2, agent=True)
    assert ended.codes == [2, 2], ended.said
    assert words in ended.said[0]
    assert "".join(ended.said).count("swaptrain: error") == 1, ended.said
    assert not config.run.dir.exists()


@pytest.mark.whole
@pytest.mark.trains
@pytest.mark.parametrize("missing", [0, 1])
def test_a_directory_that_is_missing(missing: int, tmp_path: Path, server: Server) -> None:
    """Is named, with exit 3, and nothing is changed: once it is back the run goes on."""
    config = rank_config(tmp_path / "run", {"train": {"steps": 1}})
    assert together(server, config, 2).codes == [0, 0]
    gone, away = config.run.dir / f"rank-00{missing}", tmp_path / "away"
    gone.rename(away)
    more = rank_config(tmp_path / "run", {"train": {"steps": 2}})
    ended = together(server, more, 2)
    assert ended.codes == [3, 3], ended.said
    assert "".join(ended.said).count("swaptrain: error") == 1, ended.said
    assert f"rank {missing} has no store in {gone}" in ended.said[0]
    assert not gone.exists()
    away.rename(gone)
    ended = together(server, more, 2)
    assert ended.codes == [0, 0], ended.said
