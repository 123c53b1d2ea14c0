"""`eval`: the loss that training would write behind the same step; the run stays as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, DamagedStoreError, RunError, StoppedBySignal
from swaptrain.program.instructions import Instruction, Operation
from swaptrain.store.access.lock import RunLock
from swaptrain.store.paths import RunPaths
from swaptrain.verbs.evaluate import evaluate_run, with_held_out
from swaptrain.verbs.train import train
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, rows, trained, weights
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains

TEXT = {"python": "tests.support.datasets:text"}
SETTINGS: dict[str, dict[str, Any]] = {
    "fused": {},
    "clipped": {"optimizer": {"clip_norm": 0.3}},
    "trees": {"store": {"commit": {"every": 2}}},
    "bfloat16": {"model": {"hf": LLAMA, "dtype": "bfloat16"}},
    "adapters": {"lora": {"r": 2, "target_modules": ["q_proj"]}},
}


def job(run_dir: Path, settings: str = "fused", steps: int = 2, **sections: Any) -> Config:
    tree = {"model": {"hf": LLAMA}, "data": TEXT, "eval": {**TEXT, "every": 1, "batches": 3}}
    tree |= {"memory": {"segment": "64KiB"}, "train": {"steps": steps}}
    return config_of(run_dir, {**tree, **SETTINGS[settings], **sections})


def kept(run_dir: Path) -> dict[str, bytes]:
    """Return what a run keeps: all files but the lock and what is scratch."""
    names = [p for p in run_dir.rglob("*") if p.is_file() and p.name != "lock"]
    return {str(p.relative_to(run_dir)): p.read_bytes() for p in names if "data" not in p.parts}


@pytest.mark.parametrize(
    "settings", proof_but(SETTINGS, "fused", whole=("clipped", "bfloat16", "adapters", "trees"))
)
def test_it_is_the_loss_of_the_training(settings: str, tmp_path: Path) -> None:
    """Bit for bit, of a run without held-out data too; afterwards nothing is another."""
    watched = rows(trained(job(tmp_path / "watched", settings)))
    config = job(tmp_path / "run", settings)
    blind = trained(job(tmp_path / "run", settings, eval=None))
    before = kept(blind)
    found = evaluate_run(config)
    assert (found.step, found.found.loss) == (2, watched[-1]["eval_loss"])
    assert evaluate_run(config).found == found.found
    assert kept(blind) == before
    whole = trained(job(tmp_path / "watched", settings, steps=4))
    assert_same_bits(
        weights(trained(job(tmp_path / "run", settings, steps=4, eval=None))), weights(whole)
    )


def test_what_a_step_writes_is_counted_beside_an_evaluation(tmp_path: Path) -> None:
    """That waits for it: in the line of the next step, as without one.

    How many values are spilled before they are used differs by some per mille from run to run,
    and what the last step leaves to be written is in no line.
    """
    watched = rows(trained(job(tmp_path / "watched", steps=4)))
    blind = rows(trained(job(tmp_path / "blind", steps=4, eval=None)))
    assert min(row["write_bytes"] for row in watched[1:]) > 0
    written, others = (sum(row["write_bytes"] for row in found) for found in (watched, blind))
    assert others > 0 and 0.9 * others <= written <= 1.1 * others


@pytest.mark.proof
def test_a_run_of_no_steps_has_a_loss(tmp_path: Path) -> None:
    """That of what it begins from."""
    config = job(tmp_path / "run", steps=0)
    trained(config)
    found = evaluate_run(config)
    assert found.step == 0 and found.found.loss == pytest.approx(4.16, abs=0.3)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on the standard output; keys set other data over the config."""
    trained(job(tmp_path / "run", eval=None))
    (tmp_path / "job.yaml").write_text((tmp_path / "run" / "config.yaml").read_text())
    capsys.readouterr()
    command = ["eval", "--config", str(tmp_path / "job.yaml")]
    assert main(command) == 2
    assert "there is no held-out data" in capsys.readouterr().err
    keys = ["eval.python=tests.support.datasets:text", "eval.every=1", "eval.batches=2"]
    assert main(["eval", str(tmp_path / "run"), *keys]) == 2
    said = capsys.readouterr().err
    assert "data.python of" in said and "code is not taken from a run directory" in said
    assert main(["eval", *keys]) == 2
    assert "give one of RUN and --config FILE" in capsys.readouterr().err
    assert main([*command, "--data", "none.txt"]) == 2
    assert "--data none.txt: there is no such file" in capsys.readouterr().err
    assert main([*command, *keys]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("step 2 | eval ") and "perplexity" in out[-1]
    assert "4 items" in out[-1]


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path) -> None:
    """No run; a step that is not whole; two at a time. What goes on is what went on before."""
    with pytest.raises(ConfigError, match="is not a run directory"):
        evaluate_run(job(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    config = job(tmp_path / "run", steps=2, eval=None)

    def stop(step: int, instruction: Instruction) -> None:
        if step == 2 and instruction.operation is Operation.BACKWARD:
            raise StoppedBySignal(15, "stopped")

    with pytest.raises(StoppedBySignal):
        train(config, observe=stop)
    with pytest.raises(RunError, match="then eval"):
        evaluate_run(job(tmp_path / "run"))
    trained(config)
    assert evaluate_run(job(tmp_path / "run")).step == 2


@pytest.mark.parametrize(
    "settings", proof_but(SETTINGS, "fused", whole=("clipped", "bfloat16", "adapters", "trees"))
)
def test_a_snapshot_is_evaluated(settings: str, tmp_path: Path) -> None:
    """With the loss of its step, and while the run trains on; what is not there is named."""
    more = {"store": {**SETTINGS[settings].get("store", {}), "keep": {"every": 1, "last": 2}}}
    config = job(tmp_path / "run", settings, 3, **more)
    lines = rows(trained(config))
    before = kept(config.run.dir)
    assert evaluate_run(config, 2).found.loss == lines[1]["eval_loss"]
    assert kept(config.run.dir) == before
    with RunLock(config.run.dir, note=print):
        assert evaluate_run(config, 2).found.loss == lines[1]["eval_loss"]
    with pytest.raises(ConfigError, match=r"no snapshot of it; there are: 2, 3"):
        evaluate_run(config, 1)


@pytest.mark.whole
def test_a_snapshot_that_is_dropped_meanwhile_is_no_other_step(tmp_path: Path) -> None:
    """Its slots are written again, through the same links: that is said, and no loss is."""
    keep = {"store": {"keep": {"every": 1, "last": 1}}}
    config = job(tmp_path / "run", steps=2, eval=None, **keep)
    trained(config)

    def train_on(said: str) -> None:
        if said.startswith("capturing") and not said.startswith("step"):
            trained(job(tmp_path / "run", steps=4, eval=None, **keep))

    with pytest.raises((RunError, DamagedStoreError), match="dropped while it was read"):
        evaluate_run(job(tmp_path / "run", **keep), 2, note=train_on)
    assert not RunPaths(config.run.dir).evaluation.exists()
    assert evaluate_run(job(tmp_path / "run", **keep), 4).step == 4


@pytest.mark.proof
def test_what_a_killed_one_left_is_replaced(tmp_path: Path) -> None:
    """And one at a time."""
    config = job(tmp_path / "run")
    trained(config)
    found = evaluate_run(config).found
    left = RunPaths(config.run.dir).evaluation
    (left / "slots" / "torn").mkdir(parents=True)
    (left / "lock").touch()
    with RunLock(left, note=print), pytest.raises(RunError, match="in use by another process"):
        evaluate_run(config)
    assert evaluate_run(config).found == found
    assert not left.exists()


def test_files_are_evaluated_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the eval section names; their kind is told by their names."""
    tree = {"model": {"hf": LLAMA | {"vocab_size": 257}}, "train": {"steps": 1}}
    words = tmp_path / "words.txt"
    words.write_text("To be, or not to be, that is the question. " * 40)
    tree |= {"data": {"text": [str(words)], "tokenizer": "bytes", "sequence_length": 16}}
    config = config_of(tmp_path / "run", {**tree, "memory": {"segment": "256KiB"}})
    trained(config)
    found = evaluate_run(with_held_out(config, [str(words)]))
    assert found.items == (len(words.read_text()) + 1) // 16
    assert main(["eval", str(config.run.dir), "--data", str(words)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(found.line().rpartition(" | ")[0])
    assert 0 <= found.found.scalars["accuracy"] <= 1
    assert not (config.run.dir / "data" / "eval.json").exists()
    for files, said in ((["a.txt", "b.jsonl"], "one kind"), (["model"], "one kind")):
        with pytest.raises(ConfigError, match=said):
            with_held_out(config, files)
    with pytest.raises(ConfigError, match="no file matches"):
        evaluate_run(with_held_out(config, [str(tmp_path / "none*.txt")]))


@pytest.mark.parametrize("settings", proof_but(["fused", "trees"], whole=["trees"]))
def test_the_loss_before_the_first_step_is_taken_too(settings: str, tmp_path: Path) -> None:
    """In the line of step 1 alone, where nothing switches it off; the steps stay what they are."""
    begun = job(tmp_path / "begun", settings, steps=0)
    trained(begun)
    found = rows(trained(job(tmp_path / "run", settings)))
    assert found[0]["eval_loss_before"] == evaluate_run(begun).found.loss
    assert "eval_loss_before" not in found[1]
    without = job(
        tmp_path / "off", settings, eval={**TEXT, "every": 1, "batches": 3, "first": False}
    )
    silent = rows(trained(without))
    assert all("eval_loss_before" not in row for row in silent)
    assert [row["loss"] for row in silent] == [row["loss"] for row in found]
    assert_same_bits(weights(tmp_path / "off"), weights(tmp_path / "run"))


KILLED = """
import os, signal, sys
from functools import partial
from swaptrain.cli import main
from swaptrain.run import assemble
left = [int(sys.argv[1])]
def killed(instruction, slabs):
    left[0] -= instruction.operation.value == "evaluate"
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
assemble.Executor = partial(assemble.Executor, computed=killed)
main(sys.argv[2:])
"""


@pytest.mark.parametrize("verb", proof_but(["eval", "train"], whole=["train"]))
def test_a_kill_inside_an_evaluation_loses_nothing(verb: str, tmp_path: Path) -> None:
    """The next `eval` gives the loss of a run that was not killed, and training its bits."""
    whole = trained(job(tmp_path / "whole", steps=3))
    config = job(tmp_path / "run", steps=2)
    words = ["--config", str(tmp_path / "run.yaml")]
    if verb == "eval":
        trained(config)
        words = ["eval", *words]
    command = [sys.executable, "-c", KILLED, "4", *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    if verb == "eval":
        assert evaluate_run(config).found.loss == rows(whole)[1]["eval_loss"]
    run = trained(job(tmp_path / "run", steps=3))
    for key in ("loss", "grad_norm", "eval_loss"):
        assert [row[key] for row in rows(run)] == [row[key] for row in rows(whole)]
    assert_same_bits(weights(run), weights(whole))
