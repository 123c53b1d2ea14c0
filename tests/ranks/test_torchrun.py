"""Under torchrun itself: ranks that it starts again go on, whatever the dead ones have left."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from swaptrain.config.schema import Config
from swaptrain.store.paths import RunPaths, rank_dir
from tests.ranks.test_safe import TREE, state
from tests.support.launching import Started, started, steps_of
from tests.support.ranks import together
from tests.support.serving import Server
from tests.support.together import rank_config

# Three starts of torchrun's, each of which imports torch in two processes: 40 seconds.
pytestmark = [pytest.mark.trains, pytest.mark.whole]


def _start(made: ExitStack, config: Config, machines: int, arguments: list[str]) -> list[Started]:
    """Start torchrun for two ranks: once, or once on each of two machines, which are this one."""
    of_all = ["--standalone", "--nproc-per-node", "2"]
    if machines == 2:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        of_all = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    path = config.run.dir.with_suffix(".yaml")
    train = ["-m", "swaptrain", "--config", str(path), *arguments]
    found = []
    for machine in range(machines):
        own = [] if machines == 1 else ["--node-rank", str(machine)]
        torchrun = ["torch.distributed.run", *of_all, *own, "--max-restarts", "2"]
        log = path.with_name(f"said-{machine}")
        command = [sys.executable, "-m", *torchrun, *train]
        found.append(made.enter_context(started(command, log)))
    return found


@pytest.mark.parametrize(
    ("machines", "kills", "arguments"),
    [
        (1, (0, 1), []),
        (1, (1, 0), []),
        (1, (0, 1), ["--fresh"]),
        (2, (0, 1), []),
        (2, (1, 0), ["--fresh"]),
    ],
)
def test_ranks_that_are_started_again_go_on(
    machines: int, kills: tuple[int, int], arguments: list[str], tmp_path: Path, server: Server
) -> None:
    """Each survivor says why it ends, of this attempt; with --fresh the run is begun anew once."""
    tree = {**TREE, "train": {"steps": 40}}
    whole = rank_config(tmp_path / "whole", tree)
    ended = together(server, whole, 2)
    assert ended.codes == [0, 0], ended.said

    config = rank_config(tmp_path / "run", tree)
    metrics = RunPaths(rank_dir(config.run.dir, 0)).metrics
    with ExitStack() as made:
        running = _start(made, config, machines, arguments)
        for rank in kills:
            running[0].wait_for_steps(metrics, steps_of(metrics) + 3)
            lock = RunPaths(rank_dir(config.run.dir, rank)).lock.read_text()
            found = re.match(r"pid (\d+)", lock)
            assert found is not None, lock
            os.kill(int(found[1]), signal.SIGKILL)
        ends = [one.end() for one in running]
    said = "".join(text for _, text in ends)
    assert [code for code, _ in ends] == [0] * machines, said
    # The signal with which torchrun ends the other ranks may come before they find out.
    assert said.count("swaptrain: error") + said.count("swaptrain: stopped") == 2, said
    assert "since rank" not in said
    assert len(re.findall(r"going on with step \d+ of 40", said)) == 2, said
    assert said.count("the run goes on and is not deleted once more") == 2 * len(arguments)
    assert state(config) == state(whole)
