"""What several ranks cannot do together is refused by name, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

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


def test_a_rank_with_other_data(tmp_path: Path, server: Server) -> None:
    """Under the same config: a file that has other bytes on another machine."""
    ended = together(server, rank_config(tmp_path / "run", {}), 2, other_data=1)
    assert ended.codes == [2, 2], ended.said
    assert "different data" in ended.said[0]


@pytest.mark.trains
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
