"""Whatever ends a rank, all ranks end, and the same command goes on with the same bits."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.schema import Config
from swaptrain.store.paths import rank_dir
from tests.support.killing import final_state, metrics_key
from tests.support.ranks import together
from tests.support.serving import Server
from tests.support.together import rank_config

pytestmark = pytest.mark.trains

TREE: dict[str, Any] = {"data": {"micro_batches": 2}, "train": {"steps": 3}}
CLIPPED: dict[str, Any] = {**TREE, "optimizer": {"clip_norm": 0.3}}


def state(config: Config, ranks: int = 2) -> list[Any]:
    """Return what a finished run has on its disks, of all ranks."""
    dirs = [rank_dir(config.run.dir, rank) for rank in range(ranks)]
    return [(metrics_key(run_dir), final_state(run_dir)) for run_dir in dirs]


def whole(folder: Path, server: Server, tree: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """Return the end of a run that nothing interrupts, and the calls to the disk of its ranks."""
    config = rank_config(folder / "whole", tree)
    ended = together(server, config, 2, counts=True)
    assert ended.codes == [0, 0], ended.said
    assert None not in ended.counts
    return state(config), [count for count in ended.counts if count is not None]


def killed(folder: Path, server: Server, tree: dict[str, Any], kills: dict[int, int]) -> list[Any]:
    """Return the end of a run whose ranks die in calls of these numbers, and which goes on."""
    config = rank_config(folder / "-".join(f"{r}at{n}" for r, n in kills.items()), tree)
    ended = together(server, config, 2, kill={str(rank): at for rank, at in kills.items()})
    for rank, code in enumerate(ended.codes):
        if rank in kills:
            assert code in (-signal.SIGKILL, 1), ended.said
        else:
            assert code == 1, ended.said
            assert ended.said[rank].count("swaptrain: error") == 1, ended.said[rank]
            assert "Traceback" not in ended.said[rank]
    assert -signal.SIGKILL in ended.codes
    again = together(server, config, 2)
    assert again.codes == [0, 0], again.said
    return state(config)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.whole)])
def test_a_killed_rank_ends_the_others(rank: int, tmp_path: Path, server: Server) -> None:
    """In the middle of a commit; the others say so in one line."""
    expected, counts = whole(tmp_path, server, TREE)
    assert killed(tmp_path, server, TREE, {rank: counts[rank] * 4 // 5}) == expected


@pytest.mark.whole
@pytest.mark.parametrize("tree", [TREE, CLIPPED], ids=["fused", "clipped"])
def test_kills_anywhere(tree: dict[str, Any], tmp_path: Path, server: Server) -> None:
    """One rank, or both, at calls drawn from all of a run, creation and end included."""
    expected, counts = whole(tmp_path, server, tree)
    draws = random.Random(7)
    for number in range(14):
        ranks = ([0], [1], [0, 1])[number % 3]
        kills = {rank: draws.randrange(1, counts[rank]) for rank in ranks}
        assert killed(tmp_path, server, tree, kills) == expected, kills


@pytest.mark.whole
def test_a_rank_that_hangs_ends_the_others_in_time(tmp_path: Path, server: Server) -> None:
    """With a message that names the key; the run goes on."""
    tree = {**TREE, "distributed": {"timeout": 4}}
    config = rank_config(tmp_path / "run", tree)
    ended = together(server, config, 2, hang=[1, 30], end_hung=1)
    assert ended.codes[0] == 1
    assert "distributed.timeout" in ended.said[0]
    assert ended.said[0].count("swaptrain: error") == 1
    again = together(server, rank_config(tmp_path / "run", TREE), 2)
    assert again.codes == [0, 0], again.said


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.whole)]
)
def test_a_signal_to_one_rank_stops_all_behind_a_step(
    number: signal.Signals, tmp_path: Path, server: Server
) -> None:
    """All ranks end with the signal's code, behind the same step, which is committed."""
    config = rank_config(tmp_path / "run", {**TREE, "train": {"steps": 400}})
    metrics = rank_dir(config.run.dir, 0) / "metrics.jsonl"
    ended = together(server, config, 2, signals={"1": [number, str(metrics), 2]})
    assert ended.codes == [128 + number] * 2, ended.said
    assert "".join(ended.said).count("swaptrain: stopped after step") == 1, ended.said
    dirs = [rank_dir(config.run.dir, rank) for rank in range(2)]
    lines = [(run_dir / "metrics.jsonl").read_text().splitlines() for run_dir in dirs]
    steps = [json.loads(rows[-1])["step"] for rows in lines]
    assert steps[0] == steps[1] < 400
    more = rank_config(tmp_path / "run", {**TREE, "train": {"steps": steps[0] + 1}})
    again = together(server, more, 2)
    assert again.codes == [0, 0], again.said
    assert f"going on with step {steps[0] + 1}" in again.said[0]
