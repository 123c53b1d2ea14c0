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
from tests.support.matrix import proof_but
from tests.support.ranks import together
from tests.support.runs import assert_same_bits, losses, reference, trained
from tests.support.serving import Server
from tests.support.together import rank_config
from tests.verbs.test_plan import LLAMA

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("between", proof_but([None, 4], None))
def test_a_run_of_two_ranks_as_one(
    between: int | None, tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """export, inspect and verify; then one process goes on, behind so many ranks `between`."""
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
    assert main(["eval", str(run), "eval.every=1"]) == 2  # whose model is code
    assert main(["plan", "--config", str(run.with_suffix(".yaml"))]) == 2
    assert "holds a run of 2 ranks: plan another one" in capsys.readouterr().err
    held_out = ["eval.every=1", "eval.batches=3", "eval.python=tests.support.datasets:tokens"]
    evaluate = ["eval", "--config", str(run.with_suffix(".yaml")), *held_out]
    assert main(evaluate) == 0
    said = _step_line(capsys)
    assert said.startswith("step 2 ")
    assert not (run / "joined").exists()

    if between is not None:
        _check_cuts(run, tmp_path / "cut", weights, two.parameters)
        three = reference(rank_config(run, {}), ranks=2)
        assert main(["reshard", str(run), "--ranks", str(between)]) == 0
        ended = together(server, rank_config(run, {}), between)
        assert ended.codes == [0] * between, ended.said
        # The third loss is that of the weights behind the second step.
        assert losses(run / f"rank-{between - 1:03d}")[-1] == three.losses[2]

    assert main(["reshard", str(run), "--ranks", "1"]) == 0
    assert not list(run.glob("rank-*"))
    assert main(evaluate) == 0
    assert (_step_line(capsys) == said) == (between is None)  # else of another step
    more = rank_config(run, {"train": {"steps": 4}})
    trained(load_config(run.with_suffix(".yaml")))
    assert len(losses(more.run.dir)) == 4
    assert main(["verify", str(run)]) == 0


def _step_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `eval` has said of a step, up to the seconds."""
    return capsys.readouterr().out.splitlines()[-1].rpartition(" | ")[0]


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


@pytest.mark.whole
def test_what_reads_a_run_of_ranks_says_what_it_says_of_one_process(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """eval and generate, before and behind a reshard to one; ranks that are missing are named."""
    run = tmp_path / "run"
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    data = {"python": None, "text": [str(text)], "tokenizer": "bytes", "sequence_length": 16}
    model = {"hf": {**LLAMA, "vocab_size": 320}}
    config = rank_config(run, {"model": model, "data": data, "train": {"steps": 2}})
    ended = together(server, config, 2)
    assert ended.codes == [0, 0], ended.said
    asked = [
        ["generate", str(run), "--prompt", "the", "--max-new-tokens", "5"],
        ["eval", str(run), "--data", str(text)],
    ]
    said = [_said(one, capsys) for one in asked]
    away = run / "rank-001"
    away.rename(tmp_path / "elsewhere")
    for verb in (["verify", str(run)], ["inspect", str(run)], asked[0]):
        assert main(verb) == 2
        assert "bring those of all machines together" in capsys.readouterr().err
    (tmp_path / "elsewhere").rename(away)
    assert main(["reshard", str(run), "--ranks", "1"]) == 0
    assert [_said(one, capsys) for one in asked] == said


def _said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a verb prints, without its seconds."""
    capsys.readouterr()
    assert main(arguments) == 0
    return capsys.readouterr().out.rpartition(" | ")[0]


@pytest.mark.whole
def test_a_report_has_all_ranks(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The charts of rank 0, said so, and a line of each."""
    run = tmp_path / "run"
    ended = together(server, rank_config(run, {}), 2)
    assert ended.codes == [0, 0], ended.said
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(run / "report.html")
    assert "the charts are of rank 0" in printed.err
    page = (run / "report.html").read_text()
    assert "rank 0, which is shown" in page and "rank 1" in page and "exchanged" in page
    again = together(server, rank_config(run, {"train": {"steps": 4}}), 2)
    assert again.codes == [0, 0], again.said
