"""A run of several ranks is exported, looked at and divided anew as one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from swaptrain.cli import main
from swaptrain.config.load import load_config
from swaptrain.verbs.reshard import reshard_run
from tests.support.ranks import together
from tests.support.runs import assert_same_bits, losses, reference, trained
from tests.support.serving import Server
from tests.support.together import rank_config

pytestmark = pytest.mark.trains


def test_a_run_of_two_ranks_as_one(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """export, inspect and verify; then four ranks go on, and then one process."""
    run = tmp_path / "run"
    config = rank_config(run, {"train": {"steps": 2}})
    ended = together(server, config, 2)
    assert ended.codes == [0, 0], ended.said
    two = reference(config, ranks=2)

    weights = tmp_path / "weights.safetensors"
    assert main(["export", str(run), "--to", str(weights), "--dtype", "float32"]) == 0
    assert_same_bits(load_file(weights), two.parameters)
    capsys.readouterr()
    assert main(["inspect", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "step 2" in shown
    assert str(run) in shown
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count("nothing is wrong") == 2
    assert main(["export", str(run / "rank-001"), "--to", str(weights)]) == 2
    assert "give the directory of the run" in capsys.readouterr().err
    assert main(["eval", str(run), "eval.every=1"]) == 2
    assert not (run / "joined").exists()

    _check_cuts(run, tmp_path / "cut", weights, two.parameters)

    three = reference(rank_config(run, {}), ranks=2)
    assert main(["reshard", str(run), "--ranks", "4"]) == 0
    ended = together(server, rank_config(run, {}), 4)
    assert ended.codes == [0] * 4, ended.said
    # The third loss is that of the weights behind the second step.
    assert losses(run / "rank-003")[-1] == three.losses[2]

    assert main(["reshard", str(run), "--ranks", "1"]) == 0
    assert not list(run.glob("rank-*"))
    more = rank_config(run, {"train": {"steps": 4}})
    trained(load_config(run.with_suffix(".yaml")))
    assert len(losses(more.run.dir)) == 4
    assert main(["verify", str(run)]) == 0


def _check_cuts(run: Path, there: Path, weights: Path, expected: dict[str, Any]) -> None:
    """A reshard that is cut short at any name that it moves is completed by the next one."""
    rename, at = os.rename, 0
    while True:
        at += 1
        shutil.copytree(run, there, symlinks=True)
        left = [at]

        def counted(*names: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            rename(*names)

        cut = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "rename", counted)
            try:
                reshard_run(there, 3, lambda _: None)
            except KeyboardInterrupt:
                cut = True
        if cut:
            reshard_run(there, 3, lambda _: None)
        assert sorted(path.name for path in there.iterdir()) == [
            "rank-000", "rank-001", "rank-002",
        ]  # fmt: skip
        assert main(["export", str(there), "--to", str(weights), "--dtype", "float32"]) == 0
        assert_same_bits(load_file(weights), expected)
        shutil.rmtree(there)
        if not cut:
            return
