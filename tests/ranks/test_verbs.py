"""A run of several ranks is exported, looked at and divided anew as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from swaptrain.cli import main
from swaptrain.config.load import load_config
from swaptrain.store.paths import RunPaths, rank_dirs
from swaptrain.store.slots.slots import Slots
from tests.support.ranks import together
from tests.support.runs import assert_same_bits, losses, reference, trained
from tests.support.serving import Server
from tests.support.together import rank_config
from tests.verbs.test_plan import LLAMA

pytestmark = pytest.mark.trains


def test_a_run_of_two_ranks_as_one(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """export, inspect and verify; then one process goes on."""
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

    assert main(["reshard", str(run), "--ranks", "1"]) == 0
    assert not list(run.glob("rank-*"))
    assert main(evaluate) == 0
    assert _step_line(capsys) == said
    more = rank_config(run, {"train": {"steps": 4}})
    trained(load_config(run.with_suffix(".yaml")))
    assert len(losses(more.run.dir)) == 4
    assert main(["verify", str(run)]) == 0


def _step_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `eval` has said of a step, up to the seconds."""
    return capsys.readouterr().out.splitlines()[-1].rpartition(" | ")[0]


@pytest.mark.proof
def test_all_damaged_ranks_are_named(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong with one of them; of each the tree is read that it goes on from."""
    run = tmp_path / "run"
    ended = together(server, rank_config(run, {"train": {"steps": 2}}), 2)
    assert ended.codes == [0, 0], ended.said
    ranks = rank_dirs(run)
    chunks = [_chunk(rank) for rank in ranks]
    # As where a kill came before its own switch: the step of both is in its other tree.
    Slots(ranks[1], trees=True).switch_tree()
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count("is at step 2") == 2
    for chunk in chunks:
        content = bytearray(chunk.read_bytes())
        content[0] ^= 1
        chunk.write_bytes(content)
    assert main(["verify", str(run)]) == 3
    printed = capsys.readouterr()
    for rank, chunk in zip(ranks, chunks, strict=True):
        assert str(chunk) in printed.out
        assert f"1 thing is wrong in {rank}" in printed.err
    for rank in ranks:
        RunPaths(rank).root_record("a").write_text("{}")
        RunPaths(rank).root_record("b").write_text("{}")
    assert main(["verify", str(run)]) == 3
    printed = capsys.readouterr()
    assert all(f"wrong in {rank}" in printed.err for rank in ranks)
    assert "Traceback" not in printed.err


def _chunk(rank: Path) -> Path:
    """Return a file of the weights that a rank goes on from."""
    slot = min((RunPaths(rank).store / "segments").iterdir()).resolve()
    return slot / "weights" / "c" / "0"


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
    """Return what a verb prints, without its seconds, and those of a start that takes long."""
    capsys.readouterr()
    assert main(arguments) == 0
    said = capsys.readouterr().out.rpartition(" | ")[0]
    return "\n".join(line for line in said.splitlines() if not line.startswith("starting: "))


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
