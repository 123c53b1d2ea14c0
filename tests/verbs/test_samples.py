"""`eval.samples`: a run writes what its model says, and trains as without that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swaptrain.cli import main
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, StoppedBySignal
from swaptrain.generate import Prompt, Sampling
from swaptrain.program.instructions import Instruction, Operation
from swaptrain.store.paths import RunPaths
from swaptrain.verbs.generate import generate_text
from swaptrain.verbs.train import train
from tests.support.matrix import proof_but
from tests.support.runs import assert_same_bits, config_of, rows, trained, weights
from tests.whole.test_exactness import LLAMA

pytestmark = pytest.mark.trains

SETTINGS: dict[str, dict[str, Any]] = {
    "fused": {},
    "clipped": {"optimizer": {"clip_norm": 0.3}},
    "trees": {"store": {"commit": {"every": 3}}},
    "small": {"memory": {"segment": "64KiB", "host": "64MiB"}, "model": {"dtype": "bfloat16"}},
    "adapters": {"lora": {"r": 2, "target_modules": ["q_proj"]}},
}
PROMPTS = ["To be", "is the question"]


def job(tmp_path: Path, name: str, settings: str = "fused", steps: int = 4, **eval_: Any) -> Config:
    words = tmp_path / "words.txt"
    words.write_text("To be, or not to be, that is the question. " * 40)
    tree: dict[str, Any] = {
        "model": {"hf": {**LLAMA, "vocab_size": 257, "max_position_embeddings": 64}},
        "data": {"text": [str(words)], "tokenizer": "bytes", "sequence_length": 16},
        "memory": {"segment": "64KiB"},
        "train": {"steps": steps},
        "eval": {"text": [str(words)], "every": 2, "batches": 2, "sample_tokens": 8, **eval_},
    }
    more = SETTINGS[settings]
    tree = {**tree, **more, "model": {**tree["model"], **more.get("model", {})}}
    return config_of(tmp_path / name, tree)


def written(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunPaths(run_dir).samples.read_text().splitlines()]


@pytest.mark.parametrize(
    "settings", proof_but(SETTINGS, "trees", whole=("fused", "clipped", "small"))
)
def test_texts_are_those_of_generate(settings: str, tmp_path: Path) -> None:
    """Of each evaluated step, and the training keeps its bits; a last step's by the verb."""
    config = job(tmp_path, "run", settings, samples=PROMPTS)
    run_dir = trained(config)
    plain = trained(job(tmp_path, "plain", settings))
    assert_same_bits(weights(run_dir), weights(plain))
    assert [row["loss"] for row in rows(run_dir)] == [row["loss"] for row in rows(plain)]
    found = written(run_dir)
    assert [row["step"] for row in found] == [2, 4]
    prompts, sampling = [Prompt(text) for text in PROMPTS], Sampling(max_new_tokens=8)
    again = generate_text(config, prompts, sampling, note=print)
    assert [one["text"] for one in found[-1]["samples"]] == again.texts
    assert [one["prompt"] for one in found[-1]["samples"]] == PROMPTS


@pytest.mark.proof
def test_a_step_that_is_done_again_is_written_once(tmp_path: Path) -> None:
    """Stopped behind the evaluation of step 2, and gone on with."""
    config = job(tmp_path, "run", samples=PROMPTS)
    whole = written(trained(job(tmp_path, "whole", samples=PROMPTS)))

    def stop(step: int, instruction: Instruction) -> None:
        if step == 3 and instruction.operation is Operation.BACKWARD:
            raise StoppedBySignal(15, "stopped")

    with pytest.raises(StoppedBySignal):
        train(config, observe=stop)
    trained(config)
    assert written(config.run.dir) == whole


def test_what_cannot_be_sampled_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that writes no text; a prompt that is too long; nothing is there afterwards."""
    with pytest.raises(ConfigError, match=r"eval\.samples: .* and the model has 64 positions"):
        train(job(tmp_path, "long", samples=["x" * 60]))
    assert not (tmp_path / "long").exists()
    path = tmp_path / "job.yaml"
    path.write_text(job(tmp_path, "other").resolved_yaml())
    keys = ["model.hf=null", "model.python=tests.support.models:language", "eval.samples=[a]"]
    assert main(["--config", str(path), *keys]) == 2
    assert "writes no text" in capsys.readouterr().err
    assert main(["--config", str(path), "eval.samples=[]"]) == 2
    assert "eval.samples" in capsys.readouterr().err
