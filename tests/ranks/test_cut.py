"""A wire between two machines that is cut: both ranks end, with a message each, and go on later."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from swaptrain.config.schema import Config
from swaptrain.store.paths import RunPaths, rank_dir
from tests.ranks.test_safe import TREE, state
from tests.support.launching import Started, Wire, started, wired
from tests.support.ranks import together
from tests.support.serving import Server
from tests.support.together import rank_config

# Two starts of processes that import torch, and the timeout: a minute and a half.
pytestmark = [pytest.mark.trains, pytest.mark.whole]

_TIMEOUT_S = 30
"""Longer than two starts may lie apart on a machine that is busy."""


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Yield two networks with a wire between them."""
    with ExitStack() as made:
        try:
            found = made.enter_context(wired())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"networks of its own (ip netns) are not permitted here: {error}")
        yield found


def _start(made: ExitStack, wire: Wire, config: Config, port: int) -> list[Started]:
    arguments = ["-m", "swaptrain", "--config", str(config.run.dir.with_suffix(".yaml"))]
    ranks = []
    for rank in range(2):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": wire.address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "wire",
        }
        log = config.run.dir.with_name(f"said-{port}-{rank}")
        command = wire.command(rank, arguments)
        ranks.append(made.enter_context(started(command, log, **environment)))
    return ranks


def test_a_wire_that_is_cut_ends_both_ranks(wire: Wire, tmp_path: Path, server: Server) -> None:
    """Nobody is told of it: each finds out by the timeout, and asks nobody for long."""
    tree = {**TREE, "train": {"steps": 40}, "distributed": {"timeout": _TIMEOUT_S}}
    whole = rank_config(tmp_path / "whole", tree)
    ended = together(server, whole, 2)
    assert ended.codes == [0, 0], ended.said

    config = rank_config(tmp_path / "run", tree)
    metrics = RunPaths(rank_dir(config.run.dir, 0)).metrics
    with ExitStack() as made:
        ranks = _start(made, wire, config, 29511)
        ranks[0].wait_for_steps(metrics, 3)
        wire.cut()
        for number, rank in enumerate(ranks):
            code, said = rank.end()
            assert code == 1, said
            assert said.count("swaptrain: error") == 1, said
            assert f"rank {number} waited for the others" in said
            assert "distributed.timeout" in said and "Traceback" not in said
    wire.join()
    with ExitStack() as made:
        for rank in _start(made, wire, config, 29512):
            code, said = rank.end()
            assert code == 0, said
    assert state(config) == state(whole)
